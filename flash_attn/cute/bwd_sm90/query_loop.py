"""The loop of a key tile's CTA over query tiles in block-sparse backward on SM90.

All warp roles of a CTA loop over the same tiles in the same order: one warp loads q and do, the warpgroups multiply,
one warp adds dq to global memory. Mask and full blocks are one loop, and each entry says which of the two it is. The
next entry is prefetched. Without a plan a CTA loops over the whole list of a key tile and query head; with a plan
(`backward_plan`) over a work tile, a range of such a list.

A block may hold several of the kernel's tiles; tiles past the end of the queries are skipped. In deterministic mode an
entry has a semaphore value, the number of key tiles that add to the dq of its query block before, and entries are in
the order of `write_order.sorted_entries`.
"""

from dataclasses import dataclass
from typing import Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from quack import copy_utils

from flash_attn.cute import barrier
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.lists.rows import entry_at, find_row
from flash_attn.cute.named_barrier import NamedBarrierBwd


@dataclass(frozen=True)
class PlanTile:
    """A work tile of a plan, for one CTA: entries `begin` .. `end` - 1 of a key tile's list."""

    batch: Int32
    head: Int32
    n_block: Int32
    begin: Int32
    end: Int32
    rank: Int32  # number of work tiles that add to the same dk and dv before
    start: Optional[Int64] = None  # offset of the row's first entry in ragged lists

    @staticmethod
    def read(tensors: Optional[BlockSparseTensors], launch_index: Int32) -> "Optional[PlanTile]":
        """The work tile of a launch index; None without a plan."""
        if tensors is None or tensors.plan is None:
            return None
        start = None
        if len(tensors.mask_block_idx.shape) == 1:
            low, high = (tensors.plan[launch_index, field] for field in (6, 7))
            start = (Int64(high) << 32) | Int64(Uint32(low))
        return PlanTile(*(tensors.plan[launch_index, field] for field in range(6)), start)


