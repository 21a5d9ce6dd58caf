"""`selected_attention` of a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nsa_layer import autocast, support
from nsa_layer.call import SELECTED_ALONE, Call, CallSpec
from nsa_layer.checks import check_scale
from nsa_layer.config import ListConfig
from nsa_layer.context_parallel import gather, heads
from nsa_layer.context_parallel.checks import TILES, TOKENS, check_list_shard, token_layout, whole_lengths
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
    cu_seqlens: Tensor | None,
    block_size: int,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    return_lse: bool,
    backend: str | None,
    validate: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_attention`, which is passed in, of a rank's tokens; arguments as there."""
    on_gpu = cu_seqlens is not None and cu_seqlens.is_cuda
    lists, q_tile = check_list_shard(cp, q, k, v, block_indices, cu_seqlens, read=validate or not on_gpu)
    config = ListConfig(block_size=block_size, q_tile=q_tile, window_size=0, deterministic=deterministic)
    spec = CallSpec(config, causal, check_scale(softmax_scale, q.shape[-1]), listed=True, branches=SELECTED_ALONE)
    call = Call(q, k, v, cu_seqlens=cu_seqlens, block_indices=block_indices, spec=spec)
    call = support.on_backend(backend, call)
    if cp.mode_of(k.shape[-2]) == "heads":
        static = dict(block_size=block_size, softmax_scale=softmax_scale, causal=causal, validate=validate)
        static |= dict(deterministic=deterministic, backend=backend, return_lse=return_lse)
        function = partial(selected_attention, **static)
        layouts = {TOKENS: token_layout(q.shape[-3], cp), TILES: lists}
        return heads.attend(function, cp, call, layouts, (TOKENS,) * (1 + return_lse))
    lengths = None if cu_seqlens is None or torch.compiler.is_compiling() else whole_lengths(cu_seqlens, q, cp)
    with autocast.off(q.device):
        o, lse = gather.attend(cp, call._replace(spec=replace(call.spec, lengths=lengths)))
    return (o, lse) if return_lse else o
