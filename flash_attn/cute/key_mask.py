"""What the 64 queries of a warpgroup see of a key block, in wgmma's registers of scores.

A thread holds two rows, 8 apart, and of every 8 columns two neighbouring ones. What hides keys from a
row without asking a mask_mod (the end of the keys, the causal edge, a window) is a range of keys for
each row, so a row of registers is masked with the bits of one word. `sees_all` is the same for all
threads of a warpgroup: a block that no edge runs through costs a comparison or two.
"""

from dataclasses import dataclass
from typing import Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from flash_attn.cute import utils
from flash_attn.cute.dq_spec import ROWS
from flash_attn.cute.mask import call_mask_mod, r2p_bitmask_above, r2p_bitmask_below, sm90_col_to_r2p_idx
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.utils import AuxData

ROWS_OF_THREAD = 2


@dataclass(frozen=True)
class KeyMask:
    """The edges of a warpgroup's rows; `first` is the first of them in the sequence.

    left, right: how many keys before and after its own one a query sees; None for all. Causal is right = 0.
    packed: how many query heads' rows take turns, a token's one after the other; `head` is then their key/value head.
    """

    seqlen: SeqlenInfoQK
    batch: Int32
    head: Int32
    first: Int32
    thread: Int32  # of the warpgroup
    left: Optional[Int32]
    right: Optional[Int32]
    mask_mod: cutlass.Constexpr[Optional[Callable]]
    aux_data: AuxData
    packed: int = 1

    @property
    def shift(self) -> Int32:
        """A query's own key is the query plus this: the last query's is the last key."""
        return self.seqlen.seqlen_k - self.seqlen.seqlen_q

    def row(self, r: int) -> Int32:
        """The query of the thread's r-th row, in the sequence."""
        return self._query(self._place(r))

    def _place(self, r: int) -> Int32:
        return self.first + self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r

    def _query(self, place: Int32) -> Int32:
        return place if self.packed == 1 else place // self.packed

    def query_head(self, r: int) -> Int32:
        """Of the thread's r-th row."""
        return self.head if self.packed == 1 else self.head * self.packed + self._place(r) % self.packed

    def column(self, c: int) -> Int32:
        """Of the thread's c-th register of a row, counted from the block's first key."""
        return self.thread % 4 * 2 + (c // 2 * 8 + c % 2)

    @cute.jit
    def sees_all(self, key: Int32, width: cutlass.Constexpr[int]) -> Boolean:
        """Whether no edge hides one of the keys from one of the rows."""
        end = key + width
        seen = end <= self.seqlen.seqlen_k
        if const_expr(self.right is not None):
            seen = seen and end - 1 <= self._query(self.first) + self.shift + self.right
        if const_expr(self.left is not None):
            last = cutlass.min(self._query(self.first + (ROWS - 1)) + 1, self.seqlen.seqlen_q) - 1
            seen = seen and key >= last + self.shift - self.left
        return seen

    @cute.jit
    def hide(
        self, scores: cute.Tensor, key: Int32, asked: Boolean, at: cutlass.Constexpr[int], width: cutlass.Constexpr[int]
    ) -> None:
        """Set to -inf what a block's keys may not give.

        Args:
            scores: [2 rows, registers of a row].
            key: the block's first.
            asked: whether the mask_mod counts here.
            at: the block's first column among the scores'. width: keys of the block.
        """
        if const_expr(self.mask_mod is not None):
            if asked and key < self.seqlen.seqlen_k:
                self._ask(scores, key, at // 4, width // 4)
        if not self.sees_all(key, width):
            self._hide_past_edges(scores, key, at // 4, width)

    @cute.jit
    def _hide_past_edges(
        self, scores: cute.Tensor, key: Int32, begin: cutlass.Constexpr[int], width: cutlass.Constexpr[int]
    ) -> None:
        offset = key + self.thread % 4 * 2  # the key of the thread's first column
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            own = self.row(r) + self.shift
            end = self.seqlen.seqlen_k
            if const_expr(self.right is not None):
                end = cutlass.min(end, own + self.right + 1)
            keep = r2p_bitmask_below(_register(end - offset, width), 0)
            if const_expr(self.left is not None):
                keep = keep & r2p_bitmask_above(_register(own - self.left - offset, width), 0)
            for c in cutlass.range_constexpr(width // 4):
                kept = Boolean(keep & (Uint32(1) << c))
                scores[r, begin + c] = scores[r, begin + c] if kept else -Float32.inf

    @cute.jit
    def _ask(
        self, scores: cute.Tensor, key: Int32, begin: cutlass.Constexpr[int], count: cutlass.Constexpr[int]
    ) -> None:
        # Rows and keys past the ends are hidden anyway; tensors that a mask_mod reads may end there.
        batch = utils.scalar_to_ssa(self.batch, Int32)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            head = utils.scalar_to_ssa(self.query_head(r), Int32)
            row = utils.scalar_to_ssa(cutlass.min(self.row(r), self.seqlen.seqlen_q - 1), Int32)
            for c in cutlass.range_constexpr(count):
                column = cutlass.min(key + self.column(c), self.seqlen.seqlen_k - 1)
                seen = call_mask_mod(
                    self.mask_mod, batch, head, row, utils.scalar_to_ssa(column, Int32), self.seqlen, self.aux_data
                )
                kept = Boolean(utils.ssa_to_scalar(seen))
                scores[r, begin + c] = scores[r, begin + c] if kept else -Float32.inf


@cute.jit
def _register(column: Int32, width: cutlass.Constexpr[int]) -> Int32:
    """The first of a row's registers whose column, counted from the thread's first, is not below `column`."""
    return sm90_col_to_r2p_idx(cutlass.max(cutlass.min(column, width), 0))
