"""fp32 rows as two fp16 rows and a power of two, ``x = (hi + lo) * scale`` to 22 bits, for dot products by fp16 MMA.

A row's largest element is scaled to [2^14, 2^15), which leaves fp16 room for much smaller ones. Both halves share one
scale, so that ``hi.hi + hi.lo + lo.hi`` goes into one accumulator; lo.lo is below its rounding. Numbers of 11 bits,
such as means of small integers, have lo = 0 and are exact.

An accumulator of D = 128 products stays below 2^38. It is multiplied by the key's scale first, and must stay in the
range of fp32 for every key, so that a score overflows only where q . k does: the queries' scales lend 2^-23 to the
keys'.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

VECTOR = 8  # numbers of a row in one thread: 16 bytes of fp16

# Of the exponent's 8 bits, biased by 127: 14 is what the largest number gets.
TOP = 14
LEAST_EXPONENT = TOP + 1  # so that scale and its inverse are both normal numbers
KEYS_DOWN = 23  # log2 of the factor that queries' scales lend to keys'


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


def split(share: list[Float32], lanes: int, row: cute.Tensor, lane: Int32, active: bool, *, shift: int = 0) -> Float32:
    """Write a thread's share of a row as [hi | lo], 2 D numbers of fp16, where `active`.

    Returns the row's scale times ``2 ** shift``, or the highest power of two if that is less.
    """
    exponent = (bits_of(largest(share, lanes)) >> 23) & 0xFF
    exponent = cutlass.max(exponent, LEAST_EXPONENT + max(0, -shift))
    up, scale = float_of((254 + TOP - exponent) << 23), float_of(cutlass.min(exponent - TOP + shift, 254) << 23)
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
