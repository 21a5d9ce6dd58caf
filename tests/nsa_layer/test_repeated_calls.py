"""Calls of attention that were made before: other tensors of the same sizes are launched alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stub_kernels import launches, stubs

from flash_attn.cute.runtime import repeated_calls
from nsa_layer import NSAConfig
from nsa_layer.cute.token_unions import query_lists
from nsa_tools.testing.cases import Case


def tensors(**sizes: int) -> tuple[torch.Tensor, ...]:
    of = dict(T=256, S=512, Hq=4, Hkv=2, D=128) | sizes
    shapes = (of["T"], of["Hq"]), (of["S"], of["Hkv"]), (of["S"], of["Hkv"])
    return tuple(torch.zeros(1, *shape, of["D"], dtype=torch.bfloat16) for shape in shapes)


def lists() -> Any:
    case = Case(T=256, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16, config=NSAConfig(block_counts=4))
    of_tokens, offset = torch.zeros(1, 256, 2, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return query_lists(of_tokens, 2, 256, 512, spec=case.spec, q_offset=offset)


def offset() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


CALLS = {
    "causal": lambda: (tensors(), dict(causal=True, softmax_scale=0.1)),
    "window": lambda: (tensors(), dict(window_size_left=63, window_size_right=0, q_offset=offset())),
    "compressed": lambda: (tensors(S=8), dict(causal=True, compress_factor=64, compress_offset=63, q_offset=offset())),
    "lists": lambda: (tensors(), dict(causal=True, block_sparse_tensors=lists(), pack_gqa=True, q_offset=offset())),
}


def told(call: Any) -> list:
    """The launches of a call of these tensors, with addresses told by the input."""
    (q, k, v), options = call
    named = [x for value in options.values() for x in (value if isinstance(value, tuple) else (value,))]
    inputs = [q, k, v, *(x for x in named if isinstance(x, torch.Tensor))]
    return launches(lambda: repeated_calls.attend(q, k, v, **options), inputs)[0]


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> list:
    """Calls of the interface."""
    from flash_attn.cute import interface

    monkeypatch.setattr(repeated_calls, "_calls", {})  # else they may become too many in the middle of a test
    made, function = [], interface._flash_attn_fwd

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options)
        return function(*args, **options)

    with stubs():
        counted.compile_cache = function.compile_cache
        monkeypatch.setattr(interface, "_flash_attn_fwd", counted)
        yield made


@pytest.mark.parametrize("name", CALLS)
def test_the_same_is_launched_for_other_tensors(interface: list, name: str) -> None:
    first, again = told(CALLS[name]()), told(CALLS[name]())
    assert len(first) == len(interface) == 1 and again == first


def test_calls_apart_are_not_taken_for_one_another(interface: list) -> None:
    (q, k, v), options = CALLS["window"]()
    calls = [((q, k, v), options), (tensors(T=128), options), ((q, k, v), options | dict(window_size_left=31))]
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    calls += [((q.half(), k.half(), v.half()), options), ((q, heads_first, v), options)]
    for call in calls * 2:
        told(call)
    assert len(interface) == len(calls)


@pytest.mark.parametrize("name", ["one tensor", "copied"])
def test_calls_whose_tensors_are_not_known_by_address(interface: list, name: str) -> None:
    (q, k, v), options = CALLS["causal"]()
    v = k if name == "one tensor" else torch.zeros(1, 512, 2, 129, dtype=torch.bfloat16)[..., :128]
    for _ in range(2):
        told(((q, k, v), options))
    assert len(interface) == 2


def test_gradients_are_left_out(interface: list) -> None:
    (q, k, v), options = CALLS["causal"]()
    told(((q, k, v), options))
    with torch.no_grad():
        told(((q.requires_grad_(), k, v), options))
    assert len(interface) == 1


def test_outputs_that_are_given_are_written(interface: list) -> None:
    """By the first call and by those after."""
    (q, k, v), options = CALLS["causal"]()
    o, lse = torch.zeros_like(q), torch.zeros(1, 4, 256)
    for _ in range(2):
        noted, _ = launches(lambda: repeated_calls.attend(q, k, v, (o, lse), **options), [q, k, v, o, lse])
        places = [arg[0] for _, args in noted for arg in args if isinstance(arg[0], tuple)]
        assert places == [("input", i) for i in range(5)]
    assert len(interface) == 1
