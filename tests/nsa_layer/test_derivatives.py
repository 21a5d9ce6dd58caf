"""First derivatives by every way of asking; second ones, vmap and forward mode are right or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from layer_calls import needs_hopper, operator_call
from stub_kernels import stubbed_layer
from torch.autograd import forward_ad, functional

from nsa_layer import NSAConfig, nsa
from nsa_layer.operators.registration import OPS
from nsa_tools.testing.cases import Case, make_inputs

SMALL = Case(T=40, D=8, dtype=torch.float64, config=NSAConfig(block_size=8, block_counts=3, q_tile=16, window_size=8))
# The kernels' own sizes; on a GPU nothing is stubbed.
KERNELS = Case(T=300, D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=4))
FIXED = Case(T=300, D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=4, deterministic=True))

Loss = Callable[[torch.Tensor], torch.Tensor]


def problem(backend: str, device: str = "cpu", case: Case | None = None) -> tuple[Loss, torch.Tensor]:
    """A loss of q that is not linear in anything, and a q; "operator" is eager's, called by itself, "padded" the
    kernels with rows that are padded."""
    if backend == "padded":
        backend, case = "cute", replace(KERNELS, D=40, Dv=24)
    case = case or (KERNELS if device == "cuda" or backend == "cute" else SMALL)
    if backend == "operator":
        call, static = operator_call(case, device, grads=())
        q, *others = call.tensors
        return lambda q: OPS.attend(q, *others, **static)[0].square().sum(), q
    inputs = make_inputs(case, device)
    given = inputs.tensors() | dict(config=case.config, backend=backend)
    return lambda q: nsa(**given | dict(q=q)).square().sum(), inputs.q


def grad_of_grad(loss: Loss, q: torch.Tensor) -> object:
    (dq,) = torch.autograd.grad(loss(q.requires_grad_()), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)


def backward_of_backward(loss: Loss, q: torch.Tensor) -> object:
    loss(q.requires_grad_()).backward(create_graph=True)
    dq, q.grad = q.grad, None
    return dq.square().sum().backward()


def first_layer(loss: Loss, q: torch.Tensor) -> object:
    """q is no leaf, and only what it is made of asks."""
    x = q.requires_grad_()
    (dx,) = torch.autograd.grad(loss(x * 2), x, create_graph=True)
    return torch.autograd.grad(dx.sum(), x)


ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON
def test_create_graph_changes_no_bit_of_a_gradient(device: str) -> None:
    """A gradient made so is differentiable in anything that the operator does not see."""
    if device == "cuda":
        needs_hopper()
    loss, q = problem("eager") if device == "cpu" else problem("cute", "cuda", FIXED)
    q.requires_grad_()
    (plain,) = torch.autograd.grad(loss(q), q)
    (dq,) = torch.autograd.grad(loss(q), q, create_graph=True)
    assert torch.equal(dq, plain) and torch.equal(torch.func.grad(loss)(q.detach()), plain) and plain.any()
    weight = torch.randn_like(q, requires_grad=True)
    (of_weight,) = torch.autograd.grad((weight * dq).sum(), weight)
    assert torch.equal(of_weight, dq)


@pytest.mark.parametrize("lengths", [None, (7, 0, 33)], ids=["batch", "packed"])
def test_func_grad_gives_what_autograd_gives(lengths: tuple[int, ...] | None) -> None:
    inputs = make_inputs(Case(T=40, D=8, config=SMALL.config, lengths=lengths, compress_weights=True))
    given = {name: x.requires_grad_() for name, x in inputs.tensors().items()}

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(given, tensors, strict=True))
        return nsa(**named, cu_seqlens=inputs.cu_seqlens, config=SMALL.config).square().sum()

    want = torch.autograd.grad(loss(*given.values()), list(given.values()))
    got = torch.func.grad(loss, argnums=tuple(range(len(given))))(*(x.detach() for x in given.values()))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["eager", "operator"])
def test_a_vjp_without_gradients_of_its_own(backend: str) -> None:
    """It is called outside the transform, whose tensors are no longer alive."""
    loss, q = problem(backend)
    with torch.no_grad():
        _, of_loss = torch.func.vjp(loss, q)
        (got,) = of_loss(torch.ones((), dtype=q.dtype))
    (want,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["eager", "operator"])
def test_the_value_of_an_inner_transform_has_the_outer_derivative(backend: str) -> None:
    loss, q = problem(backend)

    def value_within(q: torch.Tensor) -> torch.Tensor:
        return torch.func.grad_and_value(loss)(q)[1]

    assert torch.equal(torch.func.grad(value_within)(q), torch.func.grad(loss)(q))
    with pytest.raises(NotImplementedError, match="nsa: forward mode"):
        torch.func.jvp(value_within, (q,), (q,))


def is_grads_batched(loss: Loss, q: torch.Tensor) -> object:
    out = loss(q.requires_grad_())
    return torch.autograd.grad(out, q, torch.ones(3, dtype=out.dtype, device=out.device), is_grads_batched=True)


def dual_input(loss: Loss, q: torch.Tensor) -> object:
    with forward_ad.dual_level():
        return loss(forward_ad.make_dual(q, torch.ones_like(q)))


def dual_gradient(loss: Loss, q: torch.Tensor) -> object:
    out = loss(q.requires_grad_())
    with forward_ad.dual_level():
        return torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


SECOND = RuntimeError, "second derivatives .* are supported by backend='reference' only"
VMAP, FORWARD = ((NotImplementedError, f"{said}.* backend='reference'") for said in ("vmap", "forward mode"))
REFUSED = {
    "grad of grad": (SECOND, grad_of_grad),
    "backward of backward": (SECOND, backward_of_backward),
    "of an input's input": (SECOND, first_layer),
    "hvp": (SECOND, lambda loss, q: functional.hvp(loss, q, q)),
    "vhp": (SECOND, lambda loss, q: functional.vhp(loss, q, q)),
    "jvp by two backwards": (SECOND, lambda loss, q: functional.jvp(loss, q, q)),
    "hessian": (SECOND, functional.hessian),
    "jacobian of a graph": (
        SECOND,
        lambda loss, q: functional.jacobian(loss, q.requires_grad_(), True).sum().backward(),
    ),
    "func.grad": (SECOND, lambda loss, q: torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)),
    "vmap": (VMAP, lambda loss, q: torch.func.vmap(loss)(q[None])),
    "vmap of grad": (VMAP, lambda loss, q: torch.func.vmap(torch.func.grad(loss))(q[None])),
    "is_grads_batched": (VMAP, is_grads_batched),
    "jacobian": (VMAP, lambda loss, q: functional.jacobian(lambda q: loss(q)[None], q, vectorize=True)),
    "jacrev": (VMAP, lambda loss, q: torch.func.jacrev(loss)(q)),  # whose vmap begins in backward
    "jvp": (FORWARD, lambda loss, q: torch.func.jvp(loss, (q,), (q,))),
    "jvp of grad": (FORWARD, lambda loss, q: torch.func.jvp(torch.func.grad(loss), (q,), (q,))),
    "jacfwd": (FORWARD, lambda loss, q: torch.func.jacfwd(lambda x: loss(x * q))(q.new_ones(()))),
    "func.hessian": (FORWARD, lambda loss, q: torch.func.hessian(lambda x: loss(x * q))(q.new_ones(()))),
    "dual input": (FORWARD, dual_input),
    "dual gradient": (FORWARD, dual_gradient),
}


@ON
@pytest.mark.parametrize("backend", ["eager", "cute", "padded", "operator"])
@pytest.mark.parametrize("way", REFUSED)
def test_second_derivatives_vmap_and_forward_mode_are_refused(way: str, backend: str, device: str) -> None:
    (error, said), ask = REFUSED[way]
    stubbed = stubbed_layer() if backend in ("cute", "padded") and device == "cpu" else nullcontext()
    with stubbed, pytest.raises(error, match=f"nsa: {said}"):
        ask(*problem(backend, device))


def test_a_packing_of_vmap_is_refused() -> None:
    q, k, v = (torch.randn(40, h, 8) for h in (4, 2, 2))
    starts = torch.tensor([[0, 10, 40], [0, 20, 40]], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="nsa: vmap"):
        torch.func.vmap(lambda starts: nsa(q, k, v, cu_seqlens=starts, config=SMALL.config))(starts)


def test_what_a_transform_does_not_touch_is_left_alone() -> None:
    loss, q = problem("eager")
    want, x = loss(q), torch.arange(3.0, dtype=torch.float64)
    got, _ = torch.func.jvp(lambda x: x.sum() + loss(q), (x,), (x,))
    assert torch.equal(got, 3 + want)
    assert torch.equal(torch.func.vmap(lambda x: x + loss(q))(x), x + want)
    with forward_ad.dual_level():
        assert torch.equal(loss(q), want)


def test_transforms_of_the_reference() -> None:
    loss, q = problem("reference")
    assert torch.autograd.gradgradcheck(loss, q.clone().requires_grad_(), fast_mode=True)
    dq = torch.func.grad(loss)(q)
    _, tangent = torch.func.jvp(loss, (q,), (q,))
    torch.testing.assert_close(tangent, (dq * q).sum())
    torch.testing.assert_close(torch.func.vmap(loss)(torch.stack([q, -q]))[0], loss(q))
