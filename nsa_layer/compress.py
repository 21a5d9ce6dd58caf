"""k, v -> k_cmp, v_cmp: the mean of each complete block, then an optional projection per key/value head."""

from __future__ import annotations

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.problem import accumulation_dtype


def mean_pool(x: torch.Tensor, *, config: NSAConfig) -> torch.Tensor:
    """Means of `block_size` tokens every `stride` tokens, over complete blocks only.

    Args:
        x: [B, T, H, D].

    Returns:
        [B, Tc, H, D] in fp32 (fp64 for fp64 input); ``Tc = (T - block_size) // stride + 1``, 0 when T < block_size.
    """
    l, d = config.block_size, config.stride
    Tc = config.compressed_length(x.shape[1])
    if Tc == 0:
        # A product with x keeps the graph connected: the gradient is zero, not missing.
        return x[:, :0].to(accumulation_dtype(x.dtype))
    # A block is l // d strides; summing strides first reads each token once, whatever the overlap.
    strides = x[:, : (Tc - 1) * d + l].unflatten(1, (-1, d)).sum(2, dtype=accumulation_dtype(x.dtype))
    total = strides[:, :Tc]
    for shift in range(1, l // d):
        total = total + strides[:, shift : shift + Tc]
    return total / l


def mean_pool_backward(d_pooled: torch.Tensor, T: int, *, config: NSAConfig) -> torch.Tensor:
    """The transpose of `mean_pool`: [B, Tc, H, D] -> [B, T, H, D], tokens of no complete block get 0."""
    l, d = config.block_size, config.stride
    B, Tc, H, D = d_pooled.shape
    dx = d_pooled.new_zeros(B, T, H, D)
    if Tc == 0:
        return dx
    per_token = d_pooled / l
    covered = dx[:, : (Tc - 1) * d + l].unflatten(1, (-1, d))
    for shift in range(l // d):
        covered[:, shift : shift + Tc] += per_token.unsqueeze(2)
    return dx


def project(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """``x[..., h, :] @ weight[h]`` in x's dtype; x: [B, Tc, H, D], weight: [H, D, D] or None for the identity."""
    if weight is None:
        return x
    return torch.einsum("bthd,hde->bthe", x, weight.to(x.dtype))


def compress(x: torch.Tensor, weight: torch.Tensor | None, *, config: NSAConfig) -> torch.Tensor:
    """`mean_pool`, then `project`: [B, T, H, D] -> [B, Tc, H, D], not yet rounded to x's dtype."""
    return project(mean_pool(x, config=config), weight)
