"""Gates and the weighted sum of the three branches."""

from __future__ import annotations

import torch

from nsa_layer.call_spec import accumulation_dtype, equal_gates
from nsa_layer.compress import project


def gate_values(q: torch.Tensor, gate_weight: torch.Tensor | None, gates: torch.Tensor | None) -> torch.Tensor:
    """The gates in the accumulation dtype: [..., Hq, D] -> [..., Hq, 3].

    ``sigmoid(q[t, h] . gate_weight[h, i])``, or `gates` as they are, or 1/3 each where neither is given.
    """
    acc = accumulation_dtype(q.dtype)
    if gates is not None:
        return gates.to(acc)
    if gate_weight is not None:
        return project(q.to(acc), gate_weight.mT).sigmoid()
    return equal_gates(q)


def weighted_sum(g: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
    """``sum_i g_i * o_i`` of two or three outputs in g's dtype, rounded once: g [..., Hq, 3], o_i [..., Hq, Dv]."""
    total = g[..., 0:1] * outputs[0]
    for i, o in enumerate(outputs[1:], 1):
        total = total + g[..., i : i + 1] * o
    return total.to(outputs[0].dtype)
