"""Layouts of shards: the rows that ranks hold, and the keys that a rank's queries can attend to.

Tokens, compressed blocks and query tiles all have rows. A block or tile belongs to the chunk of its first token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from nsa_layer.call import CallSpec
from nsa_layer.context_parallel.spec import ContextParallel, rank_chunks
from nsa_layer.cute.memory_plan import split_heads

Tensor = torch.Tensor
STEPS_FROM = 1 << 16  # tokens of all ranks from which on heads are exchanged a few at a time
# Tokens times key/value heads of a step, at most: a rank then needs as much memory as one GPU for a rank's tokens.
STEP_TOKENS = 3 << 20
BlockRange = tuple[slice, tuple[int, ...], int]  # tokens, how many of each sequence, blocks


class ShardLayout(NamedTuple):
    """Rows of each chunk, in the order of the sequence, and the rows of all ranks that each rank reads.

    Attributes:
        counts: rows of each chunk.
        cp: the ranks that hold the chunks.
        ranges: of each rank, of rows of the whole sequence or pack; None: all rows.
    """

    counts: tuple[int, ...]
    cp: ContextParallel
    ranges: Sequence[Sequence[slice]] | None = None

    @classmethod
    def of_tokens(cls, cp: ContextParallel, local: int) -> ShardLayout:
        """Layout of tokens, of which each rank holds `local`."""
        return cls((local // len(cp.chunks),) * cp.num_chunks, cp)

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.counts)

    @property
    def local(self) -> int:
        """Rows of this rank."""
        return sum(self.counts[chunk] for chunk in self.cp.chunks)

    @property
    def read(self) -> Sequence[Sequence[slice]]:
        """Ranges of each rank."""
        return [[slice(0, self.total)]] * self.cp.size if self.ranges is None else self.ranges

    @property
    def sizes(self) -> list[int]:
        """Rows of each range that this rank reads."""
        return [rows.stop - rows.start for rows in self.read[self.cp.rank]]

    def pieces(self) -> Iterator[tuple[int, int, slice, int, slice]]:
        """Each part of a range that is in one chunk, where the range or the chunk is this rank's.

        Returns:
            (rank whose range it is, number of the range, rows in it; rank that holds the rows, rows in its shard).
        """
        starts, chunks, cp = (0, *accumulate(self.counts)), [], self.cp  # rank, first row, end, first row in the shard
        for holder, of_rank in enumerate(rank_chunks(cp.size, cp.load_balance)):
            first = 0
            for chunk in of_rank:
                chunks.append((holder, starts[chunk], starts[chunk + 1], first))
                first += self.counts[chunk]
        local_chunks = [chunk for chunk in chunks if chunk[0] == cp.rank]
        for reader, of_rank in enumerate(self.read):
            for i, rows in enumerate(of_rank):
                for holder, begin, end, first in chunks if reader == cp.rank else local_chunks:
                    start, stop = max(rows.start, begin), min(rows.stop, end)
                    if start < stop:
                        local = slice(first + start - begin, first + stop - begin)
                        yield reader, i, slice(start - rows.start, stop - rows.start), holder, local


def block_ranges(tokens: ShardLayout, lengths: Sequence[int], span: int, stride: int) -> list[BlockRange]:
    """For each chunk the tokens of the blocks that start in it, which may reach into the next chunks.

    Args:
        lengths: of the packed sequences, or of one sequence.
        span, stride: of blocks.
    """
    ranges, starts, first, chunk = [], (0, *accumulate(lengths)), 0, tokens.counts[0]
    for begin in range(0, tokens.total, chunk):
        blocks, counts = [], []
        while starts[first + 1] <= begin:
            first += 1
        for start, stop in pairwise(starts[first:]):
            if start >= begin + chunk:
                break
            blocks.append(min(stop, start + -(-max(0, begin - start) // stride) * stride))
            # Up to the token before the last one of a block that starts in the next chunk.
            counts.append(max(0, min(stop, begin + chunk + span - 1) - blocks[-1]))
        complete = sum(max(0, (n - span) // stride + 1) for n in counts)
        ranges.append((slice(blocks[0], blocks[0] + sum(counts)), tuple(counts), complete))
    return ranges


def block_layout(tokens: ShardLayout, lengths: Sequence[int], span: int, stride: int) -> ShardLayout:
    """Layout of the complete blocks; arguments as of `block_ranges`."""
    return ShardLayout(tuple(count for *_, count in block_ranges(tokens, lengths, span, stride)), tokens.cp)


class QueryShard(NamedTuple):
    """Contiguous queries of one chunk, and the range of keys that they can attend to.

    Attributes:
        queries: rows in the rank's shard.
        keys: rows in the whole sequence, or pack: of every sequence that has queries here.
        lengths: (queries, keys, position of the first query) of each sequence here; of a batch one for all.
        before: number of sequences that end before the chunk.
    """

    queries: slice
    keys: slice
    lengths: tuple[tuple[int, int, int], ...]
    before: int

    def spec(self, whole: CallSpec) -> CallSpec:
        """The static side of this shard's call."""
        if whole.lengths is None:
            return whole
        queries, keys, _ = zip(*self.lengths)
        return replace(whole, lengths=queries, lengths_k=keys)

    def blocks(self, whole: CallSpec) -> slice:
        """Rows of its compressed keys in the whole call's."""
        count = whole.config.compressed_length
        begin = sum(map(count, whole.lengths[: self.before])) if whole.lengths else 0
        return slice(begin, begin + sum(count(S) for _, S, _ in self.lengths))

    def window(self, spec: CallSpec, *, tile: int = 1) -> tuple[slice, tuple[tuple[int, int], ...]]:
        """Rows of the shard's keys that the sliding windows of its queries see, and for each sequence
        (keys, position of the first query in them).

        Args:
            tile: keys before the first query are a multiple of it, if there are as many, so that kernels, which read
                whole tiles, are as fast as with all keys.
        """
        reach, begin, total = spec.config.window_reach, self.lengths[0][2], self.keys.stop - self.keys.start
        end = begin + self.queries.stop - self.queries.start
        first = max(0, begin - -(-reach // tile) * tile)
        last = end if spec.causal else min(total, end + -(-reach // tile) * tile)
        lengths, start = [], 0
        for _, keys, offset in self.lengths:
            skipped = max(0, first - start)
            lengths.append((min(keys, last - start) - skipped, offset - skipped))
            start += keys
        return slice(first, last), tuple(lengths)


def query_shards(tokens: ShardLayout, lengths: Sequence[int], *, cut: bool) -> list[list[QueryShard]]:
    """The shards of each rank, one for each of its chunks.

    Args:
        lengths: of the packed sequences, or of one sequence.
        cut: leave out keys behind the last query: no query attends to them, and no list names them.
    """
    size, ends, cp = tokens.counts[0], list(accumulate(lengths)), tokens.cp

    def shard(i: int, chunk: int) -> QueryShard:
        begin, end = chunk * size, (chunk + 1) * size
        before, of_sequences = bisect_right(ends, begin), []
        first_key = last_key = start = ends[before - 1] if before else 0
        for stop in ends[before:]:
            if start >= end:
                break
            if stop > start:
                last_query = min(stop, end)
                last_key = last_query if cut else stop
                of_sequences.append((last_query - max(begin, start), last_key - start, max(0, begin - start)))
            start = stop
        return QueryShard(slice(i * size, (i + 1) * size), slice(first_key, last_key), tuple(of_sequences), before)

    return [[*map(shard, range(len(of_rank)), of_rank)] for of_rank in rank_chunks(cp.size, cp.load_balance)]


def head_steps(heads: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """(first, end) of the key/value heads of each step of a call with this number of tokens.

    One head at both ends, since nothing runs beside their exchanges, and few steps between, since kernels of more heads
    are faster; all at once in short calls.
    """
    if tokens < STEPS_FROM:
        return ((0, heads),)
    inner = split_heads(max(0, heads - 2), max(1, min(STEP_TOKENS // tokens, -(-heads // 2))))
    last = ((heads - 1, heads),) if heads > 1 else ()
    return ((0, 1), *((first + 1, end + 1) for first, end in inner), *last)


def resized(x: Tensor, rows: int, heads: int | None = None) -> Tensor:
    """A tensor without memory like x [..., n, H, D], with this many rows, and heads."""
    return x.new_empty((*x.shape[:-3], rows, heads or x.shape[-2], x.shape[-1]), device="meta")
