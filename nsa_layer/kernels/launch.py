"""Launches of the layer's kernels, compiled once for each key: kept in memory, and on disk beside the fork's.

A key holds static, hashable values. Kernels are compiled from fake tensors, without a GPU or the caller's tensors;
sizes are symbols unless the key holds them. Under FakeTensorMode kernels are compiled and nothing is launched, which is
how one machine compiles for another's GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from torch._guards import detect_fake_mode

from flash_attn.cute.cache_utils import get_jit_cache
from flash_attn.cute.runtime.lazy_imports import import_compiler
from nsa_layer.support import device_arch

Compiled = Callable[..., object]

OPTIONS = "--enable-tvm-ffi"

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
}

_compiled: dict[tuple[Hashable, ...], Compiled] = {}


def launch(name: str, key: tuple[Hashable, ...], compile_kernel: Callable[[], Compiled], *arguments: object) -> None:
    """Run a kernel on PyTorch's current stream.

    Args:
        name: the kernel's; also its folder in the cache on disk.
        key: all that `compile_kernel` depends on.
        compile_kernel: makes the kernel where there is none for the key, by ``cute.compile`` with `OPTIONS` and with
            `fake_stream()` as last argument.
        arguments: what the compiled kernel takes: tensors, numbers and None, without the stream.
    """
    first = next(a for a in arguments if isinstance(a, torch.Tensor))
    entry = (name, first.device.index, *key)  # GPUs of a machine may be of several architectures
    kernel = _compiled.get(entry)
    if kernel is None:
        kernel = _compiled[entry] = _load_or_compile(name, key, compile_kernel)
    if not _is_fake(first):
        kernel(*arguments)


def forget() -> None:
    """Forget the kernels in memory, so that the cache on disk is asked again."""
    _compiled.clear()


def fake_tensor(
    dtype: torch.dtype, shape: Sequence[object], *, align: int = 16, leading: int = -1
) -> cute.runtime.Tensor:
    """A tensor to compile for: its last dimension (`leading`) is contiguous, all other strides are symbols.

    Args:
        shape: ints, and ``cute.sym_int()`` for sizes that are known at launch.
        align: bytes that the start and all strides are multiples of.
    """
    element = DTYPES[dtype]
    multiple = max(1, align * 8 // element.width)
    leading %= len(shape)
    strides = tuple(1 if i == leading else cute.sym_int64(divisibility=multiple) for i in range(len(shape)))
    return cute.runtime.make_fake_tensor(element, tuple(shape), stride=strides, assumed_align=align)


def fake_stream() -> object:
    """The stream to compile for: PyTorch's current one at each launch."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and detect_fake_mode([tensor]) is not None


def _load_or_compile(name: str, key: tuple[Hashable, ...], compile_kernel: Callable[[], Compiled]) -> Compiled:
    cache = get_jit_cache(f"nsa_{name}")
    # The fork's cache knows of changes to the fork's own files only.
    versioned = (_sources(), device_arch(), *key)
    if versioned not in cache:
        import_compiler()
        cache[versioned] = compile_kernel()
    return cache[versioned]


@lru_cache(maxsize=1)
def _sources() -> str:
    """A hash of all files of this package."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted(folder.rglob("*.py")):
        digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
