"""`selected_attention` of a rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nsa_layer import autocast, support
from nsa_layer.call import Call
from nsa_layer.context_parallel import gather, heads
from nsa_layer.context_parallel.checks import TOKENS, check_list_shard
from nsa_layer.context_parallel.spec import ContextParallel

Tensor = torch.Tensor


def attend(
    selected_attention: Callable[..., Any],
    cp: ContextParallel,
    call: Call,
    *,
    backend: str | None,
    return_lse: bool,
    validate: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selected_attention`, which is passed in, of a rank's tokens; arguments as there."""
    gathers = cp.mode_of(call.k.shape[-2]) == "gather"
    read = gathers or validate or not getattr(call.cu_seqlens, "is_cuda", False)
    spec, layouts = check_list_shard(call, cp, **options, read=read)
    call = support.on_backend(backend, call._replace(spec=spec))
    if gathers:
        with autocast.off(call.q.device):
            o, lse = gather.attend(cp, call)
        return (o, lse) if return_lse else o
    function = partial(selected_attention, **options, backend=backend, validate=validate, return_lse=return_lse)
    return heads.attend(function, cp, call, layouts, (TOKENS,) * (1 + return_lse))
