"""The kernels of a call of `nsa`, compiled before it is made: on a machine without a GPU too, each in any process.

The call is made with fake tensors, which launch nothing, and whatever it looks for in the kernel cache it finds there,
as a stand-in. So it names all its kernels within a second. Each of them is then compiled by the same call, in which
that one alone is looked for in earnest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from nsa_layer.cli.shape import Shape
from nsa_layer.policy import Sizes, schedule
from nsa_layer.problem import Problem

Found = Callable[[object, object, str], bool]
UNLINKED = "not linked with support for cuda"


@dataclass(frozen=True)
class Call:
    """A call of `nsa`, but for its values.

    Attributes:
        shape: its `device` and what the GPU has free are not asked for: without a budget heads go in one group.
        gated: with ``gate_weight``.
        projected: with ``compress_k_weight`` and ``compress_v_weight``.
        backward: backward too.
    """

    shape: Shape
    gated: bool = True
    projected: bool = False
    backward: bool = True


def kernels(call: Call) -> list[str]:
    """The names of the call's kernels, folder and file in the cache, in the order in which it asks for them.

    Needs the target's environment, as all of this module does.

    Raises:
        RuntimeError: kernels are not kept on disk.
    """
    names: dict[str, None] = {}

    def found(cache: object, key: object, name: str) -> bool:
        names[name] = None
        return True

    with _lookups(found):
        _make(call)
    return list(names)


def compile_kernel(call: Call, name: str) -> float | None:
    """Compile one of the call's kernels, unless the cache has it: the seconds that took, or None.

    Raises:
        RuntimeError: the call has no such kernel, or it could not be written.
    """
    files = []

    def found(cache: object, key: object, asked: str) -> bool:
        if asked == name and not files:
            files.append(cache.cache_path / f"{name.split('/')[1]}.o")
            files.append(files[0].exists())
        return asked != name

    begin = time.perf_counter()
    with _lookups(found):
        _make(call)
    if not files:
        raise RuntimeError(f"the call asks for no kernel {name}")
    if not files[0].exists():
        raise RuntimeError(f"compiled, but not written to {files[0].parent}")
    return None if files[1] else time.perf_counter() - begin


class _StandIn:
    """In place of a kernel that is not launched."""

    def __call__(self, *arguments: object, **named: object) -> None:
        raise RuntimeError("a stand-in was launched")


@contextmanager
def _lookups(found: Found) -> Iterator[None]:
    """In the body the cache has a stand-in for every kernel of which `found` (cache, key, name) says so."""
    from flash_attn.cute import cache_utils
    from nsa_layer.kernels import launch

    kind, stand_in, placed = cache_utils.JITPersistentCache, _StandIn(), []
    if not isinstance(cache_utils.get_jit_cache(), kind):
        raise RuntimeError("kernels are not kept on disk: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is off, or see above")
    looks_up = kind.__contains__

    def contains(cache: cache_utils.JITPersistentCache, key: object) -> bool:
        if not found(cache, key, f"{cache.cache_path.name}/{cache._key_to_hash(key)}"):
            return looks_up(cache, key)
        if key not in cache.cache:
            cache.cache[key] = stand_in
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


class _Unlinked(TorchFunctionMode):
    """What PyTorch without CUDA cannot do to a fake tensor on a GPU, it does to one without a device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if UNLINKED not in str(error):
                raise
        if re.search("[^_]_$", function.__name__):  # in place
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        args, kwargs = tree_map_only(torch.Tensor, lambda x: _like(x, "meta"), (args, kwargs))
        return tree_map_only(torch.Tensor, lambda x: _like(x, "cuda"), function(*args, **kwargs))


def _like(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _make(call: Call) -> None:
    """The call, group by group, with fake tensors; groups of one size ask for the same kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nsa_layer import heads
    from nsa_layer.packing import Packing

    shape = call.shape
    config, tokens = shape.config, shape.tokens()
    problem = Problem(config, True, shape.D**-0.5, shape.lengths)
    meta = (torch.empty(*tokens, *of, dtype=shape.dtype, device="meta") for of in _head_shapes(shape)[::2])
    sizes = Sizes.of(*meta, problem=problem, gated=call.gated, needs_grad=call.backward)
    plan = schedule(sizes, shape.policy, torch.device("cpu"))
    with FakeTensorMode(), _Unlinked(), torch.no_grad():
        q, k, v = (_fake(*tokens, *of, dtype=shape.dtype) for of in _head_shapes(shape))
        weight = _fake(shape.Hq, 3, shape.D, dtype=shape.dtype) if call.gated else None
        w_k, w_v = (_fake(shape.Hkv, D, D, dtype=shape.dtype) if call.projected else None for D in (shape.D, shape.Dv))
        inputs = heads.Inputs(q, k, v, weight, None, w_k, w_v, Packing.of(problem, q.device))
        for first, end in {end - first: (first, end) for first, end in plan.groups}.values():
            group = inputs.heads(first, end)
            o = _fake(*group.q.shape[:-1], shape.Dv, dtype=shape.dtype)
            kept = heads.forward(group, o, problem=problem, kept=plan.kept)
            if call.backward:
                into = (torch.empty_like(x) for x in group[:3])
                heads.backward(group, kept, torch.empty_like(o), *into, problem=problem)


def _head_shapes(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(heads, head dimension) of q, k and v."""
    return (shape.Hq, shape.D), (shape.Hkv, shape.D), (shape.Hkv, shape.Dv)


def _fake(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")
