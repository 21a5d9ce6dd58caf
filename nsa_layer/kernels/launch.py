"""Launches of the layer's kernels, compiled once for each key: kept in memory, and on disk beside the fork's.

A kernel is a class: made of its static options, called with tensors, numbers and a stream. It is compiled, without a
GPU, for tensors like the call's, whose sizes are symbols unless its `shapes` say otherwise. Under FakeTensorMode
kernels are compiled and nothing is launched, which is how one machine compiles for another's GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from torch._guards import detect_fake_mode

from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.runtime import launches
from flash_attn.cute.runtime.lazy_imports import import_compiler
from nsa_layer.support import device_arch

Compiled = Callable[..., object]

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
}

_compiled: dict[tuple[Hashable, ...], Compiled] = {}


def launch(name: str, kernel: type, static: tuple[Hashable, ...], *arguments: object) -> None:
    """Run ``kernel(*static)`` on PyTorch's current stream, compiled for these options and the tensors' dtypes.

    Args:
        name: the kernel's folder in the cache on disk.
        kernel: its ``shapes`` say for which tensors it is compiled, in the order of its arguments, such as "B T H D".
            A name is a size, the same in all tensors of a call; D and numbers are static, and D is one of the static
            options. Packed tensors have no B. Rows start at multiples of 16 bytes where D is last, else at any
            element, or as "@32" says. Strides are free but for the last dimension's, which is 1 unless "*" is given.
        arguments: tensors, of which some may be None, then numbers.
    """
    first = next(a for a in arguments if isinstance(a, torch.Tensor))
    dtypes = [getattr(a, "dtype", None) for a in arguments]
    entry = (name, first.device.index, first.dim(), static, *dtypes)  # GPUs may be of several architectures
    compiled = _compiled.get(entry)
    if compiled is None:
        compiled = _compiled[entry] = _load_or_compile(name, entry[2:], lambda: _compile(kernel(*static), arguments))
    if not is_fake(first):
        launches.of(compiled)(*arguments)


def rows_aligned(x: torch.Tensor) -> bool:
    """True if rows of a tensor start at multiples of 16 bytes, its heads and tokens having any strides."""
    step = 16 // x.element_size()
    return not any(stride % step for stride in x.stride()[:-1]) and (is_fake(x) or not x.data_ptr() % 16)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy if its rows are not aligned to 16 bytes, by which kernels read."""
    return x if x.stride(-1) == 1 and rows_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def forget() -> None:
    """Forget the kernels in memory, so that the cache on disk is asked again."""
    _compiled.clear()


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor without memory, with which kernels are compiled and not launched."""
    return type(tensor) is not torch.Tensor and detect_fake_mode([tensor]) is not None


def _load_or_compile(name: str, key: tuple[Hashable, ...], compile_kernel: Callable[[], Compiled]) -> Compiled:
    cache = get_jit_cache(f"nsa_{name}")
    # The fork's cache knows of changes to the fork's own files only.
    versioned = (_sources(), device_arch(), *key)
    if versioned not in cache:
        import_compiler()
        cache[versioned] = compile_kernel()
    return cache[versioned]


def _compile(kernel: object, arguments: tuple[object, ...]) -> Compiled:
    sizes: dict[str, object] = {}
    numbers = {int: cutlass.Int32, float: cutlass.Float32}
    fake = [
        numbers[type(a)](a) if type(a) in numbers else None if a is None else _fake_tensor(a, shape, sizes)
        for a, shape in zip(arguments, (*kernel.shapes, *[""] * len(arguments)))
    ]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *fake, stream, options="--enable-tvm-ffi")


def _fake_tensor(like: torch.Tensor, shape: str, sizes: dict[str, object]) -> cute.runtime.Tensor:
    """A tensor of these dimensions to compile for; `sizes` are the symbols of names."""
    names, options = shape.removesuffix(" *").partition("@")[::2]
    names = names.split()
    if like.dim() < len(names):
        names.remove("B")
    of = [size if name == "D" or name.isdigit() else name for name, size in zip(names, like.shape)]
    of = [sizes.setdefault(size, cute.sym_int()) if isinstance(size, str) else size for size in of]
    align = int(options) if options else 16 if names[-1] == "D" else like.itemsize
    strides = [cute.sym_int64(divisibility=align // like.itemsize) for _ in of]
    if not shape.endswith("*"):
        strides[-1] = 1
    return cute.runtime.make_fake_tensor(DTYPES[like.dtype], tuple(of), stride=tuple(strides), assumed_align=align)


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of all files of this package."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted(folder.rglob("*.py")):
        digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
