"""Options of each branch's attention call, forward and backward, and of the pooling kernels."""

from __future__ import annotations

from itertools import accumulate

import torch

from nsa_layer.call import CallSpec
from nsa_layer.cute.host_constants import numbers_on
from nsa_layer.cute.varlen import Varlen


def pooling_options(spec: CallSpec, varlen: Varlen | None) -> dict:
    """Options of `mean_pool` and `mean_pool_backward`."""
    options = dict(block_size=spec.config.span, stride=spec.config.stride)
    return options if varlen is None else options | dict(cu_seqlens=varlen.cu_seqlens_k, cu_blocks=varlen.cu_compressed)


def compressed_options(spec: CallSpec, varlen: Varlen | None, q_offset: torch.Tensor | None) -> dict:
    """Options of the compressed branch: attention to complete blocks under the compressed-causal mask."""
    options: dict = {}
    if varlen is not None:
        lengths = dict(max_seqlen_q=varlen.longest, max_seqlen_k=varlen.longest_compressed)
        options = dict(cu_seqlens_q=varlen.cu_seqlens, cu_seqlens_k=varlen.cu_compressed, **lengths)
    if spec.causal:
        options |= dict(causal=True, compress_factor=spec.config.stride, compress_offset=spec.config.offset)
        options |= position_options(q_offset)
    return options


def window_options(spec: CallSpec, varlen: Varlen | None, q_offset: torch.Tensor | None) -> dict:
    """Options of the sliding window of ``config.window_size`` tokens."""
    reach = max(0, spec.config.window_size - 1)
    window = dict(window_size_left=reach, window_size_right=0 if spec.causal else reach)
    if spec.window is None:
        return window | token_options(varlen) | position_options(q_offset)
    keys, first = zip(*spec.window)
    starts, first = numbers_on(((0, *accumulate(keys)), first * (len(q_offset) // len(first))), q_offset.device)
    tokens = {} if varlen is None else token_options(varlen) | dict(cu_seqlens_k=starts, max_seqlen_k=max(keys))
    return window | tokens | position_options(first)


def position_options(q_offset: torch.Tensor | None) -> dict:
    """Options of a call whose queries have an offset among more keys; none without q_offset."""
    return {} if q_offset is None else dict(q_offset=q_offset)


def token_options(varlen: Varlen | None) -> dict:
    """Options that any call over the tokens of packed sequences needs; none for a batch."""
    if varlen is None:
        return {}
    starts = dict(cu_seqlens_q=varlen.cu_seqlens, cu_seqlens_k=varlen.cu_seqlens_k)
    return starts | dict(max_seqlen_q=varlen.longest, max_seqlen_k=varlen.longest_k)
