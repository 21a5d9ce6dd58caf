"""Masks of an SM100 tile of 128 queries that walks the blocks that either of its halves lists (`query_halves`).

A step computes the scores of all 128 queries. Those of a half that does not list the block are set to -inf, after
everything else has been masked; a block that both halves list costs a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn.cute.fwd_sm90.masks import TailMask
from flash_attn.cute.lists.rows import HalfEntries

BOTH = 3


@dataclass(frozen=True)
class HalfMask:
    """A `TailMask` of forward for one entry; a thread has the scores of one query."""

    tail: TailMask
    halves: Int32

    def at_tail(self, n_block: Int32) -> Boolean:
        """True if a step for this block has to be masked, though no edge may run through it."""
        return self.tail.at_tail(n_block) | (self.halves != BOTH)

    def __call__(self, acc_S: cute.Tensor, n_block: Int32, mask_seqlen: bool, **options: Any) -> None:
        self.tail(acc_S, n_block, mask_seqlen, **options)
        hide_query(acc_S, self._query() // (self.tail.mask.tile_m // 2), self.halves)

    def _query(self) -> Int32:
        """The thread's query in its tile."""
        mask, given = self.tail.mask, self.tail.mask_fn.keywords
        coordinates = given["thr_mma"].partition_C(cute.make_identity_tensor((mask.tile_m, mask.tile_n)))
        return given["thr_tmem_load"].partition_D(coordinates[(None, None), 0, 0])[0][0]


def mask_at(
    mask: TailMask, entries: cute.Tensor | HalfEntries, kv_subtile_factor: int, place: Int32, **options: Any
) -> Callable:
    """The mask function of the tile of keys at `place` in a row, with some options given: `mask` itself, or for a half.

    kv_subtile_factor: tiles of keys in a block, one place each.
    """
    if isinstance(entries, HalfEntries):
        mask = HalfMask(mask, entries.halves(place // kv_subtile_factor))
    return partial(mask, **options) if options else mask


@cute.jit
def hide_query(acc_S: cute.Tensor, half: Int32, halves: Int32) -> None:
    """acc_S: all of a thread's scores, of a query in the given half."""
    if (halves >> half) & 1 == 0:
        for i in cutlass.range_constexpr(cute.size(acc_S.shape)):
            acc_S[i] = -Float32.inf


@cute.jit
def halves_at(
    place: Int32,
    mask_count: Int32,
    mask: HalfEntries,
    full: HalfEntries | None,
) -> Int32:
    """The halves that list the entry at a place in a row: its mask blocks, then its full ones."""
    halves = Int32(0)
    if const_expr(full is None):
        halves = mask.halves(place)
    else:
        if place < mask_count:
            halves = mask.halves(place)
        else:
            halves = full.halves(place - mask_count)
    return halves


@cute.jit
def hide_columns(acc_S: cute.Tensor, coordinates: cute.Tensor, halves: Int32, tile_m: cutlass.Constexpr[int]) -> None:
    """Backward, whose scores are transposed.

    Args:
        acc_S: a thread's scores. coordinates: (key, query) of each in the tile.
    """
    if halves != BOTH:
        begin = Int32(0) if halves & 1 != 0 else Int32(tile_m // 2)
        end = Int32(tile_m) if halves & 2 != 0 else Int32(tile_m // 2)
        for i in cutlass.range_constexpr(cute.size(acc_S.shape)):
            query = coordinates[i][1]
            acc_S[i] = acc_S[i] if query >= begin and query < end else -Float32.inf
