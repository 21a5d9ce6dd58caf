"""Which sliding windows overlap their tiles in SM90 forward.

In a window of a few hundred keys a tile of queries is done after a handful of key tiles, however long
the sequence is: as long as with short block lists. So CTAs stay and walk the tiles (`tile_overlap`).
Nothing has to be asked for ahead, as a tile's keys follow from its number; and all tiles but those at
a sequence's ends walk equally far, so dealing them out by number ends evenly.
"""

from typing import Optional, Tuple

from flash_attn.cute import compress_schedule
from flash_attn.cute.list_overlap import MOST_HEAD_DIM

# Key tiles of a tile of queries, at most: what 2,048 keys reach into, whichever tile the kernel takes. Waiting for
# queries and output takes as long as a few key tiles: there is less to win the longer the walk. And the last round of
# a fixed deal costs up to one walk, where a CTA to a tile goes to whichever multiprocessor is free first.
MOST_KEY_TILES = 20


def overlapped_stages(
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
    """Into how many key tiles the windows of a tile of queries reach at most, wherever the tile begins."""
    tile_m, tile_n = tile
    keys = -(-tile_m // packed_heads) + left + right
    return -(-(keys - 1) // tile_n) + 1
