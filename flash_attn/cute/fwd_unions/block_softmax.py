"""Online softmax a block at a time, whose rows do not depend on the blocks that other rows of their tile list.

The rules are those of `fwd_sm90/union_softmax`: a row's maximum is that of its own blocks so far, and maxima of a row
are integers apart in base 2, so that going from one to another is exact. A block that a row does not list changes
nothing.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Numeric
from quack import layout_utils

from flash_attn.cute import utils
from flash_attn.cute.softmax import Softmax

BELOW_HALF = 15  # float16 has few exponents: probabilities are at most 2^15, not 1


@dataclass
class BlockSoftmax(Softmax):
    """`row_max` counts from `base`, the row's first maximum, in base 2: integers, or -inf for a row that saw nothing.

    shift: probabilities are at most 2 to the power of it.
    """

    base: cute.Tensor | None = None
    shift: cutlass.Constexpr[int] = 0

    @staticmethod
    def of(rows: int, scale_log2: Float32, dtype: type[Numeric]) -> "BlockSoftmax":
        """dtype: of the probabilities."""
        row_max, row_sum, base = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
        shift = BELOW_HALF if dtype is Float16 else 0
        return BlockSoftmax(scale_log2, rows, row_max, row_sum, base=base, shift=shift)

    def reset(self) -> None:
        Softmax.reset(self)
        self.base.fill(0.0)

    @cute.jit
    def add_block(self, acc_S: cute.Tensor, acc_O: cute.Tensor, hidden: tuple[Float32, ...]):
        """Put a block's probabilities in place of its scores, and scale the output so far.

        hidden: of each row, infinite where it does not list the block, else 0.
        """
        scores, output = layout_utils.reshape_acc_to_mn(acc_S), layout_utils.reshape_acc_to_mn(acc_O)
        row_scale = cute.make_rmem_tensor_like(self.row_max, Float32)
        for r in cutlass.range_constexpr(self.num_rows):
            before, block = self.row_max[r], scores[r, None].load()
            most = cute.arch.warp_reduction_max(utils.fmax_reduce(block, arch=self.arch), threads_in_group=4)
            most = (most - hidden[r]) * self.scale_log2
            self.base[r] = Float32(cutlass.select_(before == -Float32.inf, most, self.base[r]))
            # Of a number and none, fmax is the number.
            self.row_max[r] = utils.fmax(before, cute.math.ceil(most - self.base[r]))
            row_scale[r] = cute.math.exp2(before - _finite(self.row_max[r]), fastmath=True)
            top = _finite(self.row_max[r] + self.base[r]) - self.shift + hidden[r]
            p = cute.math.exp2(block * self.scale_log2 - top, fastmath=True)
            self.row_sum[r] = utils.fadd_reduce(p, init_val=self.row_sum[r] * row_scale[r], arch=self.arch)
            scores[r, None].store(p)
        if cute.arch.vote_any_sync(Boolean(row_scale[0] != 1.0) | Boolean(row_scale[1] != 1.0)):
            for r in cutlass.range_constexpr(self.num_rows):
                output[r, None].store(output[r, None].load() * row_scale[r])

    @cute.jit
    def finish(self, acc_O: cute.Tensor):
        """Divide the output by the rows' sums; `row_sum` is their log-sum-exp then, natural."""
        for r in cutlass.range_constexpr(self.num_rows):
            self.row_max[r] = self.row_max[r] + self.base[r] - self.shift
        scale = Softmax.finalize(replace(self, scale_log2=Float32(1.0)))
        output = layout_utils.reshape_acc_to_mn(acc_O)
        for r in cutlass.range_constexpr(self.num_rows):
            output[r, None].store(output[r, None].load() * scale[r])


def _finite(maximum: Float32) -> Float32:
    """0 for a row that has seen nothing."""
    return Float32(cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum))
