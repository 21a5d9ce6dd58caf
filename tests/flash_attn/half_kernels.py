"""The functions with which SM100's kernels walk and hide lists of halves, around stubs, as programs for the CPU.

`half_walk` runs them. Importing this imports the DSL, which looks at the architecture once a process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from flash_attn.cute import block_sparse_utils, copy_utils
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100
from flash_attn.cute.lists.half_tiles import HalfMask, halves_at, hide_columns
from flash_attn.cute.lists.rows import with_halves

TILE = (128, 128)


class Unmasked:
    """Stands for a TailMask that hides nothing, with its thread's way to find its query."""

    tile_m = tile_n = 128

    def __init__(self, thr_mma: Any, thr_tmem_load: Any) -> None:
        self.mask, self.mask_fn = self, partial(print, thr_mma=thr_mma, thr_tmem_load=thr_tmem_load)

    def at_tail(self, n_block: Int32) -> Boolean:
        return Boolean(False)

    def __call__(self, *args: Any, **options: Any) -> None: ...


class Query:
    """Stands for a thread's part of the product and of the load, where the thread has this query of the tile."""

    def __init__(self, query: int) -> None:
        self.query = query

    def partition_C(self, coordinates: Any) -> Query:
        return self

    def __getitem__(self, at: Any) -> Query:
        return self

    def partition_D(self, coordinates: Any) -> list[list[int]]:
        return [[self.query]]


class Step:
    """Stands for a step of the softmax, of a thread of one half: writes what it is called with, and what it sees."""

    def __init__(self, out: cute.Tensor, kind: int, half: int) -> None:
        self.out, self.kind, self.half = out, kind, half

    def __call__(self, at: Any, a: Any, b: Any, n_block: Any, is_first: bool = False, mask_fn: Any = None) -> Any:
        acc_S = cute.make_rmem_tensor((1,), Float32)
        acc_S.fill(1.0)
        if mask_fn is not None:
            mask_fn(acc_S, n_block=n_block)
        self.out[at, 0], self.out[at, 1] = Int32(self.kind), n_block
        self.out[at, 2 + self.half] = Int32(acc_S[0] > 0.0)
        return at + 1, a, b


class Sequence:
    """Stands for a SeqlenInfoQK; only stacked lists ask."""

    num_n_blocks = 0


def half_lists(tensors: tuple[cute.Tensor, ...], rows_before: str) -> BlockSparseTensors:
    *lists, before, starts, full_starts = tensors
    more = {rows_before: before, "cu_block_idx_offsets": starts, "cu_full_block_idx_offsets": full_starts}
    return with_halves(BlockSparseTensors(*lists, **more), True)


@cute.jit
def walk_forward(
    mask_cnt: cute.Tensor, mask_idx: cute.Tensor, full_cnt: cute.Tensor, full_idx: cute.Tensor,
    before: cute.Tensor, starts: cute.Tensor, full_starts: cute.Tensor,
    out: cute.Tensor, sequence: Int32, head: Int32, row: Int32,
) -> None:  # fmt: skip
    """out: [kind, block, whether the first half sees it, whether the second does] of each entry of a row."""
    tensors = (mask_cnt, mask_idx, full_cnt, full_idx, before, starts, full_starts)
    lists = half_lists(tensors, "cu_total_m_blocks")
    masks, mask, fulls, full = block_sparse_utils.get_curr_blocksparse_tensors(sequence, head, row, lists, Sequence())
    for half in cutlass.range_constexpr(2):
        at = Int32(0)
        if masks > 0:
            query = Query(64 * half)
            at, _, _ = block_sparse_utils.softmax_block_sparse_sm100_list(
                mask, masks, masks, 1, Step(out, 0, half), Unmasked(query, query),
                at, Int32(0), Int32(0), False, True, False,
            )  # fmt: skip
        if fulls > 0:
            query = Query(64 * half + 63)
            at, _, _ = block_sparse_utils.softmax_block_sparse_sm100_list(
                full, fulls, fulls, 1, Step(out, 1, half), Unmasked(query, query),
                at, Int32(0), Int32(0), False, masks == 0, True,
            )  # fmt: skip


