"""How the SM90 kernels cut compressed-causal attention into CTAs.

There are few keys and many queries. In forward a CTA sees a handful of key tiles, so what counts is
how little of the last one is wasted and how many queries share it. In backward a CTA holds a key
tile and walks all later queries: with few key tiles most multiprocessors would idle, and every walk
would read all queries from memory. Sharing a key tile's queries among CTAs mends both, since CTAs
of neighbouring key tiles then walk the same short stretch of queries at the same time, out of the
L2. Where the factor is 1 there are as many keys as queries, and the kernels' own choices hold.
`docs/compress_factor.md` has the measurements.
"""

from typing import Optional, Tuple

# Queries of a share at most: with q and do in 16 bits and D = 128 that is 4 MiB of the L2's 50.
MOST_QUERIES = 8192
# Query tiles of a share at least: loading K and V and adding up dK and dV cost about as many tiles.
LEAST_TILES = 8


def forward_tile(head_dim: int, head_dim_v: int, packed_heads: int, plain: bool) -> Optional[Tuple[int, int]]:
    """(tile_m, tile_n) for SM90 forward, or None for the kernel's own choice.

    `packed_heads`: how many query heads share the rows of a tile, 0 or 1 where none do. `plain`: no
    score_mod, mask_mod, block lists or paged keys, which cost registers or tie tile_n.
    """
    tile_m, tile_n = 192, 80
    fits = 96 < head_dim <= 128 and 96 < head_dim_v <= 128 and tile_m % max(packed_heads, 1) == 0
    return (tile_m, tile_n) if plain and fits else None


def query_shares(seqlen_q: int, tile_m: int, key_tiles: int, num_sms: int) -> int:
    """Into how many shares SM90 backward cuts the queries; `key_tiles` counts all heads and batches.

    Shares of at most MOST_QUERIES; as many as finish first if every CTA walks a whole share.
    """
    tiles = -(-seqlen_q // tile_m)
    least = -(-seqlen_q // MOST_QUERIES)
    most = max(least, tiles // LEAST_TILES)

    def time(shares: int) -> int:
        rounds = -(-key_tiles * shares // num_sms)
        return rounds * (-(-tiles // shares) + LEAST_TILES)

    return min((least << doubling for doubling in range(6) if least << doubling <= most), key=time, default=least)
