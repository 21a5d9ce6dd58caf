"""The whole layer's host work, forward and backward, is such that it can be repeated: nothing refuses."""

from __future__ import annotations

import pytest
import torch
from stub_kernels import launches, stubs

from nsa_layer import NSAConfig
from nsa_layer.cute import autograd
from nsa_tools.testing.cases import DIFFERENTIABLE, Case, make_inputs

SMALL = dict(T=300, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16)
CASES = [
    Case(**SMALL),
    Case(**SMALL, config=NSAConfig(deterministic=True), compress_weights=True),
    Case(**SMALL, gate="given"),
    Case(**SMALL, gate="none", config=NSAConfig(block_stride=32)),
    Case(**SMALL, causal=False, config=NSAConfig(block_size=128)),
    Case(**SMALL | dict(T=40)),
    Case(**SMALL, lengths=(300, 0, 70)),
    Case(**SMALL, lengths=(300, 0, 70), config=NSAConfig(deterministic=True), compress_weights=True),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_step_is_repeated(case: Case) -> None:
    forward, backward = autograd._forward, autograd._backward
    forward.clear(), backward.clear()
    seen, kept = [], []
    with stubs():
        for seed in range(4):
            inputs = make_inputs(Case(**vars(case) | dict(seed=seed)))
            tensors = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
            given = [x.requires_grad_() for x in tensors.values() if x is not None]
            own = [forward.function, backward.function]
            with pytest.MonkeyPatch.context() as patch:
                called = []
                for prepared, function in zip((forward, backward), own):
                    patch.setattr(prepared, "function", lambda *a, f=function, **k: called.append(1) or f(*a, **k))

                def step() -> object:
                    o, _ = autograd.attend(**tensors, problem=case.problem, cu_seqlens=inputs.cu_seqlens)
                    return torch.autograd.grad(o, given, inputs.do)

                everything = [*given, inputs.do, *(() if inputs.cu_seqlens is None else (inputs.cu_seqlens,))]
                seen.append(launches(step, everything)[0])
                kept.append(everything)
            assert len(called) == (2 if seed < 2 else 0), (forward.refusals, backward.refusals)
    refusals = forward.refusals + backward.refusals
    forward.clear(), backward.clear()
    assert refusals == []
    assert len(seen[0]) > 10 and seen[1:] == seen[:1] * 3
