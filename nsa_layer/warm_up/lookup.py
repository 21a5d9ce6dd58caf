"""Names the kernels that a call of `nsa`, `selected_attention` or `nsa_with_kvcache` launches, and compiles them, from
shapes alone and without a GPU.

The call is made with fake tensors, which launch nothing. For the names, every lookup in the kernel cache finds a
stand-in, which is a matter of a second. Each kernel is then compiled by the same call, in which all other lookups find
one; any process can do that for any kernel.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from nsa_layer.call import Call, Signature
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.warm_up.jobs import Kernel


def kernel_files(call: Signature) -> dict[str, Path]:
    """The call's kernels in the order of their launches: names, as folder and file in the cache, and paths.

    The process must have a target's `jobs.ENVIRONMENT`, for `compile_kernel` too; RuntimeError without a cache on disk.
    """
    files: dict[str, Path] = {}

    def note(cache: object, name: str) -> bool:
        files[name] = cache.cache_path / f"{name.split('/')[1]}.o"
        return True

    with lookups(note):
        make_call(call)
    return files


def compile_kernel(kernel: Kernel, *, wait: bool = True) -> Kernel:
    """Compile a kernel unless the cache has it; an error of the compiler is a field of the result. One that another
    process is compiling is waited for, or left to it."""
    from flash_attn.cute.runtime import kernel_cache

    begin = time.perf_counter()
    if kernel.file.exists() or not wait and kernel_cache.LOCKS.is_held(kernel.file.with_suffix(".compiling")):
        return kernel
    try:
        with lookups(lambda cache, name: name != kernel.name):
            make_call(kernel.call)
    except Exception as error:  # the compiler raises many kinds
        return kernel._replace(error=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if not kernel.file.exists():
        return kernel._replace(error=f"the call asks for no such kernel, or none could be written to {kernel.file}")
    return kernel._replace(seconds=time.perf_counter() - begin)


def _stand_in(*arguments: object, **named: object) -> None:
    """A stand-in for a kernel that is never launched."""
    raise RuntimeError("a stand-in was launched")


@contextmanager
def lookups(stands_in: Callable[[object, str], bool]) -> Iterator[None]:
    """While entered, the cache holds a stand-in for every kernel for which ``stands_in(cache, name)`` is true."""
    from flash_attn.cute import cache_utils
    from nsa_layer.kernels import launch

    kind, placed = cache_utils.JITPersistentCache, []
    if not isinstance(cache_utils.get_jit_cache(), kind):
        raise RuntimeError("kernels are not kept on disk: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is off, or see above")
    looks_up = kind.__contains__

    def contains(cache: cache_utils.JITPersistentCache, key: object) -> bool:
        if not stands_in(cache, f"{cache.cache_path.name}/{cache._key_to_hash(key)}"):
            return looks_up(cache, key)
        if key not in cache.cache:
            cache.cache[key] = _stand_in
            placed.append((cache, key))
        return True

    kind.__contains__ = contains
    launch.forget()
    try:
        yield
    finally:
        kind.__contains__ = looks_up
        launch.forget()
        for cache, key in placed:
            del cache.cache[key]


class OnMeta(TorchFunctionMode):
    """Runs operators on fake GPU tensors without CUDA or a GPU: on meta tensors where they look for one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "cuda" not in str(error).lower():
                raise
        if re.search("[^_]_$", function.__name__):  # in place
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        args, kwargs = tree_map_only(torch.Tensor, lambda x: _like(x, "meta"), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda x: _like(x, "cuda"), function(*args, **kwargs))


def _like(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def make_call(call: Signature) -> None:
    """Make the call with fake tensors: kernels that no cache has are compiled, and nothing is launched.

    Of groups of heads of one size, which launch the same kernels, one runs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flash_attn.cute.runtime import kernel_cache
    from nsa_layer.cute import backend, kvcache

    with kernel_cache.at_first_miss(lambda: None), FakeTensorMode(), OnMeta(), torch.no_grad():
        tensors = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, shape, dtype in call.tensors}
        fake = Call.of(tensors)._replace(spec=call.spec)
        if call.plan is None:
            kvcache.step(fake, memory=MemoryPolicy(budget=sys.maxsize))
            return
        groups = {end - first: (first, end) for first, end in call.plan.groups}
        plan = replace(call.plan, groups=tuple(groups.values()))
        o, saved = backend.forward(fake, plan=plan, backward=call.backward)
        if call.backward:
            backend.backward(fake, saved, torch.empty_like(o), plan=plan, o=o, d_sums=saved.index_sums)
