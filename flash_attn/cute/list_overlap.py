"""Where tiles with short block lists overlap in SM90 forward, and how the next tile's list comes in time.

With lists of a few blocks a CTA to a tile spends as long waiting for its queries, its list and the way
out of its output as a long walk takes for several blocks. `tile_overlap` lets CTAs stay and walk the
tiles. What is then left between two tiles is the list: a count, an entry and only then keys, each read
waiting for the one before. The warp that stores outputs is idle while a tile is computed, so it asks
for the row of the tile after it, and the loads find that in the L1.

Tiles are dealt out by their number alone, so lists of very different lengths would end unevenly. Only
their width is known without waiting for the GPU: where rows have room for more than `MOST_ENTRIES` a
CTA to a tile stays.
"""

from typing import Optional, Tuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import llvm

from flash_attn.cute import compress_schedule, utils
from flash_attn.cute.block_sparse_utils import sparse_tensor_m_block
from flash_attn.cute.block_sparsity import BlockSparseTensors, BlockSparseTensorsTorch
from flash_attn.cute.list_rows import ListRow, find_row

# Room of a row for mask and full blocks together, at most.
MOST_ENTRIES = 64

MOST_HEAD_DIM = 128  # above, the accumulator leaves no registers for walking on

ENTRIES_A_SECTOR = 8  # of 32 bytes, which is what memory is read by


def overlapped_stages(
    tensors: Optional[BlockSparseTensorsTorch],
    head_dim: int,
    head_dim_v: int,
    *,
    tile: Tuple[int, int],
    packed_heads: int,
    p_in_smem: bool,
) -> int:
    """In how many stages of keys and values SM90 forward with these lists, as normalised, overlaps its tiles; or 0.

    Lists of packed sequences and of wide rows do not.
    """
    padded = tensors is not None and tensors.mask_block_cnt.ndim == 3 and tensors.mask_block_idx.ndim == 4
    if not padded or head_dim > MOST_HEAD_DIM:
        return 0
    lists = (tensors.mask_block_idx, tensors.full_block_idx)
    if sum(x.shape[-1] for x in lists if x is not None) > MOST_ENTRIES:
        return 0
    return compress_schedule.stages_beside_two_queries(
        head_dim, head_dim_v, tile=tile, packed_heads=packed_heads, p_in_smem=p_in_smem
    )


@cute.jit
def prefetch_row(
    tensors: BlockSparseTensors,
    qhead_per_kvhead: cutlass.Constexpr[int],
    q_subtile_factor: cutlass.Constexpr[int],
    tile_idx: Tuple[Int32, Int32, Int32, Int32],
):
    """A warp asks for the counts and entries of a tile's row: half its lanes for each of two lists."""
    m_block, head_idx, batch_idx, _ = tile_idx
    block = sparse_tensor_m_block(m_block, qhead_per_kvhead, q_subtile_factor)
    row = find_row(tensors, None, batch_idx, head_idx, block, Int32(0))
    lane = cute.arch.lane_idx()
    half = Int32(cute.arch.WARP_SIZE // 2)
    if lane < half:
        _prefetch_list(row, tensors.mask_block_cnt, row.entries(tensors.mask_block_idx), lane)
    if const_expr(tensors.full_block_cnt is not None):
        if lane >= half:
            _prefetch_list(row, tensors.full_block_cnt, row.entries(tensors.full_block_idx, full=True), lane - half)
    cute.arch.sync_warp()  # what follows is for a whole warp


@cute.jit
def _prefetch_list(row: ListRow, counts: cute.Tensor, entries: cute.Tensor, turn: Int32):
    """The first turn is for the count; the last of the rest is for what an unaligned row reaches over its sectors."""
    width = cute.size(entries)
    first = (turn - 1) * ENTRIES_A_SECTOR
    if turn == 0:
        _prefetch(utils.elem_pointer(counts, row.place))
    elif width > 0 and first < width + ENTRIES_A_SECTOR - 1:
        _prefetch(utils.elem_pointer(entries, (cutlass.min(first, width - 1),)))


@cute.jit
def _prefetch(pointer: cute.Pointer):
    llvm.inline_asm(
        None,
        [pointer.toint().ir_value()],
        "prefetch.global.L1 [$0];",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
