"""Memory: nothing is read before it is written, nothing written beside it, and running out of it does no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from fuzz import strategies
from fuzz.attention import attend, both_lists, make_inputs
from fuzz.canary import Guarded, untouched
from fuzz.case import Attention
from fuzz.kinds import COMPRESSED, KINDS, call, listed, packed
from fuzz.prop import GPU, Skip, holds
from fuzz.properties.layer import kernel_cases, on_both
from nsa_layer import nsa
from nsa_tools.testing import cases
from nsa_tools.testing.cases import Case, Inputs, Result, run

Leaves = dict[str, torch.Tensor]

SEGMENT = 2 << 20  # what PyTorch's allocator asks the driver for, at least


def unwritten(inputs: Inputs, backend: str, device: str) -> tuple[Result, Result]:
    """A call as it is, and one with NaN in all new memory and canaries around it; inputs stay as they are."""
    once = run(backend, inputs)
    unchanged = untouched(inputs.tensors("do", "cu_seqlens"))
    with Guarded(device):
        again = run(backend, inputs)
    unchanged()
    return once, again


@on_both("faults.nothing unwritten is read")
def nothing_unwritten_is_read(case: Case, backend: str, device: str) -> None:
    """The same bits where it is deterministic, and nowhere NaN."""
    once, again = (result.tensors() for result in unwritten(cases.make_inputs(case, device), backend, device))
    exact = backend == "eager" or case.config.deterministic
    for name, x in once.items():
        assert _alike(again[name], x, exact or name == "o"), f"{name} depends on what was in memory before"


@dataclass(frozen=True)
class Step:
    """Forward and backward of something.

    Attributes:
        fresh: leaves without gradients, the same values each time.
        run: gives leaves their gradients, through autograd.
        same_bits: whether those have the same bits each time.
    """

    fresh: Callable[[], Leaves]
    run: Callable[[Leaves], None]
    same_bits: bool

    def grads(self) -> Leaves:
        leaves = self.fresh()
        self.run(leaves)
        return {name: x.grad for name, x in leaves.items()}


def survives_running_out(step: Step, runs_out: Callable[[], AbstractContextManager]) -> bool:
    """The step in want of memory: no gradient is half written, and the next call is right.

    A gradient that was there before, as in steps whose gradients add up, stays or is added to as a whole. Returns
    whether memory ran out.
    """
    ran_out = False
    right, before = step.grads(), {name: x.clone() for name, x in step.grads().items()}
    for earlier in (False, True):
        leaves = step.fresh()
        unchanged = untouched(leaves)
        for name, x in leaves.items():
            x.grad = before[name].clone() if earlier else None
        try:
            with runs_out():
                step.run(leaves)
        except torch.OutOfMemoryError as error:
            said = str(error)
        else:
            continue
        ran_out = True
        unchanged()
        for name, x in leaves.items():
            assert _whole(x.grad, before[name] if earlier else None, right[name], step.same_bits), (
                f"a gradient of {name} is half written: {said}"
            )
        for name, grad in step.grads().items():
            assert _alike(grad, right[name], step.same_bits), f"the next gradient of {name} differs, after {said}"
    return ran_out


def asserted(ran_out: bool) -> None:
    """A case for which memory was enough says nothing."""
    if not ran_out:
        raise Skip


def _whole(grad: torch.Tensor | None, before: torch.Tensor | None, right: torch.Tensor | None, same_bits: bool) -> bool:
    """True for a gradient as it was, or for that and the right one together."""
    if grad is None or before is None:
        return before is None and (grad is None or _alike(grad, right, same_bits))
    return grad.equal(before) or _alike(grad, before + right, same_bits)


def _alike(one: torch.Tensor, other: torch.Tensor, same_bits: bool) -> bool:
    """Kernels add in any order, unless they are deterministic; a log-sum-exp may be -inf."""
    if same_bits:
        return one.equal(other)
    finite = other.isfinite()
    if not finite.equal(one.isfinite()) or not one[~finite].equal(other[~finite]):
        return False
    one, other = one[finite].double(), other[finite].double()
    if not one.numel():
        return True
    return float((one - other).abs().max()) <= 0.05 * max(float(other.abs().max()), 1e-3)


def nth_allocation(step: Step, device: str, number: int) -> Callable[[], AbstractContextManager]:
    """A context in which one allocation of the step fails, of all that it makes."""
    step.grads()
    leaves = step.fresh()
    with Guarded(device) as counted:
        step.run(leaves)
    if not counted.count:
        raise Skip
    return partial(Guarded, device, fail_at=1 + number % counted.count)


@contextmanager
def capped(spare: int) -> Iterator[None]:
    """Within, PyTorch gets no more than so many bytes of GPU memory beyond what is in use."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + spare) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def layer_step(case: Case, backend: str, device: str) -> Step:
    inputs = cases.make_inputs(case, device)
    given = inputs.tensors()
    static = dict(config=case.config, causal=case.causal, backend=backend, cu_seqlens=inputs.cu_seqlens)
    return Step(
        lambda: {name: x.detach().clone().requires_grad_() for name, x in given.items()},
        lambda leaves: nsa(**leaves, **static).backward(inputs.do),
        backend == "eager" or case.config.deterministic,
    )


def attention_step(case: Attention) -> Step:
    x = make_inputs(case)
    lists = both_lists(case, x.q.device)
    return Step(
        lambda: {name: getattr(x, name).detach().clone().requires_grad_() for name in "qkv"},
        lambda leaves: attend(case, x, list(leaves.values()), **lists)[0].backward(x.do),
        case.deterministic,
    )


@on_both("faults.out of memory")
def out_of_memory(case: Case, backend: str, device: str) -> None:
    step = layer_step(case, backend, device)
    asserted(survives_running_out(step, nth_allocation(step, device, case.seed * 7919)))


@holds("faults.out of GPU memory", kernel_cases, needs=GPU)
def out_of_gpu_memory(case: Case) -> None:
    """PyTorch's own allocator runs out, wherever it does: in operators, in autograd, in the kernels' outputs."""
    case = replace(case, T=case.T + 2000, lengths=None)
    step = layer_step(case, "cute", "cuda")
    step.grads()
    asserted(survives_running_out(step, partial(capped, case.seed % 40 * SEGMENT)))


MEMORY_KINDS = (
    call(D=128, causal=True, dtype="float16"),
    call(Hkv=4, deterministic=True, **COMPRESSED),
    listed(list_heads=2, plan=1, deterministic=True, causal=True, block_k=64),
    packed("compact", D=128, list_heads=2, passes=1),
)
assert set(MEMORY_KINDS) <= set(KINDS), "kernels of their own would have to be compiled"


@holds("faults.out of memory, attention", strategies.attention, kinds=MEMORY_KINDS, needs=GPU)
def out_of_memory_in_attention(case: Attention) -> None:
    """The public functions: an allocation fails, or PyTorch's allocator runs out."""
    step = attention_step(case)
    step.grads()
    planted = nth_allocation(step, "cuda", case.seed)
    ways = (planted, partial(capped, case.seed % 20 * SEGMENT))
    asserted(any([survives_running_out(step, runs_out) for runs_out in ways]))
