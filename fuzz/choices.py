"""Drawn selections of blocks, and the tokens that they show."""

from __future__ import annotations

import torch

from nsa_layer.config import NSAConfig


def random_choice(T: int, B: int, H: int, config: NSAConfig, generator: torch.Generator) -> torch.Tensor:
    """Lists int32 [B, H, M, n] of a causal choice: ascending, of any length, padded with -1."""
    M, n, N = config.num_tiles(T), config.list_width(T), config.num_blocks(T)
    indices = torch.full((B, H, M, n), -1, dtype=torch.int32)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, M))).tolist():
        most = min(N, ((i + 1) * config.q_tile - 1) // config.block_size + 1)  # causal: no block after the tile
        count = int(torch.randint(0, min(n, most) + 1, (), generator=generator))
        chosen = torch.randperm(most, generator=generator)[:count].sort().values
        indices[b, h, i, :count] = chosen.to(torch.int32)
    return indices


def visible_tokens(indices: torch.Tensor, T: int, config: NSAConfig, causal: bool) -> torch.Tensor:
    """Tokens that each query sees through its tile's list [B, H, M, n]: bool [B, H, T, T]."""
    B, H, M, _ = indices.shape
    visible = torch.zeros(B, H, T, T, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, M))).tolist():
        for j in indices[b, h, i].tolist():
            if j >= 0:
                rows = slice(i * config.q_tile, (i + 1) * config.q_tile)
                visible[b, h, rows, j * config.block_size : (j + 1) * config.block_size] = True
    return visible.tril() if causal else visible
