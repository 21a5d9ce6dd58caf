"""Addresses of a decode step's rows: queries, new keys and values, and caches, contiguous or in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from nsa_layer.kernels.decode.spec import DecodeSpec, StepTensors
from nsa_layer.kernels.fp8 import E4M3
from nsa_layer.kernels.varlen import compressed_end, compressed_length

UNLIMITED = 2**31 - 1  # rows of caches in pages


@dataclass(frozen=True)
class Lengths:
    """The sequences' lengths, and their rows in contiguous caches.

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

    def sequence(self, b: Int32, rows: Int32 | int = UNLIMITED) -> Sequence:
        """Sequence b; rows: sequences that contiguous caches hold."""
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
        inside = inside & (compressed_length(S, spec.span, spec.stride) <= self.compressed_capacity)
        return Sequence(spec, b, cutlass.select_(inside, row, Int32(0)), first_row, T, S, inside)

    def queries(self, b: Int32) -> tuple[Int32, Int32]:
        """(first row, number of rows) of a sequence's packed queries."""
        if const_expr(self.cu_seqlens_q is None):
            return Int32(0), Int32(self.spec.T)
        first = self.cu_seqlens_q[b]
        return first, self.cu_seqlens_q[b + 1] - first


@dataclass(frozen=True)
class Sequence:
    """One sequence: T queries, the last of S tokens.

    Attributes:
        row: the sequence's row in contiguous caches.
        first_row: its first row in packed queries.
        inside: its lengths and row are within the caches; its pages are not checked.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    b: Int32
    row: Int32
    first_row: Int32
    T: Int32
    S: Int32
    inside: Boolean

    def completed(self) -> tuple[Int32, Int32]:
        """Compressed keys before this call, and after it."""
        before, after = (compressed_length(S, self.spec.span, self.spec.stride) for S in (self.S - self.T, self.S))
        return before, after

    def position(self, token: Int32) -> Int32:
        return self.S - self.T + token

    def keys_end(self, t: Int32) -> Int32:
        """One past the last compressed key that token t sees."""
        spec = self.spec
        seen = compressed_end(t, spec.offset, spec.stride)
        return cutlass.min(seen, compressed_length(self.S, spec.span, spec.stride))


@dataclass(frozen=True)
class Table:
    """Page table of one sequence, for caches [pages, page, H, D]; without pages, its row of caches [rows, S, H, D].

    Attributes:
        pages: int32 [B, n], or None.
        size: slots of a page.
        count: pages of the caches.
    """

    pages: cute.Tensor | None
    sequence: Sequence
    size: Int32
    count: Int32

    def page(self, at: Int32) -> Int32:
        """First index into the caches of slot `at`: its page, or the row; clamped to the caches."""
        if const_expr(self.pages is None):
            return self.sequence.row
        page = self.pages[self.sequence.b, at // self.size]
        return cutlass.min(cutlass.max(page, 0), self.count - 1)

    def within(self, at: Int32) -> Int32:
        """Second index into the caches of slot `at`."""
        return at if const_expr(self.pages is None) else at % self.size

    def used(self, slots: Int32) -> tuple[cute.Tensor, Int32, Int32, Int32]:
        """An entry of `pages_exist`' tables for the first `slots` slots."""
        return self.pages, self.sequence.b, cute.ceil_div(slots, self.size), self.count


