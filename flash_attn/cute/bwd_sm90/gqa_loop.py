"""The loop of a key tile's CTA over the query tiles of several query heads in SM90 backward.

Query heads of one key/value head share k, v, dk and dv: a CTA that loops over several heads loads k and v and stores dk
and dv once, which pays under a short window, where loops are a few tiles long. All warp roles finish a head before the
next one, so that CTAs of neighbouring key tiles read the same queries from L2. All tiles are masked: a second loop body
costs more than masks. With block lists, which the heads of a CTA share, each head's loop is `query_loop`'s; another
kernel computes dq.
"""

from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn.cute.bwd_sm90.query_loop import QueryLoop, load_queries, multiply_queries


@dataclass(frozen=True)
class HeadLoop:
    """Query heads `head` .. `head + heads - 1`, and query tiles `begin` .. `end` - 1 of each.

    backwards: from the last tile to the first.
    """

    head: Int32
    heads: int
    begin: Int32
    end: Int32
    backwards: bool

    def m_block(self, position: Int32) -> Int32:
        """The query tile at a position of the loop, begin .. end - 1."""
        return self.begin + self.end - 1 - position if self.backwards else position


@cute.jit
def load_heads(loop: HeadLoop, state_q, state_do, load_tile: Callable, copies: Callable):
    """Load the loop's tiles of q and do; k and v with the first. Returns the advanced states.

    copies(head): keyword arguments of load_tile for a query head.
    """
    kv_loaded = False
    for head in cutlass.range(loop.head, loop.head + loop.heads, unroll=1):
        load_of_head = partial(load_tile, **copies(head))
        for position in cutlass.range(loop.begin, loop.end, unroll=1):
            state_q, state_do = load_of_head(loop.m_block(position), state_q, state_do, load_kv=not kv_loaded)
            kv_loaded = True
    return state_q, state_do


@cute.jit
def multiply_heads(loop: HeadLoop, state_q, state_do, multiply: Callable, of_head: dict[str, Callable], mask: Callable):
    """Accumulate the loop's tiles into dk and dv, which the caller zeroed. Returns the advanced states.

    of_head: keyword arguments of multiply, functions that get ``head_idx=``. mask: multiply's mask_fn, likewise.
    """
    for head in cutlass.range(loop.head, loop.head + loop.heads, unroll=1):
        multiply_of_head = _named(multiply, dict(of_head, mask_fn=mask), head)
        for position in cutlass.range(loop.begin, loop.end, unroll=1):
            state_q, state_do = multiply_of_head(loop.m_block(position), state_q, state_do)
    return state_q, state_do


def _named(multiply: Callable, of_head: dict[str, Callable], head: Int32) -> Callable:
    return partial(multiply, **{name: partial(function, head_idx=head) for name, function in of_head.items()})


@cute.jit
def load_listed_heads(
    loop: QueryLoop,
    head: Int32,
    heads: cutlass.Constexpr[int],
    state_q,
    state_do,
    load_tile: Callable,
    copies: Callable,
    m_block_max: Int32,
):
    """`query_loop.load_queries` for `heads` query heads from `head` on; copies as in `load_heads`."""
    for current in cutlass.range(head, head + heads, unroll=1):
        # All heads have the same tiles: where the first head has one before m_block_max, it loaded k and v.
        state_q, state_do = load_queries(
            loop, state_q, state_do, partial(load_tile, **copies(current)), m_block_max, current > head
        )
    return state_q, state_do


@cute.jit
def multiply_listed_heads(
    loop: QueryLoop,
    head: Int32,
    heads: cutlass.Constexpr[int],
    state_q,
    state_do,
    multiply: Callable,
    of_head: dict[str, Callable],
    mask_listed: Callable,
    mask_full: Optional[Callable],
    sees_all: Callable,
    m_block_max: Int32,
):
    """`query_loop.multiply_queries` for `heads` query heads from `head` on; of_head as in `multiply_heads`."""
    for current in cutlass.range(head, head + heads, unroll=1):
        full_of_head = None
        if const_expr(mask_full is not None):
            full_of_head = partial(mask_full, head_idx=current)
        state_q, state_do = multiply_queries(
            loop,
            state_q,
            state_do,
            _named(multiply, of_head, current),
            partial(mask_listed, head_idx=current),
            full_of_head,
            sees_all,
            m_block_max,
        )
    return state_q, state_do


@cute.jit
def add_dq_heads(
    loop: HeadLoop,
    add: Callable,
    accumulator: Callable,
    semaphore: Optional[cute.Tensor],
    rank_of: Callable,
    by_two: cutlass.Constexpr[bool],
):
    """`query_loop.add_dq` for the loop's heads and tiles.

    accumulator(head): of `query_loop.add_dq`. semaphore: [query tiles, 1, heads] counters, for an ordered reduction in
    which rank_of(m_block) key tiles add to query tile m_block before. by_two: `add` is
    `ordered_reduction.add_in_order`, which also takes the index of the tile in the CTA.
    """
    number = Int32(0)
    for head in cutlass.range(loop.head, loop.head + loop.heads, unroll=1):
        of_head, counters = accumulator(head), None
        if const_expr(semaphore is not None):
            counters = semaphore[None, None, head]
        for position in cutlass.range(loop.begin, loop.end, unroll=1):
            m_block, rank = loop.m_block(position), Int32(0)
            if const_expr(semaphore is not None):
                rank = rank_of(m_block)
            if const_expr(by_two):
                add(number, of_head, counters, m_block, rank)
                number += 1
            else:
                add(of_head, counters, m_block, rank)
