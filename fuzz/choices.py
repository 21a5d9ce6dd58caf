"""Drawn selections of blocks."""

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
