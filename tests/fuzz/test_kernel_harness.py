"""Properties of kernels, tried on a CPU with plain PyTorch in their place: right ones pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import fuzz.properties.kernels as kernels
import fuzz.properties.relations as relations
from fuzz import attention
from fuzz.case import Attention
from fuzz.prop import properties
from fuzz.run import Budget, run_property

NAMES = [name for name in properties() if name.startswith(("attention.is", "relations"))]
Tensors = dict[str, torch.Tensor]


def plain(call: attention.Call, *, times: int = 1) -> list[Tensors]:
    """The definition in fp32, rounded; lists and options are made as for the kernels."""
    attention.options(call)
    for backward in (False, True):
        attention.lists_for(call, backward)
    got = attention.reference(call, torch.float32)
    return [{name: t.float() if name == "lse" else t.to(call.q.dtype) for name, t in got.items()}] * times


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    def place(run: Callable) -> None:
        for module in (kernels, relations):
            monkeypatch.setattr(module, "make", partial(attention.make, device="cpu"))
            monkeypatch.setattr(module, "run", run)

    return place


@pytest.mark.parametrize("name", NAMES)
def test_right_results_pass(name: str, stand_in: Callable) -> None:
    stand_in(plain)
    prop = properties()[name]
    for kind in range(0, len(prop.kinds), 5):
        outcome = run_property(prop, Budget(examples=2, shrink=1), kind=kind)
        assert outcome.failure is None, f"{outcome.failure.case}\n{outcome.failure.trace}"


def blind_to_the_last_key(call: attention.Call, *, times: int = 1) -> list[Tensors]:
    (got,) = plain(call)
    return [got | {"dk": got["dk"].index_fill(-3, torch.tensor([got["dk"].shape[-3] - 1]), 0)}] * times


def never_written(call: attention.Call, *, times: int = 1) -> list[Tensors]:
    (got,) = plain(call)
    return [got | {"o": got["o"].index_fill(-1, torch.tensor([3]), float("nan"))}] * times


@pytest.mark.parametrize("wrong", [blind_to_the_last_key, never_written])
def test_wrong_results_do_not(wrong: Callable, stand_in: Callable) -> None:
    stand_in(wrong)
    prop = properties()["attention.is its definition"]
    failure = run_property(prop, Budget(examples=20, shrink=1)).failure
    assert failure is not None and failure.case.startswith(Attention.__name__)


def test_layouts_hold_the_same_values() -> None:
    x = torch.randn(2, 5, 3, 4)
    for layout in ("heads first", "fused"):
        other = attention.laid_out(x, layout)
        assert other.equal(x) and not other.is_contiguous() and other.stride(-1) == 1
    assert attention.laid_out(x, "expanded batch").stride(0) == 0
