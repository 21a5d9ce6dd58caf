"""Tiles and shares of queries of the SM90 kernels under the compressed-causal mask.

There are few keys and many queries. Forward takes tiles that waste little of the last key tile. In backward a CTA holds
a key tile and loops over all later queries: CTAs share a key tile's queries, so that multiprocessors are busy and CTAs
of neighbouring key tiles read the same queries out of the L2. Where the factor is 1 the kernels' own choices hold.
`docs/compress_factor.md` has the measurements.
"""

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

from cutlass import Int32

from flash_attn.cute.compressed_causal.mask import CompressArgs

# Queries of a share at most: CTAs that loop over it together drift apart, and have to stay within the L2.
MOST_QUERIES = 8192
# Query tiles of a share at least.
LEAST_TILES = 8
# Shares of average length that a multiprocessor gets, where queries are long enough.
ROUNDS = 4


def forward_tile(head_dim: int, head_dim_v: int, packed_heads: int, plain: bool) -> Optional[Tuple[int, int]]:
    """(tile_m, tile_n) for SM90 forward, or None for the kernel's own choice.

    `packed_heads`: how many query heads share the rows of a tile, 0 or 1 where none do. `plain`: no
    score_mod, mask_mod, block lists or paged keys, which cost registers or tie tile_n.
    """
    wide = all(96 < size <= 128 for size in (head_dim, head_dim_v))
    tile_m, tile_n = 192, 80 if wide else 112
    fits = (wide or head_dim == head_dim_v in (64, 96)) and tile_m % max(packed_heads, 1) == 0
    return (tile_m, tile_n) if plain and fits else None


class QueryShares(NamedTuple):
    """Backward's queries in `count` shares of `tiles` query tiles each; in deterministic mode none may be empty."""

    count: int | Int32
    tiles: int | Int32

    def traced(self) -> "QueryShares":
        """The same as an example argument for the compiler: run-time values, not constants."""
        return QueryShares(*map(Int32, self))

    def limits(self, share: Int32) -> Tuple[Int32, Int32]:
        """A share's half-open range of query tiles, in a kernel; the last one may reach over the end."""
        return share * self.tiles, (share + 1) * self.tiles


@lru_cache(maxsize=1024)
def query_shares(
    compress: CompressArgs, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, heads: int, num_sms: int
) -> QueryShares:
    """The shares that SM90 backward cuts the queries into; `heads` of all batches.

    Shares are launched from the last to the first. They are as long as gives each multiprocessor `ROUNDS` of them,
    within what the L2 holds and what the start of a CTA is worth.
    """
    tiles = -(-seqlen_q // tile_m)
    visited = sum(tiles - first_query_tile(compress, key, seqlen_q, tile_m) for key in range(0, seqlen_k, tile_n))
    share = max(LEAST_TILES, min(MOST_QUERIES // tile_m, visited * heads // (ROUNDS * num_sms)))
    return QueryShares(max(-(-tiles // share), 1), share)


def last_keys_first(compress: Optional[CompressArgs], plain: bool) -> bool:
    """True if SM90 backward may start with a query tile's last key tile.

    `plain`: fixed length, no block lists; in deterministic mode no position of each sequence's queries either.
    """
    return compress is not None and compress.factor > 1 and plain


def first_query_tile(compress: CompressArgs, key: int, seqlen_q: int, tile_m: int) -> int:
    """The first tile of queries of which one sees `key`, as all later ones do; the number of tiles where none does."""
    row = max(key * compress.factor + compress.offset, 0)
    return row // tile_m if row < seqlen_q else -(-seqlen_q // tile_m)
