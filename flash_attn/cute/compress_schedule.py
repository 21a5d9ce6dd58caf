"""How the SM90 kernels cut compressed-causal attention into CTAs.

There are few keys and many queries. In forward a CTA sees a handful of key tiles, so what counts is
how little of the last one is wasted and how many queries share it. In backward a CTA holds a key
tile and walks all later queries: with few key tiles most multiprocessors would idle, and every walk
would read all queries from memory. Sharing a key tile's queries among CTAs mends both, since CTAs
of neighbouring key tiles then walk the same short stretch of queries at the same time, out of the
L2. Where the factor is 1 there are as many keys as queries, and the kernels' own choices hold.
`docs/compress_factor.md` has the measurements.
"""

import heapq
import math
from functools import lru_cache
from typing import Iterator, List, NamedTuple, Optional, Tuple

import cutlass
from cutlass import Int32

from flash_attn.cute.compress import CompressArgs, compressed_query_tile_range

# Queries of a share at most: CTAs that walk it together drift apart, and have to stay within the L2.
MOST_QUERIES = 8192
# Query tiles of a share at least.
LEAST_TILES = 8
# What loading K and V and adding up dK and dV cost, in query tiles.
START_TILES = 12
# From so many CTAs of the longest share on, for a multiprocessor, how the last ones end makes no difference.
MANY_ROUNDS = 16

SMEM_BYTES = 227 << 10  # of a CTA
BARRIER_BYTES = 1 << 10  # what the barriers take, with what aligns the tiles behind them


def forward_tile(head_dim: int, head_dim_v: int, packed_heads: int, plain: bool) -> Optional[Tuple[int, int]]:
    """(tile_m, tile_n) for SM90 forward, or None for the kernel's own choice.

    `packed_heads`: how many query heads share the rows of a tile, 0 or 1 where none do. `plain`: no
    score_mod, mask_mod, block lists or paged keys, which cost registers or tie tile_n.
    """
    tile_m, tile_n = 192, 80
    fits = 96 < head_dim <= 128 and 96 < head_dim_v <= 128 and tile_m % max(packed_heads, 1) == 0
    return (tile_m, tile_n) if plain and fits else None


def overlapped_stages(
    factor: int,
    head_dim: int,
    head_dim_v: int,
    *,
    tile: Tuple[int, int],
    packed_heads: int,
    p_in_smem: bool,
) -> int:
    """In how many stages of keys and values SM90 forward lets one tile's loads and stores run under another's
    arithmetic (tile_overlap.py); 0 where it does not.

    Where the factor is 1 there are as many keys as queries, and long walks.
    """
    if factor <= 1:
        return 0
    return stages_beside_two_queries(head_dim, head_dim_v, tile=tile, packed_heads=packed_heads, p_in_smem=p_in_smem)


