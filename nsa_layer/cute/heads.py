"""One group of key/value heads with its query heads: the layer's forward and backward on the kernels, part by part.

Heads do not depend on one another, so a call is a loop over groups, most often of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.compress import project, project_backward
from nsa_layer.cute import branches
from nsa_layer.cute.grad_accum import Call, GradAccumulators, backward_layouts
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.topk_dispatch import block_topk
from nsa_layer.kernels.gating.gated_sum import gated_sum
from nsa_layer.kernels.gating.gated_sum_backward import gated_sum_backward
from nsa_layer.kernels.mean_pool.pool import pool, unpool
from nsa_layer.profiler_ranges import component

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """What a group reads; shapes as in `nsa`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate_weight: Tensor | None
    gates: Tensor | None
    w_k: Tensor | None
    w_v: Tensor | None
    packing: Packing | None

    def heads(self, first: int, end: int) -> Inputs:
        """Key/value heads `first` to `end` with their query heads."""
        G = self.q.shape[-2] // self.k.shape[-2]
        query, key = (first * G, end * G), (first, end)
        tokens = of_heads(self.q, -2, query), of_heads(self.k, -2, key), of_heads(self.v, -2, key)
        gating = of_heads(self.gate_weight, 0, query), of_heads(self.gates, -2, query)
        projections = of_heads(self.w_k, 0, key), of_heads(self.w_v, 0, key)
        return Inputs(*tokens, *gating, *projections, self.packing)


def of_heads(x: Tensor | None, dim: int, heads: tuple[int, int]) -> Tensor | None:
    """(first, end) of a tensor's heads, or of no tensor."""
    if x is None or heads == (0, x.shape[dim]):
        return x
    return x.narrow(dim, heads[0], heads[1] - heads[0])


class SavedForBackward(NamedTuple):
    """What backward needs of forward.

    Attributes:
        block_indices, block_counts: the choice, int32 [B, Hkv, M, n] and [B, Hkv, M]; packed without B.
        k_cmp, v_cmp: compressed keys and values as attention takes them.
        k_mean, v_mean: the means of their blocks in fp32 where these are projected, else None.
        o_cmp, o_slc, o_swa: None where the output is computed again.
        g: the gates, fp32 [..., Hq, 3]; None for equal shares.
    """

    block_indices: Tensor
    block_counts: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_mean: Tensor | None
    v_mean: Tensor | None
    o_cmp: Tensor | None
    o_slc: Tensor | None
    o_swa: Tensor | None
    lse_cmp: Tensor
    lse_slc: Tensor
    lse_swa: Tensor
    g: Tensor | None


class WeightGradients(NamedTuple):
    """Gradients of what is not q, k and v; None where there is no such input."""

    gate_weight: Tensor | None
    gates: Tensor | None
    w_k: Tensor | None
    w_v: Tensor | None


def forward(inputs: Inputs, o: Tensor, *, spec: CallSpec, kept: tuple[bool, bool, bool]) -> SavedForBackward:
    """Write the group's output to o [..., Hq, Dv] and return what backward needs.

    Args:
        kept: whether the outputs of the compressed, the selected and the window branch are among it.
    """
    q, packing = inputs.q, inputs.packing
    # The window needs nothing but q, k and v: the GPU has work at once, while the host launches the short kernels.
    window = _window(inputs, spec)
    with component("compress"):
        k_scored, k_cmp, v_cmp, k_mean, v_mean = _compress(inputs, spec)
    with component("block_topk"):
        indices, counts = block_topk(q, k_scored, spec=spec, packing=packing)
    del k_scored
    attended = _compressed(inputs, k_cmp, v_cmp, spec), _selected(inputs, indices, counts, spec), window
    outputs, lses = zip(*attended)
    with component("gate"):
        g = gated_sum(q, *outputs, gate_weight=inputs.gate_weight, gates=inputs.gates, out=o)[1]
    saved = (x if keep else None for x, keep in zip(outputs, kept))
    return SavedForBackward(indices, counts, k_cmp, v_cmp, k_mean, v_mean, *saved, *lses, g)


def backward(
    inputs: Inputs, kept: SavedForBackward, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *, spec: CallSpec
) -> WeightGradients:
    """Write the gradients of the group's q, k and v to dq, dk and dv, and return those of the rest."""
    q, k, v, packing = *inputs[:3], inputs.packing
    with component("lists"):
        selected = _selected_call(inputs, kept, spec)
    calls = _calls(inputs, kept, selected, spec)
    layouts = backward_layouts(q, tuple(calls.values()), key=spec)
    lses = (kept.lse_cmp, kept.lse_slc, kept.lse_swa)
    with component("gate"):
        gate = gated_sum_backward(
            do,
            *_outputs(inputs, kept, spec),
            *lses,
            g=kept.g,
            q=q,
            gate_weight=inputs.gate_weight,
            gates=inputs.gates,
            tile_m=layouts.tile_m,
            cu_seqlens=None if packing is None else packing.cu_seqlens,
            out=dq,
        )
    # Equal and sigmoid shares are in lse_log2: all branches get the same do.
    do_cmp, do_slc, do_swa = gate.do_branches or (do, do, do)
    rows_cmp, rows_slc, rows_swa = zip(gate.dpsum, gate.lse_log2)
    sums = GradAccumulators(layouts, q.device, softmax_scale=spec.softmax_scale)
    if "cmp" in calls:
        with component("cmp"):
            dk_cmp, dv_cmp = sums.compressed(q, do_cmp, calls["cmp"], *rows_cmp)
    else:
        dk_cmp, dv_cmp = torch.zeros_like(kept.k_cmp), torch.zeros_like(kept.v_cmp)
    with component("swa"):
        sums.tokens(q, do_swa, calls["swa"], *rows_swa)
    with component("slc"):
        sums.tokens(q, do_slc, calls["slc"], *rows_slc)
    sums.dq(q, dq, calls["swa"], add=inputs.gate_weight is not None)
    with component("compress"):
        d_k_mean, dw_k = project_backward(dk_cmp, kept.k_mean, inputs.w_k)
        d_v_mean, dw_v = project_backward(dv_cmp, kept.v_mean, inputs.w_v)
        unpool(d_k_mean, d_v_mean, **_pooling(spec, packing), like_k=k, like_v=v, out_k=dk, out_v=dv)
    with component("convert"):
        sums.dk_dv(dk, dv, calls["swa"], add=True)
    return WeightGradients(gate.d_weight, gate.d_gates, dw_k, dw_v)


