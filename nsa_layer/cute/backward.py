"""Backward of the kernels' backend, top to bottom, for one group of key/value heads after the other."""

from __future__ import annotations

import torch

from flash_attn.cute.bwd_dkdv.interface import backward_dkdv
from flash_attn.cute.bwd_dkdv.spec import KeyPairs
from flash_attn.cute.bwd_sm90.two_pass import backward_dq
from flash_attn.cute.interface import _flash_attn_bwd
from nsa_layer.call import Call, Saved
from nsa_layer.config import BRANCHES
from nsa_layer.cute.branch_options import compressed_options, pooling_options, window_options
from nsa_layer.cute.forward import attend_branch, attend_selected
from nsa_layer.cute.grad_accum import GradAccumulators, KeyGradient, backward_layouts
from nsa_layer.cute.head_slices import head_group, joined, narrow, query_heads, saved_of_group
from nsa_layer.cute.index_loss import index_loss_backward
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.selected import dq_options, query_lists, selected_options, token_block_csr, use_split_dq
from nsa_layer.cute.varlen import Varlen, as_kernels_read
from nsa_layer.kernels.gating.backward import gated_sum_backward
from nsa_layer.kernels.launch import aligned_rows
from nsa_layer.kernels.pooling.mean_pool import mean_pool_backward
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project_backward
from nsa_layer.support import reads_unions
from nsa_layer.warm_up.api import compile_missing

Tensor = torch.Tensor
SUMS_STEP = 64  # rows that row sums of packed sequences start at multiples of


