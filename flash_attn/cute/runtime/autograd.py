"""Autograd around the kernels: an error for second derivatives, and versions of the block lists that backward reads.

The output of a kernel has no autograd graph: under ``create_graph=True`` gradients would silently be constants.
`torch.autograd.function.once_differentiable` does not help: its error is attached to new leaves, which differentiation
with respect to the inputs does not reach. Block lists are saved for backward as tensors, so that autograd raises if
they were modified in between.
"""

from functools import wraps
from typing import Any, Callable

import torch


def differentiable_once(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate the backward of an autograd function: a second derivative raises, also under create_graph=True."""

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
    """A context with its saved tensors unpacked, which activation checkpointing allows only once."""

    def __init__(self, ctx: Any, saved_tensors: tuple) -> None:
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Tied(torch.autograd.Function):
    """Identity on gradients, with the tensors that they depend on as further inputs; its backward raises."""

    @staticmethod
    def forward(ctx: Any, function: str, depended: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function = function
        return tensors[depended:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        refuse_second_derivative(ctx.function)


def refuse_second_derivative(name: str) -> None:
    raise RuntimeError(
        f"{name} was asked for a second derivative: the gradients that attention kernels compute cannot be "
        "differentiated again. Differentiate attention in plain PyTorch, or detach the gradient"
    )


def save_lists(ctx: Any, *given: Any) -> list[torch.Tensor]:
    """The tensors of block lists, for ``ctx.save_for_backward``; other fields are kept in ``ctx.kept_lists``."""
    ctx.kept_lists, saved = [], []
    for lists in given:
        fields = list(lists or ())
        positions = [at for at, field in enumerate(fields) if isinstance(field, torch.Tensor)]
        for at in positions:
            saved.append(_versioned(fields[at]))
            fields[at] = None
        ctx.kept_lists.append((lists and type(lists), fields, positions))
    return saved


def take_lists(ctx: Any, saved: list[Any]) -> tuple[list[Any], list[Any]]:
    """Inverse of `save_lists`: the lists, and the saved tensors after theirs."""
    given, tensors = [], iter(saved)
    for kind, fields, positions in ctx.kept_lists:
        fields = fields.copy()
        for at in positions:
            fields[at] = next(tensors)
        given.append(kind and kind(*fields))
    return given, list(tensors)


def _versioned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it was made under inference_mode: autograd cannot save tensors without a version."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor
