"""Static options of the top-k kernel, and the layout of tiles and heads over a CTA's rows that follows from them."""

from dataclasses import dataclass

from cutlass import Int32

from nsa_layer.kernels.select_by_tile.split_fp16 import TILE

ROWS = 4  # rows of a thread: two in each of its two fragments


@dataclass(frozen=True)
class TopKSpec:
    """Static options of the top-k kernel.

    Attributes:
        G: query heads whose scores are summed.
        share: entries of a list in one thread.
        init: forced blocks at the sequence's begin; local: up to a tile's first own block, the others are forced, too.
        crowded: forced blocks may be more than a list has entries.
    """

    D: int
    G: int
    share: int
    causal: bool
    init: int
    local: int
    crowded: bool
    packed: bool

    @property
    def parts(self) -> int:
        """Parts in which rows of keys are loaded: one, if shared memory holds whole rows."""
        return 1 if self.D <= 128 else 4

    @property
    def softmax(self) -> bool:
        """True if a group's heads are summed after a softmax; with one head, probabilities order as scores."""
        return self.G > 1

    @property
    def heads(self) -> int:
        """Rows of a tile: G rounded up to a power of two."""
        return 1 << (self.G - 1).bit_length()

    @property
    def tiles(self) -> int:
        """Tiles of a CTA."""
        return TILE // self.heads

    @property
    def lists(self) -> int:
        """Tiles that a thread's rows belong to."""
        return max(1, ROWS // self.heads)

    @property
    def lane_bits(self) -> int:
        """The number of bits of the head among the three bits of a lane's row."""
        return max(0, self.heads.bit_length() - 3)

    def tile_and_head(self, m: Int32, half: Int32, warp_m: Int32, q: Int32) -> tuple[Int32, Int32]:
        """For a CTA's row ``64 m + 16 warp_m + 8 half + q``: its tile in the CTA, and its head in the group."""
        heads, free = self.heads, 3 - self.lane_bits
        if heads == 1:
            return 64 * m + 16 * warp_m + 8 * half + q, Int32(0)
        if heads == 2:
            return 32 * m + 8 * warp_m + q, Int32(half)
        return (warp_m << free) + (q & ((1 << free) - 1)), half + 2 * m + 4 * (q >> free)
