"""`selected_attention` on the kernels: every token attends to its own list, or its tile's, forward and backward.

Forward and dq walk unions of the lists of a tile's tokens, dk and dv the exact pairs of tokens and blocks. Both are
made again in backward. Nothing is read by the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from nsa_layer.call_spec import DIFFERENTIABLE, CallSpec, CallTensors, Saved
from nsa_layer.fork import require_patched
from nsa_layer.warm_up.api import compile_missing
from nsa_layer.warm_up.shapes import ListsShape

require_patched()

from flash_attn.cute.bwd_dkdv_sm90.interface import backward_dkdv  # noqa: E402
from flash_attn.cute.bwd_dq_sm90.interface import backward_dq  # noqa: E402
from flash_attn.cute.fwd_unions.interface import forward_unions  # noqa: E402
from flash_attn.cute.multiply.form import by_warp  # noqa: E402
from flash_attn.cute.runtime import repeated_calls  # noqa: E402
from nsa_layer.cute.token_unions import Extents, key_pairs, query_lists  # noqa: E402
from nsa_layer.kernels.launch import readable  # noqa: E402
from nsa_layer.profiler_ranges import component  # noqa: E402
from nsa_layer.support import device_arch  # noqa: E402

Tensor = torch.Tensor
START = 64  # rows that row sums of packed sequences start at multiples of


def forward(tensors: CallTensors, spec: CallSpec, *, needs_grad: bool) -> tuple[Tensor, Saved]:
    """o, and the log-sum-exp.

    Args:
        needs_grad: there will be a backward.
    """
    (q, k, v), block_indices, extents = _readable(tensors, spec)
    with _compiled_together(q, k, block_indices, extents, spec, backward=needs_grad):
        o, lse = attend(q, k, v, block_indices, extents, spec)
    return o, Saved(lse_slc=lse)


def backward(tensors: CallTensors, spec: CallSpec, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the differentiable tensors."""
    (q, k, v), block_indices, extents = _readable(tensors, spec)
    with _compiled_together(q, k, block_indices, extents, spec, backward=True):
        found = gradients(extents, spec, do, q, k, v, block_indices, o, lse)
    return *found, *[None] * (len(DIFFERENTIABLE) - 3)


def _readable(tensors: CallTensors, spec: CallSpec) -> tuple[tuple[Tensor, ...], Tensor, Extents]:
    q, k, v = map(readable, tensors[:3])
    starts = (tensors.cu_seqlens, tensors.cu_seqlens_k) if spec.bound is not None else ()
    extents = Extents.of_lists(q, k, tensors.q_heads_per_list, tensors.q_offset, spec, *starts)
    return (q, k, v), tensors.block_indices, extents


def _compiled_together(
    q: Tensor, k: Tensor, block_indices: Tensor, extents: Extents, spec: CallSpec, *, backward: bool
) -> AbstractContextManager[None]:
    """Within, kernels that are missing are compiled side by side, before the first is launched."""
    shapes = (tuple(x.shape) for x in (q, k, block_indices))
    if spec.bound is not None:  # kernels for others of these bounds are the same
        of_q, of_k = (spec.bound, len(q) - spec.bound), (len(k), 0)
        spec = replace(spec, lengths=of_q, lengths_k=of_k, bound=None)
    return compile_missing(lambda: ListsShape(*shapes, q.dtype, spec, extents.q_offset is not None, backward))


def attend(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, extents: Extents, spec: CallSpec
) -> tuple[Tensor, Tensor]:
    """o and the LSE."""
    with component("lists"):
        lists = query_lists(block_indices, q.shape[-2] // block_indices.shape[-2], extents)
    options = dict(softmax_scale=spec.softmax_scale, causal=spec.causal) | _options(extents)
    packed = extents.cu_seqlens is not None
    if packed:
        options |= dict(max_seqlen_q=extents.queries)
    with component("slc"):
        if by_warp(device_arch(q.device.index)):
            return forward_unions(q, k, v, lists, **options)
        if packed:
            options |= dict(max_seqlen_k=extents.keys)
        options |= dict(pack_gqa=block_indices.shape[-2] == k.shape[-2])
        return repeated_calls.attend(q, k, v, block_sparse_tensors=lists, **options)


def gradients(extents: Extents, spec: CallSpec, do: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    (q, k, v, block_indices, o, lse), do = saved, readable(do)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    count = extents.tokens if extents.cu_seqlens is None else extents.tokens + START * (len(extents.cu_seqlens) - 1)
    shape = (*q.shape[:-3], q.shape[-2], -(-count // START) * START)
    dpsum, lse_log2 = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    fixed = dict(softmax_scale=spec.softmax_scale, causal=spec.causal, start=START) | _options(extents)
    with component("lists"):
        lists = query_lists(block_indices, q.shape[-2] // block_indices.shape[-2], extents)
    with component("slc_dq"):
        backward_dq(q, k, v, do, dpsum, lse_log2, lists, dq=dq, out=o, lse=lse, **fixed)
    del lists
    with component("pairs"):
        pairs = key_pairs(block_indices, (q.shape[-2], k.shape[-2]), extents)
    with component("slc_dkdv"):
        backward_dkdv(q, k, v, do, dpsum, lse_log2, pairs, dk=dk, dv=dv, **fixed)
    return dq, dk, dv


def _options(extents: Extents) -> dict[str, Tensor | None]:
    """Options of calls of attention's kernels."""
    return dict(cu_seqlens_q=extents.cu_seqlens, cu_seqlens_k=extents.cu_seqlens_k, q_offset=extents.q_offset)
