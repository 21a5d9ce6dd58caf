"""Rows of a sequence, or of a pack, by rank: tokens, and what has a row where its first token is: blocks and tiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from nsa_layer.context_parallel.spec import ContextParallel, chunks_of

Tensor = torch.Tensor


class Rows(NamedTuple):
    """Rows of each chunk, in the order of the sequence, and who has which chunk.

    Attributes:
        counts: of each chunk.
        size, load_balance: of the ranks.
    """

    counts: tuple[int, ...]
    size: int
    load_balance: str | None

    @classmethod
    def of_tokens(cls, cp: ContextParallel, local: int) -> Rows:
        """Rows of tokens, of which each rank has so many."""
        return cls((local // len(cp.chunks),) * cp.count, cp.size, cp.load_balance)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Numbers of a rank's chunks."""
        return chunks_of(rank, self.size, self.load_balance)

    def of_rank(self, rank: int) -> list[int]:
        """Rows of each of a rank's chunks."""
        return [self.counts[chunk] for chunk in self.chunks(rank)]

    @property
    def most(self) -> int:
        """Rows of the rank with most of them: what each one sends."""
        return max(sum(self.of_rank(rank)) for rank in range(self.size))

    @property
    def in_order(self) -> bool:
        """True if the ranks' rows one after the other are those of the sequence."""
        return self.load_balance is None and len(set(self.counts)) == 1

    def to_whole(self, x: Tensor) -> Tensor:
        """[R, B, most, ...], each rank's rows -> [B, all rows, ...], in order."""
        if self.in_order:
            return x.movedim(0, 1).flatten(1, 2)
        parts = [x[0]] * len(self.counts)
        for rank in range(self.size):
            begin = 0
            for chunk in self.chunks(rank):
                parts[chunk] = x[rank, :, begin : begin + self.counts[chunk]]
                begin += self.counts[chunk]
        return torch.cat(parts, dim=1)

    def to_ranks(self, x: Tensor) -> Tensor:
        """The inverse of `to_whole`, contiguous; what a rank has not is 0."""
        if self.in_order:
            return x.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        parts: list[Tensor] = []
        for rank in range(self.size):
            own = [x[:, at] for at, (of, _) in self.places() if of == rank]
            missing = self.most - sum(part.shape[1] for part in own)
            parts += [*own, x.new_zeros(x.shape[0], missing, *x.shape[2:])] if missing else own
        return torch.cat(parts, dim=1).unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()

    def places(self) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Each chunk's rows among all, and where they begin: a rank, and a row among its own."""
        starts = (0, *accumulate(self.counts))
        for rank in range(self.size):
            begin = 0
            for chunk in self.chunks(rank):
                yield slice(starts[chunk], starts[chunk + 1]), (rank, begin)
                begin += self.counts[chunk]

    def padded(self, x: Tensor) -> Tensor:
        """A rank's rows [B, n, ...] -> [B, most, ...]."""
        missing = self.most - x.shape[1]
        return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1) if missing else x


class Piece(NamedTuple):
    """Tokens of the blocks that start in a chunk.

    Attributes:
        begin: of the first one, from the chunk's start.
        lengths: tokens of each sequence from there on; those of the last end with its last block.
        count: blocks.
    """

    begin: int
    lengths: tuple[int, ...]
    count: int


def pieces(lengths: tuple[int, ...], chunk: int, span: int, stride: int) -> tuple[Piece, ...]:
    """Rows of tokens that the blocks of compression that start in each chunk are made of.

    Args:
        lengths: of the packed sequences, or of one sequence.
        chunk: tokens of a chunk.
        span, stride: of blocks.
    """
    return _pieces(lengths, chunk, span, stride)


# What compiles a graph calls it, with constants, and does not look inside.
pieces._dynamo_marked_constant = True


@lru_cache(maxsize=256)
def _pieces(lengths: tuple[int, ...], chunk: int, span: int, stride: int) -> tuple[Piece, ...]:
    found, starts = [], (0, *accumulate(lengths))
    for begin in range(0, starts[-1], chunk):
        end, first, count, own = begin + chunk, None, 0, []
        for s in range(max(0, bisect_left(starts, begin + 1) - 1), len(lengths)):
            start, after = starts[s], starts[s + 1]
            if start >= end:
                break
            at = start + -(-max(0, begin - start) // stride) * stride  # the first block here, if there is one
            blocks = max(0, min((after - span - at) // stride + 1, -(-(end - at) // stride)))
            first = min(at, after) if first is None else first
            inside = min(end, after)
            until = inside if after <= end else max(at, at + (blocks - 1) * stride + span) if blocks else inside
            own.append(max(0, until - max(first, at)))
            count += blocks
        found.append(Piece((begin if first is None else first) - begin, tuple(own), count))
    return tuple(found)


def of_blocks(cp: ContextParallel, lengths: Sequence[int], chunk: int, span: int, stride: int) -> Rows:
    """Rows of compressed keys."""
    return Rows(tuple(p.count for p in pieces(tuple(lengths), chunk, span, stride)), cp.size, cp.load_balance)


def of_tiles(cp: ContextParallel, lengths: Sequence[int], chunk: int, q_tile: int) -> Rows:
    """Rows of lists of blocks."""
    return of_blocks(cp, lengths, chunk, 1, q_tile)
