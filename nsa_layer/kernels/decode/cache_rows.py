"""Rows of one call: of its queries, of its new keys and values, and of caches."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from nsa_layer.kernels.decode.places import LARGEST, Sequence, Table
from nsa_layer.kernels.decode.spec import StepTensors


@dataclass(frozen=True)
class Stored:
    """A key cache and its value cache, or one of them, [rows, S, Hkv, D] or [pages, page, Hkv, D], and what is new.

    Attributes:
        new: k and v, [B, T, Hkv, D] or [1, total, Hkv, D]; None where nothing is.
    """

    caches: tuple[cute.Tensor, cute.Tensor]
    new: tuple[cute.Tensor | None, cute.Tensor | None]
    pages: cute.Tensor | None

    def table(self, sequence: Sequence) -> Table:
        cache = self.caches[0] if const_expr(self.caches[0] is not None) else self.caches[1]
        count, size = cache.shape[:2]
        return Table(self.pages, sequence, Int32(size), Int32(count))

    def token(self, i: int, table: Table, page: Int32, at: Int32, head: Int32) -> cute.Tensor:
        """Row [D] of a token that is on the page: of the cache, or of what this call appends to it."""
        row = self.caches[i][page, table.within(at), head, None]
        if const_expr(self.new[i] is None):
            return row
        sequence, dtype = table.sequence, row.element_type
        past = at - sequence.position(Int32(0))
        new = new_row(self.new[i], sequence, cutlass.max(past, 0), head)
        address = cutlass.select_(past >= 0, new.iterator.toint(), row.iterator.toint())
        return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16), row.layout)


@dataclass(frozen=True)
class Caches:
    """All that a step reads and writes.

    Attributes:
        window: its own keys and values, or one of them, if it has some.
        keys: compressed keys and values; None where the step does not attend to them.
        weights: [Hkv, D, D] or None each, that project compressed keys and values.
    """

    tokens: Stored
    window: Stored | None
    keys: Stored | None
    weights: tuple[cute.Tensor | None, cute.Tensor | None]

    @classmethod
    def of(cls, step: StepTensors) -> Caches:
        tokens = Stored((step.k_cache, step.v_cache), (step.k, step.v), step.page_table)
        window = Stored((step.k_win_cache, step.v_win_cache), (step.k_win, step.v_win), step.page_table)
        keys = Stored((step.k_cmp_cache, step.v_cmp_cache), (step.k_cmp, step.v_cmp), step.cmp_page_table)
        window = None if const_expr(step.k_win_cache is None and step.v_win_cache is None) else window
        keys = None if const_expr(step.k_cmp_cache is None) else keys
        return cls(tokens, window, keys, (step.compress_k_weight, step.compress_v_weight))

    @property
    def rows(self) -> Int32 | int:
        """Sequences that contiguous caches hold."""
        return LARGEST if const_expr(self.tokens.pages is not None) else Int32(self.tokens.caches[0].shape[0])

    def read_window(self) -> Stored:
        """Keys and values of the window: its own, and otherwise the tokens'."""
        if const_expr(self.window is None):
            return self.tokens
        tokens, own = self.tokens, self.window
        caches = [mine if theirs is None else theirs for mine, theirs in zip(tokens.caches, own.caches)]
        new = [mine if cache is None else theirs for mine, cache, theirs in zip(tokens.new, own.caches, own.new)]
        return Stored(tuple(caches), tuple(new), tokens.pages)


def new_row(x: cute.Tensor, sequence: Sequence, token: Int32, head: Int32) -> cute.Tensor:
    """Row [D] of a sequence's token of this call, [B, T, H, D], packed [1, total, H, D]; of one that is there."""
    at = cutlass.min(cutlass.max(sequence.first_row + token, 0), x.shape[1] - 1)
    return x[sequence.b * cutlass.min(x.shape[0] - 1, 1), at, head, None]
