"""Compressed keys and values outside of `nsa`: by a network over the tokens of a block, or by means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nsa_layer.checks import check_lengths
from nsa_layer.config import NSAConfig
from nsa_layer.eager.pooling import compress

# `compressed` for "k_cmp" and "v_cmp" with their networks or weights: (x, lengths, starts) -> compressed tokens of x.
Compressors = Mapping[str, Callable[..., torch.Tensor]]


class BlockMLP(nn.Module):
    """Two layers over all tokens of a compressed block, for each key/value head, as in arXiv:2502.11089.

    An embedding of its position in the block is added to each token; between the layers, of 2 D units, is a GELU.
    """

    def __init__(self, heads: int, dim: int, *, config: NSAConfig, **at: Any) -> None:
        super().__init__()
        self.config = config
        self.position = nn.Parameter(torch.empty(heads, config.span, dim, **at))
        self.up = nn.Parameter(torch.empty(heads, config.span * dim, 2 * dim, **at))
        self.down = nn.Parameter(torch.empty(heads, 2 * dim, dim, **at))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw layers of deviation 1 / sqrt(fan in), and small embeddings."""
        nn.init.normal_(self.position, std=0.02)  # of torch.nn.init, which transformers keeps from what it has loaded
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, Hkv, D] -> [B, Tc, Hkv, D], one for each complete block."""
        if self.config.compressed_length(x.shape[1]) > 0:
            blocks = x.unfold(1, self.config.span, self.config.stride).transpose(-1, -2)  # [B, Tc, Hkv, l, D]
        else:  # none, through the layers all the same: their gradients are zero, not missing
            blocks = x[:, :0, :, None].expand(-1, -1, -1, self.config.span, -1)
        tokens = blocks.flatten(-2) + self.position.flatten(-2)  # copied first: no export could prove its strides
        rows = tokens.flatten(0, 1).transpose(0, 1)  # [Hkv, B * Tc, l * D]
        compressed = torch.bmm(F.gelu(torch.bmm(rows, self.up)), self.down)
        return compressed.transpose(0, 1).unflatten(0, blocks.shape[:2])


def compressed(
    x: torch.Tensor,
    lengths: tuple[int, ...] | None = None,
    starts: torch.Tensor | None = None,
    *,
    network: BlockMLP | None,
    weight: torch.Tensor | None,
    config: NSAConfig,
) -> torch.Tensor:
    """Compressed tokens in the dtype of x: [B, T, Hkv, D] -> [B, Tc, Hkv, D], packed [total, Hkv, D] -> [all, Hkv, D].

    Args:
        lengths: of packed sequences, none of whose blocks holds tokens of two.
        starts: int32 [sequences + 1], of packed sequences whose lengths are not known; the result then has rows for as
            many blocks as there could be, of which the last ones may be of anything.
        network: instead of the mean and the projection by weight [Hkv, D, D].
    """
    static = dict(network=network, weight=weight, config=config)
    if lengths is not None:
        return torch.cat([compressed(part.unsqueeze(0), **static)[0] for part in x.split(lengths)])
    if starts is not None:
        return compressed(_packed_blocks(x, starts, config), **static).squeeze(1)
    return (compress(x, weight, config=config) if network is None else network(x)).to(x.dtype)


def compress_sequences(
    compressors: Compressors, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, *, read: bool = True
) -> dict[str, torch.Tensor]:
    """Arguments k_cmp and v_cmp of whole sequences, packed ones with ``cu_seqlens``, whose lengths are ``read``."""
    lengths = None
    if compressors and cu_seqlens is not None:
        lengths = check_lengths(cu_seqlens, k, "cu_seqlens", "q", read=read)
    return {name: f(x, lengths, cu_seqlens) for (name, f), x in zip(compressors.items(), (k, v))}


def compress_blocks(compressors: Compressors, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Compressed keys and values of blocks: [blocks, span, Hkv, D] -> [blocks, Hkv, D]."""
    return [f(x).squeeze(1) for f, x in zip(compressors.values(), (k, v), strict=True)]


def _packed_blocks(x: torch.Tensor, starts: torch.Tensor, config: NSAConfig) -> torch.Tensor:
    """[total, Hkv, D] -> [rows, l, Hkv, D], the tokens of the complete blocks of all sequences, in order."""
    total, starts = x.shape[0], starts.to(x.device).long()
    counts = config.compressed_length(starts.diff())
    ends = counts.cumsum(0)
    block = torch.arange(config.compressed_capacity(total), device=x.device)
    sequence = torch.searchsorted(ends, block, right=True).clamp(max=counts.shape[0] - 1)
    first = starts[sequence] + (block - (ends - counts)[sequence]) * config.stride
    tokens = first[:, None] + torch.arange(config.span, device=x.device)
    return x[tokens.clamp(max=total - 1)]