@dataclass(frozen=True)
class QueryLoop:
    """Query tiles `begin` .. `end` - 1 of a key tile's list. `flagged`: `mask_idx` has mask and full blocks, as
    2 * block + is_full; else only mask blocks, and full blocks follow in `full_idx`."""

    begin: Int32
    end: Int32
    mask_count: Int32
    mask_idx: cute.Tensor
    full_idx: Optional[cute.Tensor]
    locks: Optional[cute.Tensor]
    subtiles: int
    flagged: bool

    @staticmethod
    def create(
        tensors: BlockSparseTensors,
        batch: Int32,
        head: Int32,
        n_block: Int32,
        subtiles: int,
        flagged: bool,
        plan_tile: Optional[PlanTile] = None,
    ) -> "QueryLoop":
        """flagged: see the class. plan_tile: limits the loop to its entries."""
        start = None if plan_tile is None else plan_tile.start
        row = find_row(tensors, tensors.cu_total_n_blocks, batch, head, n_block, start)
        count, mask_idx = row.count(tensors.mask_block_cnt), row.entries(tensors.mask_block_idx)
        begin, end = Int32(0), count
        full_idx, locks = None, None
        if tensors.full_block_cnt is not None:
            end = count + row.count(tensors.full_block_cnt)
            full_idx = row.entries(tensors.full_block_idx, full=True)
        if flagged:
            locks = row.entries(tensors.dq_write_order)
        if plan_tile is not None:
            begin, end = plan_tile.begin, plan_tile.end
        return QueryLoop(begin * subtiles, end * subtiles, count, mask_idx, full_idx, locks, subtiles, flagged)

    @property
    def has_full(self) -> bool:
        """True if entries may be full blocks, known at compile time."""
        return self.flagged or self.full_idx is not None

    @cute.jit
    def entry(self, tile: Int32) -> Int32:
        """2 * block + is_full for tile `tile` of the loop; past its end, for the last one."""
        position = cutlass.min(tile, self.end - 1) // self.subtiles
        entry = Int32(0)
        if const_expr(self.flagged):
            entry = self.mask_idx[position]
        else:
            entry = entry_at(position, self.mask_count, self.mask_idx, self.full_idx)
        return entry

    def m_block(self, entry: Int32, tile: Int32) -> Int32:
        return (entry >> 1) * self.subtiles + tile % self.subtiles

    def lock(self, tile: Int32) -> Int32:
        return self.locks[cutlass.min(tile, self.end - 1) // self.subtiles]


@cute.jit
def load_queries(loop: QueryLoop, state_q, state_do, load_tile: Callable, m_block_max: Int32, kv_loaded=False):
    """Load the loop's tiles of q and do; k and v with the first, unless `kv_loaded`. Returns the advanced states."""
    coming = loop.entry(loop.begin)
    for tile in cutlass.range(loop.begin, loop.end, unroll=1):
        m_block = loop.m_block(coming, tile)
        coming = loop.entry(tile + 1)
        if m_block < m_block_max:
            state_q, state_do = load_tile(m_block, state_q, state_do, load_kv=not kv_loaded)
            kv_loaded = True
    return state_q, state_do


@cute.jit
def multiply_queries(
    loop: QueryLoop,
    state_q,
    state_do,
    multiply: Callable,
    mask_listed: Callable,
    mask_full: Optional[Callable],
    sees_all: Callable,
    m_block_max: Int32,
):
    """Accumulate the loop's tiles into dk and dv, which the caller zeroed. Returns the advanced states.

    mask_listed, mask_full: masks for mask blocks and for full blocks; mask_full is None where both have the same.
    sees_all(m_block): neither the end of the keys nor the causal edge hides a pair of the tile, so that a full block
    needs no mask.
    """
    coming = loop.entry(loop.begin)
    for tile in cutlass.range(loop.begin, loop.end, unroll=1):
        entry = coming
        m_block = loop.m_block(entry, tile)
        coming = loop.entry(tile + 1)
        if m_block < m_block_max:
            if const_expr(mask_full is None):
                if sees_all(m_block):
                    state_q, state_do = multiply(m_block, state_q, state_do)
                else:
                    state_q, state_do = multiply(m_block, state_q, state_do, mask_fn=mask_listed)
            else:
                if entry & 1 == 0:
                    state_q, state_do = multiply(m_block, state_q, state_do, mask_fn=mask_listed)
                elif sees_all(m_block):
                    state_q, state_do = multiply(m_block, state_q, state_do)
                else:
                    state_q, state_do = multiply(m_block, state_q, state_do, mask_fn=mask_full)
    return state_q, state_do


@cute.jit
def add_dq(
    loop: QueryLoop, add: Callable, accumulator: cute.Tensor, semaphore: Optional[cute.Tensor], m_block_max: Int32
):
    """Add the dq of the loop's tiles, staged by the warpgroups, to the accumulator in global memory.

    add: `add_tile` with its first arguments bound. accumulator: [(part size, parts), query tiles]. semaphore: [query
    tiles, 1] counters, zero at launch, for an ordered reduction by semaphore value; None: in any order.
    """
    ordered = const_expr(semaphore is not None)
    coming, lock_coming = loop.entry(loop.begin), Int32(0)
    if const_expr(ordered):
        lock_coming = loop.lock(loop.begin)
    for tile in cutlass.range(loop.begin, loop.end, unroll=1):
        m_block, lock = loop.m_block(coming, tile), lock_coming
        coming = loop.entry(tile + 1)
        if const_expr(ordered):
            lock_coming = loop.lock(tile + 1)
        if m_block < m_block_max:
            add(accumulator, semaphore, m_block, lock)


@cute.jit
def add_tile(
    staged: cute.Tensor,
    parts: cutlass.Constexpr[int],
    threads_per_part: cutlass.Constexpr[int],
    part_bytes: cutlass.Constexpr[int],
    accumulator: cute.Tensor,
    semaphore: Optional[cute.Tensor],
    m_block: Int32,
    lock: Int32,
):
    """Add the dq of one query tile; with a semaphore, after `lock` other key tiles.

    staged: [part size, parts] in shared memory.
    """
    ordered, lane = const_expr(semaphore is not None), cute.arch.lane_idx()
    for part in cutlass.range_constexpr(parts):
        if const_expr(not ordered):  # an ordered reduction waits for its copies below
            cute.arch.cp_async_bulk_wait_group(parts - 1 - part, read=True)
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + part, number_of_threads=threads_per_part + cute.arch.WARP_SIZE
        )
    if const_expr(ordered):
        barrier.wait_eq(semaphore[(m_block, None)].iterator, lane, 0, lock)
    for part in cutlass.range_constexpr(parts):
        cute.arch.barrier(
            barrier_id=int(NamedBarrierBwd.dQFullWG0) + part, number_of_threads=threads_per_part + cute.arch.WARP_SIZE
        )
        with cute.arch.elect_one():
            copy_utils.cpasync_reduce_bulk_add_f32(
                staged[None, part].iterator, accumulator[(None, part), m_block].iterator, part_bytes
            )
        cute.arch.cp_async_bulk_commit_group()
    if const_expr(ordered):
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        barrier.arrive_inc(semaphore[(m_block, None)].iterator, lane, 0, 1)
