"""Static sizes that the kernels of a decode step are compiled for, and their tensors' shapes."""

from __future__ import annotations

from dataclasses import dataclass

WARP, WARPS = 32, 4
ROWS, KEYS = 16, 16  # of one product of a warp: (token, head) pairs, and keys
VECTOR = 8  # elements of 16 bytes
MOST_QUERIES = 8
MOST_OF_CLUSTER = 8  # thread blocks
RESIDENT = 2  # thread blocks of a multiprocessor
LAUNCH = dict(block=(WARP * WARPS, 1, 1), min_blocks_per_mp=RESIDENT, preferred_smem_carveout=75, use_pdl=True)


@dataclass(frozen=True)
class DecodeSpec:
    """A step's static sizes.

    Attributes:
        T: queries of a sequence, at most.
        appends: the queries' keys and values are not in the caches yet.
        n: blocks that a token lists.
        init, local: forced blocks at the sequence's begin, and up to a token's own.
    """

    D: int
    G: int
    T: int
    span: int
    stride: int
    offset: int
    block_size: int
    n: int
    window: int
    init: int
    local: int
    appends: bool

    @property
    def rows(self) -> int:
        """Queries of a key/value head."""
        return self.T * self.G

    @property
    def chosen(self) -> int:
        """Blocks that a token may list beside those that are forced; there are candidates where all of these are."""
        return max(1, self.n - self.init - self.local)
