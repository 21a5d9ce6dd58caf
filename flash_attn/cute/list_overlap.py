"""Where tiles with short block lists overlap in SM90 forward.

With lists of a few blocks a CTA to a tile spends as long waiting for its queries, its list and the way
out of its output as a long walk takes for several blocks. `tile_overlap` lets CTAs stay and walk the
tiles.

Tiles are dealt out by their number alone, so lists of very different lengths would end unevenly. Only
their width is known without waiting for the GPU: where rows have room for more than `MOST_ENTRIES` a
CTA to a tile stays.
"""

from typing import Optional, Tuple

from flash_attn.cute import compress_schedule
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

# Room of a row for mask and full blocks together, at most.
MOST_ENTRIES = 64

MOST_HEAD_DIM = 128  # above, the accumulator leaves no registers for walking on


def room(tensors: BlockSparseTensorsTorch) -> int:
    """How many blocks a row of rectangular lists has room for, mask and full ones together."""
    return sum(x.shape[-1] for x in (tensors.mask_block_idx, tensors.full_block_idx) if x is not None)


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
    if room(tensors) > MOST_ENTRIES:
        return 0
    return compress_schedule.stages_beside_two_queries(
        head_dim, head_dim_v, tile=tile, packed_heads=packed_heads, p_in_smem=p_in_smem
    )
