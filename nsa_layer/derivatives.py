"""First derivatives by reverse mode; anything beyond raises an error that names it, instead of giving zeros.

PyTorch's `once_differentiable` is not enough: its error is attached to new leaves, so that a second derivative with
respect to the operator's own inputs finds no path to it, and is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
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
    """A function that refuses vmap and forward mode; its first argument computes it of the others."""

    @staticmethod
    def forward(compute: Callable[..., tuple], *args: Any) -> tuple:
        return compute(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(VMAP)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)


class FirstDerivatives(ReverseMode):
    """Backward as a function of everything that it depends on, so that every second derivative fails here."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            "nsa: second derivatives (of a gradient with create_graph, hvp, hessian, grad of grad) are supported by "
            "backend='reference' only"
        )


def first_derivatives(compute: Callable[..., tuple], *args: Any) -> tuple:
    """``compute(*args)``, of gradients and everything else that it depends on, for the backward of a function: without
    autocast, and refusing to be differentiated."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(map(functorch.is_legacy_batchedtensor, tensors)):  # is_grads_batched has a vmap of its own, no transform
        raise NotImplementedError(VMAP)
    with autocast.off(tensors[0].device):
        if torch.is_grad_enabled() or is_transformed():
            return FirstDerivatives.apply(compute, *args)
        return compute(*args)


def refuse_transforms(*tensors: Any) -> None:
    """Raise NotImplementedError where vmap or forward mode acts on one of the tensors."""
    if not is_transformed():
        return
    transforms = {layer.level(): layer.key() for layer in functorch.get_interpreter_stack() or ()}
    for x in tensors:
        while isinstance(x, torch.Tensor):
            transform = transforms.get(functorch.maybe_get_level(x))
            if transform == functorch.TransformType.Vmap:
                raise NotImplementedError(VMAP)
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(FORWARD_MODE)
            x = functorch.get_unwrapped(x) if functorch.is_functorch_wrapped_tensor(x) else None


def apply_here(function: type[torch.autograd.Function], compute: Callable[..., tuple], *args: Any) -> Any:
    """``function.apply(compute, *args)`` in an operator's kernel, which each transform of `torch.func` calls at its
    level."""
    apply = super(torch.autograd.Function, function).apply  # the class's own looks at forward's signature every time
    if not torch._C._are_functorch_transforms_active():
        return apply(compute, *unwrap_dead_wrappers(args))

    def compute_below(*args: Any) -> tuple:
        # A function's forward runs without derivatives of its level; lower levels need theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return compute(*args)

    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(compute_below, *args)


@lru_cache
def _of_one_level(function: type[torch.autograd.Function]) -> type:
    """The class with this one's methods whose apply acts at the current level alone; PyTorch 2.15 has no such apply
    for Function itself."""
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "setup_context", "backward", "jvp")}
    return type(function)(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


def is_transformed() -> bool:
    """True if a transform of `torch.func`, vmap or forward mode is active; compiled code knows none."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
