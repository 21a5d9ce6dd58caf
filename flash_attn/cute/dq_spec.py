"""What a kernel of the dq pass of SM90 backward is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import torch

WARPGROUPS, THREADS = 2, 128  # that multiply, and threads of each
ROWS = 64  # queries of a warpgroup
TILE_M = WARPGROUPS * ROWS  # queries of a tile
STEP = 128  # keys
SHARED_MEMORY = 224 * 1024  # bytes for tiles
MOST_STAGES = 4

DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


@dataclass(frozen=True)
class Output:
    """Where dq goes, and what is added to it on the way; hashable.

    Attributes:
        from_accum: it starts from what the fp32 accumulator holds, else from 0.
        to_dq: it is scaled, rounded and written to dq; else it goes to the accumulator as it is.
        onto_dq: what dq holds is added before rounding.
    """

    from_accum: bool
    to_dq: bool
    onto_dq: bool = False


@dataclass(frozen=True)
class DqSpec:
    """What a kernel is compiled for, lists and mask_mod apart; hashable.

    Attributes:
        group: query heads of a key/value head.
        list_group: of them, how many share a list that is indexed by key/value head; else 1.
        subtiles: tiles of TILE_M queries in a block of the lists.
        edges: whether there is a left and a right end of what a query sees; causal is a right one.
        packed, seqused: whether cu_seqlens, and seqused, are there for queries and keys.
        sums: whether dpsum and lse_log2 are computed and written, not read.
        start: rows that sequences of dpsum, lse_log2 and the accumulator start at multiples of.
        stay: as many CTAs as run at a time walk the tiles; else a CTA to a tile.
    """

    dtype: torch.dtype
    head_dim: int
    block_k: int
    group: int
    list_group: int
    subtiles: int
    edges: tuple[bool, bool]
    packed: tuple[bool, bool]
    seqused: tuple[bool, bool]
    output: Output
    sums: bool
    start: int
    stay: bool

    @property
    def stages(self) -> int:
        """Of k and v in shared memory, beside q and do."""
        row = 2 * self.head_dim * 2  # bytes of a token's k and v, or q and do
        return min(MOST_STAGES, (SHARED_MEMORY - TILE_M * row) // (STEP * row))

    @property
    def box(self) -> tuple[int, int]:
        """Keys and head dimensions of k or v that are loaded at a time."""
        return self.block_k, box_columns(self.head_dim)


def box_columns(head_dim: int) -> int:
    """Head dimensions that one swizzled row of shared memory holds."""
    return 64 if head_dim % 64 == 0 else 32
