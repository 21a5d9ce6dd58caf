"""Products of a stage of keys with a CTA's queries, by a warpgroup: keys are rows, (token, head) pairs columns."""

from dataclasses import dataclass

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum


def operand_layout(dtype: type, rows: int, D: int, stages: int) -> cute.ComposedLayout:
    """[rows, D, stages] in shared memory."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, D)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, D, stages), order=(0, 1, 2))


@dataclass(frozen=True)
class Products:
    """One thread's part: `scores` are being computed from `start` to `finish`."""

    mma: cute.TiledMma
    keys: cute.Tensor
    queries: cute.Tensor
    scores: cute.Tensor

    @staticmethod
    def of(sK: cute.Tensor, sQ: cute.Tensor, thread: Int32) -> "Products":
        """sK: [keys, D, stages]; sQ: [columns, D, 1]."""
        dtype, shape = sK.element_type, (sK.shape[0], sQ.shape[0])
        shape = tuple(cute.size(x) for x in shape)
        k_major = OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=shape
        )
        own = mma.get_slice(thread)
        keys, queries = own.make_fragment_A(own.partition_A(sK)), own.make_fragment_B(own.partition_B(sQ))
        return Products(mma, keys, queries, cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32))

    def start(self, stage: Int32) -> None:
        warpgroup.fence()
        atom = cute.make_mma_atom(self.mma.op)
        for part in range(cute.size(self.keys, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, part > 0)
            row, column = self.keys[None, None, part, stage], self.queries[None, None, part, 0]
            cute.gemm(atom, self.scores, row, column, self.scores)
        warpgroup.commit_group()

    def finish(self) -> None:
        warpgroup.wait_group(0)

    def score(self, row: int, column: int) -> Float32:
        """The product of one of this thread's keys and one of its columns."""
        return self.scores[(column % 2, row, column // 2), 0, 0]
