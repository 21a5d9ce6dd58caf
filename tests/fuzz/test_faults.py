"""Steps that leave something behind when memory runs out are noticed, on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import fuzz.properties.faults as faults
from fuzz import attention
from fuzz.canary import Guarded
from fuzz.kinds import listed
from fuzz.properties.faults import Leaves, Step, nth_allocation, survives_running_out

X = torch.arange(6.0) + 1


def fresh() -> Leaves:
    return {name: X.clone().requires_grad_() for name in "ab"}


def whole(leaves: Leaves) -> None:
    (leaves["a"] * leaves["b"].exp()).sum().backward()


def half_written(leaves: Leaves) -> None:
    """The first half of a gradient is there before the second half gets its memory."""
    for x in leaves.values():
        x.grad = torch.zeros(6) if x.grad is None else x.grad
        for part in range(2):
            x.grad[3 * part : 3 * part + 3] += X[:3] * 2


def scaled_in_place(leaves: Leaves) -> None:
    """An input is scaled for a while."""
    with torch.no_grad():
        leaves["a"].mul_(2)
    whole(leaves)
    with torch.no_grad():
        leaves["a"].mul_(0.5)


class KeepsAFlag:
    """A workspace that is cleared at the end of a call, and not if the call ends early."""

    def __init__(self) -> None:
        self.flag = torch.zeros(1)

    def __call__(self, leaves: Leaves) -> None:
        self.flag += 1
        (leaves["a"] * leaves["b"] * self.flag.clone()).sum().backward()
        self.flag.zero_()


def numbers(run: object) -> range:
    leaves = fresh()
    with Guarded("cpu") as counted:
        run(leaves)
    return range(counted.count)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (whole, None),
        (half_written, "half written"),
        (scaled_in_place, "a was changed"),
        (KeepsAFlag(), "the next gradient of a differs"),
    ],
)
def test_what_is_left_behind_is_noticed(run: object, said: str | None) -> None:
    """By some allocation that fails; whole gradients are right whichever fails."""
    complaints = []
    for number in numbers(run):
        if isinstance(run, KeepsAFlag):
            run.flag.zero_()
        step = Step(fresh, run, same_bits=True)
        try:
            assert survives_running_out(step, nth_allocation(step, "cpu", number)), "said enough"
        except AssertionError as error:
            complaints.append(str(error))
    assert (said is None) == (not complaints)
    assert not survives_running_out(Step(fresh, whole, same_bits=True), nullcontext), "there is enough"
    assert all(said in text for text in complaints), complaints


def test_every_allocation_can_fail() -> None:
    """Copies and sums as well as empty tensors; not views, nor what is written in place."""
    with Guarded("cpu") as counted:
        x = torch.ones(4)
        y = (x + 1).clone()
        y.view(2, 2).add_(1)
    assert counted.count == 3
    with pytest.raises(torch.OutOfMemoryError, match="allocation 2"), Guarded("cpu", fail_at=2):
        torch.ones(4) + 1


def dense(case: object, x: attention.Inputs, inputs: list[torch.Tensor], **_: object) -> tuple[torch.Tensor, None]:
    """In place of the public functions: plain attention over all keys."""
    q, k, v = (x.float() for x in inputs)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    p = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).to(x.q.dtype), None


def test_steps_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "make_inputs", partial(attention.make_inputs, device="cpu"))
    monkeypatch.setattr(faults, "attend", dense)
    step = faults.attention_step(listed(deterministic=True, T_q=130, T_k=60))
    assert step.same_bits and set(step.grads()) == set("qkv")
    for number in range(0, 40, 5):
        survives_running_out(step, nth_allocation(step, "cpu", number))
