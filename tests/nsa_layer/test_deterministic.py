"""Around the kernels, the layer adds floating-point numbers in an order that a GPU keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from layer_calls import Noted, deterministic
from stub_kernels import launches, stubbed_layer

from nsa_layer import NSAConfig, nsa
from nsa_layer.operators import layer
from nsa_tools.testing.cases import Case, make_inputs, run

# Operators that add through atomics, or in an order that changes, on CUDA tensors of floating point.
UNORDERED = ("index_add", "scatter_add", "scatter_reduce", "index_put", "put", "cumsum", "histc", "bincount")


@pytest.mark.parametrize("lengths", [None, (300, 0, 1, 699)], ids=["batch", "packed"])
def test_nothing_is_added_through_atomics(lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With launches that do nothing."""
    config = NSAConfig(deterministic=True, block_counts=5, block_size=32, q_tile=128)
    sizes = dict(T=1000, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16)
    case = Case(**sizes, lengths=lengths, config=config, compress_weights=True)
    monkeypatch.setattr(layer, "needs_dispatcher", lambda *_: False)  # what an operator calls is not noted
    with stubbed_layer(), Noted("aten") as noted:
        run("cute", make_inputs(case))
    seen = {op.overloadpacket.__name__.removesuffix("_") for op, args, _ in noted.calls if any(map(is_real, args))}
    assert "bmm" in seen and not seen & {*UNORDERED}


def is_real(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def step(config: NSAConfig, forward: AbstractContextManager, backward: AbstractContextManager) -> list:
    """The launches of a step of the layer, with each half in a context of its own."""
    inputs = make_inputs(Case(T=300, Hq=4, Hkv=2, D=64, dtype=torch.bfloat16))
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

    def call() -> object:
        with forward:
            o = nsa(q, k, v, config=config, backend="cute")
        with backward:
            return torch.autograd.grad(o, (q, k, v), inputs.do)

    return launches(call, [q, k, v, inputs.do])[0]


def test_pytorch_may_ask_for_it() -> None:
    """At any call, and at backward alone; one that asks leaves nothing for one that does not."""
    config, free = NSAConfig(block_counts=3), nullcontext()
    with stubbed_layer():
        ordered, plain = step(config.replace(deterministic=True), free, free), step(config, free, free)
        assert ordered != plain
        for _ in range(3):  # more often than it takes to repeat a call without its host work
            assert step(config, deterministic(), deterministic()) == ordered
            assert step(config, free, deterministic()) == ordered
            assert step(config, free, free) == plain
