"""Compressed keys and values: the mean of each complete block, then an optional projection per key/value head."""

from __future__ import annotations

import torch

from nsa_layer.call import accumulation_dtype, mean_scale
from nsa_layer.config import NSAConfig
from nsa_layer.projection import project


def mean_pool(x: torch.Tensor, *, config: NSAConfig) -> torch.Tensor:
    """Means of complete blocks, in the accumulation dtype: x [B, T, H, D] -> [B, Tc, H, D]."""
    l, d = config.span, config.stride
    Tc = config.compressed_length(x.shape[1])
    if Tc == 0:
        # A product with x keeps the graph connected: the gradient is zero, not missing.
        return x[:, :0].to(accumulation_dtype(x.dtype))
    # A block is l // d strides; summing strides first reads each token once, whatever the overlap. Each sum is scaled
    # before it is taken, forward and backward.
    of_tokens, of_strides = mean_scale(d), mean_scale(l // d)
    tokens = x.to(accumulation_dtype(x.dtype)) / of_tokens
    strides = tokens.unfold(1, d, d).sum(-1)  # a slice of the complete ones would be a guard that no export can prove
    total = strides[:, :Tc] / of_strides
    for shift in range(1, l // d):
        total = total.add(strides[:, shift : shift + Tc], alpha=1 / of_strides)
    return total / (l / (of_tokens * of_strides))


def mean_pool_backward(d_means: torch.Tensor, T: int, *, config: NSAConfig) -> torch.Tensor:
    """The gradient [B, T, H, D] of `mean_pool`'s input, in d_means' dtype; 0 for tokens of no complete block."""
    d, Tc = config.stride, d_means.shape[1]
    strides = d_means.new_zeros(d_means.shape[0], -(-T // d), *d_means.shape[2:])
    for shift in range(config.span // d):
        strides[:, shift : shift + Tc] += d_means
    return strides.div_(config.span).repeat_interleave(d, dim=1)[:, :T]


def compress(x: torch.Tensor, weight: torch.Tensor | None, *, config: NSAConfig) -> torch.Tensor:
    """`mean_pool`, then `project`: [B, T, H, D] -> [B, Tc, H, D], not yet rounded to x's dtype."""
    return project(mean_pool(x, config=config), weight)
