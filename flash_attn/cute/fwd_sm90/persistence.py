"""Rules for persistent CTAs in SM90 forward: short rows of block lists, short windows, compressed keys.

Where a tile visits few keys, the latency of loading q and the list and of storing o is as long as the work. There
persistent CTAs loop over tiles (`persistent_scheduler`), in a static schedule that lists of very different lengths
would unbalance. Only the lists' width is known without a sync: above `MOST_ENTRIES` each tile has its own CTA.
"""

import math
from typing import NamedTuple, Optional, Tuple

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.compressed_causal import schedule as compress_schedule
from flash_attn.cute.compressed_causal.mask import CompressArgs
from flash_attn.cute.lists import tiling
from flash_attn.cute.lists.query_bits import has_bits

MOST_ENTRIES = 64  # largest capacity of a row, mask and full blocks together
MOST_UNION_ENTRIES = 128  # of a union of tokens' lists, which neighbours' similar lists fill to a fifth or a third
MOST_HEAD_DIM = 128  # above, the accumulator leaves too few registers for overlapping tiles

# Most keys that a tile of queries visits in a window (fewer at a window of 2,048): longer loops gain less, and the
# last wave of a static schedule costs up to one loop.
MOST_KEYS = 2560

SMEM_BYTES = 227 << 10  # of a CTA
BARRIER_BYTES = 1 << 10  # barriers, and padding that aligns the tiles after them


def capacity(tensors: BlockSparseTensorsTorch) -> float:
    """Capacity of a row, mask and full blocks together, from the shapes alone.

    Infinite for ragged and stacked lists, whose rows may have any length, and for lists without tensors.
    """
    counts, entries = tensors.mask_block_cnt, tensors.mask_block_idx
    if counts is None or entries.ndim != counts.ndim + 1:
        return math.inf
    return sum(x.shape[-1] for x in (entries, tensors.full_block_idx) if x is not None)


def has_short_rows(tensors: BlockSparseTensorsTorch) -> bool:
    """True if persistent CTAs may take the tiles in a static schedule: rows are short, so none is much longer."""
    return capacity(tensors) <= (MOST_UNION_ENTRIES if has_bits(tensors) else MOST_ENTRIES)


class ForwardTile(NamedTuple):
    """Sizes of a tile of SM90 forward. packed_heads: query heads packed into its rows."""

    head_dim: int
    head_dim_v: int
    queries: int
    keys: int
    packed_heads: int
    p_in_smem: bool

    def stages_beside_two_queries(self, most: int) -> int:
        """Stages of k and v that fit beside the q of two tiles, `most` at most; 0 where tiles cannot overlap.

        Three stages of 128 keys are 1 to 3 % faster than two. o overwrites q, so D and Dv have to be equal; q is
        loaded by TMA, so the heads of a group have to divide the tile.
        """
        D, Dv = self.head_dim, self.head_dim_v
        held = 2 * self.queries * D + (self.queries * self.keys if self.p_in_smem else 0)
        stages = min(((SMEM_BYTES - BARRIER_BYTES) // 2 - held) // (self.keys * (D + Dv)), most)
        return stages if D == Dv and D % 16 == 0 and self.queries % self.packed_heads == 0 and stages >= 2 else 0

    def in_window(self, left: Optional[int], right: Optional[int]) -> bool:
        """True if a tile of queries visits at most `MOST_KEYS` keys in this window."""
        return left is not None and right is not None and self.keys_reached(left, right) * self.keys <= MOST_KEYS

    def keys_reached(self, left: int, right: int) -> int:
        """Upper bound of the key tiles that the windows of a tile's queries intersect."""
        keys = -(-self.queries // self.packed_heads) + left + right
        return -(-(keys - 1) // self.keys) + 1


def window_tile(
    head_dim: int, head_dim_v: int, packed_heads: int, window: Tuple[Optional[int], Optional[int]], plain: bool
) -> Optional[Tuple[int, int]]:
    """(tile_m, tile_n) of SM90 forward in a short window whose tiles count from its end (`window_tiles`), or None.

    The tile of the compressed-causal mask, where keys are few as well. None: the kernel's own choice.

    packed_heads: query heads packed into the rows of a tile. window: (left, right); None: unbounded on this side.
    plain: one length for all sequences, and no other mask or score_mod.
    """
    shape = compress_schedule.forward_tile(head_dim, head_dim_v, packed_heads, plain)
    if shape is None:
        return None
    tile = ForwardTile(head_dim, head_dim_v, *shape, packed_heads, p_in_smem=False)
    return shape if tile.in_window(*window) and tile.stages_beside_two_queries(3) else None


def overlapped_stages(
    tile: ForwardTile,
    *,
    compress: Optional[CompressArgs] = None,
    lists: Optional[BlockSparseTensorsTorch] = None,
    window: Tuple[Optional[int], Optional[int]] = (None, None),
) -> int:
    """Stages of k and v with which SM90 forward overlaps one tile's loads and stores with another's arithmetic; 0 where
    it does not.

    compress: a factor of 1 gives long loops, without overlap. lists: normalised; those of packed sequences do not
    overlap. window: (left, right); None: unbounded on this side, or the call has another mask too.
    """
    if lists is not None:
        few = tile.head_dim <= MOST_HEAD_DIM and lists.mask_block_cnt.ndim == 3 and has_short_rows(lists)
    elif compress is not None:
        few = compress.factor > 1
    else:
        few = tile.head_dim <= MOST_HEAD_DIM and tile.in_window(*window)
    return tile.stages_beside_two_queries(tiling.MOST_KEY_STAGES if has_bits(lists) else 3) if few else 0
