"""Gradients of kernels cannot be differentiated again, and say so where that is asked.

What a kernel writes has no history. Under ``create_graph=True`` a gradient from it would be taken for a constant: a
Hessian-vector product would be 0, and a penalty on the gradient would lose its own, without a word.
`torch.autograd.function.once_differentiable` does not help: the node that it makes to raise hangs on leaves of its own,
so nobody who differentiates with respect to the inputs ever comes to it.
"""

from functools import wraps
from typing import Any, Callable

import torch


def differentiable_once(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """For the backward of an autograd function: gradients are right under create_graph=True, and theirs raise.

    Raises:
        RuntimeError: from differentiating a gradient with respect to what it depends on.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> tuple:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved, function = ctx.saved_tensors, type(ctx).__name__.removesuffix("Backward")
        with torch.no_grad():
            results = backward(_Unpacked(ctx, saved), *grads)
        depended = [t for t in (*saved, *grads) if t is not None and t.requires_grad]
        tied = iter(_Tied.apply(function, len(depended), *depended, *(t for t in results if t is not None)))
        return tuple(None if result is None else next(tied) for result in results)

    return wrapper


class _Unpacked:
    """A context whose saved tensors have been unpacked: activation checkpointing lets nobody do that twice."""

    def __init__(self, ctx: Any, saved_tensors: tuple) -> None:
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Tied(torch.autograd.Function):
    """Gradients as they are, tied to the tensors that they depend on."""

    @staticmethod
    def forward(ctx: Any, function: str, depended: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function = function
        return tensors[depended:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{ctx.function} was asked for a second derivative: the gradients that attention kernels compute cannot be "
            "differentiated again. Differentiate attention in plain PyTorch, or detach the gradient"
        )
