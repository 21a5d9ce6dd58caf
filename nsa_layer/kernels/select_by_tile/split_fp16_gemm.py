"""Products of rows of split fp16: to shared memory by cp.async, then ldmatrix and three mma.sync."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from nsa_layer.kernels.select_by_tile.online_softmax import PARTS
from nsa_layer.kernels.select_by_tile.split_fp16 import VECTOR

TILE = 128  # rows of a CTA, and keys of a step
THREADS = 256
WARPS_M, WARPS_N = 4, PARTS


def rows_layout(D: int, stages: int) -> cute.ComposedLayout:
    """Swizzled shared memory of `TILE` rows, hi and lo, for ldmatrix."""
    atom = cute.make_ordered_layout((8, 64), order=(1, 0))
    # In bytes, since it is pointers that are swizzled: 16 stay together.
    atom = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, atom)
    return cute.tile_to_shape(atom, (TILE, D, 2 * stages), (0, 1, 2))


def tiled_mma() -> cute.TiledMma:
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(Float16, Float32, (16, 8, 16)),
        (WARPS_M, WARPS_N, 1),
        permutation_mnk=(16 * WARPS_M, 16 * WARPS_N, 16),
    )


def row_copy(D: int) -> cute.TiledCopy:
    lanes = D // VECTOR
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float16, num_bits_per_copy=128
    )
    threads = cute.make_ordered_layout((THREADS // lanes, lanes), order=(1, 0))
    return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))


def copy_row(copy: cute.TiledCopy, row: cute.Tensor, tXsX: cute.Tensor, lane: Int32, i: int, part: Int32):
    """Copy a thread's share of hi and lo."""
    lanes = row.shape[0] // 2 // VECTOR
    for half in range(2):
        source = cute.local_tile(row, (VECTOR,), (half * lanes + lane,))
        target = tXsX[None, i, 0, part + half]
        cute.copy(copy, cute.make_tensor(source.iterator, target.layout), target)


@cute.jit
def split_gemm(sA: cute.Tensor, sB: cute.Tensor, acc: cute.Tensor, stage: Int32):
    """``acc = hi.hi + hi.lo + lo.hi`` for all rows and the keys of a stage."""
    tidx, _, _ = cute.arch.thread_idx()
    mma = tiled_mma()
    thread = mma.get_slice(tidx)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), Float16)
    copy_A = cute.make_tiled_copy_A(atom, mma).get_slice(tidx)
    copy_B = cute.make_tiled_copy_B(atom, mma).get_slice(tidx)
    tAsA, tBsB = copy_A.partition_S(sA), copy_B.partition_S(sB)
    A = [thread.make_fragment_A(thread.partition_A(sA[None, None, 0])) for _ in range(2)]
    B = [thread.make_fragment_B(thread.partition_B(sB[None, None, 0])) for _ in range(2)]
    acc.fill(0.0)
    for k in cutlass.range_constexpr(cute.size(sA, mode=[1]) // 16):
        for half in cutlass.range_constexpr(2):
            cute.copy(copy_A, tAsA[None, None, k, half], copy_A.retile(A[half])[None, None, k])
            cute.copy(copy_B, tBsB[None, None, k, 2 * stage + half], copy_B.retile(B[half])[None, None, k])
        for a, b in ((1, 0), (0, 1), (0, 0)):
            cute.gemm(mma, acc, A[a][None, None, k], B[b][None, None, k], acc)
