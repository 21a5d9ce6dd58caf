"""Products of heads' rows with a matrix per head, of compressed keys and values and of gates, and their gradients."""

from __future__ import annotations

import torch


def project(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """``x[..., h, :] @ weight[h]`` in x's dtype, x without a weight: x [..., H, D], weight [H, D, E] -> [..., H, E].

    One batched product of views: nothing is copied, and heads lie one after the other in memory.
    """
    if weight is None:
        return x
    return _rows_first(torch.bmm(_heads_first(x), weight.to(x.dtype)), x)


def project_backward(
    d_projected: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of `project`: x's in x's dtype, the weight's summed in x's dtype and rounded once to its own.

    Without a weight x is not read, and its gradient is ``d_projected``.
    """
    if weight is None:
        return d_projected, None
    d = _heads_first(d_projected.to(x.dtype))
    dx = torch.bmm(d, weight.to(x.dtype).transpose(1, 2))
    d_weight = torch.bmm(_heads_first(x).transpose(1, 2), d)
    return _rows_first(dx, x), d_weight.to(weight.dtype)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[..., H, D] -> [H, rows, D], a view."""
    return x.flatten(0, -3).transpose(0, 1)


def _rows_first(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[H, rows, E] -> [..., H, E] with x's leading dimensions, a view."""
    return y.transpose(0, 1).reshape(*x.shape[:-1], y.shape[-1])
