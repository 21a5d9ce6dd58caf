"""The layer on the fork's kernels: what is saved, what is computed again, in which order memory is freed.

Saved: q, k, v, the weights, each branch's o and lse, the gates, and the chosen blocks. Computed again in backward: the
compressed keys and values, and the block lists. Nothing is chosen again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from nsa_layer import branches
from nsa_layer.compress import compress, mean_pool, mean_pool_backward, project
from nsa_layer.gate import gate_values, gate_values_backward, weighted_sum_backward, weighted_sum_sliced
from nsa_layer.problem import Aux, Problem
from nsa_layer.select import choose_blocks
from nsa_layer.tokens import sum_rounded

Tensor = torch.Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    problem: Problem,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    compress_k_weight: Tensor | None,
    compress_v_weight: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Aux]:
    """The operator on the kernels; arguments as `nsa` has checked them."""
    o, *aux = _Attend.apply(q, k, v, gate_weight, gates, compress_k_weight, compress_v_weight, cu_seqlens, problem)
    return o, Aux(*aux)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate_weight, gates, w_k, w_v, cu_seqlens, problem):
        o_cmp, lse_cmp, block_indices = _compressed_and_choice(q, k, v, w_k, w_v, cu_seqlens, problem)
        o_slc, lse_slc = _selected(q, k, v, block_indices, cu_seqlens, problem)
        o_swa, lse_swa = branches.window_forward(q, k, v, problem=problem, cu_seqlens=cu_seqlens)
        g = gate_values(q, gate_weight, gates)
        o = weighted_sum_sliced(g, o_cmp, o_slc, o_swa)
        # Equal shares are one number: made again in backward, not kept.
        kept_g = None if gate_weight is None and gates is None else g
        saved = (q, k, v, gate_weight, gates, w_k, w_v, cu_seqlens, kept_g, block_indices)
        ctx.save_for_backward(*saved, o_cmp, lse_cmp, o_slc, lse_slc, o_swa, lse_swa)
        ctx.problem = problem
        aux = (block_indices, g, lse_cmp, lse_slc, lse_swa)
        ctx.mark_non_differentiable(*aux)
        ctx.set_materialize_grads(False)
        return o, *aux

    @staticmethod
    @once_differentiable
    def backward(ctx, do, *_):
        if do is None:
            return (None,) * 9
        q, k, v, gate_weight, gates, w_k, w_v, cu_seqlens, g, block_indices, *outputs = ctx.saved_tensors
        o_cmp, lse_cmp, o_slc, lse_slc, o_swa, lse_swa = outputs
        problem = ctx.problem
        g = gate_values(q, None, None) if g is None else g
        (do_cmp, do_slc, do_swa), dg = weighted_sum_backward(
            do, g, (o_cmp, o_slc, o_swa), need_gates=gate_weight is not None or gates is not None
        )
        dq_gate = d_gate_weight = None
        if gate_weight is not None:
            dq_gate, d_gate_weight = gate_values_backward(dg, g, q, gate_weight)
        d_gates = None if gates is None else dg.to(gates.dtype)
        del dg
        dq_cmp, dk_cmp, dv_cmp, dw_k, dw_v = _compressed_backward(
            q, k, v, w_k, w_v, o_cmp, lse_cmp, do_cmp, cu_seqlens, problem
        )
        del do_cmp
        dq_slc, dk_slc, dv_slc = _selected_backward(q, k, v, o_slc, lse_slc, do_slc, block_indices, cu_seqlens, problem)
        del do_slc
        dq_swa, dk_swa, dv_swa = branches.window_backward(
            q, k, v, o_swa, lse_swa, do_swa, problem=problem, cu_seqlens=cu_seqlens
        )
        dq = sum_rounded((dq_cmp, dq_slc, dq_swa, dq_gate), q.dtype)
        dk = sum_rounded((dk_cmp, dk_slc, dk_swa), k.dtype)
        dv = sum_rounded((dv_cmp, dv_slc, dv_swa), v.dtype)
        return dq, dk, dv, d_gate_weight, d_gates, dw_k, dw_v, None, None


def _sequences(problem: Problem, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """[B, T, ...] tensors as they are; packed [total, ...] ones as [1, T, ...] views, sequence by sequence."""
    if problem.lengths is None:
        yield tensors
        return
    start = 0
    for length in problem.lengths:
        if length:
            yield tuple(t[start : start + length].unsqueeze(0) for t in tensors)
        start += length


def _joined(problem: Problem, parts: list[Tensor], dim: int = 0) -> Tensor:
    """What `_sequences` took apart; `dim` counts without the leading 1."""
    return parts[0] if problem.lengths is None else torch.cat([part.squeeze(0) for part in parts], dim=dim)


def _selected_sparsity(
    q: Tensor, k: Tensor, chosen: Tensor, problem: Problem, *, backward: bool, cu_seqlens: Tensor | None = None
) -> branches.Sparsity:
    tile = (branches.backward_tile if backward else branches.forward_tile)(q.device, problem.config.block_size)
    static = dict(problem=problem, tile=tile, backward=backward, cu_seqlens=cu_seqlens)
    return branches.selected_sparsity(chosen, q.shape[-3], (q.shape[-2], k.shape[-2]), **static)


def _compressed_and_choice(
    q: Tensor, k: Tensor, v: Tensor, w_k: Tensor | None, w_v: Tensor | None, cu_seqlens: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed branch's o and lse, and the chosen blocks, which come from the same compressed keys."""
    config = problem.config
    width = config.list_width(max(problem.lengths)) if problem.lengths else None
    keys, values, choices = [], [], []
    for q_seq, k_seq, v_seq in _sequences(problem, q, k, v):
        k_cmp = compress(k_seq, w_k, config=config)  # not rounded: the choice scores these
        chosen = choose_blocks(q_seq, k_cmp, config=config, causal=problem.causal, softmax_scale=problem.softmax_scale)
        if width is not None:
            chosen = torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1)
        keys.append(k_cmp.to(k.dtype)), values.append(compress(v_seq, w_v, config=config).to(v.dtype))
        choices.append(chosen)
    packing = branches.compressed_packing(problem, cu_seqlens)
    o, lse = branches.compressed_forward(
        q, _joined(problem, keys), _joined(problem, values), problem=problem, packing=packing
    )
    return o, lse, _joined(problem, choices, 1)


