"""Loads of q and do in tiles of packed heads, as for lists with bits: row r is token r // G, query head r % G.

By TMA where a warpgroup's 64 rows are whole tokens, or a fraction of one; else each warpgroup loads its own rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from flash_attn.cute.bwd_dq.spec import THREADS
from flash_attn.cute.fwd_sm90.loads import TmaTensor
from flash_attn.cute.fwd_sm90.masks import KeyMask
from flash_attn.cute.lists.tiling import ROWS

VECTOR = 8  # elements of 16 bytes
ROWS_LOADED = 3  # the first warpgroup's named barrier of `load_rows`, after the scheduler's


def tma_of_rows(
    load: cpasync.CopyBulkTensorTileG2SOp, mX: cute.Tensor, slot: cute.ComposedLayout, heads: int
) -> TmaTensor:
    """TMA atom for 64 rows of q or do, [T, D, Hq, B] (packed [total, D, Hq]), with `heads` packed heads.

    Returns:
        The atom, None where TMA cannot load them, and the tensor; with an atom [(heads, T), D, Hq / heads, B].
    """
    rows = ROWS
    if heads > 1:
        if ROWS % heads and heads % ROWS:
            return None, mX
        (T, D, Hq, *batch), (token, column, head, *sequence) = mX.shape, mX.stride
        shape, stride = ((heads, T), D, Hq // heads, *batch), ((head, token), column, head * heads, *sequence)
        mX = cute.make_tensor(mX.iterator, cute.make_layout(shape, stride=stride))
        rows = (min(heads, ROWS), max(ROWS // heads, 1))
    return cpasync.make_tiled_tma_atom(load, mX, slot, (rows, mX.shape[1]))


@cute.jit
def load_rows(sources: tuple[cute.Tensor, ...], slots: tuple[cute.Tensor, ...], mask: KeyMask, group: Int32):
    """Load the warpgroup's rows without TMA; rows past the end are zeros.

    sources: [T, D, Hq] of the sequence, each. slots: [ROWS, D] of shared memory, each; nothing reads them any more.
    group: the warpgroup's number.
    """
    cute.arch.barrier(barrier_id=ROWS_LOADED + group, number_of_threads=THREADS)
    for source, slot in zip(sources, slots):
        columns = source.shape[1] // VECTOR
        loaded = cute.make_rmem_tensor((VECTOR, ROWS * columns // THREADS), source.element_type)
        loaded.fill(0)
        for i in cutlass.range_constexpr(ROWS * columns // THREADS):
            at = mask.thread + i * THREADS
            row = mask.first + at // columns
            if row < mask.seqlen.seqlen_q * mask.packed:
                head = mask.head * mask.packed + row % mask.packed
                vector = cute.local_tile(source[row // mask.packed, None, head], (VECTOR,), (at % columns,))
                cute.autovec_copy(vector, loaded[None, i])
        for i in cutlass.range_constexpr(ROWS * columns // THREADS):
            at = mask.thread + i * THREADS
            cute.autovec_copy(loaded[None, i], cute.local_tile(slot[at // columns, None], (VECTOR,), (at % columns,)))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=ROWS_LOADED + group, number_of_threads=THREADS)
