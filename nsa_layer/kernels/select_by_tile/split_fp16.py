"""fp32 rows as two fp16 rows and a power of two, ``x = (hi + lo) * scale`` to 22 bits, for dot products by fp16 MMA.

A row's largest element is scaled to [2^14, 2^15), so that fp16 holds much smaller ones, too. Both halves share one
scale, so that ``hi.hi + hi.lo + lo.hi`` goes into one accumulator; lo.lo is below its rounding. Numbers of 11 bits,
such as means of small integers, have lo = 0 and are exact.

An accumulator of D = 256 products stays below 2^39. It is multiplied by the key's scale first, and must stay in the
range of fp32 for every key, so that a score overflows only where q . k does: a factor of 2^24 is moved from the
keys' scales to the queries'. Rows go to shared memory by cp.async, then by ldmatrix to three mma.sync.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cutlass_dsl import T, dsl_user_op

from nsa_layer.kernels.select_by_tile.online_softmax import PARTS

VECTOR = 8  # numbers of a row in one thread: 16 bytes of fp16

# Exponents of fp32, biased by 127. The largest element of a row gets exponent 14.
TOP = 14
LEAST_EXPONENT = TOP + 1  # so that scale and its inverse are both normal numbers
KEYS_DOWN = 24  # log2 of a factor that is moved from keys' scales to queries'

TILE = 128  # rows of a CTA, and keys of a step
THREADS = 256
WARPS_M, WARPS_N = 4, PARTS


@dsl_user_op
def bits_of(x: Float32, *, loc=None, ip=None) -> Int32:
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(bits: Int32, *, loc=None, ip=None) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def largest(share: list[Float32], lanes: int) -> Float32:
    """The largest of the absolute values of a row that lies over `lanes` neighbouring threads."""
    top = Float32(0.0)
    for x in share:
        top = cute.arch.fmax(top, cute.arch.fmax(x, -x))
    return cute.arch.warp_reduction_max(top, threads_in_group=lanes)


def powers_of_two(share: list[Float32], lanes: int, *, shift: int = 0) -> tuple[Float32, Float32]:
    """The factor that brings a row's largest element to [2^14, 2^15), and its inverse times ``2 ** shift``, or the
    highest power of two if that is less."""
    exponent = (bits_of(largest(share, lanes)) >> 23) & 0xFF
    exponent = cutlass.max(exponent, LEAST_EXPONENT + max(0, -shift))
    return float_of((254 + TOP - exponent) << 23), float_of(cutlass.min(exponent - TOP + shift, 254) << 23)


def split(share: list[Float32], lanes: int, row: cute.Tensor, lane: Int32, active: bool, *, shift: int = 0) -> Float32:
    """Write a thread's share of a row as [hi | lo], fp16 [2 D], if `active`; returns the row's scale, the second
    result of `powers_of_two`."""
    up, scale = powers_of_two(share, lanes, shift=shift)
    hi, lo = (cute.make_rmem_tensor((VECTOR,), Float16) for _ in range(2))
    for c, x in enumerate(share):
        hi[c] = (x * up).to(Float16)
        lo[c] = (x * up - hi[c].to(Float32)).to(Float16)
    write(row, lane, lanes, hi, lo, active)
    return scale


@cute.jit
def write(row: cute.Tensor, lane: Int32, lanes: int, hi: cute.Tensor, lo: cute.Tensor, active: bool):
    if active:
        cute.autovec_copy(hi, cute.local_tile(row, (VECTOR,), (lane,)))
        cute.autovec_copy(lo, cute.local_tile(row, (VECTOR,), (lanes + lane,)))


def row_length(D: int) -> int:
    """Elements of a split row of D elements, padding included."""
    return next(n for n in (64, 128, 256) if D <= n)


def rows_layout(D: int, stages: int) -> cute.ComposedLayout:
    """Swizzled shared memory of `TILE` rows, hi and lo, for ldmatrix."""
    atom = cute.make_ordered_layout((8, 64), order=(1, 0))
    # Pointers are swizzled, so in bytes: 16 bytes stay together.
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
def split_gemm(sA: cute.Tensor, sB: cute.Tensor, acc: cute.Tensor, stage: Int32, part: int = 0):
    """``acc = hi.hi + hi.lo + lo.hi`` for all rows and the keys of a stage.

    part: the part of D that the stage of keys holds; parts from the second on are added to acc.
    """
    tidx, _, _ = cute.arch.thread_idx()
    mma = tiled_mma()
    thread = mma.get_slice(tidx)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), Float16)
    copy_A = cute.make_tiled_copy_A(atom, mma).get_slice(tidx)
    copy_B = cute.make_tiled_copy_B(atom, mma).get_slice(tidx)
    tAsA, tBsB = copy_A.partition_S(sA), copy_B.partition_S(sB)
    A = [thread.make_fragment_A(thread.partition_A(sA[None, None, 0])) for _ in range(2)]
    B = [thread.make_fragment_B(thread.partition_B(sB[None, None, 0])) for _ in range(2)]
    steps = cute.size(sB, mode=[1]) // 16
    if const_expr(part == 0):
        acc.fill(0.0)
    for k in cutlass.range_constexpr(steps):
        at = part * steps + k
        for half in cutlass.range_constexpr(2):
            cute.copy(copy_A, tAsA[None, None, at, half], copy_A.retile(A[half])[None, None, at])
            cute.copy(copy_B, tBsB[None, None, k, 2 * stage + half], copy_B.retile(B[half])[None, None, k])
        for a, b in ((1, 0), (0, 1), (0, 0)):
            cute.gemm(mma, acc, A[a][None, None, at], B[b][None, None, k], acc)