def _selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, cu_seqlens: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    sparsity = _selected_sparsity(q, k, block_indices, problem, backward=False, cu_seqlens=cu_seqlens)
    return branches.selected_forward(q, k, v, problem=problem, sparsity=sparsity, cu_seqlens=cu_seqlens)


def _selected_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor]:
    sparsity = _selected_sparsity(q, k, block_indices, problem, backward=True, cu_seqlens=cu_seqlens)
    static = dict(problem=problem, sparsity=sparsity, cu_seqlens=cu_seqlens)
    return branches.selected_backward(q, k, v, o, lse, do, **static)


def _compressed_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_k: Tensor | None,
    w_v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    cu_seqlens: Tensor | None,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv of the compressed branch (dk, dv in fp32, not rounded) and the gradients of both projections."""
    means = [[mean_pool(x, config=problem.config) for x in pair] for pair in _sequences(problem, k, v)]
    k_means, v_means = zip(*means)
    k_cmp = _joined(problem, [project(mean, w_k).to(k.dtype) for mean in k_means])
    v_cmp = _joined(problem, [project(mean, w_v).to(v.dtype) for mean in v_means])
    packing = branches.compressed_packing(problem, cu_seqlens)
    dq, dk_cmp, dv_cmp = branches.compressed_backward(q, k_cmp, v_cmp, o, lse, do, problem=problem, packing=packing)
    dk, dw_k = _uncompress(dk_cmp, k_means, w_k, k, problem)
    dv, dw_v = _uncompress(dv_cmp, v_means, w_v, v, problem)
    return dq, dk, dv, dw_k, dw_v


def _uncompress(
    d_cmp: Tensor, means: Sequence[Tensor], weight: Tensor | None, x: Tensor, problem: Problem
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the tokens x, in fp32, and of the projection, from that of the compressed blocks."""
    d_weight = None if weight is None else torch.zeros_like(weight, dtype=torch.float32)
    d_tokens, start = [], 0
    for mean, (tokens,) in zip(means, _sequences(problem, x)):
        d_blocks = d_cmp if problem.lengths is None else d_cmp[start : start + mean.shape[1]].unsqueeze(0)
        d_blocks, start = d_blocks.float(), start + mean.shape[1]
        if weight is not None:
            d_weight += torch.einsum("bthd,bthe->hde", mean, d_blocks)
            d_blocks = torch.einsum("bthe,hde->bthd", d_blocks, weight.float())
        d_tokens.append(mean_pool_backward(d_blocks, tokens.shape[1], config=problem.config))
    return _joined(problem, d_tokens), None if weight is None else d_weight.to(weight.dtype)