def _compress(inputs: Inputs, spec: CallSpec) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The keys that are scored, fp32; compressed keys and values as attention takes them; fp32 means to be kept."""
    k, v, dtype, packing = inputs.k, inputs.v, inputs.k.dtype, inputs.packing
    static = _pooling(spec, packing) | ({} if packing is None else dict(total_blocks=packing.total_blocks))
    v_dtype = dtype if inputs.w_v is None else torch.float32
    k_dtypes = (torch.float32, dtype) if inputs.w_k is None else (torch.float32,)
    (k_mean, *k_rounded), v_mean = pool(k, v, k_dtypes=k_dtypes, v_dtype=v_dtype, **static)
    k_scored = project(k_mean, inputs.w_k)
    k_cmp = k_rounded[0] if k_rounded else k_scored.to(dtype)
    v_cmp = project(v_mean, inputs.w_v).to(dtype)
    return k_scored, k_cmp, v_cmp, None if inputs.w_k is None else k_mean, None if inputs.w_v is None else v_mean


def _pooling(spec: CallSpec, packing: Packing | None) -> dict:
    static = dict(block_size=spec.config.block_size, stride=spec.config.stride)
    return static if packing is None else static | dict(cu_seqlens=packing.cu_seqlens, cu_blocks=packing.cu_blocks)


def _compressed(inputs: Inputs, k_cmp: Tensor, v_cmp: Tensor, spec: CallSpec) -> branches.Pair:
    with component("cmp"):
        return branches.compressed_forward(inputs.q, k_cmp, v_cmp, spec=spec, packing=inputs.packing)


def _selected(inputs: Inputs, indices: Tensor, counts: Tensor, spec: CallSpec) -> branches.Pair:
    with component("lists"):
        sparsity = _sparsity(inputs, indices, counts, spec)
    with component("slc"):
        return branches.selected_forward(*inputs[:3], spec=spec, sparsity=sparsity, packing=inputs.packing)


def _window(inputs: Inputs, spec: CallSpec) -> branches.Pair:
    with component("swa"):
        return branches.window_forward(*inputs[:3], spec=spec, packing=inputs.packing)


def _outputs(inputs: Inputs, kept: SavedForBackward, spec: CallSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The branches' outputs, those that were not kept computed again: the same launches, the same bits."""
    o_cmp, o_slc, o_swa = kept.o_cmp, kept.o_slc, kept.o_swa
    if o_cmp is None:
        o_cmp = _compressed(inputs, kept.k_cmp, kept.v_cmp, spec)[0]
    if o_slc is None:
        o_slc = _selected(inputs, kept.block_indices, kept.block_counts, spec)[0]
    if o_swa is None:
        o_swa = _window(inputs, spec)[0]
    return o_cmp, o_slc, o_swa


def _sparsity(
    inputs: Inputs, indices: Tensor, counts: Tensor, spec: CallSpec, *, backward: bool = False, ordered: bool = False
) -> branches.Sparsity:
    q, k, packing = inputs.q, inputs.k, inputs.packing
    tile = (branches.backward_tile if backward else branches.forward_tile)(q.device, spec.config.block_size)
    cu_seqlens = None if packing is None else packing.cu_seqlens
    static = dict(spec=spec, tile=tile, cu_seqlens=cu_seqlens, block_counts=counts)
    return branches.selected_sparsity(
        indices, q.shape[-3], (q.shape[-2], k.shape[-2]), backward=backward, ordered=ordered, **static
    )


def _selected_call(inputs: Inputs, kept: SavedForBackward, spec: CallSpec) -> Call:
    """The selected branch's backward: in two passes where they are faster, or where adds to dq would need an order."""
    q, k, v, packing = *inputs[:3], inputs.packing
    chosen, deterministic = (kept.block_indices, kept.block_counts), spec.config.deterministic
    two = branches.takes_two_passes(q, v, spec)
    of_keys = _sparsity(inputs, *chosen, spec, backward=True, ordered=deterministic and not two)
    options = branches.selected_options(of_keys, packing) | dict(deterministic=deterministic)
    if not two:
        return Call(k, v, options)
    of_queries = _sparsity(inputs, *chosen, spec)
    return Call(k, v, options | dict(without_dq=True), branches.dq_options(of_queries, packing))


def _calls(inputs: Inputs, kept: SavedForBackward, selected: Call, spec: CallSpec) -> dict[str, Call]:
    """The branches' backward calls; no compressed one where no block is complete."""
    _, k, v, packing = *inputs[:3], inputs.packing
    static = dict(deterministic=spec.config.deterministic)
    calls = {}
    if kept.k_cmp.shape[-3]:
        calls["cmp"] = Call(kept.k_cmp, kept.v_cmp, branches.compressed_options(spec, packing) | static)
    calls["swa"] = Call(k, v, branches.window_options(spec, packing) | static)
    return calls | {"slc": selected}
