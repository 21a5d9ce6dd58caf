"""Options of the dk and dv pass's kernels, the pairs that they loop over, and the calls that it can do."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch

from flash_attn.cute.lists.tiling import ROWS, TOKEN_DIMS, box_columns
from flash_attn.cute.mma.host import DTYPES

WARPGROUPS, THREADS = 2, 128  # that multiply, and threads of each
SHARED_MEMORY = 224 * 1024  # bytes for tiles
MOST_STAGES = 4
MOST_SUMS = 256  # columns of dk and dv in the registers of a warpgroup
SMALL_BLOCKS = (16, 32)

Tensor = torch.Tensor


class KeyPairs(NamedTuple):
    """The (token, key block) pairs of lists by token, by block, and how they are dealt out.

    A row is a block of keys of a key/value head: row (b * Hkv + h) * N + block of sequence b, which has N blocks; where
    sequences are packed, row h * N + cu_blocks[b] + block, N blocks in all, or more. A row's pairs are one work tile,
    also where it has none, or several where they are many, which add up through partial sums.

    Attributes:
        work_tiles: in the order of rows: row, first pair, the one after the last, and the number of the
            partial sum, or -1 where it is the row's only work tile.
        by_head: query heads have lists of their own: `tokens` holds position * G + head of the group of G.
    """

    tokens: Tensor  # int32 [pairs], or longer: positions in their sequence, ascending
    work_tiles: Tensor  # int32 [bound, 4]
    row_tiles: Tensor  # int32 [rows + 1], work tiles before each row
    partials: int  # bound of the number of partial sums
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
    add: bool  # whether what dk and dv hold is added before rounding
    start: int  # rows that sequences of dpsum and lse_log2 start at multiples of
    use_mma_sync: bool  # how products are made (`mma.product`)
    by_head: bool  # whether a pair has a row of one head, not of all of a group

    @property
    def dims(self) -> tuple[int, int]:
        """Of q and k, and of do and v."""
        return self.head_dim, self.head_dim_v

    def columns(self, dim: int) -> int:
        """Columns of a tile in shared memory, of rows of so many: with zeros behind where the heads of a token, which
        are loaded there together, would not begin at multiples of 128 bytes."""
        return -(-dim // 64) * 64 if self.heads % 2 else dim

    @property
    def tile_dims(self) -> tuple[int, int]:
        """`columns` of q and k, and of do and v."""
        return self.columns(self.head_dim), self.columns(self.head_dim_v)

    @property
    def split(self) -> bool:
        """True if the warpgroups share work tiles: the first makes dk, the second dv, both with scores of their own."""
        return sum(self.tile_dims) > MOST_SUMS

    @property
    def teams(self) -> int:
        """Work tiles that a CTA has at a time."""
        return 1 if self.split else WARPGROUPS

    @property
    def parts(self) -> int:
        """Tiles of 64 keys in a block; of a smaller one the tile has more keys than are wanted."""
        return -(-self.block_size // ROWS)

    @property
    def keys(self) -> int:
        """Keys of a tile that are wanted."""
        return min(self.block_size, ROWS)

    @property
    def heads(self) -> int:
        """Query heads of a token that are loaded at a time."""
        return 1 if self.by_head else next(n for n in range(min(self.group, ROWS), 0, -1) if self.group % n == 0)

    @property
    def slices(self) -> int:
        """Loads that a token's heads take, those of a pair with all of them."""
        return self.group // self.heads

    @property
    def loads(self) -> int:
        """Loads of a pair."""
        return 1 if self.by_head else self.slices

    @property
    def slots(self) -> int:
        """Loads that fill a tile of 64 rows, or all but a few of them."""
        return ROWS // self.heads

    @property
    def stages(self) -> int:
        """Tiles of q and do in shared memory, of each work tile, beside k and v."""
        tile = 2 * self.teams * ROWS * sum(self.tile_dims)
        return min(MOST_STAGES, SHARED_MEMORY // tile - 1)

    def key_box(self, dim: int) -> tuple[int, int]:
        """Keys and head dimensions of k or v, of so many, that are loaded at a time."""
        return self.keys, self.columns(dim) if self.keys == ROWS else box_columns(self.columns(dim))


def unsupported(arch: int, dtype: torch.dtype, head_dim: int, head_dim_v: int, block_size: int) -> Optional[str]:
    """Why `backward_dkdv` cannot do a call, or None."""
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
