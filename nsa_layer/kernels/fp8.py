"""Conversions of caches in FP8 (float8_e4m3fn), four elements to a register: to fp16 and fp32, and from fp32."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

E4M3 = cutlass.Float8E4M3FN
# The lower two and the upper two elements of a word, in fp16: exact.
_LOWER = "{ .reg .b16 two, none; mov.b32 {two, none}, $1; cvt.rn.f16x2.e4m3x2 $0, two; }"
_UPPER = "{ .reg .b16 two, none; mov.b32 {none, two}, $1; cvt.rn.f16x2.e4m3x2 $0, two; }"
_FROM_FLOATS = (
    "{ .reg .b16 lower, upper; cvt.rn.satfinite.e4m3x2.f32 lower, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 upper, $4, $3; mov.b32 $0, {lower, upper}; }"
)


@dsl_user_op
def _asm(text: str, constraints: str, *operands: Int32 | Float32, loc: object = None, ip: object = None) -> Int32:
    values = [x.ir_value(loc=loc, ip=ip) for x in operands]
    static = dict(has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT)
    return Int32(llvm.inline_asm(T.i32(), values, text, constraints, **static, loc=loc, ip=ip))


def unpack(word: Int32) -> tuple[Int32, Int32]:
    """The four elements of a word in fp16, two to a word."""
    return _asm(_LOWER, "=r,r", word), _asm(_UPPER, "=r,r", word)


def pack(x: list[Float32]) -> Int32:
    """Four numbers in FP8, rounded to the nearest, saturating."""
    return _asm(_FROM_FLOATS, "=r,f,f,f,f", *x)


def words(x: cute.Tensor) -> cute.Tensor:
    """A tensor in registers as 32-bit words."""
    return cute.recast_tensor(x, Int32)


def floats(x: cute.Tensor) -> list[Float32]:
    """The elements of a vector in registers, in FP8 or 16 bits, in fp32."""
    size = cute.size(x)
    if x.element_type != E4M3:
        return [x[i].to(Float32) for i in range(size)]
    whole, halves = (cute.make_rmem_tensor((-(-size // 4) * 4,), dtype) for dtype in (E4M3, Float16))
    words(whole).fill(0)
    for i in range(size):
        whole[i] = x[i]
    for i in range(cute.size(whole) // 4):
        words(halves)[2 * i], words(halves)[2 * i + 1] = unpack(words(whole)[i])
    return [halves[i].to(Float32) for i in range(size)]


def inverse(scale: cute.Tensor | None, head: Int32) -> Float32:
    """1 / a head's scale; 1 if there are no scales."""
    return Float32(1.0) if scale is None else 1.0 / scale[head]


def store(x: list[Float32], by: Float32, target: cute.Tensor) -> None:
    """Write numbers, times `by` if the target is in FP8, to a vector in registers or memory."""
    size, x = len(x), x + x[-1:] * (-len(x) % 4)
    kept = cute.make_rmem_tensor((len(x),), target.element_type)
    if target.element_type == E4M3:
        for i in range(len(x) // 4):
            words(kept)[i] = pack([y * by for y in x[4 * i : 4 * i + 4]])
    else:
        for i, y in enumerate(x):
            kept[i] = y.to(target.element_type)
    cute.autovec_copy(cute.local_tile(kept, (size,), (0,)), target)
