"""How the CTAs of SM90 backward under a sliding window share out the query heads (`head_walk`).

A CTA that walks more heads pays less often for what stands around a walk, but there are fewer CTAs, and the last of
them leave multiprocessors idle for longer.
"""

from functools import lru_cache
from typing import Optional, Tuple

# What stands around a CTA's walk costs, in query tiles: k and v before, the sums of dk and dv after.
AROUND_TILES = 2.9
# Of the time, that walking several heads has to save.
LEAST_SAVING = 0.02


@lru_cache(maxsize=1024)
def heads_per_cta(
    window: Tuple[Optional[int], Optional[int]],
    tokens: Tuple[int, int],
    *,
    batch: int,
    heads: Tuple[int, int],
    tile: Tuple[int, int],
    sms: int,
) -> int:
    """How many query heads of one key/value head a CTA walks, in a call without lists.

    Args:
        window: (left, right); None: without an end on this side.
        tokens: (queries, keys) of a sequence, packed: of all.
        batch: how many sequences of as many tokens there are, packed: 1.
        heads: (Hq, Hkv).
        tile: queries and keys of the kernel's.
    """
    if window == (None, None):
        return 1
    (tile_m, tile_n), (Hq, Hkv) = tile, heads
    reached = tokens[0] if None in window else max(1, min(tokens[0], tile_n + sum(window)))
    walks = -(-tokens[1] // tile_n) * Hq * batch
    group = Hq // Hkv
    times = {n: time(walks // n, n * -(-reached // tile_m), sms) for n in range(1, group + 1) if group % n == 0}
    best = min(times, key=lambda n: (times[n], n))
    return best if times[best] <= (1 - LEAST_SAVING) * times[1] else 1


def time(ctas: int, tiles: int, sms: int) -> float:
    """Of so many CTAs that walk so many query tiles each, in query tiles."""
    return -(-ctas // sms) * (AROUND_TILES + tiles)
