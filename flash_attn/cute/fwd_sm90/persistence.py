"""Rules for persistent CTAs in SM90 forward: short rows of block lists, and short windows.

With lists of a few blocks a CTA to a tile spends as long waiting for its queries, its list and the way
out of its output as a long walk takes for several blocks. `persistent_scheduler` lets CTAs stay and
walk the tiles.

Tiles are dealt out by their number alone, so lists of very different lengths would end unevenly. Only
their width is known without waiting for the GPU: where rows have room for more than `MOST_ENTRIES` a
CTA to a tile stays.

In a window of a few hundred keys a tile of queries is done after a handful of key tiles, however long
the sequence is: as long as with short block lists. So CTAs stay here too.
All tiles but those at a sequence's ends walk equally far, so dealing them out by number ends evenly.
"""

from typing import Optional, Tuple

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.compressed_causal import schedule as compress_schedule

# Room of a row for mask and full blocks together, at most.
MOST_ENTRIES = 64

MOST_HEAD_DIM = 128  # above, the accumulator leaves no registers for walking on


def room(tensors: BlockSparseTensorsTorch) -> int:
    """Blocks that a row of rectangular lists has room for, mask and full ones together."""
    return sum(x.shape[-1] for x in (tensors.mask_block_idx, tensors.full_block_idx) if x is not None)


def stages_for_lists(
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


# Key tiles of a tile of queries, at most: what 2,048 keys reach into, whichever tile the kernel takes. Waiting for
# queries and output takes as long as a few key tiles: there is less to win the longer the walk. And the last round of
# a fixed deal costs up to one walk, where a CTA to a tile goes to whichever multiprocessor is free first.
MOST_KEY_TILES = 20


def stages_for_window(
    window: Tuple[Optional[int], Optional[int]],
    head_dim: int,
    head_dim_v: int,
    *,
    tile: Tuple[int, int],
    packed_heads: int,
    p_in_smem: bool,
) -> int:
    """In how many stages of keys and values SM90 forward with this window, (left, right), overlaps its tiles; or 0.

    A window without an end on one side does not.
    """
    left, right = window
    if left is None or right is None or head_dim > MOST_HEAD_DIM:
        return 0
    if key_tiles(left, right, tile, packed_heads) > MOST_KEY_TILES:
        return 0
    return compress_schedule.stages_beside_two_queries(
        head_dim, head_dim_v, tile=tile, packed_heads=packed_heads, p_in_smem=p_in_smem
    )


def key_tiles(left: int, right: int, tile: Tuple[int, int], packed_heads: int) -> int:
    """Key tiles that the windows of a tile of queries reach at most, wherever the tile begins."""
    tile_m, tile_n = tile
    keys = -(-tile_m // packed_heads) + left + right
    return -(-(keys - 1) // tile_n) + 1
