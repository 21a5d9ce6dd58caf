"""The query tiles that the CTA of a key tile loops over in SM90 backward for several query heads.

Query heads of one key/value head have the same k and v and add to the same dk and dv: a CTA that loops over the query
tiles of several heads loads k and v and stores dk and dv once. Under a short window, where loops are a few tiles long,
that pays. All warp roles take all tiles of a head before the next head, so that CTAs of neighbouring key tiles read the
same queries out of the L2. All tiles are masked: a second loop body costs more than masks do. With block lists, which
the heads of a CTA share, each head's loop is that of `query_loop`; dq is another kernel's.
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
    """Query heads `head` .. `head + heads - 1`, for each the query tiles `begin` .. `end` - 1.

    backwards: from the last tile to the first.
    """

    head: Int32
    heads: int
    begin: Int32
    end: Int32
    backwards: bool

    def m_block(self, place: Int32) -> Int32:
        """The query tile in a place from begin to end - 1."""
        return self.begin + self.end - 1 - place if self.backwards else place


@cute.jit
def load_heads(loop: HeadLoop, state_q, state_do, load_tile: Callable, copies: Callable):
    """Load the loop's tiles of q and do; k and v with the first of them. Returns the advanced states.

    copies(head): what load_tile takes by name to load of that head.
    """
    kv_loaded = False
    for head in cutlass.range(loop.head, loop.head + loop.heads, unroll=1):
        load_of_head = partial(load_tile, **copies(head))
        for place in cutlass.range(loop.begin, loop.end, unroll=1):
            state_q, state_do = load_of_head(loop.m_block(place), state_q, state_do, load_kv=not kv_loaded)
            kv_loaded = True
    return state_q, state_do


@cute.jit
def multiply_heads(loop: HeadLoop, state_q, state_do, multiply: Callable, of_head: dict[str, Callable], mask: Callable):
    """Multiply the loop's tiles into dk and dv, which have to hold zeros. Returns the advanced states.

    of_head: what multiply takes by name, to be given the head. mask: the same.
    """
    for head in cutlass.range(loop.head, loop.head + loop.heads, unroll=1):
        multiply_of_head = _named(multiply, dict(of_head, mask_fn=mask), head)
        for place in cutlass.range(loop.begin, loop.end, unroll=1):
            state_q, state_do = multiply_of_head(loop.m_block(place), state_q, state_do)
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
        # All loop over the same tiles: where the first head found one before m_block_max, k and v came with it.
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

    accumulator: of a head. semaphore: [query tiles, 1, heads] counters; with them key tiles add to query tile m_block
    in the order of rank_of(m_block). by_two: `add` is `ordered_reduction.add_in_order`, which takes the number of the
    tile too.
    """
    number = Int32(0)
    for head in cutlass.range(loop.head, loop.head + loop.heads, unroll=1):
        of_head, counters = accumulator(head), None
        if const_expr(semaphore is not None):
            counters = semaphore[None, None, head]
        for place in cutlass.range(loop.begin, loop.end, unroll=1):
            m_block, rank = loop.m_block(place), Int32(0)
            if const_expr(semaphore is not None):
                rank = rank_of(m_block)
            if const_expr(by_two):
                add(number, of_head, counters, m_block, rank)
                number += 1
            else:
                add(of_head, counters, m_block, rank)
