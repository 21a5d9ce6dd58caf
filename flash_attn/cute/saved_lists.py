"""Block lists between forward and backward, where autograd sees who writes to them.

Backward reads the lists that the call was given. Kept on the context they would be read as they are by then: a buffer
that is refilled for the next batch gives the gradient of other blocks. Of tensors that are saved for backward autograd
knows the version, and raises "modified by an inplace operation".
"""

from typing import Any

import torch


def save_lists(ctx: Any, *given: Any) -> list[torch.Tensor]:
    """The tensors of block lists, for ``ctx.save_for_backward``; what is no tensor, and None, stays on the context."""
    ctx.kept_lists, saved = [], []
    for lists in given:
        fields = list(lists or ())
        places = [at for at, field in enumerate(fields) if isinstance(field, torch.Tensor)]
        for at in places:
            saved.append(_versioned(fields[at]))
            fields[at] = None
        ctx.kept_lists.append((lists and type(lists), fields, places))
    return saved


def take_lists(ctx: Any, saved: list[Any]) -> tuple[list[Any], list[Any]]:
    """The lists again, and what was saved behind their tensors."""
    given, tensors = [], iter(saved)
    for kind, fields, places in ctx.kept_lists:
        fields = fields.copy()
        for at in places:
            fields[at] = next(tensors)
        given.append(kind and kind(*fields))
    return given, list(tensors)


def _versioned(tensor: torch.Tensor) -> torch.Tensor:
    """Tensors made under inference_mode have no version, and are not saved: a copy, which nobody else can change."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor
