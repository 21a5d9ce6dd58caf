"""Ordered reduction in deterministic backward on SM90: CTAs add to dq, and to dk and dv, in a fixed order.

A semaphore for each query tile and head, and one for each key tile, counts the CTAs that have added. A CTA waits for
its rank, awaits its bulk copies, and increments: 2 us per CTA, as long as a query tile's products. So two warps
alternate over a CTA's tiles of dq; a tile's shared memory is free as soon as copies have read it. A third warp adds dk
and dv, which the warpgroups stage in the memory of q, v, k and do: a semaphore in the warpgroups' own code may
serialise their wgmmas (1.25 times the time).

With block lists, and with positions of queries, one warp adds dq, and the warpgroups add dk and dv. Key tiles add in
launch order: a CTA only ever waits for one that was launched before it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack import copy_utils

from flash_attn.cute import barrier
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.bwd_sm90 import accumulators
from flash_attn.cute.named_barrier import NamedBarrierBwd
from flash_attn.cute.seqlen_info import SeqlenInfoQK

DQ_WARPS = (1, 2)  # alternate over a CTA's tiles, from the first warp on
DKV_WARP = 3


@cute.jit
def rank_of(
    block_info: BlockInfo,
    seqlen: SeqlenInfoQK,
    last_keys_first: cutlass.Constexpr[bool],
    n_block: Int32,
    m_block: Int32,
) -> Int32:
    """The number of key tiles that add to the dq of query tile m_block before n_block."""
    begin, end = block_info.get_n_block_min_max(seqlen, m_block)
    rank = n_block - begin
    if const_expr(last_keys_first):
        rank = end - 1 - n_block
    return rank


def dq_warp_index() -> Int32:
    """Index of this warp in DQ_WARPS."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - DQ_WARPS[0]


def full_barrier(part: int | Int32, number: Int32) -> Int32:
    """Barrier: warpgroup `part` has staged a tile of parity `number` (0 or 1) of its CTA."""
    odd = int(NamedBarrierBwd.dQFullOddWG0) - int(NamedBarrierBwd.dQFullWG0)
    return int(NamedBarrierBwd.dQFullWG0) + part + number * odd


@cute.jit
def free_first(parts: cutlass.Constexpr[int], threads_per_part: cutlass.Constexpr[int]) -> None:
    """Release the staging buffer, for the warpgroups' first tile."""
    if dq_warp_index() == 1:
        for part in cutlass.range_constexpr(parts):
            _free(part, threads_per_part)


@cute.jit
def add_in_order(
    staged: cute.Tensor,
    parts: cutlass.Constexpr[int],
    threads_per_part: cutlass.Constexpr[int],
    part_bytes: cutlass.Constexpr[int],
    first_stores: cutlass.Constexpr[bool],
    number: Int32,
    accumulator: cute.Tensor,
    counters: cute.Tensor,
    m_block: Int32,
    rank: Int32,
) -> None:
    """Add the dq of query tile m_block, its CTA's number-th, to the accumulator after `rank` other key tiles.

    staged: [part size, parts] in shared memory. accumulator: [(part size, parts), query tiles]. counters: [query
    tiles, 1], zero at launch. first_stores: rank 0 stores instead of adding.
    """
    if number % 2 == dq_warp_index():
        counter = counters[(m_block, None)].iterator
        _wait(counter, rank)
        for part in cutlass.range_constexpr(parts):
            cute.arch.barrier(
                barrier_id=full_barrier(part, number % 2), number_of_threads=threads_per_part + cute.arch.WARP_SIZE
            )
            with cute.arch.elect_one():
                source, target = staged[None, part].iterator, accumulator[(None, part), m_block].iterator
                if const_expr(first_stores):
                    accumulators.store_or_add(rank == 0, source, target, part_bytes)
                else:
                    copy_utils.cpasync_reduce_bulk_add_f32(source, target, part_bytes)
            cute.arch.cp_async_bulk_commit_group()
        for part in cutlass.range_constexpr(parts):
            cute.arch.cp_async_bulk_wait_group(parts - 1 - part, read=True)
            _free(part, threads_per_part)
        with cute.arch.elect_one():
            accumulators.raise_flag(counter)


def _free(part: int, threads_per_part: int) -> None:
    cute.arch.barrier_arrive(
        barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + part, number_of_threads=threads_per_part + cute.arch.WARP_SIZE
    )


@cute.jit
def stage(acc: cute.Tensor, staged: cute.Tensor, tidx: Int32, threads_per_part: cutlass.Constexpr[int]) -> None:
    """Write a warpgroup's rows of dk or dv to shared memory: [part size, parts]."""
    parts = cute.size(staged, mode=[1])
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(atom, cute.make_layout((threads_per_part, parts)), cute.make_layout(4))
    target = copy.get_slice(tidx).partition_D(staged)
    cute.autovec_copy(cute.make_tensor(acc.iterator, target.shape), target)


def staged_all(threads: int) -> None:
    """Signal DKV_WARP that dk and dv are staged; called by all threads that stage them."""
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=int(NamedBarrierBwd.dKVFull), number_of_threads=threads + cute.arch.WARP_SIZE)


@cute.jit
def add_dkv_in_order(
    staged: tuple[cute.Tensor, cute.Tensor],
    targets: list[cute.Tensor],
    threads: cutlass.Constexpr[int],
    counter: cute.Pointer,
    rank: Int32,
) -> None:
    """Add dk and dv of a key tile, staged by `threads` threads, to their accumulators after `rank` other CTAs."""
    cute.arch.barrier(barrier_id=int(NamedBarrierBwd.dKVFull), number_of_threads=threads + cute.arch.WARP_SIZE)
    _wait(counter, rank)
    with cute.arch.elect_one():
        for source, target in zip(staged, targets):
            for part in cutlass.range_constexpr(cute.size(source, mode=[1])):
                part_bytes = cute.size(source, mode=[0]) * Float32.width // 8
                copy_utils.cpasync_reduce_bulk_add_f32(
                    source[None, part].iterator, target[None, part].iterator, part_bytes
                )
        cute.arch.cp_async_bulk_commit_group()
        accumulators.raise_flag(counter)


@cute.jit
def _wait(counter: cute.Pointer, rank: Int32) -> None:
    added = barrier.ld_acquire(counter)
    while added != rank:
        added = barrier.ld_acquire(counter)
    cute.arch.fence_proxy("async.global")
