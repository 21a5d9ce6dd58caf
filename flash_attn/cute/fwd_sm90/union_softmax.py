"""Online softmax whose rows do not depend on what is loaded for other rows of their tile.

Over a union of tokens' lists (`lists.query_bits`) other tokens decide which of a token's blocks share a step. With one
maximum for a step that would reach a row's bits: probabilities are rounded relative to it. So each block has a maximum
of its own, that of the row's blocks so far, and maxima of a row are integers apart in base 2: what is computed for a
block is the same wherever it stands, and going from one maximum to another is exact. A block that a row does not list
changes nothing, and hiding it takes one number, not a mask of its scores.

Causality follows, bit by bit, where entries are in ascending order: the blocks that later tokens list are among those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Numeric, const_expr
from quack import layout_utils

from flash_attn.cute import utils
from flash_attn.cute.softmax import Softmax

BELOW_HALF = 15  # float16 has few exponents: probabilities are at most 2^15, not 1


@dataclass
class UnionSoftmax(Softmax):
    """`row_max` counts from `base`, the row's first maximum, in base 2: integers, or -inf for a row that saw nothing.

    hidden: [rows, blocks of a step], infinite where a row does not list the block, else 0.
    shift: probabilities are at most 2 to the power of it.
    """

    base: Optional[cute.Tensor] = None
    hidden: Optional[cute.Tensor] = None
    shift: cutlass.Constexpr[int] = 0

    @staticmethod
    def of(softmax: Softmax, dtype: type[Numeric]) -> UnionSoftmax:
        """dtype: of the probabilities."""
        shift = BELOW_HALF if dtype is Float16 else 0
        base, hidden = (cute.make_rmem_tensor((softmax.num_rows, *of), Float32) for of in ((), (2,)))
        return UnionSoftmax(
            softmax.scale_log2, softmax.num_rows, softmax.row_max, softmax.row_sum, softmax.arch,
            softmax.softmax_scale, base, hidden, shift,
        )  # fmt: skip

    def reset(self) -> None:
        Softmax.reset(self)
        self.base.fill(0.0)

    @cute.jit
    def online_softmax(
        self,
        acc_S: cute.Tensor,
        is_first: cutlass.Constexpr[bool] = False,
        check_inf: cutlass.Constexpr[bool] = True,
    ) -> cute.Tensor:
        """Probabilities of a step of two blocks in place of its scores.

        Returns:
            what the rows of the output so far are scaled by.
        """
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        width = cute.size(scores, mode=[1]) // 2
        halves = cute.logical_divide(scores, (None, width))  # [rows, (registers of a block, blocks)]
        row_scale = cute.make_rmem_tensor_like(self.row_max, Float32)
        fall = cute.make_rmem_tensor_like(self.row_max, Float32)  # of the first block, from its maximum to the second's
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            before = Float32(-Float32.inf) if const_expr(is_first) else self.row_max[r]
            first, base = self._maximum(halves[r, (None, 0)].load(), before, self.base[r], self.hidden[r, 0])
            last, self.base[r] = self._maximum(halves[r, (None, 1)].load(), first, base, self.hidden[r, 1])
            row_sum = Float32(0.0) if const_expr(is_first) else self.row_sum[r] * _exact(before, first)
            fall[r] = _exact(first, last)
            for part, top in enumerate((first + base, last + self.base[r])):
                block = halves[r, (None, part)].load()
                top = _finite(top) - self.shift + self.hidden[r, part]
                p = cute.math.exp2(block * self.scale_log2 - top, fastmath=True)
                row_sum = utils.fadd_reduce(p, init_val=row_sum, arch=self.arch)
                halves[r, (None, part)].store(p)
                if const_expr(part == 0):
                    row_sum = row_sum * fall[r]
            row_scale[r] = _exact(before, last)
            self.row_max[r], self.row_sum[r] = last, row_sum
        if Boolean(fall[0] != 1.0) | Boolean(fall[1] != 1.0):
            for r in cutlass.range_constexpr(cute.size(self.row_max)):
                halves[r, (None, 0)].store(halves[r, (None, 0)].load() * fall[r])
        return row_scale

    def finalize(self, final_scale: Float32 = 1.0, sink_val: Float32 | cute.Tensor | None = None) -> cute.Tensor:
        for r in range(self.num_rows):
            self.row_max[r] = self.row_max[r] + self.base[r] - self.shift
        in_base_2 = replace(self, scale_log2=Float32(1.0))
        return Softmax.finalize(in_base_2, final_scale=final_scale, sink_val=sink_val)

    def _maximum(
        self, block: cute.TensorSSA, before: Float32, base: Float32, hidden: Float32
    ) -> tuple[Float32, Float32]:
        """A row's maximum with this block, and its base, which is this block's if `before` none was seen."""
        most = cute.arch.warp_reduction_max(utils.fmax_reduce(block, arch=self.arch), threads_in_group=4)
        most = (most - hidden) * self.scale_log2
        base = Float32(cutlass.select_(before == -Float32.inf, most, base))
        return utils.fmax(before, cute.math.ceil(most - base)), base  # of a number and none, it is the number


def _finite(maximum: Float32) -> Float32:
    """0 for a row that has seen nothing."""
    return Float32(cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum))


def _exact(before: Float32, after: Float32) -> Float32:
    """2 to the power of a difference of integers, at most 0; 0 for a row that had seen nothing before."""
    return cute.math.exp2(before - _finite(after), fastmath=True)
