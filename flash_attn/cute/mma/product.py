"""Matrix products of a warpgroup's 64 rows: wgmma on SM90, ldmatrix and mma.sync per warp elsewhere.

Each warp has 16 rows of wgmma's accumulator, in the register layout of mma.sync; A operands in registers have the same
layout too. wgmma is asynchronous until `wait`, mma.sync is complete when the call returns. SM100 has no wgmma, and its
tcgen05 needs other kernels: these are correct there, not fast.
"""

from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from flash_attn.cute.lists.tiling import ROWS

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
WARPS = 4  # of a warpgroup
COLUMNS, K_STEP = 16, 16  # rows of B that one ldmatrix loads, and depth of an mma.sync

Index = Int32 | tuple[Int32, Int32]


@dataclass(frozen=True)
class Product:
    """A product A B^T, added to an accumulator or not.

    loads: ldmatrix copies of A and B; None with wgmma, and for A in registers.
    """

    mma: cute.TiledMma  # of the warpgroup
    A: cute.Tensor  # [64, K, stages] in shared memory, or [64, K] in registers; A, B: partitioned for wgmma or ldmatrix
    B: cute.Tensor  # [N, K, stages] in shared memory
    columns: int
    use_mma_sync: bool
    loads: tuple[Optional[cute.TiledCopy], Optional[cute.TiledCopy]] = (None, None)

    def __call__(
        self,
        *,
        B_idx: Index,
        A_idx: Optional[Int32] = None,
        acc: Optional[cute.Tensor] = None,
        zero_init: bool = False,
        wg_wait: int = -1,
    ) -> cute.Tensor:
        """Multiply a stage of each operand. Returns the accumulator, `acc` or a new one.

        zero_init: overwrite acc instead of adding. wg_wait: as in `wait`; -1: do not wait.
        """
        if acc is None:
            acc, zero_init = sum_registers(self.columns), True
        A = self.A if A_idx is None else self.A[None, None, None, A_idx]
        B = self.B[None, None, None, B_idx]
        if not self.use_mma_sync:
            from quack import sm90_utils  # only compiling needs it

            sm90_utils.gemm(self.mma, acc, A, B, zero_init=zero_init, wg_wait=wg_wait)
        else:
            if zero_init:
                acc.fill(0.0)
            self._multiply(acc, A, B)
        return acc

    def _multiply(self, acc: cute.Tensor, A: cute.Tensor, B: cute.Tensor) -> None:
        sums = cute.make_tensor(acc.iterator, cute.make_layout(((2, 2), 1, self.columns // 8)))
        load_a, load_b = self.loads
        for k in range(cute.size(B, mode=[2])):
            a = A[None, None, k]
            if load_a is not None:
                loaded = cute.make_rmem_tensor(((2, 2, 2), 1, 1), self.B.element_type)
                cute.copy(load_a, a, load_a.retile(loaded)[None, None, 0])
                a = loaded[None, None, 0]
            b = cute.make_rmem_tensor(((2, 2), self.columns // 8, 1), self.B.element_type)
            cute.copy(load_b, B[None, None, k], load_b.retile(b)[None, None, 0])
            cute.gemm(self.mma, sums, a, b[None, None, 0], sums)


def sum_registers(columns: int) -> cute.Tensor:
    """A thread's accumulator registers in wgmma's layout: ((2 columns, 2 rows, columns / 8), 1, 1)."""
    return cute.make_rmem_tensor(((2, 2, columns // 8), 1, 1), Float32)


def of_shared(A: cute.Tensor, B: cute.Tensor, thread: Int32, use_mma_sync: bool) -> Product:
    """A product of operands in shared memory.

    A: [64, K, stages], B: [N, K, stages], both contiguous along K. thread: of the warpgroup.
    """
    (rows, _, _), (columns, _, _) = [[cute.size(t, mode=[i]) for i in range(3)] for t in (A, B)]
    if use_mma_sync:
        mma = _mma_of_warps(A.element_type)
        load_a, load_b = _ldmatrix(mma, A, False, thread), _ldmatrix(mma, B, False, thread, of_b=True)
        return Product(mma, load_a.partition_S(A), load_b.partition_S(B), columns, True, (load_a, load_b))
    mma = hopper.make_trivial_tiled_mma(
        A.element_type, A.element_type, K_MAJOR, K_MAJOR, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(rows, columns)
    )
    own = mma.get_slice(0)
    a, b = own.make_fragment_A(own.partition_A(A)), own.make_fragment_B(own.partition_B(B))
    return Product(mma, a, b, columns, False)


def of_registers(B: cute.Tensor, thread: Int32, use_mma_sync: bool, regs: Optional[cute.Pointer] = None) -> Product:
    """A product with A in registers, which the caller writes to `Product.A`.

    B: [N, K, stages] in shared memory, contiguous along N. regs: A's registers; None: new ones.
    """
    columns, K = cute.size(B, mode=[0]), cute.size(B, mode=[1])
    load = None
    if use_mma_sync:
        mma = _mma_of_warps(B.element_type)
        load = _ldmatrix(mma, B, True, thread, of_b=True)
        operand, shape = load.partition_S(B), ((2, 2, 2), 1, K // K_STEP)
    else:
        mma = hopper.make_trivial_tiled_mma(
            B.element_type, B.element_type, K_MAJOR, MN_MAJOR, Float32, atom_layout_mnk=(1, 1, 1),
            tiler_mn=(ROWS, columns), a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        own = mma.get_slice(0)
        operand, shape = own.make_fragment_B(own.partition_B(B)), own.partition_shape_A((ROWS, K))
    A = cute.make_rmem_tensor(shape, B.element_type) if regs is None else cute.make_tensor(regs, shape)
    return Product(mma, A, operand, columns, use_mma_sync, (None, load))


def _mma_of_warps(dtype: type[cutlass.Numeric]) -> cute.TiledMma:
    """mma.sync for 16 rows per warp and `COLUMNS` columns at a time."""
    op = warp.MmaF16BF16Op(dtype, Float32, (16, 8, K_STEP))
    return cute.make_tiled_mma(op, (WARPS, 1, 1), permutation_mnk=(ROWS, COLUMNS, K_STEP))


def _ldmatrix(
    mma: cute.TiledMma, operand: cute.Tensor, transpose: bool, thread: Int32, of_b: bool = False
) -> cute.TiledCopy:
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), operand.element_type)
    return (cute.make_tiled_copy_B if of_b else cute.make_tiled_copy_A)(atom, mma).get_slice(thread)


def wait(use_mma_sync: bool, groups: int) -> None:
    """Wait until at most `groups` wgmmas are in flight; mma.sync needs no wait."""
    if not use_mma_sync:
        warpgroup.wait_group(groups)