def backward(
    call: Call,
    saved: Saved,
    do: Tensor,
    *,
    plan: MemoryPlan,
    o: Tensor | None = None,
    dq: Tensor | None = None,
    window: slice | None = None,
    d_sums: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the differentiable call, from the results of `forward.forward`.

    Args:
        o: of forward, where the selected branch is alone.
        dq: written, if not None.
        window: rows of k and v that k_win and v_win are, whose gradients are parts of dk and dv then, and are returned
            as None.
        d_sums: the gradient of ``saved.index_sums``, of which the first number counts.
    """
    (call, varlen), do = as_kernels_read(call._replace(spec=call.spec.in_force())), aligned_rows(do)
    with compile_missing(call, plan, backward=True):
        of_keys = (*call[1:3], call.k_win, call.v_win)[: 4 if window is None else 2]
        dense = dict(memory_format=torch.contiguous_format)
        of_keys = [None if x is None else torch.empty_like(x, **dense) for x in of_keys]
        if window is not None:
            of_keys += [x[..., window, :, :] for x in of_keys]
        dq = torch.empty_like(call.q, **dense) if dq is None else dq
        rest, pairs = [], None
        for group in plan.groups:
            part, query = head_group(call, *group), query_heads(*call[:2], *group)
            of_group = saved_of_group(saved, group, call.k.shape[-2])
            if part.block_indices is not None:
                of_group = of_group._replace(block_indices=part.block_indices)
            into = narrow(dq, -2, query), *(narrow(x, -2, group) for x in of_keys)
            of_rows = narrow(do, -2, query), *into
            if call.one_branch:
                pairs = backward_selected(part, varlen, of_group, narrow(o, -2, query), *of_rows[:4])
                rest.append((None,) * 6)
            else:
                rest.append(backward_group(part, varlen, of_group, *of_rows, window_adds=window is not None))
        rest = [joined(list(parts), dim) for parts, dim in zip(zip(*rest), (0, -2, 0, 0, -2, -2))]
        of_index = _index_backward(call, varlen, saved, pairs if len(plan.groups) == 1 else None, d_sums)
    return dq, *of_keys[:2], *rest, *(of_keys[2:] if window is None else (None, None)), *of_index


def backward_group(
    call: Call,
    varlen: Varlen,
    saved: Saved,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dk_win: Tensor | None,
    dv_win: Tensor | None,
    *,
    window_adds: bool,
) -> tuple[Tensor | None, ...]:
    """Write the gradients of the group's tokens to dq, dk, dv, dk_win and dv_win, and return the gradients of
    gate_weight, gates, both compression weights, k_cmp and v_cmp.

    Args:
        dk_win, dv_win: None where the window reads k, and v.
        window_adds: dk_win and dv_win are parts of dk and dv.
    """
    (q, k, v, gate_weight, gates, w_k, w_v), spec, config = call[:7], call.spec, call.config
    compressed, selected, window = map(config.computes, BRANCHES)
    k_cmp = saved.k_cmp if call.k_cmp is None else call.k_cmp
    v_cmp = saved.v_cmp if call.v_cmp is None else call.v_cmp
    scale, ordered = spec.softmax_scale, dict(deterministic=config.deterministic)
    of_cmp = compressed_options(call, varlen) if compressed else None
    of_swa = window_options(call, varlen) if window else None
    cu_seqlens, fixed = varlen.cu_seqlens, dict(softmax_scale=scale)
    unions = selected and reads_unions(config, k.shape[-1], listed=spec.listed)
    # Without unions dk and dv of the selected branch read lists by key tile; so does dq, unless its own pass is faster.
    split_dq = unions or selected and use_split_dq(q, v, spec)
    by_key, by_query = _selected_lists(call, varlen, saved, split_dq) if selected else (None, None)
    calls = dict(cmp=dict(k=k_cmp, v=v_cmp, **of_cmp, **ordered)) if compressed and k_cmp.shape[-3] else {}
    if window:
        calls["swa"] = dict(zip("kv", call.of_window), **of_swa, **ordered)
    if by_key is not None:
        ordered |= dict(without_dq=True) if split_dq else {}
        calls["slc"] = dict(k=k, v=v, **by_key, **ordered)
    sequences = None if cu_seqlens is None else len(cu_seqlens)  # which the spec of bounds does not say
    layouts = backward_layouts(q, tuple(calls.values()), key=(spec, sequences, call.q_offset is None))
    start = layouts[0].dq.start if layouts else SUMS_STEP

    outputs = _recompute(call, saved, (k_cmp, v_cmp), of_cmp, by_query, of_swa)
    with component("gate"):
        of_columns = map(config.of_branches, (outputs, (saved.lse_cmp, saved.lse_slc, saved.lse_swa)))
        gating = dict(g=saved.g, q=q, gate_weight=gate_weight, gates=gates, tile_m=start, out=dq)
        gate = gated_sum_backward(do, *of_columns, **gating, cu_seqlens=cu_seqlens)
    del outputs, of_columns
    # Equal and sigmoid gates are in lse_log2: all branches get the same do.
    names = config.of_branches(("cmp", "slc", "swa"))
    dos = dict(zip(names, gate.do_branches or (do,) * len(names)))
    rows = dict(zip(names, zip(gate.dpsum, gate.lse_log2)))
    # The window adds to dk and dv of the selected branch where both read the same.
    apart = dk_win is not None or dv_win is not None
    keys = [name if name == "cmp" or (name == "swa" and apart) else "tokens" for name in calls]
    sums = GradAccumulators(layouts, q.device, softmax_scale=scale, keys=keys)
    dk, dv = KeyGradient(dk), KeyGradient(dv)
    pairs = ((dk, dk_win), (dv, dv_win))
    of_window = [grad if x is None else KeyGradient(x, filled=window_adds) for grad, x in pairs]

    def launch(name: str, **into: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the accumulators; returns dk and dv where the call stores them instead."""
        shared = sums.share(*rows[name], with_dq=not calls[name].get("without_dq"))
        more = calls[name] | fixed | into
        return _flash_attn_bwd(q, out=None, dout=dos[name], lse=None, **more, shared=shared)[1:]

    with component("cmp"):
        pairs = ((k_cmp, call.k_cmp, w_k), (v_cmp, call.v_cmp, w_v)) if compressed else ()
        dk_cmp, dv_cmp = [_compressed_gradient(*pair, packed=call.packed) for pair in pairs] or (None, None)
        if "cmp" in calls and launch("cmp", dk=dk_cmp, dv=dv_cmp)[0] is None:
            sums.add_dk_dv("cmp", KeyGradient(dk_cmp), KeyGradient(dv_cmp), [], of_cmp.get("cu_seqlens_k"))
    stored = []
    if window:
        with component("swa"):
            stored.append(launch("swa"))
    accum = None
    if by_key is not None:
        with component("slc"):
            stored.append(launch("slc"))
        if split_dq:
            accum = sums.take_dq(layouts[-1])
    with component("convert"):
        add = sums.write_dq(dq, cu_seqlens, add=gate_weight is not None)
    if split_dq:
        with component("slc_dq" if unions else "slc"):
            into = dict(dq=dq, accum=accum, add=add, start=start)
            backward_dq(q, k, v, dos["slc"], *rows["slc"], **fixed, **into, **dq_options(by_query))
    elif not add:
        dq.zero_()
    del accum
    d_weights = _compress_backward(call, varlen, saved, (dk_cmp, dv_cmp), dk, dv) if compressed else (None, None)
    with component("convert"):
        if apart and not window_adds:
            sums.add_dk_dv("swa", *of_window, stored[:1], of_swa.get("cu_seqlens_k"))
        sums.add_dk_dv("tokens", dk, dv, stored[apart:], varlen.cu_seqlens_k)
    if unions:
        _add_selected(call, varlen, saved.block_indices, dos["slc"], rows["slc"], dk, dv, start)
    for grad in (dk, dv):
        if not (grad.filled or unions):
            grad.out.zero_()
    if window_adds:  # where the others have written
        with component("convert"):
            sums.add_dk_dv("swa", *of_window, stored[:1], of_swa.get("cu_seqlens_k"))
    dk_cmp, dv_cmp = None if call.k_cmp is None else dk_cmp, None if call.v_cmp is None else dv_cmp
    return gate.d_weight, gate.d_gates, *d_weights, dk_cmp, dv_cmp


def _index_backward(
    call: Call, varlen: Varlen, saved: Saved, pairs: KeyPairs | None, d_sums: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of q_index and k_index, of all heads at once: they may share one index key; pairs: if there already."""
    if d_sums is None:
        return None, None
    if pairs is None:
        with component("pairs"):
            pairs = token_block_csr(call, varlen, saved.block_indices)
    with component("index"):
        return index_loss_backward(call, varlen, saved, pairs, d_sums)


def _compressed_gradient(x: Tensor, of_caller: Tensor | None, weight: Tensor | None, *, packed: bool) -> Tensor:
    """For the gradient of compressed keys or values, which no kernel writes where no sequence has a block: 0 there if
    the rows are the caller's, or summed to the gradient of a weight."""
    return torch.zeros_like(x) if packed and (of_caller is not None or weight is not None) else torch.empty_like(x)


def _selected_lists(call: Call, varlen: Varlen, saved: Saved, split_dq: bool) -> tuple[dict | None, dict | None]:
    """Options of the selected branch's calls: over lists by key tile, where no unions are read; and over forward's."""
    by_key, by_query, selection = None, None, (call, varlen, saved.block_indices, saved.block_counts)
    with component("lists"):
        if not reads_unions(call.config, call.k.shape[-1], listed=call.spec.listed):
            by_key = selected_options(*selection, backward=True)
        if split_dq or saved.o_slc is None:
            by_query = selected_options(*selection, backward=False)
    return by_key, by_query


def _recompute(
    call: Call,
    saved: Saved,
    compressed: tuple[Tensor, Tensor],
    of_cmp: dict | None,
    of_slc: dict | None,
    of_swa: dict | None,
) -> tuple[Tensor | None, ...]:
    """The branches' outputs; unsaved ones are recomputed by the same launches with the same options, if the branch is
    there, which give the same bits."""
    (q, k, v), spec, o_cmp, o_slc, o_swa = call[:3], call.spec, saved.o_cmp, saved.o_slc, saved.o_swa
    if o_cmp is None and of_cmp is not None:
        with component("cmp"):
            o_cmp = attend_branch(q, *compressed, spec, of_cmp)[0]
    if o_slc is None and of_slc is not None:
        with component("slc"):
            o_slc = attend_selected(q, k, v, spec, of_slc)[0]
    if o_swa is None and of_swa is not None:
        with component("swa"):
            o_swa = attend_branch(q, *call.of_window, spec, of_swa)[0]
    return o_cmp, o_slc, o_swa


def _compress_backward(
    call: Call,
    varlen: Varlen,
    saved: Saved,
    d_compressed: tuple[Tensor, Tensor],
    dk: KeyGradient,
    dv: KeyGradient,
) -> list[Tensor | None]:
    """Write the parts of dk and dv that come through the compressed keys that were made; gradients of their weights."""
    of_means, of_weights = [], []
    with component("compress"):
        for name, d, grad in zip("kv", d_compressed, (dk, dv)):
            d_mean = d_weight = None
            if getattr(call, f"{name}_cmp") is None:
                weight = getattr(call, f"compress_{name}_weight")
                d_mean, d_weight = project_backward(d, getattr(saved, f"{name}_mean"), weight)
            grad.filled = d_mean is not None
            of_means.append(d_mean)
            of_weights.append(d_weight)
        mean_pool_backward(*of_means, dk.out, dv.out, **pooling_options(call.config, varlen))
    return of_weights


def _add_selected(
    call: Call,
    varlen: Varlen,
    block_indices: Tensor,
    do: Tensor,
    rows: tuple[Tensor, Tensor],
    dk: KeyGradient,
    dv: KeyGradient,
    start: int,
) -> KeyPairs:
    """Add the selected branch's dk and dv, by the exact pairs of unions, which are returned; rows: sums and
    log-sum-exps, of which sequences start at multiples of `start`."""
    spec, starts = call.spec, dict(cu_seqlens_q=varlen.cu_seqlens, cu_seqlens_k=varlen.cu_seqlens_k)
    with component("pairs"):
        pairs = token_block_csr(call, varlen, block_indices)
    with component("slc_dkdv"):
        add = dk.filled or dv.filled
        for grad in (dk, dv):
            if add and not grad.filled:
                grad.out.zero_()
        into = dict(dk=dk.out, dv=dv.out, add=add, start=start, softmax_scale=spec.softmax_scale)
        backward_dkdv(*call[:3], do, *rows, pairs, **into, causal=spec.causal, q_offset=call.q_offset, **starts)
    return pairs


def backward_selected(
    call: Call, varlen: Varlen, saved: Saved, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> KeyPairs:
    """Write dq, dk and dv of the selected branch alone, and return the tokens of each block."""
    (q, k, v), spec, (T, Hq) = call[:3], call.spec, call.q.shape[-3:-1]
    count = T if varlen.cu_seqlens is None else T + SUMS_STEP * (len(varlen.cu_seqlens) - 1)
    shape = (*q.shape[:-3], Hq, -(-count // SUMS_STEP) * SUMS_STEP)
    dpsum, lse_log2 = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    fixed = dict(softmax_scale=spec.softmax_scale, causal=spec.causal, start=SUMS_STEP, q_offset=call.q_offset)
    starts = dict(cu_seqlens_q=varlen.cu_seqlens, cu_seqlens_k=varlen.cu_seqlens_k)
    with component("lists"):
        lists = query_lists(call, varlen, saved.block_indices)
    with component("slc_dq"):
        backward_dq(q, k, v, do, dpsum, lse_log2, lists, dq=dq, out=o, lse=saved.lse_slc, **fixed, **starts)
    del lists
    into = (KeyGradient(dk), KeyGradient(dv), SUMS_STEP)
    return _add_selected(call, varlen, saved.block_indices, do, (dpsum, lse_log2), *into)
