"""Compression by a module, of blocks that reach into the tokens of the next ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.layout import ShardLayout, block_ranges
from nsa_layer.context_parallel.spec import ContextParallel, rank_chunks
from nsa_layer.context_parallel.transport import gather

Tensor = torch.Tensor


def compress_shard(
    x: Tensor,
    lengths: tuple[int, ...] | None,
    cp: ContextParallel,
    compress: Callable[[Tensor, tuple[int, ...] | None], Tensor],
    *,
    config: NSAConfig,
) -> Tensor:
    """Compressed rows of the blocks that start in this rank's chunks.

    Args:
        x: [B, n, H, D], packed [n, H, D].
        lengths: of the whole call's packed sequences.
        compress: [B, T, H, D] -> [B, Tc, H, D], or packed and lengths -> packed.

    Returns:
        [B, rows, H, D], packed [rows, H, D].

    Raises:
        NotImplementedError: a graph would have to know lengths of packed sequences.
    """
    if lengths is None and x.dim() == 3:
        raise NotImplementedError("cp in a graph, with cu_seqlens and rows of blocks")
    batch = x if lengths is None else x[None]
    layout = ShardLayout.of_tokens(cp, batch.shape[1])
    blocks = block_ranges(lengths or (layout.total,), layout.counts[0], config.span, config.stride)
    ranges = [[blocks[chunk][0] for chunk in rank_chunks(r, cp.size, cp.load_balance)] for r in range(cp.size)]
    rows = []
    for tokens, chunk in zip(gather(batch, layout, cp, ranges), cp.chunks, strict=True):
        rows.append(compress(tokens, None) if lengths is None else compress(tokens[0], blocks[chunk][1]))
    return torch.cat(rows, dim=1 if lengths is None else 0)
