"""Backward in plain PyTorch, with the lines of `nsa_layer/cute/backward.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from nsa_layer.call import DIFFERENTIABLE, LSES, Call, Saved, accumulation_dtype, equal_gates
from nsa_layer.eager.chunk_attention import attend_chunks_backward, to_compute_dtype, visible_compressed, visible_window
from nsa_layer.eager.forward import batches, compress_batch
from nsa_layer.eager.index import loss_backward
from nsa_layer.eager.list_attention import attend_lists_backward
from nsa_layer.eager.pooling import mean_pool_backward
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project_backward

Tensor = torch.Tensor


def backward(
    call: Call,
    saved: Saved,
    do: Tensor,
    *,
    plan: object = None,
    o: Tensor | None = None,
    dq: Tensor | None = None,
    window: slice | None = None,
    d_sums: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the differentiable tensors, in their dtypes; None for a tensor that is None.

    Args:
        plan, o, dq: not read; outputs are computed again.
        window: as in `nsa_layer.cute.backward.backward`.
        d_sums: the gradient of ``saved.index_sums``, of which the first number counts.
    """
    spec, lists, acc = call.spec, saved.block_indices, accumulation_dtype(do.dtype)
    inputs, call = call.differentiable, call._replace(block_indices=lists) if call.block_indices is None else call
    sums = call.map(partial(torch.zeros_like, dtype=acc, memory_format=torch.contiguous_format), DIFFERENTIABLE)
    if window is not None:
        sums = sums._replace(k_win=sums.k[..., window, :, :], v_win=sums.v[..., window, :, :])
    of_rows = {name: getattr(saved, name) for name in ("g", "index_dz", "index_tokens")}
    of_rows |= {name: x if (x := getattr(saved, name)) is None else x.mT for name in LSES.values()}
    packed, begin = spec.lengths is not None, 0
    for (batch, *offsets), (sums_i, *_) in zip(batches(call), batches(sums), strict=True):
        end = begin + batch.q.shape[packed]
        rows = (None, slice(begin, end)) if packed else slice(begin, end)
        saved_i = Saved(**{name: x[rows] for name, x in of_rows.items() if x is not None})
        _backward_batch(batch, saved_i, do[rows], sums_i, *offsets)
        if d_sums is not None:
            _backward_index(batch, saved_i, d_sums[0], sums_i)
        begin = end
    if window is not None:
        sums = sums._replace(k_win=None, v_win=None)
    return tuple(None if total is None else total.to(x.dtype) for total, x in zip(sums.differentiable, inputs))


def _backward_index(batch: Call, saved: Saved, d: Tensor, sums: Call) -> None:
    """Add the gradients of ``d`` times the numerator of the index' loss."""
    with component("index"):
        grads = loss_backward(d * batch.spec.index_scale, *batch.index, saved.index_dz, saved.index_tokens.long())
    _add((sums.q_index, sums.k_index), grads)


def _backward_batch(batch: Call, saved: Saved, do: Tensor, sums: Call, q_offset: int, window_offset: int) -> None:
    """Add the gradients of a batch of `batches` to ``sums``; g is [B, T, Hq, branches], the LSEs are [B, T, Hq]."""
    (q, k, v, do), spec, config, g = map(to_compute_dtype, (*batch[:3], do)), batch.spec, batch.config, saved.g
    lists, where, scale = batch.block_indices, dict(spec=spec, q_offset=q_offset), spec.softmax_scale
    gates = dict(zip(config.branches, (equal_gates(q, len(config.branches)) if g is None else g).unbind(-1)))
    dg = {name: torch.zeros(q.shape[:-1], dtype=sums.q.dtype, device=q.device) for name in gates}
    if config.computes("compressed"):
        with component("compress"):
            (k_mean, _, k_cmp), (v_mean, _, v_cmp) = (compress_batch(batch, name) for name in "kv")
        with component("cmp"):
            of = visible_compressed(spec, q_offset, k_cmp.shape[1]), saved.lse_cmp, gates["compressed"], scale
            dq, dk_cmp, dv_cmp, dg["compressed"] = attend_chunks_backward(do, q, k_cmp, v_cmp, *of)
        sums.q.add_(dq)
    if config.computes("selected"):
        with component("slc"):
            of = lists, saved.lse_slc, gates["selected"]
            *grads, dg["selected"] = attend_lists_backward(do, q, k, v, *of, **where)
        _add(sums[:3], grads)
    if config.computes("window"):
        with component("swa"):
            of = visible_window(spec, window_offset), saved.lse_swa, gates["window"], scale
            *grads, dg["window"] = attend_chunks_backward(do, q, *map(to_compute_dtype, batch.of_window), *of)
        _add((sums.q, *sums.of_window), grads)
    with component("gate"):
        dg = torch.stack([*dg.values()], -1)
        if batch.gates is not None:
            sums.gates.add_(dg)
        elif batch.gate_weight is not None:
            dq, dw = project_backward(dg * g * (1 - g), batch.q.to(g.dtype), batch.gate_weight.mT)
            _add((sums.q, sums.gate_weight), (dq, dw.mT))
    if not config.computes("compressed"):
        return
    with component("compress"):
        for name, mean, d in (("k", k_mean, dk_cmp), ("v", v_mean, dv_cmp)):
            if mean is None:
                getattr(sums, f"{name}_cmp").add_(d)
                continue
            weight = getattr(batch, f"compress_{name}_weight")
            d_mean, dw = project_backward(d, mean, weight)
            getattr(sums, name).add_(mean_pool_backward(d_mean, k.shape[1], config=config))
            if weight is not None:
                getattr(sums, f"compress_{name}_weight").add_(dw)


def _add(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for total, d in zip(sums, grads, strict=True):
        total.add_(d)
