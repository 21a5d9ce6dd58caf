"""First derivatives by every way of asking; second ones, vmap and forward mode are right or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from stub_kernels import stubbed_layer
from torch.autograd import forward_ad, functional

from nsa_layer import NSAConfig, nsa

SMALL = NSAConfig(block_size=8, block_counts=3, q_tile=16, window_size=8)
T, HQ, HKV, D = 40, 4, 2, 8
# On a GPU the kernels' own sizes, and nothing is stubbed.
ON_GPU = dict(T=300, HQ=4, HKV=2, D=64)

Loss = Callable[[torch.Tensor], torch.Tensor]


def problem(backend: str, device: str = "cpu", **options: object) -> tuple[Loss, torch.Tensor]:
    """A loss of q that is not linear in anything, and a q; options are the config's."""
    real = device == "cuda" or backend == "cute"
    t, hq, hkv, d = ON_GPU.values() if real else (T, HQ, HKV, D)
    static = dict(config=NSAConfig(block_counts=4, **options) if real else SMALL, backend=backend)
    dtype = torch.bfloat16 if real else torch.float64
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, t, h, d, generator=draw).to(device, dtype) for h in (hq, hkv, hkv))
    gate_weight = torch.randn(hq, 3, d, generator=draw).to(device, dtype)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return nsa(q, k, v, gate_weight=gate_weight, **static).square().sum()

    return loss, q


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


SECOND = {
    "grad of grad": grad_of_grad,
    "backward of backward": backward_of_backward,
    "of an input's input": first_layer,
    "hvp": lambda loss, q: functional.hvp(loss, q, q),
    "vhp": lambda loss, q: functional.vhp(loss, q, q),
    "jvp by two backwards": lambda loss, q: functional.jvp(loss, q, q),
    "hessian": functional.hessian,
    "jacobian": lambda loss, q: functional.jacobian(loss, q.requires_grad_(), create_graph=True).sum().backward(),
    "func.grad": lambda loss, q: torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q),
}
REFUSED = "nsa: second derivatives .* are supported by backend='reference' only"


ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
BACKENDS = pytest.mark.parametrize("backend", ["eager", "cute"])


def stubbed(backend: str, device: str) -> AbstractContextManager:
    return stubbed_layer() if (backend, device) == ("cute", "cpu") else nullcontext()


@ON
@BACKENDS
@pytest.mark.parametrize("way", SECOND)
def test_second_derivatives_are_refused(way: str, backend: str, device: str) -> None:
    with stubbed(backend, device), pytest.raises(RuntimeError, match=REFUSED):
        SECOND[way](*problem(backend, device))


@ON
def test_create_graph_changes_no_bit_of_a_gradient(device: str) -> None:
    """A gradient made so is differentiable in anything that the operator does not see."""
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    loss, q = problem("eager" if device == "cpu" else "cute", device, deterministic=True)
    q.requires_grad_()
    (plain,) = torch.autograd.grad(loss(q), q)
    (dq,) = torch.autograd.grad(loss(q), q, create_graph=True)
    assert torch.equal(dq, plain)
    weight = torch.randn_like(q, requires_grad=True)
    (of_weight,) = torch.autograd.grad((weight * dq).sum(), weight)
    assert torch.equal(of_weight, dq)


@pytest.mark.parametrize("lengths", [None, (7, 0, 33)], ids=["batch", "packed"])
def test_func_grad_gives_what_autograd_gives(lengths: tuple[int, ...] | None) -> None:
    draw = torch.Generator().manual_seed(0)
    lead = (1, T) if lengths is None else (T,)
    q, k, v = (torch.randn(*lead, h, D, generator=draw) for h in (HQ, HKV, HKV))
    weights = torch.randn(HQ, 3, D, generator=draw), torch.randn(HKV, D, D, generator=draw)
    starts = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    def loss(q, k, v, gate_weight, w_k):
        given = dict(gate_weight=gate_weight, compress_k_weight=w_k, cu_seqlens=starts, config=SMALL)
        return nsa(q, k, v, **given).square().sum()

    inputs = [x.requires_grad_() for x in (q, k, v, *weights)]
    want = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.func.grad(loss, argnums=tuple(range(5)))(*(x.detach() for x in inputs))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
def test_func_grad_on_the_kernels() -> None:
    loss, q = problem("cute", "cuda", deterministic=True)
    got = torch.func.grad(loss)(q)
    (want,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    assert torch.equal(got, want) and want.any()


def test_a_vjp_without_gradients_of_its_own() -> None:
    """It is called outside the transform, whose tensors are no longer alive."""
    loss, q = problem("eager")
    with torch.no_grad():
        _, of_loss = torch.func.vjp(loss, q)
        (got,) = of_loss(torch.ones((), dtype=q.dtype))
    (want,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    assert torch.equal(got, want)


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


TRANSFORMS = {
    "vmap": ("vmap", lambda loss, q: torch.func.vmap(loss)(q[None])),
    "vmap of grad": ("vmap", lambda loss, q: torch.func.vmap(torch.func.grad(loss))(q[None])),
    "is_grads_batched": ("vmap", is_grads_batched),
    "jacobian": ("vmap", lambda loss, q: functional.jacobian(lambda q: loss(q)[None], q, vectorize=True)),
    "jvp": ("forward mode", lambda loss, q: torch.func.jvp(loss, (q,), (q,))),
    "jvp of grad": ("forward mode", lambda loss, q: torch.func.jvp(torch.func.grad(loss), (q,), (q,))),
    "jacfwd": ("forward mode", lambda loss, q: torch.func.jacfwd(lambda x: loss(x * q))(q.new_ones(()))),
    "hessian": ("forward mode", lambda loss, q: torch.func.hessian(lambda x: loss(x * q))(q.new_ones(()))),
    "dual input": ("forward mode", dual_input),
    "dual gradient": ("forward mode", dual_gradient),
}


@ON
@BACKENDS
@pytest.mark.parametrize("way", TRANSFORMS)
def test_vmap_and_forward_mode_are_refused(way: str, backend: str, device: str) -> None:
    said, ask = TRANSFORMS[way]
    with stubbed(backend, device), pytest.raises(NotImplementedError, match=f"nsa: ({said}).* backend='reference'"):
        ask(*problem(backend, device))


def test_jacrev_is_refused() -> None:
    """Its vmap begins in backward."""
    loss, q = problem("eager")
    with pytest.raises(NotImplementedError, match="nsa: vmap"):
        torch.func.jacrev(loss)(q)


def test_a_packing_of_vmap_is_refused() -> None:
    q, k, v = (torch.randn(T, h, D) for h in (HQ, HKV, HKV))
    starts = torch.tensor([[0, 10, T], [0, 20, T]], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="nsa: vmap"):
        torch.func.vmap(lambda starts: nsa(q, k, v, cu_seqlens=starts, config=SMALL))(starts)


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
