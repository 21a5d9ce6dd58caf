"""Products of a stage of keys and a CTA's queries, by a warpgroup."""

from dataclasses import dataclass

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from flash_attn.cute.mma.product import Product, of_shared, sum_registers, wait


def operand_layout(dtype: type, rows: int, D: int, stages: int) -> cute.ComposedLayout:
    """[rows, D, stages] in shared memory."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, D)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, D, stages), order=(0, 1, 2))


@dataclass(frozen=True)
class Products:
    """A thread's part of a product; `scores` are complete after `finish`."""

    product: Product
    scores: cute.Tensor

    @staticmethod
    def of(sA: cute.Tensor, sB: cute.Tensor, thread: Int32, use_mma_sync: bool) -> "Products":
        """sA: [64, D, stages]; sB: [columns, D, stages]."""
        product = of_shared(sA, sB, thread, use_mma_sync)
        return Products(product, sum_registers(product.columns))

    def start(self, a: Int32 | int, b: Int32 | int) -> None:
        """Start the product of two stages."""
        product = self.product
        if product.use_mma_sync:
            product(A_idx=a, B_idx=b, acc=self.scores, zero_init=True)
            return
        # Not `product()`, which computes operands' addresses in 64 bits.
        warpgroup.fence()
        atom = cute.make_mma_atom(product.mma.op)
        for part in range(cute.size(product.A, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, part > 0)
            row, column = product.A[None, None, part, a], product.B[None, None, part, b]
            cute.gemm(atom, self.scores, row, column, self.scores)
        warpgroup.commit_group()

    def finish(self, in_flight: int = 0) -> None:
        """Wait for all products of the warpgroup but the last `in_flight`."""
        wait(self.product.use_mma_sync, in_flight)

    def score(self, row: int, column: int) -> Float32:
        """The product of one of this thread's two rows and one of its columns."""
        return self.scores[(column % 2, row, column // 2), 0, 0]
