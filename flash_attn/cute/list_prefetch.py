"""How a tile's block list comes in time where CTAs walk the tiles in SM90 forward (`list_overlap`).

What is left between two tiles is the list: a count, an entry and only then keys, each read waiting for
the one before. The warp that stores outputs is idle while a tile is computed, so it asks for the row of
the tile after it, and the loads find that in the L1.
"""

from typing import Tuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import llvm

from flash_attn.cute import utils
from flash_attn.cute.block_sparse_utils import sparse_tensor_m_block
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.list_rows import ListRow, find_row

ENTRIES_A_SECTOR = 8  # of 32 bytes, which is what memory is read by


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
