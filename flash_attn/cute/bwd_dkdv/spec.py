"""Compile-time options of the dk and dv pass's kernels, the pairs they loop over, and the calls they support."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch

from flash_attn.cute.lists.tiling import ROWS, TOKEN_DIMS, box_columns
from flash_attn.cute.mma.host import DTYPES, MOST_STAGES, SHARED_MEMORY

WARPGROUPS, THREADS = 2, 128  # consumer warpgroups, and threads of each
MOST_SUMS = 256  # accumulator columns, of dk and dv together, that a warpgroup's registers hold
SMALL_BLOCKS = (16, 32)

Tensor = torch.Tensor


class KeyPairs(NamedTuple):
    """The transpose of tokens' block lists (CSR): the tokens of each key block, cut into work tiles.

    A row is a block of keys of a key/value head: row (b * Hkv + h) * N + block of sequence b, which has N blocks; where
    sequences are packed, row h * N + cu_blocks[b] + block, N blocks in all, or more. A row has one work tile, even if
    it lists no token, or several with a partial sum each, where it lists many.

    Attributes:
        work_tiles: in the order of rows: row, first pair, end of its pairs, and index of its partial sum, -1 where it
            is the row's only work tile.
        by_head: query heads have lists of their own: `tokens` holds position * G + head of the group of G.
    """

    tokens: Tensor  # int32 [at least pairs]: positions in their sequence, ascending in a row
    work_tiles: Tensor  # int32 [bound, 4]
    row_tiles: Tensor  # int32 [rows + 1], work tiles before each row
    partials: int  # upper bound of the number of partial sums
    block_size: int = ROWS  # keys of a block, a multiple of 64, or 16 or 32
    cu_blocks: Optional[Tensor] = None  # int32 [sequences + 1], blocks before each packed sequence
    by_head: bool = False


@dataclass(frozen=True)
class DkdvSpec:
    """Options that the kernels are compiled for; hashable."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int  # query heads of a key/value head
    block_size: int  # keys of a block
    causal: bool  # whether a token sees keys up to its own position only
    offset: bool  # whether positions of first queries are given
    packed: bool  # whether sequences are packed
    add: bool  # whether old values of dk and dv are added before rounding
    start: int  # sequences of dpsum and lse_log2 start at multiples of this many rows
    use_mma_sync: bool  # instead of wgmma (`mma.product`)
    by_head: bool  # whether a pair is of one query head, not of all of a group

    @property
    def dims(self) -> tuple[int, int]:
        """(D, Dv): head dimensions of q and k, and of do and v."""
        return self.head_dim, self.head_dim_v

    def columns(self, dim: int) -> int:
        """Columns of a shared-memory tile of rows of `dim` columns: padded with zeros to a multiple of 64 for an odd
        number of `heads`, whose rows in one TMA box would otherwise not begin at multiples of 128 bytes."""
        return -(-dim // 64) * 64 if self.heads % 2 else dim

    @property
    def tile_dims(self) -> tuple[int, int]:
        """`columns` of (D, Dv)."""
        return self.columns(self.head_dim), self.columns(self.head_dim_v)

    @property
    def split(self) -> bool:
        """True if the warpgroups share work tiles: the first computes dk, the second dv, each its own scores."""
        return sum(self.tile_dims) > MOST_SUMS

    @property
    def teams(self) -> int:
        """Work tiles in flight per CTA."""
        return 1 if self.split else WARPGROUPS

    @property
    def parts(self) -> int:
        """Tiles of 64 keys per block; a smaller block is one tile, of which only `keys` are used."""
        return -(-self.block_size // ROWS)

    @property
    def keys(self) -> int:
        """Keys of a tile that belong to its block."""
        return min(self.block_size, ROWS)

    @property
    def heads(self) -> int:
        """Query heads of a token in one load: the largest divisor of the group up to 64."""
        return 1 if self.by_head else next(n for n in range(min(self.group, ROWS), 0, -1) if self.group % n == 0)

    @property
    def slices(self) -> int:
        """Loads for all query heads of a token's group."""
        return self.group // self.heads

    @property
    def loads(self) -> int:
        """Loads per (token, block) pair."""
        return 1 if self.by_head else self.slices

    @property
    def slots(self) -> int:
        """Loads per tile of 64 rows; the last 64 % heads rows stay empty."""
        return ROWS // self.heads

    @property
    def stages(self) -> int:
        """Pipeline stages of q and do per work tile, beside its k and v."""
        tile = 2 * self.teams * ROWS * sum(self.tile_dims)
        return min(MOST_STAGES, SHARED_MEMORY // tile - 1)

    def key_box(self, dim: int) -> tuple[int, int]:
        """(keys, columns) of the TMA box for k or v of `dim` columns."""
        return self.keys, self.columns(dim) if self.keys == ROWS else box_columns(self.columns(dim))


def unsupported(arch: int, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: int) -> Optional[str]:
    """Why `backward_dkdv` does not support a call, or None."""
    if arch // 10 not in (9, 10):
        return f"sm_{arch}: the dk and dv pass by token is for sm_90 and sm_100"
    if dtype not in DTYPES:
        return f"q is {dtype}: the dk and dv pass by token supports float16 and bfloat16"
    if (head_dim, head_dim_v) not in TOKEN_DIMS:
        supported = ", ".join(map(str, TOKEN_DIMS))
        return f"head dimensions {head_dim} and {head_dim_v}: dk and dv by token support {supported}"
    if block_size % ROWS and block_size not in SMALL_BLOCKS:
        return f"blocks of {block_size} keys: the dk and dv pass by token supports multiples of {ROWS}, 16 and 32"
    return None
