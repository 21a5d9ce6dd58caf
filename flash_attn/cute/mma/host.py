"""Host code that the dq pass, the dk and dv pass and forward over unions share: limits, fake arguments, compiling."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Optional

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.runtime.lazy_imports import fake_tensor
from flash_attn.cute.runtime.own_device import on_own_device

SHARED_MEMORY = 224 * 1024  # bytes of a CTA for tiles
MOST_STAGES = 4
DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


def on_plain_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call with plain strides: those of dimensions of one element are as in a contiguous tensor.

    The stride of a dimension of one element is never used, but a compiled kernel refuses it unless it is aligned. The
    tensors' GPU is made the current one.
    """

    @on_own_device
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(with_plain_strides, args), **{name: with_plain_strides(x) for name, x in kwargs.items()})

    return call


def with_plain_strides(x: Any) -> Any:
    """A tensor with the strides of dimensions of one element as in a contiguous one; anything else as it is."""
    if not isinstance(x, torch.Tensor) or 1 not in x.shape:
        return x
    strides = list(x.stride())
    after = 1
    for dim in reversed(range(x.ndim)):
        if x.shape[dim] == 1:
            strides[dim] = after
        after = strides[dim] * x.shape[dim]
    return x if tuple(strides) == x.stride() else x.as_strided(x.shape, strides)


class CompiledKernels:
    """Cache of the compiled kernels of one name, by compile key."""

    def __init__(self, name: str) -> None:
        self.compile_cache = get_jit_cache(name)

    def __call__(self, key: Hashable, kernel: Callable[[], Any], arguments: Callable[[], list[Any]]) -> Callable:
        """The kernel from the cache, or ``kernel()`` compiled for the fake ``arguments()`` and a stream."""
        if key not in self.compile_cache:
            self.compile_cache[key] = cute.compile(
                kernel(),
                *arguments(),
                cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
                options="--enable-tvm-ffi",
            )
        return self.compile_cache[key]


@dataclass(frozen=True)
class FakeCall:
    """Fake tensors to compile a call for, with symbolic sizes and strides."""

    dtype: torch.dtype
    q: tuple  # q, k, v, o: shapes
    k: tuple
    v: tuple
    o: tuple
    lead: tuple  # batch of the queries; () where they are packed
    heads: Any  # query heads

    @staticmethod
    def of(dtype: torch.dtype, head_dim: int, head_dim_v: int, packed: tuple[bool, bool]) -> "FakeCall":
        batch, Hq, Hkv = (cute.sym_int() for _ in range(3))
        lead_q, lead_k = (() if of_side else (batch,) for of_side in packed)
        q, k = (*lead_q, cute.sym_int(), Hq), (*lead_k, cute.sym_int(), Hkv)
        shapes = ((*q, head_dim), (*k, head_dim), (*k, head_dim_v), (*q, head_dim_v))
        return FakeCall(dtype, *shapes, lead_q, Hq)

    def tokens(self, *shapes: tuple) -> list[Any]:
        return [fake_tensor(DTYPES[self.dtype], shape, divisibility=8) for shape in shapes]

    def of_rows(self, rows: Any, **options: Any) -> Any:
        """fp32 [B, Hq, rows], packed [Hq, rows]."""
        return fake_tensor(Float32, (*self.lead, self.heads, rows), **options)


def fake_indices(*given: bool) -> list[Optional[Any]]:
    """Fake int32 vectors; None for arguments that are not given."""
    return [fake_tensor(Int32, (cute.sym_int(),)) if each else None for each in given]
