"""Static tiling of the pooling kernels: blocks of a CTA and segments of tokens; no DSL."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 128
VECTOR = 8  # elements that a thread has of a row: 16 bytes of fp16 and bf16
IN_FLIGHT = 16  # rows that a thread loads before it adds the first
RUN = 8  # consecutive tokens whose gradients a thread computes
RESIDENT = 6  # CTAs of a multiprocessor; with more, registers suffice for four loads of a thread in flight
ROWS_A_TILE = 128  # of 128 elements: 32 KB a CTA
SHARED_A_TILE = 16  # strides of a tile for each stride that the next tile reads again
SMEM_FLOATS = 24 * 1024


@dataclass(frozen=True)
class Pooling:
    """Blocks of `l` tokens, every `d` tokens."""

    l: int
    d: int

    @property
    def overlap(self) -> int:
        """Blocks that a token is in, away from the ends."""
        return self.l // self.d


@dataclass(frozen=True)
class Segments:
    """The segments of a CTA's tile.

    Attributes:
        D: elements of a row.
        blocks: consecutive blocks in a tile.
        size: tokens that are summed before shared memory; a divisor of the stride, or of the block where there is one.
        count: segments in a tile.
    """

    D: int
    blocks: int
    size: int
    count: int


def plan_blocks(pooling: Pooling, widest: int) -> int:
    """Blocks of a tile: enough rows to keep memory busy, few of them read twice; 1 if more would not fit."""
    shared = pooling.overlap - 1
    strides = max(SHARED_A_TILE * shared, ROWS_A_TILE * 128 // widest // pooling.d)
    return max(1, min(strides, SMEM_FLOATS // widest) - shared)


def plan_segments(pooling: Pooling, blocks: int, D: int) -> Segments:
    """The longest segments that leave none of a tile's threads idle and fit into shared memory."""
    tokens = (blocks - 1) * pooling.d + pooling.l
    unit = pooling.d if blocks > 1 else pooling.l
    groups = THREADS // (D // VECTOR)
    fitting = [m for m in divisors(unit) if tokens // m * D <= SMEM_FLOATS]
    size = max((m for m in fitting if tokens // m >= groups), default=min(fitting))
    return Segments(D, blocks, size, tokens // size)


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]
