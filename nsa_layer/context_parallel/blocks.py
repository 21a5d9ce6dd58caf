"""Compression of the blocks that start in a rank's chunks, with the tokens of following ones that they reach into."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.halo import with_neighbours
from nsa_layer.context_parallel.rows import pieces
from nsa_layer.context_parallel.spec import ContextParallel

Tensor = torch.Tensor
Compress = Callable[[Tensor, tuple[int, ...] | None], Tensor]


def compress_own(
    x: Tensor, lengths: tuple[int, ...] | None, cp: ContextParallel, compress: Compress, *, config: NSAConfig
) -> Tensor:
    """Compressed rows of the blocks that start in this rank's chunks.

    Args:
        x: [B, n, H, D], packed [n, H, D].
        lengths: of the whole call's packed sequences.
        compress: makes [B, Tc, H, D] of [B, T, H, D], or of packed ones and their lengths.

    Returns:
        [B, rows, H, D], packed [rows, H, D].
    """
    batch = x if lengths is None else x[None]
    chunk = batch.shape[1] // len(cp.chunks)
    wanted = pieces(lengths or (batch.shape[1] * cp.size,), chunk, config.span, config.stride)
    behind = max(0, max(piece.begin + sum(piece.lengths) for piece in wanted) - chunk)
    if lengths is None and not behind and chunk % config.stride == 0:  # chunks are of whole blocks
        return compress(batch, None)
    after = [max(0, wanted[number].begin + sum(wanted[number].lengths) - chunk) for number in cp.chunks]
    parts, made = with_neighbours(batch, [(0, each) for each in after], (0, behind), cp), []
    for part, number in zip(parts, cp.chunks, strict=True):
        begin, own, _ = wanted[number]
        part = part[:, begin : begin + sum(own)]
        made.append(compress(part, None) if lengths is None else compress(part[0], own))
    return torch.cat(made, dim=1 if lengths is None else 0)
