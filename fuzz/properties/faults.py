"""Memory: nothing is read before it is written, nothing written beside it, and running out of it does no harm."""

from __future__ import annotations

from dataclasses import replace

import torch

from fuzz import strategies
from fuzz.canary import Guarded, untouched
from fuzz.prop import GPU, Skip, holds
from fuzz.properties.layer import kernel_cases
from nsa_layer import nsa
from nsa_layer.testing import DIFFERENTIABLE, Case, Inputs, make_inputs, run

Leaves = dict[str, torch.Tensor]


@holds("faults.nothing unwritten is read", strategies.layer_cases)
def nothing_unwritten_is_read(case: Case) -> None:
    """With NaN in all new memory, and canaries around it, the layer gives the same bits."""
    inputs = make_inputs(case)
    once = run("eager", inputs).tensors()
    unchanged = untouched({name: getattr(inputs, name) for name in (*DIFFERENTIABLE, "do", "cu_seqlens")})
    with Guarded("cpu") as guard:
        again = run("eager", inputs).tensors()
    guard.check()
    unchanged()
    for name, x in once.items():
        assert x.equal(again[name]), f"{name} depends on what was in memory before"


def leaves_of(inputs: Inputs) -> Leaves:
    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}
    return {name: x.detach().clone().requires_grad_() for name, x in given.items()}


def backward(inputs: Inputs, leaves: Leaves, backend: str) -> Leaves:
    """The leaves, after forward and backward through autograd."""
    static = dict(config=inputs.case.config, causal=inputs.case.causal, backend=backend, cu_seqlens=inputs.cu_seqlens)
    nsa(**leaves, **static).backward(inputs.do)
    return leaves


def survives_running_out(case: Case, backend: str, device: str, same_bits: bool) -> None:
    """Some allocation of forward or backward fails: no gradient is half written, and the next call is right."""
    inputs = make_inputs(case, device)
    with Guarded(device) as counted:
        right = {name: x.grad for name, x in backward(inputs, leaves_of(inputs), backend).items()}
    if not counted.count:
        raise Skip
    fail_at = 1 + case.seed % counted.count
    unchanged = untouched({name: getattr(inputs, name) for name in (*DIFFERENTIABLE, "do")})
    leaves = leaves_of(inputs)
    try:
        with Guarded(device, fail_at=fail_at):
            backward(inputs, leaves, backend)
    except torch.OutOfMemoryError:
        pass
    else:
        raise Skip  # an allocation that only the first call makes
    unchanged()
    for name, x in leaves.items():
        if x.grad is not None:
            assert _alike(x.grad, right[name], same_bits), f"allocation {fail_at}: a gradient of {name} is half written"
    for name, x in backward(inputs, leaves_of(inputs), backend).items():
        assert _alike(x.grad, right[name], same_bits), (
            f"after allocation {fail_at} failed, the gradient of {name} differs"
        )


def _alike(one: torch.Tensor, other: torch.Tensor, same_bits: bool) -> bool:
    """Kernels add in any order, unless they are deterministic."""
    if same_bits:
        return one.equal(other)
    size = max(float(other.double().abs().max()), 1e-3)
    return bool(one.isfinite().all()) and float((one.double() - other.double()).abs().max()) <= 0.05 * size


@holds("faults.out of memory", strategies.layer_cases)
def out_of_memory(case: Case) -> None:
    survives_running_out(case, "eager", "cpu", same_bits=True)


@holds("faults.out of memory, kernels", kernel_cases, needs=GPU)
def out_of_memory_in_kernels(case: Case) -> None:
    survives_running_out(replace(case, seed=case.seed * 7919), "cute", "cuda", same_bits=False)
