"""Backward of the kernels' backend for a group of key/value heads with their query heads, top to bottom."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.cute.bwd_dkdv_sm90.interface import backward_dkdv
from flash_attn.cute.bwd_sm90.two_pass import backward_dq
from flash_attn.cute.interface import _flash_attn_bwd
from nsa_layer.call_spec import CallSpec
from nsa_layer.compress import project_backward
from nsa_layer.cute.branch_options import compressed_options, pooling_options, window_options
from nsa_layer.cute.forward import Inputs, SavedForBackward, attend
from nsa_layer.cute.grad_accum import BranchCall, GradAccumulators, backward_layouts
from nsa_layer.cute.selected_branch import dq_options, selected_options, selected_sparsity, token_pairs, use_split_dq
from nsa_layer.kernels.gating.gated_sum_backward import gated_sum_backward
from nsa_layer.kernels.mean_pool.pool import unpool
from nsa_layer.profiler_ranges import component

Tensor = torch.Tensor


class WeightGradients(NamedTuple):
    """Gradients of the inputs beside q, k and v; None where there is no such input."""

    gate_weight: Tensor | None
    gates: Tensor | None
    w_k: Tensor | None
    w_v: Tensor | None


def backward(
    inputs: Inputs, saved: SavedForBackward, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *, spec: CallSpec
) -> WeightGradients:
    """Write the gradients of the group's q, k and v to dq, dk and dv, and return those of the weights."""
    q, k, v, gate_weight, gates, w_k, w_v, _, packing = inputs
    k_cmp, v_cmp, scale, deterministic = saved.k_cmp, saved.v_cmp, spec.softmax_scale, spec.config.deterministic
    cu_seqlens = None if packing is None else packing.cu_seqlens
    of_cmp, of_swa, fixed = compressed_options(spec, packing), window_options(spec, packing), dict(softmax_scale=scale)
    by_token = spec.config.by_token
    # By tile, dk and dv of the selected branch take lists by key tile; so does dq, unless a pass of its own is faster.
    split_dq = by_token or use_split_dq(q, v, spec)
    by_key = by_query = None
    with component("lists"):
        selection = (saved.block_indices, q.shape[-3], (q.shape[-2], k.shape[-2]))
        static = dict(spec=spec, packing=packing, block_counts=saved.block_counts)
        if not by_token:
            by_key = selected_sparsity(*selection, backward=True, **static)
        if split_dq or saved.o_slc is None:
            by_query = selected_sparsity(*selection, backward=False, **static)
    keys, options = [(k_cmp, v_cmp), (k, v)], [of_cmp, of_swa]
    if by_key is not None:
        keys.append((k, v))
        options.append(selected_options(by_key, packing) | (dict(without_dq=True) if split_dq else {}))
    calls = [BranchCall(*kv, of | dict(deterministic=deterministic)) for kv, of in zip(keys, options)]
    layouts = backward_layouts(q, tuple(calls if k_cmp.shape[-3] else calls[1:]), key=spec)

    # Outputs that were not saved: the same launches, the same bits.
    o_cmp, o_slc, o_swa = saved.o_cmp, saved.o_slc, saved.o_swa
    if o_cmp is None:
        with component("cmp"):
            o_cmp = attend(q, k_cmp, v_cmp, spec, of_cmp)[0]
    if o_slc is None:
        with component("slc"):
            o_slc = attend(q, k, v, spec, selected_options(by_query, packing))[0]
    if o_swa is None:
        with component("swa"):
            o_swa = attend(q, k, v, spec, of_swa)[0]
    with component("gate"):
        lses = (saved.lse_cmp, saved.lse_slc, saved.lse_swa)
        gating = dict(g=saved.g, q=q, gate_weight=gate_weight, gates=gates, tile_m=layouts.tile_m, out=dq)
        gate = gated_sum_backward(do, o_cmp, o_slc, o_swa, *lses, **gating, cu_seqlens=cu_seqlens)
    del o_cmp, o_slc, o_swa
    # Equal and sigmoid gates are in lse_log2: all branches get the same do.
    do_cmp, do_slc, do_swa = gate.do_branches or (do, do, do)
    rows_cmp, rows_slc, rows_swa = zip(gate.dpsum, gate.lse_log2)
    sums = GradAccumulators(layouts, q.device, softmax_scale=scale, token_calls=len(calls) - 1)

    def launch(call: BranchCall, do: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
        """Add to the accumulators; returns dk and dv where the call stores them instead."""
        shared = sums.share(*rows, with_dq=not call.options.get("without_dq"))
        return _flash_attn_bwd(q, call.k, call.v, None, do, None, **fixed, shared=shared, **call.options)[1:]

    dk_cmp = dv_cmp = None
    with component("cmp"):
        if k_cmp.shape[-3]:
            dk_cmp, dv_cmp = launch(calls[0], do_cmp, rows_cmp)
        if dk_cmp is None:
            dk_cmp, dv_cmp = torch.empty_like(k_cmp), torch.empty_like(v_cmp)
            sums.write_compressed(dk_cmp, dv_cmp, of_cmp.get("cu_seqlens_k"))
    with component("swa"):
        stored = [launch(calls[1], do_swa, rows_swa)]
    accum = None
    if not by_token:
        with component("slc"):
            stored.append(launch(calls[2], do_slc, rows_slc))
        if split_dq:
            accum = sums.take_dq(layouts.calls[-1])
    with component("convert"):
        add = sums.write_dq(dq, cu_seqlens, add=gate_weight is not None)
    if split_dq:
        with component("slc_dq" if by_token else "slc"):
            into = dict(dq=dq, accum=accum, add=add, start=layouts.calls[-1].dq.start)
            backward_dq(q, k, v, do_slc, *rows_slc, **fixed, **into, **dq_options(by_query, packing))
    del accum
    with component("compress"):
        d_k_mean, dw_k = project_backward(dk_cmp, saved.k_mean, w_k)
        d_v_mean, dw_v = project_backward(dv_cmp, saved.v_mean, w_v)
        unpool(d_k_mean, d_v_mean, dk, dv, **pooling_options(spec, packing))
    with component("convert"):
        sums.add_dk_dv(dk, dv, stored, cu_seqlens)
    if by_token:
        with component("pairs"):
            pairs = token_pairs(saved.block_indices, q.shape[-2] // k.shape[-2], spec=spec, packing=packing)
        with component("slc_dkdv"):
            into = dict(dk=dk, dv=dv, add=True, start=layouts.calls[-1].dq.start)
            where = dict(causal=spec.causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
            backward_dkdv(q, k, v, do_slc, *rows_slc[::-1], pairs, **fixed, **into, **where)
    return WeightGradients(gate.d_weight, gate.d_gates, dw_k, dw_v)
