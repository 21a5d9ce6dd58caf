"""First derivatives by reverse mode; anything beyond raises an error that names it, instead of giving zeros.

PyTorch's `once_differentiable` is not enough: its error is attached to new leaves, so that a second derivative with
respect to the operator's own inputs finds no path to it, and is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from nsa_layer import autocast

VMAP = (
    "nsa: vmap (torch.func.vmap and jacrev, is_grads_batched, vectorize=True) is supported by backend='reference' "
    "only; call nsa on a batch, or once for each gradient"
)
FORWARD_MODE = (
    "nsa: forward mode (torch.func.jvp and jacfwd, torch.autograd.forward_ad) is supported by backend='reference' "
    "only; use reverse mode"
)


class ReverseMode(torch.autograd.Function):
    """A function that vmap and forward mode refuse."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(VMAP)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)


class _FirstDerivatives(ReverseMode):
    """Backward as a function of everything that it depends on, so that every second derivative fails here."""

    @staticmethod
    def forward(backend: str, compute: Callable[..., tuple], *args: Any) -> tuple:
        return compute(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.backend = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            f"nsa: second derivatives (of a gradient with create_graph, hvp, hessian, grad of grad) are not supported "
            f"by backend={ctx.backend!r}; backend='reference' has them"
        )


def first_derivatives(backend: str, compute: Callable[..., tuple], do: torch.Tensor, *args: Any) -> tuple:
    """``compute(do, *args)`` for the backward of a function: without autocast, and refusing to be differentiated.

    Args:
        args: every tensor that the result depends on is one of them.
    """
    if functorch.is_legacy_batchedtensor(do):  # is_grads_batched has a vmap of its own, which is no transform
        raise NotImplementedError(VMAP)
    with autocast.off(do.device):
        if torch.is_grad_enabled() or _is_transformed():
            return _FirstDerivatives.apply(backend, compute, do, *args)
        return compute(do, *args)


class _Product(ReverseMode):
    """a @ b; the derivatives, of any order, are computed without autocast."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (a, b), (of_a, of_b) = ctx.saved_tensors, ctx.needs_input_grad
        with autocast.off(d.device):
            return product(d, b.mT) if of_a else None, product(a.mT, d) if of_b else None


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[H, M, K] @ [H, K, N], which a backward under autocast does not round to half precision."""
    return _Product.apply(a, b) if torch.is_grad_enabled() else a @ b


def refuse_transforms(*tensors: Any) -> None:
    """Raise NotImplementedError where vmap or forward mode acts on one of the tensors."""
    if not _is_transformed():
        return
    transforms = {layer.level(): layer.key() for layer in functorch.get_interpreter_stack() or ()}
    for x in tensors:
        while isinstance(x, torch.Tensor):
            transform = transforms.get(functorch.maybe_get_level(x))
            if transform == functorch.TransformType.Vmap:
                raise NotImplementedError(VMAP)
            if transform == functorch.TransformType.Jvp or forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(FORWARD_MODE)
            x = functorch.get_unwrapped(x) if functorch.is_functorch_wrapped_tensor(x) else None


def _is_transformed() -> bool:
    """True if a transform of `torch.func`, vmap or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