def stages_beside_two_queries(
    head_dim: int, head_dim_v: int, *, tile: Tuple[int, int], packed_heads: int, p_in_smem: bool
) -> int:
    """How many stages of keys and values to take beside two tiles' queries; 0 where tiles cannot overlap.

    Three stages are 1 to 3 % faster than two. Output takes the place of queries, so they have to be alike; queries
    come by TMA, so the heads of a group have to divide the tile; and two tiles' queries have to fit beside the keys
    and values.
    """
    tile_m, tile_n = tile
    alike = head_dim == head_dim_v and head_dim % 16 == 0 and tile_m % packed_heads == 0
    queries = 2 * tile_m * head_dim + (tile_m * tile_n if p_in_smem else 0)
    room = (SMEM_BYTES - BARRIER_BYTES) // 2 - queries
    stages = min(room // (tile_n * (head_dim + head_dim_v)), 3)
    return stages if alike and stages >= 2 else 0


class QueryShares(NamedTuple):
    """Backward's queries in shares, in query tiles: `early` each at first, `late` each after so many of them."""

    count: int | Int32
    early_count: int | Int32
    early: int | Int32
    late: int | Int32

    def traced(self) -> "QueryShares":
        """The same as an example argument for the compiler: run-time values, not constants."""
        return QueryShares(*map(Int32, self))

    def limits(self, share: Int32) -> Tuple[Int32, Int32]:
        """A share's half-open range of query tiles, in a kernel; the last one may reach over the end."""
        early = cutlass.min(share, self.early_count)
        begin = early * self.early + (share - early) * self.late
        return begin, begin + cutlass.select_(share < self.early_count, self.early, self.late)


@lru_cache(maxsize=1024)
def query_shares(
    compress: CompressArgs, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, heads: int, num_sms: int
) -> QueryShares:
    """The shares that SM90 backward cuts the queries into; `heads` of all batches.

    Shares are launched from the last to the first. Late queries see many key tiles, each a CTA of its
    own: long shares save the cost of starting one. Early queries see few: short shares of theirs,
    launched last, fill the multiprocessors up to the end. Where there are rounds enough for the end not
    to matter all shares are equally long; else it is the first plan to finish by `_finish`.
    """
    tiles, most = -(-seqlen_q // tile_m), max(MOST_QUERIES // tile_m, 1)
    lengths = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, tile_m=tile_m, tile_n=tile_n)
    begins = [compressed_query_tile_range(n, **lengths, **compress._asdict())[0] for n in range(-(-seqlen_k // tile_n))]
    begins = [begin for begin in begins if begin < tiles]
    best = QueryShares(max(-(-tiles // most), 1), 0, 0, most)
    if sum(tiles - begin for begin in begins) * heads > MANY_ROUNDS * most * num_sms:
        return best
    least = _finish(best, tiles, begins, heads, num_sms, None)
    for plan in _plans(tiles, begins, most):
        time = _finish(plan, tiles, begins, heads, num_sms, least)
        if time < least:
            best, least = plan, time
    return best


def _plans(tiles: int, begins: List[int], most: int) -> Iterator[QueryShares]:
    """Equally long shares, and early ones of several lengths up to some key tile's begin."""
    turns = sorted({begins[len(begins) * part // 8] for part in (1, 2, 3, 4)} - {0}) if begins else []
    for turn in [0, *turns]:
        for early_count in range(1, 13) if turn else [0]:
            early = -(-turn // early_count) if turn else 0
            if early > most or 0 < early < LEAST_TILES:
                continue
            left = max(tiles - early_count * early, 0)
            for late_count in range(max(-(-left // most), 1), -(-left // most) + 8):
                late = -(-left // late_count)
                if late >= LEAST_TILES:
                    yield QueryShares(early_count + -(-left // late), early_count, early, late)


def _finish(
    plan: QueryShares, tiles: int, begins: List[int], heads: int, num_sms: int, limit: Optional[float]
) -> float:
    """When the last CTA is through, in query tiles' time; a multiprocessor takes the next CTA as soon as it is free.

    Infinite where it is not before `limit`.
    """
    walks = []
    for share in reversed(range(plan.count)):
        early = min(share, plan.early_count)
        first = early * plan.early + (share - early) * plan.late
        end = min(first + (plan.early if share < plan.early_count else plan.late), tiles)
        walks += [walk for begin in reversed(begins) if (walk := end - max(first, begin)) > 0]
    if limit is not None and sum(walk + START_TILES for walk in walks) * heads >= limit * num_sms:
        return math.inf
    free = [0.0] * num_sms
    for walk in walks:
        for _ in range(heads):
            heapq.heapreplace(free, free[0] + walk + START_TILES)
    return max(free)


def writes_first(compress: Optional[CompressArgs], plain: bool) -> bool:
    """Whether SM90 backward's dq goes by `first_writer`. `plain`: not deterministic, fixed length, no block lists."""
    return compress is not None and compress.factor > 1 and plain


def unseen_query_tiles(compress: CompressArgs, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int) -> int:
    """How many tiles of queries, all of them before the others, see no key at all."""
    lengths = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return compressed_query_tile_range(0, tile_m=tile_m, tile_n=tile_n, **lengths, **compress._asdict())[0]
