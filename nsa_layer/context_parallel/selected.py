"""`selected_attention` of a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_layer import autocast
from nsa_layer.call_spec import SELECTED_ALONE, CallSpec, CallTensors
from nsa_layer.checks import check_scale
from nsa_layer.config import ListConfig
from nsa_layer.context_parallel import gather
from nsa_layer.context_parallel.checks import check_list_shard, token_layout, whole_lengths
from nsa_layer.context_parallel.heads import over_heads
from nsa_layer.context_parallel.spec import ContextParallel

Tensor = torch.Tensor


def attend(
    selected_attention: Callable[..., Any],
    cp: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    name: str,
    cu_seqlens: Tensor | None,
    block_size: int,
    softmax_scale: float | None,
    causal: bool,
    return_lse: bool,
    validate: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_attention`, which is passed in, of a rank's tokens; arguments as there, and the backend's name."""
    on_gpu = cu_seqlens is not None and cu_seqlens.is_cuda
    lists, q_tile = check_list_shard(cp, q, k, v, block_indices, cu_seqlens, read=validate or not on_gpu)
    if cp.mode_of(k.shape[-2]) == "heads":
        tokens, options = token_layout(q.shape[-3], cp), options | dict(causal=causal, validate=validate)
        options |= dict(block_size=block_size, softmax_scale=softmax_scale, cu_seqlens=cu_seqlens)

        def call(**of_heads: Tensor) -> list[Tensor]:
            o, lse = selected_attention(**of_heads, **options, return_lse=True)
            return [o, lse.mT] if return_lse else [o]

        tensors, layouts = dict(q=q, k=k, v=v, block_indices=block_indices), [tokens] * 3 + [lists]
        o, *lses = over_heads(call, cp, tensors, layouts, [tokens] * (1 + return_lse), {}, heads=k.shape[-2])
        return (o, lses[0].mT.contiguous()) if return_lse else o
    if name == "reference":
        raise NotImplementedError("cp: mode='gather' with backend='reference'")
    deterministic = options["deterministic"]
    config = ListConfig(block_size=block_size, q_tile=q_tile, window_size=0, deterministic=deterministic)
    lengths = None if cu_seqlens is None or torch.compiler.is_compiling() else whole_lengths(cu_seqlens, q, cp)
    scale = check_scale(softmax_scale, q.shape[-1])
    spec = CallSpec(config, causal, scale, lengths, listed=True, branches=SELECTED_ALONE)
    tensors = CallTensors(q, k, v, cu_seqlens=cu_seqlens, block_indices=block_indices)
    with autocast.off(q.device):
        o, lse = gather.attend(cp, name, tensors, spec=spec)
    return (o, lse) if return_lse else o
