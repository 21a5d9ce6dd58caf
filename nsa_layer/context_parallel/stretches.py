"""A rank's chunks as stretches of queries, each with the keys of the whole call that it may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from nsa_layer.call_spec import CallSpec
from nsa_layer.context_parallel.spec import ContextParallel, chunks_of

TILE = 128  # keys of the kernels' tiles, or a multiple


class Window(NamedTuple):
    """Keys of a stretch's sliding window.

    Attributes:
        before, after: how many before the stretch's first query, and behind its last one.
        keys: rows of the stretch's keys.
        lengths: (keys, position of the first query among them) of each sequence.
    """

    before: int
    after: int
    keys: slice
    lengths: tuple[tuple[int, int], ...]


class Stretch(NamedTuple):
    """Queries of one chunk.

    Attributes:
        queries: rows of the rank's tokens.
        keys: rows of the whole call's tokens: of all sequences here, up to the chunk's end where they are cut.
        lengths: (queries, keys, position of the first query) of each sequence here; of a batch one for all.
        before: sequences that end before the chunk.
    """

    queries: slice
    keys: slice
    lengths: tuple[tuple[int, int, int], ...]
    before: int

    def spec(self, whole: CallSpec) -> CallSpec:
        """The static side of this stretch's call."""
        if whole.lengths is None:
            return whole
        queries, keys, _ = zip(*self.lengths)
        return replace(whole, lengths=queries, lengths_k=keys)

    def blocks(self, whole: CallSpec) -> slice:
        """Rows of the whole call's compressed keys."""
        count = whole.config.compressed_length
        begin = sum(map(count, whole.lengths[: self.before])) if whole.lengths else 0
        return slice(begin, begin + sum(count(S) for _, S, _ in self.lengths))

    def window(self, reach: int, *, causal: bool) -> Window:
        """Keys that the sliding window of so many tokens to each side sees, under the causal mask to the left."""
        begin = self.keys.start + self.lengths[0][2]
        end = begin + self.queries.stop - self.queries.start
        first, last = max(self.keys.start, begin - reach), end if causal else min(self.keys.stop, end + reach)
        lengths, start = [], self.keys.start
        for _, keys, at in self.lengths:
            skipped = max(0, first - start)
            lengths.append((min(keys, last - start) - skipped, at - skipped))
            start += keys
        keys = slice(first - self.keys.start, last - self.keys.start)
        return Window(begin - first, last - end, keys, tuple(lengths))

    def window_of_keys(self, spec: CallSpec) -> Window:
        """`window`, of whole tiles before the stretch's first query, so that kernels are as fast as with all keys."""
        return self.window(-(-(spec.config.window_size - 1) // TILE) * TILE, causal=spec.causal)


def stretches_of_ranks(
    cp: ContextParallel, local: int, lengths: Sequence[int] | None, *, cut: bool
) -> list[list[Stretch]]:
    """The stretches of each rank.

    Args:
        local: tokens of a rank.
        lengths: of the whole call's packed sequences; None: of one length.
        cut: leave out keys after the chunk: none of its queries sees them, and no list names them.
    """
    size, ends = local // len(cp.chunks), list(accumulate(lengths or (local * cp.size,)))
    return [
        [
            stretch_at(chunk * size, slice(place * size, (place + 1) * size), ends, cut=cut)
            for place, chunk in enumerate(chunks_of(rank, cp.size, cp.load_balance))
        ]
        for rank in range(cp.size)
    ]


def stretch_at(begin: int, queries: slice, ends: Sequence[int], *, cut: bool) -> Stretch:
    """The stretch of the queries from token `begin` on; `ends` are the ends of all sequences."""
    end = begin + queries.stop - queries.start
    first = next(s for s, after in enumerate(ends) if after > begin)
    start = ends[first - 1] if first else 0
    keys, each, s, at = slice(start, start), [], first, start
    while at < end:
        after = ends[s]
        inside = min(after, end)
        if inside > at:
            until = inside if cut else after
            each.append((inside - max(begin, at), until - at, max(0, begin - at)))
            keys = slice(start, until)
        at, s = after, s + 1
    return Stretch(queries, keys, tuple(each), first)
