"""Places of a sequence's tokens and compressed keys in caches, contiguous or in pages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from nsa_layer.kernels.decode.spec import DecodeSpec, StepTensors

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Lengths:
    """Tensors of the sequences' lengths and of their rows in contiguous caches.

    Attributes:
        cache_seqlens: int32 [B].
        cu_seqlens_q: int32 [B + 1], or None: every sequence has `spec.T` queries.
        cache_batch_idx: int32 [B], or None.
        capacity, compressed_capacity: tokens and compressed keys that a sequence may have.
        total: rows of packed queries.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    cache_seqlens: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cache_batch_idx: cute.Tensor | None
    capacity: Int32
    compressed_capacity: Int32
    total: Int32

    @classmethod
    def of(cls, spec: DecodeSpec, step: StepTensors, capacity: Int32, compressed_capacity: Int32) -> Lengths:
        tensors = (step.cache_seqlens, step.cu_seqlens_q, step.cache_batch_idx)
        return cls(spec, *tensors, capacity, compressed_capacity, Int32(step.q.shape[1]))

    def sequence(self, b: Int32, rows: Int32 | int = LARGEST) -> Sequence:
        """rows: of contiguous caches."""
        spec, (first_row, T) = self.spec, self.queries(b)
        length = self.cache_seqlens[b]
        row = b if const_expr(self.cache_batch_idx is None) else self.cache_batch_idx[b]
        if const_expr(spec.appends):
            inside = (length >= 0) & (length <= self.capacity - T)
            S = length + T
        else:
            inside = (length >= T) & (length <= self.capacity)
            S = length
        inside = inside & (row >= 0) & (row < rows) & (T > 0) & (T <= spec.T)
        if const_expr(self.cu_seqlens_q is not None):
            inside = inside & (first_row >= 0) & (first_row + T <= self.total)
        T = cutlass.select_(inside, T, Int32(0))
        S = cutlass.select_(inside, S, Int32(0))
        inside = inside & (compressed_length(spec, S) <= self.compressed_capacity)
        return Sequence(spec, b, cutlass.select_(inside, row, Int32(0)), first_row, T, S, inside)

    def queries(self, b: Int32) -> tuple[Int32, Int32]:
        """The first row of a sequence's packed queries, and how many they are."""
        if const_expr(self.cu_seqlens_q is None):
            return Int32(0), Int32(self.spec.T)
        first = self.cu_seqlens_q[b]
        return first, self.cu_seqlens_q[b + 1] - first


@dataclass(frozen=True)
class Sequence:
    """One sequence: T queries, the last of S tokens.

    Attributes:
        row: of contiguous caches.
        first_row: of packed queries.
        inside: its tokens have places, as far as lengths and rows tell.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    b: Int32
    row: Int32
    first_row: Int32
    T: Int32
    S: Int32
    inside: Boolean

    def completed(self) -> tuple[Int32, Int32]:
        """Compressed keys before these queries, and with them."""
        return compressed_length(self.spec, self.S - self.T), compressed_length(self.spec, self.S)

    def position(self, token: Int32) -> Int32:
        return self.S - self.T + token

    def keys_end(self, t: Int32) -> Int32:
        """One past the last compressed key that token t sees."""
        spec = self.spec
        seen = cutlass.max(t - spec.offset + spec.stride, 0) // spec.stride
        return cutlass.min(seen, compressed_length(spec, self.S))


def compressed_length(spec: DecodeSpec, S: Int32) -> Int32:
    return cutlass.max(S - spec.span + spec.stride, 0) // spec.stride


@dataclass(frozen=True)
class Table:
    """Places of one sequence in caches [rows, S, H, D] or, with pages, [pages, page, H, D].

    Attributes:
        pages: int32 [B, n], or None.
        size: places of a page.
        count: pages of the caches.
    """

    pages: cute.Tensor | None
    sequence: Sequence
    size: Int32
    count: Int32

    def page(self, at: Int32) -> Int32:
        """The first coordinate of a place; always one of the caches'."""
        if const_expr(self.pages is None):
            return self.sequence.row
        page = self.pages[self.sequence.b, at // self.size]
        return cutlass.min(cutlass.max(page, 0), self.count - 1)

    def within(self, at: Int32) -> Int32:
        """The second coordinate."""
        return at if const_expr(self.pages is None) else at % self.size

    @cute.jit
    def lacks(self, places: Int32, thread: Int32, threads: cutlass.Constexpr[int]) -> Boolean:
        """True in a thread that finds a page, of those that have the first places, to be none of the caches'."""
        bad = Boolean(False)
        if const_expr(self.pages is not None):
            for i in cutlass.range(thread, cute.ceil_div(places, self.size), threads, unroll=4):
                page = self.pages[self.sequence.b, i]
                bad = bad | (page < 0) | (page >= self.count)
        return bad
