"""Turns at dk and dv in deterministic backward on SM100: what a CTA that has nothing to add does with its turn.

The query heads of a group add to the same dk and dv in their order: at a key tile each waits for as many turns as
there are heads before it. With lists for each query head some of them may list nothing there. They add nothing, but
the head after them counts their turn.
"""

import cutlass.cute as cute
from cutlass import Constexpr, Int32

from flash_attn.cute import barrier

WARPGROUP = 128  # threads


@cute.jit
def pass_turn(
    semaphore: cute.Tensor,
    thread: Int32,
    tile: Int32,
    head: Int32,
    batch: Int32,
    group: Constexpr[int],
    flags: Constexpr[int],
) -> None:
    """Wait for a query head's turn at a key tile, and give it to the next head.

    semaphore: int32 [key tiles, 2, key/value heads, B]. thread: of those that compute. group: query heads of a
    key/value head. flags: how many of a tile's two are in use, each by a warpgroup.
    """
    warpgroup = thread // WARPGROUP
    if warpgroup < flags:
        turns = semaphore[tile, None, head // group, batch].iterator
        barrier.wait_eq(turns, thread % WARPGROUP, warpgroup, head % group)
        barrier.arrive_inc(turns, thread % WARPGROUP, warpgroup, 1)