@cute.jit
def walk_backward(
    mask_cnt: cute.Tensor, mask_idx: cute.Tensor, full_cnt: cute.Tensor, full_idx: cute.Tensor,
    before: cute.Tensor, starts: cute.Tensor, full_starts: cute.Tensor,
    out: cute.Tensor, sequence: Int32, head: Int32, row: Int32,
) -> None:  # fmt: skip
    """The same of a key block's row."""
    tensors = (mask_cnt, mask_idx, full_cnt, full_idx, before, starts, full_starts)
    lists = half_lists(tensors, "cu_total_n_blocks")
    masks, mask, fulls, full, count = block_sparse_utils.get_block_sparse_iteration_info_bwd(
        lists, sequence, head, row, q_subtile_factor=1, m_block_max=Int32(1)
    )
    coordinates = cute.make_identity_tensor((1, 128))
    for place in cutlass.range(count):
        block, is_full = block_sparse_utils.get_m_block_from_iter_bwd(
            place, masks, mask, fulls, full, q_subtile_factor=1
        )
        acc_S = cute.make_rmem_tensor((1, 128), Float32)
        acc_S.fill(1.0)
        hide_columns(acc_S, coordinates, halves_at(place, masks, mask, full), 128)
        out[place, 0], out[place, 1] = Int32(is_full), block
        out[place, 2], out[place, 3] = Int32(acc_S[0] > 0.0), Int32(acc_S[127] > 0.0)


class Ordered:
    """Stands for a kernel, and for the rest of what its semaphore values ask, whose key blocks have `groups` tiles."""

    use_block_sparsity = list_halves = True
    q_subtile_factor = cta_group_size = 1
    tile_n = 128
    dq_write_order = dq_write_order_full = ()  # there are both

    def __init__(self, groups: int, spt: bool, seqlen_k: Int32) -> None:
        self.kv_subtile_factor, self.spt, self.seqlen_k = groups, spt, seqlen_k

    def get_n_block_max_for_m_block(self, seqlen: Ordered, m_block: Int32) -> Int32:
        return Int32(0)


@cute.jit
def wait_of_add(
    groups: cutlass.Constexpr[int], spt: cutlass.Constexpr[bool],
    order: cute.Tensor, out: cute.Tensor, cta: Int32, release: Int32, seqlen_k: Int32,
) -> None:  # fmt: skip
    """out: what the CTA waits for before it adds for a mask entry, and for a full one, with this semaphore value."""
    own = Ordered(groups, spt, seqlen_k)
    for entry in cutlass.range_constexpr(2):
        out[entry] = FlashAttentionBackwardSm100._dq_semaphore_lock_value(
            own, Int32(entry), Int32(1), order, order, own, own, own, Int32(0), cta, release
        )


def scores() -> tuple[Any, Any, Any]:
    """A tile's product: its threads' part, where it is, and how a warp loads 32 of its columns."""
    major = cute.nvgpu.OperandMajorMode.K
    mma = sm100.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, tcgen05.CtaGroup.ONE, TILE)
    threads = mma.get_slice(0)
    load = cute.make_copy_atom(tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(32)), Float32)
    return threads, threads.make_fragment_C(threads.partition_shape_C(TILE)), load


@cute.jit
def hide_forward(out: cute.Tensor, halves: Int32) -> None:
    """out: [queries, keys], scores of 1 as forward's threads leave them."""
    threads, place, atom = scores()
    for thread in cutlass.range(128):
        load = tcgen05.make_tmem_copy(atom, place[(None, None), 0, 0]).get_slice(thread)
        at = load.partition_D(threads.partition_C(cute.make_identity_tensor(TILE))[(None, None), 0, 0])
        acc_S = cute.make_rmem_tensor(at.shape, Float32)
        acc_S.fill(1.0)
        HalfMask(Unmasked(threads, load), halves)(acc_S, Int32(0), False)
        for i in cutlass.range_constexpr(cute.size(at.shape)):
            out[at[i][0], at[i][1]] = acc_S[i]


@cute.jit
def hide_backward(out: cute.Tensor, halves: Int32) -> None:
    """out: [queries, keys], scores of 1 as backward's threads leave them."""
    threads, _, atom = scores()
    for thread in cutlass.range(256):
        load = copy_utils.make_tmem_copy(atom, 2).get_slice(thread)
        at = load.partition_D(threads.partition_C(cute.make_identity_tensor(TILE)))
        acc_S = cute.make_rmem_tensor(at.shape, Float32)
        acc_S.fill(1.0)
        hide_columns(acc_S, at, halves, 128)
        for i in cutlass.range_constexpr(cute.size(at.shape)):
            out[at[i][1], at[i][0]] = acc_S[i]
