"""Options of each branch's attention call, forward and backward, and of the pooling kernels."""

from __future__ import annotations

import torch

from nsa_layer.call import Call
from nsa_layer.config import NSAConfig
from nsa_layer.cute.varlen import Varlen


def pooling_options(config: NSAConfig, varlen: Varlen) -> dict:
    """Options of `mean_pool` and `mean_pool_backward`."""
    starts = dict(cu_seqlens=varlen.cu_seqlens_k, cu_blocks=varlen.cu_compressed)
    return dict(block_size=config.span, stride=config.stride, **starts)


def compressed_options(call: Call, varlen: Varlen) -> dict:
    """Options of the compressed branch: attention to complete blocks under the compressed-causal mask."""
    options = token_options(varlen, varlen.cu_compressed, varlen.longest_compressed)
    if call.spec.causal:
        options |= dict(causal=True, compress_factor=call.config.stride, compress_offset=call.config.offset)
        options["q_offset"] = call.q_offset
    return options


def window_options(call: Call, varlen: Varlen) -> dict:
    """Options of the sliding window of ``config.window_size`` tokens."""
    reach = call.config.window_reach
    window = dict(window_size_left=reach, window_size_right=0 if call.spec.causal else reach)
    if call.win_offset is None:
        return window | token_options(varlen) | dict(q_offset=call.q_offset)
    tokens = token_options(varlen, call.cu_seqlens_win, call.spec.longest_win)
    return window | tokens | dict(q_offset=call.win_offset)


def token_options(varlen: Varlen, cu_seqlens_k: torch.Tensor | None = None, longest_k: int | None = None) -> dict:
    """Options that any call over packed sequences needs, with keys that start there (None: the tokens); none for a
    batch."""
    if varlen.cu_seqlens is None:
        return {}
    if cu_seqlens_k is None:
        cu_seqlens_k, longest_k = varlen.cu_seqlens_k, varlen.longest_k
    starts = dict(cu_seqlens_q=varlen.cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    return starts | dict(max_seqlen_q=varlen.longest, max_seqlen_k=longest_k)
