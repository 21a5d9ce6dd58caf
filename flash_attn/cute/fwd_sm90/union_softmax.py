"""Online softmax with bits of a row that do not depend on blocks that only other rows of its tile list.

Over a union of tokens' lists (`lists.query_bits`) a row's maximum is over its own blocks, and successive maxima of a
row differ by integers in base 2, so rescaling is exact. A block that a row does not list leaves it unchanged, and a
warp without a row that lists the block skips it. With ascending entries a row's bits do not depend on later tokens.
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

BELOW_HALF = 15  # float16 has a small exponent range: probabilities are scaled to at most 2^15 instead of 1


@dataclass
class UnionSoftmax(Softmax):
    """Softmax with `row_max` relative to `base`, the row's first maximum, in base 2: an integer, or -inf if empty.

    hidden: [rows], +inf where a row does not list the block, else 0.
    shift: probabilities are at most 2**shift.
    """

    base: Optional[cute.Tensor] = None
    hidden: Optional[cute.Tensor] = None
    shift: cutlass.Constexpr[int] = 0

    @staticmethod
    def of(softmax: Softmax, dtype: type[Numeric]) -> UnionSoftmax:
        """dtype: of the probabilities."""
        shift = BELOW_HALF if dtype is Float16 else 0
        base, hidden = (cute.make_rmem_tensor(softmax.num_rows, Float32) for _ in range(2))
        return UnionSoftmax(
            softmax.scale_log2, softmax.num_rows, softmax.row_max, softmax.row_sum, softmax.arch,
            softmax.softmax_scale, base, hidden, shift,
        )  # fmt: skip

    def reset(self) -> None:
        Softmax.reset(self)
        self.base.fill(0.0)

    @cute.jit
    def online_softmax(
        self, acc_S: cute.Tensor, is_first: cutlass.Constexpr[bool] = False, check_inf: cutlass.Constexpr[bool] = True
    ) -> cute.Tensor:
        """Overwrite a block's scores with probabilities.

        The branch also keeps the compiler from moving the wait for the product in flight before the softmax, as it does
        in straight-line code.

        Returns:
            the scale factors of the output's rows.
        """
        row_scale = cute.make_rmem_tensor_like(self.row_max, Float32)
        if const_expr(is_first):
            self._probabilities(acc_S, row_scale, True)
        else:
            row_scale.fill(1.0)
            if self.any_row([self.hidden[r] == 0.0 for r in range(self.num_rows)]):
                self._probabilities(acc_S, row_scale, False)
            else:
                acc_S.fill(cute.math.exp2(-self.hidden[0], fastmath=True))  # 0, but in this branch alone
        return row_scale

    @cute.jit
    def rescale_O(self, acc_O: cute.Tensor, row_scale: cute.Tensor) -> None:
        """Scale the rows of the output, unless all factors of the warp are 1."""
        if self.any_row([row_scale[r] != 1.0 for r in range(self.num_rows)]):
            Softmax.rescale_O(self, acc_O, row_scale)

    def top(self, r: int) -> Float32:
        """The base-2 score that a row's probabilities are relative to."""
        return self.row_max[r] + self.base[r] - self.shift

    def finalize(self, final_scale: Float32 = 1.0, sink_val: Float32 | cute.Tensor | None = None) -> cute.Tensor:
        for r in range(self.num_rows):
            self.row_max[r] = self.top(r)
        in_base_2 = replace(self, scale_log2=Float32(1.0))
        return Softmax.finalize(in_base_2, final_scale=final_scale, sink_val=sink_val)

    @cute.jit
    def _probabilities(self, acc_S: cute.Tensor, row_scale: cute.Tensor, is_first: cutlass.Constexpr[bool]) -> None:
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        for r in cutlass.range_constexpr(self.num_rows):
            before = Float32(-Float32.inf) if const_expr(is_first) else self.row_max[r]
            block = scores[r, None].load()
            most = cute.arch.warp_reduction_max(utils.fmax_reduce(block, arch=self.arch), threads_in_group=4)
            most = (most - self.hidden[r]) * self.scale_log2
            self.base[r] = Float32(cutlass.select_(before == -Float32.inf, most, self.base[r]))
            # fmax(x, NaN) is x.
            self.row_max[r] = utils.fmax(before, cute.math.ceil(most - self.base[r]))
            row_scale[r] = cute.math.exp2(before - _finite(self.row_max[r]), fastmath=True)
            top = _finite(self.row_max[r] + self.base[r]) - self.shift + self.hidden[r]
            p = cute.math.exp2(block * self.scale_log2 - top, fastmath=True)
            row_sum = Float32(0.0) if const_expr(is_first) else self.row_sum[r] * row_scale[r]
            self.row_sum[r] = utils.fadd_reduce(p, init_val=row_sum, arch=self.arch)
            scores[r, None].store(p)

    def any_row(self, of_rows: list[Boolean]) -> Boolean:
        """True if `of_rows`, a flag for each row of the thread, is set for any row of the warp."""
        found = Boolean(False)
        for of_row in of_rows:
            found = found | Boolean(of_row)
        return cute.arch.vote_any_sync(found)


def _finite(maximum: Float32) -> Float32:
    """The maximum, or 0 for a row that has seen no key."""
    return Float32(cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum))
