"""Hopper's host code on CPU tensors: what is launched is noted, and nothing runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import pytest
import torch

LAUNCHED: list[tuple[object, tuple]] = []


@contextmanager
def stubs() -> Iterator[None]:
    """Within, kernels are what notes its launch: those of the fork, and those of the layer."""
    from flash_attn.cute import interface
    from flash_attn.cute.cache_utils import JITCache
    from flash_attn.cute.mma.host import CompiledKernels
    from nsa_layer.cute import backend, selected  # noqa: F401, all modules with kernels
    from nsa_layer.kernels import launch
    from nsa_layer.operators import tape

    def compiled(*at: object) -> Callable[..., None]:
        return lambda *args: LAUNCHED.append((at, args))

    class Compiled(JITCache):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __contains__(self, key: object) -> bool:
            self.cache.setdefault(key, compiled(self.name, key))
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
        patch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        patch.setattr(interface, "_get_device_arch", lambda: 90)
        patch.setattr(selected, "_on_hopper", lambda device: True)
        patch.setattr(launch, "_compiled", {})
        patch.setattr(tape, "_tapes", {})
        patch.setattr(launch, "_load_or_compile", lambda name, key, compile_kernel: compiled(name, key))
        for module in [m for name, m in sys.modules.items() if name.startswith("flash_attn.cute.")]:
            for name, compiling in vars(module).items():
                if isinstance(compiling, (FunctionType, CompiledKernels)) and hasattr(compiling, "compile_cache"):
                    patch.setattr(compiling, "compile_cache", Compiled(name))
        yield


@contextmanager
def stubbed_layer() -> Iterator[None]:
    """Within, `nsa` with backend="cute" takes tensors on the CPU; what its kernels would write is never written."""
    from nsa_layer import support
    from nsa_layer.cute import memory_plan

    with stubs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "_total_memory", lambda index: 80 << 30)
        patch.setattr(support, "choose_backend", lambda backend, *_: backend)
        yield


def launches(call: Callable[[], object], inputs: list[torch.Tensor]) -> tuple[list, object]:
    """The launches of a call as data: addresses are told by the input, or by which new tensor it is."""
    LAUNCHED.clear()
    result = call()
    addresses: dict[int, object] = {t.data_ptr(): ("input", i) for i, t in reversed(list(enumerate(inputs)))}

    def data(value: object) -> object:
        if isinstance(value, torch.Tensor):
            address = addresses.setdefault(value.data_ptr(), ("new", len(addresses)))
            return address, tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, (tuple, list)):
            return type(value).__name__, [data(part) for part in value]
        return type(value).__name__, value

    # What was launched is noted with its tensors: no address stands for two.
    return [(at, [data(arg) for arg in args]) for at, args in LAUNCHED], data(result)
