"""Tiles of the SM90 kernels, and backward's split of the queries, under the compressed-causal mask.

There are few keys and many queries. Forward takes tiles that waste little of the last key tile. In backward a CTA has a
key tile and loops over later queries: several CTAs split the queries of a key tile into shares, to fill the GPU and to
let CTAs of neighbouring key tiles read the same queries from L2. With a factor of 1 the kernels' own choices hold.
`docs/compress_factor.md` has the measurements.
"""

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

from cutlass import Int32

from flash_attn.cute.compressed_causal.mask import CompressArgs

# Most queries of a share: CTAs that loop over it at the same time drift apart, and have to stay within L2.
MOST_SHARE_QUERIES = 8192
# Least query tiles of a share.
LEAST_TILES = 8
# Shares of average length per multiprocessor, where there are enough queries.
ROUNDS = 4


def forward_tile(head_dim: int, head_dim_v: int, packed_heads: int, plain: bool) -> Optional[Tuple[int, int]]:
    """(tile_m, tile_n) for SM90 forward, or None for the kernel's own choice.

    `packed_heads`: query heads packed into the rows of a tile, 0 or 1 without. `plain`: no score_mod, mask_mod,
    block lists or paged keys, which cost registers or fix tile_n.
    """
    wide = all(96 < size <= 128 for size in (head_dim, head_dim_v))
    tile_m, tile_n = 192, 80 if wide else 112
    fits = (wide or head_dim == head_dim_v in (64, 96)) and tile_m % max(packed_heads, 1) == 0
    return (tile_m, tile_n) if plain and fits else None


class QueryShares(NamedTuple):
    """A split of backward's queries into `count` shares of `tiles` query tiles each; none empty if deterministic."""

    count: int | Int32
    tiles: int | Int32

    def traced(self) -> "QueryShares":
        """Int32 values as an example argument for the compiler, which would make constants of ints."""
        return QueryShares(*map(Int32, self))

    def limits(self, share: Int32) -> Tuple[Int32, Int32]:
        """A share's range [begin, end) of query tiles, in a kernel; the last share may reach past the last tile."""
        return share * self.tiles, (share + 1) * self.tiles


@lru_cache(maxsize=1024)
def query_shares(
    compress: CompressArgs, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, heads: int, num_sms: int
) -> QueryShares:
    """The split of the queries for SM90 backward; `heads`: of all batches.

    Shares are launched from the last to the first. Their length gives each multiprocessor `ROUNDS` of them, within
    bounds set by the L2 and by the cost of starting a CTA.
    """
    tiles = -(-seqlen_q // tile_m)
    visited = sum(tiles - first_query_tile(compress, key, seqlen_q, tile_m) for key in range(0, seqlen_k, tile_n))
    share = max(LEAST_TILES, min(MOST_SHARE_QUERIES // tile_m, visited * heads // (ROUNDS * num_sms)))
    return QueryShares(max(-(-tiles // share), 1), share)


def last_keys_first(compress: Optional[CompressArgs], plain: bool) -> bool:
    """True if SM90 backward may launch key tiles from the last to the first.

    `plain`: fixed length, no block lists, and in deterministic mode no q_offset.
    """
    return compress is not None and compress.factor > 1 and plain


def first_query_tile(compress: CompressArgs, key: int, seqlen_q: int, tile_m: int) -> int:
    """The first query tile that sees `key`; the number of query tiles if none does."""
    row = max(key * compress.factor + compress.offset, 0)
    return row // tile_m if row < seqlen_q else -(-seqlen_q // tile_m)
