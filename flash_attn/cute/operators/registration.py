"""Registration of operators whose backward is an operator too; derivatives that neither has raise.

With `torch.library.register_autograd` forward mode would silently return a zero tangent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flash_attn.cute.runtime.autograd import refuse_second_derivative

NAMESPACE = "flash_attn_4"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
Tensors = tuple[torch.Tensor, ...]


def define(name: str, schema: str, outputs: int, compute: Callable[..., Tensors], fake: Callable[..., Tensors]) -> None:
    """Define an operator of tensors, without a derivative.

    schema: arguments; tensors and lists of tensors before the star.
    """
    LIBRARY.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * outputs)})", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)

    def refuse_vmap(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{NAMESPACE}: vmap over attention kernels; call them on a batch")

    torch.library.register_vmap(f"{NAMESPACE}::{name}", refuse_vmap, lib=LIBRARY)


def differentiate(name: str, function: type[torch.autograd.Function]) -> None:
    """Give an operator the gradient of an autograd function of (compute, keyword arguments, *tensors)."""
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def autograd(keys: torch._C.DispatchKeySet, *args: Any, **static: Any) -> Tensors:
        def compute(*args: Any, **static: Any) -> Tensors:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **static)

        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(f"{NAMESPACE}: forward mode over attention kernels; use reverse mode")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _apply(function, compute, static, *args)
        return compute(*args, **static)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)


class Differentiated(torch.autograd.Function):
    """Base of autograd functions of (compute, keyword arguments, *tensors), whose forward calls compute."""

    @staticmethod
    def forward(compute: Callable[..., Tensors], static: dict[str, Any], *tensors: Any) -> Tensors:
        return compute(*tensors, **static)


def differentiate_once(name: str) -> None:
    """Make the derivative of an operator raise: for the operator of a backward."""

    class Once(Differentiated):
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Tensors) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> None:
            refuse_second_derivative(f"{NAMESPACE}::{name}")

    differentiate(name, Once)


def _apply(function: type[torch.autograd.Function], compute: Callable[..., Tensors], *args: Any) -> Tensors:
    """``function.apply`` in an operator's kernel, which each transform of `torch.func` calls at its level."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(compute, *args)

    def compute_below(*args: Any, **static: Any) -> Tensors:
        # An autograd function's forward disables gradients, but transforms of lower levels may need them.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return compute(*args, **static)

    # A class of one level: from PyTorch 2.15 on, Function itself has no apply for the current level alone.
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "setup_context", "backward")}
    of_one_level = type(function)(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)
    with enable_single_level_autograd_function():
        return of_one_level.apply(compute_below, *args)