@dataclass(frozen=True)
class Stored:
    """Key cache and value cache, [rows, S, Hkv, D] or [pages, page, Hkv, D], either may be None, and the new rows.

    Attributes:
        new: k and v, [B, T, Hkv, D] or [1, total, Hkv, D]; None: nothing is appended.
        scales: of caches in FP8, fp32 [Hkv]; None: 1.
        rounded: [D, T] in shared memory: a head's new rows rounded to FP8, as the cache will hold them.
    """

    caches: tuple[cute.Tensor, cute.Tensor]
    new: tuple[cute.Tensor | None, cute.Tensor | None]
    pages: cute.Tensor | None
    scales: tuple[cute.Tensor | None, cute.Tensor | None] = (None, None)
    rounded: tuple[cute.Tensor | None, cute.Tensor | None] = (None, None)

    def scale(self, i: int, head: Int32) -> Float32:
        """The factor from stored to real values; i: 0 for keys, 1 for values."""
        return Float32(1.0) if const_expr(self.scales[i] is None) else self.scales[i][head]

    def rounds(self, i: int) -> bool:
        """True if new rows are read rounded to FP8, as later steps will read them from the cache."""
        return self.new[i] is not None and self.caches[i].element_type == E4M3

    def with_rounded(self, smem: cutlass.utils.SmemAllocator, spec: DecodeSpec) -> Stored:
        """A copy with shared memory for the new rows that `rounds`."""
        layouts = [cute.make_layout((D, spec.T)) for D in spec.dims]
        rounded = [
            smem.allocate_tensor(E4M3, layout, byte_alignment=16) if self.rounds(i) else None
            for i, layout in enumerate(layouts)
        ]
        return replace(self, rounded=tuple(rounded))

    def table(self, sequence: Sequence) -> Table:
        cache = self.caches[0] if const_expr(self.caches[0] is not None) else self.caches[1]
        count, size = cache.shape[:2]
        return Table(self.pages, sequence, Int32(size), Int32(count))

    def token(self, i: int, table: Table, page: Int32, at: Int32, head: Int32) -> cute.Tensor:
        """Row [D] of token `at`, which is on the page: in the cache, or in the new rows if this call appends it and
        they are not rounded."""
        row = self.caches[i][page, table.within(at), head, None]
        if const_expr(self.new[i] is None or self.rounds(i)):
            return row
        sequence, dtype = table.sequence, row.element_type
        past = at - sequence.position(Int32(0))
        new = new_row(self.new[i], sequence, cutlass.max(past, 0), head)
        address = cutlass.select_(past >= 0, new.iterator.toint(), row.iterator.toint())
        return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16), row.layout)


@dataclass(frozen=True)
class Caches:
    """All keys and values that a step reads and writes.

    Attributes:
        window: the window's own keys, values, or both; None: it reads those of `tokens`.
        keys: compressed keys and values; None where the step does not attend to them.
        weights: [Hkv, D, D] projections of compressed keys and of values; each may be None.
    """

    tokens: Stored
    window: Stored | None
    keys: Stored | None
    weights: tuple[cute.Tensor | None, cute.Tensor | None]

    @classmethod
    def of(cls, step: StepTensors) -> Caches:
        scales = (
            (step.k_scale, step.v_scale),
            (step.k_win_scale, step.v_win_scale),
            (step.k_cmp_scale, step.v_cmp_scale),
        )
        tokens = Stored((step.k_cache, step.v_cache), (step.k, step.v), step.page_table, scales[0])
        window = Stored((step.k_win_cache, step.v_win_cache), (step.k_win, step.v_win), step.page_table, scales[1])
        keys = Stored((step.k_cmp_cache, step.v_cmp_cache), (step.k_cmp, step.v_cmp), step.cmp_page_table, scales[2])
        window = None if const_expr(step.k_win_cache is None and step.v_win_cache is None) else window
        keys = None if const_expr(step.k_cmp_cache is None) else keys
        return cls(tokens, window, keys, (step.compress_k_weight, step.compress_v_weight))

    def with_rounded(self, smem: cutlass.utils.SmemAllocator, spec: DecodeSpec) -> Caches:
        """A copy with `Stored.with_rounded` of tokens and of the window."""
        window = None if const_expr(self.window is None) else self.window.with_rounded(smem, spec)
        return replace(self, tokens=self.tokens.with_rounded(smem, spec), window=window)

    @property
    def rows(self) -> Int32 | int:
        """Sequences that contiguous caches hold."""
        return UNLIMITED if const_expr(self.tokens.pages is not None) else Int32(self.tokens.caches[0].shape[0])

    def read_window(self) -> Stored:
        """Keys and values that the window attends to: its own, or those of `tokens` where it has none."""
        if const_expr(self.window is None):
            return self.tokens
        tokens, own = self.tokens, self.window
        caches = [mine if theirs is None else theirs for mine, theirs in zip(tokens.caches, own.caches)]
        new = [mine if cache is None else theirs for mine, cache, theirs in zip(tokens.new, own.caches, own.new)]
        scales = [
            mine if cache is None else theirs for mine, cache, theirs in zip(tokens.scales, own.caches, own.scales)
        ]
        rounded = [
            mine if cache is None else theirs for mine, cache, theirs in zip(tokens.rounded, own.caches, own.rounded)
        ]
        return Stored(tuple(caches), tuple(new), tokens.pages, tuple(scales), tuple(rounded))


def new_row(x: cute.Tensor, sequence: Sequence, token: Int32, head: Int32) -> cute.Tensor:
    """Row [D] of this call's `token` in x [B, T, H, D], packed [1, total, H, D]; clamped to the tensor."""
    at = cutlass.min(cutlass.max(sequence.first_row + token, 0), x.shape[1] - 1)
    return x[sequence.b * cutlass.min(x.shape[0] - 1, 1), at, head, None]
