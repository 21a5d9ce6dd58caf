"""Gates and the weighted sum of the three branches."""

from __future__ import annotations

import torch

from nsa_layer.problem import accumulation_dtype
from nsa_layer.tokens import token_slices


def gate_values(q: torch.Tensor, gate_weight: torch.Tensor | None, gates: torch.Tensor | None) -> torch.Tensor:
    """The gates in the accumulation dtype: [..., Hq, D] -> [..., Hq, 3].

    ``sigmoid(q[t, h] . gate_weight[h, i])``, or `gates` as they are, or 1/3 each where neither is given.
    """
    acc = accumulation_dtype(q.dtype)
    if gates is not None:
        return gates.to(acc)
    if gate_weight is not None:
        return torch.einsum("...hd,hid->...hi", q.to(acc), gate_weight.to(acc)).sigmoid()
    return torch.full((*q.shape[:-1], 3), 1 / 3, dtype=acc, device=q.device)


def weighted_sum(g: torch.Tensor, o_cmp: torch.Tensor, o_slc: torch.Tensor, o_swa: torch.Tensor) -> torch.Tensor:
    """``sum_i g_i * o_i`` in g's dtype, rounded once: g [..., Hq, 3], o_i [..., Hq, Dv] -> [..., Hq, Dv]."""
    total = g[..., 0:1] * o_cmp
    total = total + g[..., 1:2] * o_slc
    total = total + g[..., 2:3] * o_swa
    return total.to(o_cmp.dtype)


@torch.no_grad()
def weighted_sum_sliced(g: torch.Tensor, o_cmp: torch.Tensor, o_slc: torch.Tensor, o_swa: torch.Tensor) -> torch.Tensor:
    """`weighted_sum` without a graph and without full-size fp32 intermediates."""
    o = torch.empty(o_cmp.shape, dtype=o_cmp.dtype, device=o_cmp.device)
    for out, *pieces in token_slices(o, g, o_cmp, o_slc, o_swa):
        out.copy_(weighted_sum(*pieces))
    return o


@torch.no_grad()
def weighted_sum_backward(
    do: torch.Tensor, g: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, need_gates: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Gradients of `weighted_sum`: each branch's ``do_i = g_i * do`` in do's dtype, and dg [..., Hq, 3] if needed."""
    do_branches = [torch.empty(do.shape, dtype=do.dtype, device=do.device) for _ in outputs]
    dg = torch.empty_like(g) if need_gates else None
    tensors = (do, g, *outputs, *do_branches, *(() if dg is None else (dg,)))
    for do_part, g_part, *rest in token_slices(*tensors):
        do_acc = do_part.to(g.dtype)
        for i in range(3):
            rest[3 + i].copy_(g_part[..., i : i + 1] * do_acc)
            if dg is not None:
                rest[6][..., i] = (do_acc * rest[i]).sum(-1)
    return do_branches, dg


@torch.no_grad()
def gate_values_backward(
    dg: torch.Tensor, g: torch.Tensor, q: torch.Tensor, gate_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``sigmoid(q . gate_weight)``: dq's share in q's dtype, and that of the weight."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    d_weight = torch.zeros_like(gate_weight, dtype=g.dtype)
    for dq_part, dg_part, g_part, q_part in token_slices(dq, dg, g, q):
        d_logit = dg_part * g_part * (1 - g_part)
        d_weight += torch.einsum("thi,thd->hid", d_logit, q_part.to(g.dtype))
        dq_part.copy_(torch.einsum("thi,hid->thd", d_logit, gate_weight.to(g.dtype)))
    return dq, d_weight.to(gate_weight.dtype)
