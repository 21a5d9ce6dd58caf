"""A training run has ever new lengths: nothing that the host keeps grows with them beyond a bound."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from stub_kernels import LAUNCHED, stubs

from flash_attn.cute.runtime import repeated_calls
from nsa_layer import NSAConfig, checks
from nsa_layer.call_spec import CallTensors
from nsa_layer.cute import grad_accum
from nsa_layer.operators import attend
from nsa_tools.testing.cases import Case, make_inputs

OURS = ("flash_attn.cute", "nsa_layer")
CONFIGS = [
    NSAConfig(block_counts=4, q_tile=128, window_size=192),
    NSAConfig(block_counts=4, q_tile=128, window_size=192, deterministic=True),
    NSAConfig(block_counts=4, q_tile=128, block_size=128, window_size=192),
    NSAConfig(block_counts=4, q_tile=1, window_size=192),
]


def step(draw: random.Random) -> None:
    """Forward and backward of a batch or a pack that never came before; what is launched is thrown away."""
    T = draw.randint(1, 1500)
    shape: dict[str, object] = dict(T=T, B=draw.randint(1, 2))
    if draw.random() < 0.5:
        cuts = sorted(draw.randint(0, T) for _ in range(draw.randint(0, 3)))
        shape = dict(lengths=tuple(b - a for a, b in zip([0, *cuts], [*cuts, T])))
    case = Case(Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, config=draw.choice(CONFIGS), gate="given", **shape)
    made = make_inputs(case)
    given = {name: x.requires_grad_() for name, x in made.tensors().items()}
    tensors = CallTensors(**given, cu_seqlens=made.cu_seqlens)
    static = dict(softmax_scale=None, max_seqlen=None, causal=True)
    spec = checks.check_inputs(checks.Arguments(tensors, case.config, **static))
    o, _ = attend(tensors, spec=spec)
    torch.autograd.grad(o, list(given.values()), made.do)
    LAUNCHED.clear()


@lru_cache(maxsize=None)
def unbounded_cache() -> None:
    """For its type."""


def unbounded() -> Iterator[tuple[str, int]]:
    """Entries of all that our modules keep and nothing bounds: caches of functions, containers, compiled kernels."""
    bounded = {id(checks._passed), id(grad_accum._known), id(repeated_calls._calls)}
    for module in [m for name, m in sys.modules.items() if name.startswith(OURS)]:
        for name, value in vars(module).items():
            where = f"{module.__name__}.{name}"
            if isinstance(value, type(unbounded_cache)):
                if value.cache_info().maxsize is None:
                    yield where, value.cache_info().currsize
            elif isinstance(value, (dict, list, set)) and id(value) not in bounded and not name.startswith("__"):
                yield where, len(value)
            elif hasattr(value, "compile_cache") and hasattr(value.compile_cache, "cache"):
                yield f"{where}.compile_cache", len(value.compile_cache.cache)


def test_nothing_unbounded_grows_with_new_lengths() -> None:
    draw = random.Random(0)
    with stubs():
        for _ in range(60):
            step(draw)
        before = dict(unbounded())
        for _ in range(60):
            step(draw)
        after = dict(unbounded())
    assert sum(before.values()) > 100 and "nsa_layer.kernels.launch._compiled" in before
    # A kernel more for sizes that did not come before is one of a handful; one for each length would be sixty.
    grown = {name: (size, after[name]) for name, size in before.items() if after[name] > size + 4}
    assert not grown


def test_what_is_kept_of_each_shape_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    for owner, name in ((checks, "CAPACITY"), (grad_accum, "KNOWN"), (repeated_calls, "MOST")):
        monkeypatch.setattr(owner, name, 8)
    kept = (checks._passed, grad_accum._known, repeated_calls._calls)
    for each in kept:
        each.clear()
    most = [0] * len(kept)
    with stubs():
        for _ in range(30):
            step(draw)
            most = [max(so_far, len(each)) for so_far, each in zip(most, kept)]
    assert most == [8] * len(kept)
    for each in kept:
        each.clear()
