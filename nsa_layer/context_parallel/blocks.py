"""Compression of the blocks that start in a rank's chunks, with the tokens of following ones that they reach into."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from nsa_layer.compress import project
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.halo import with_neighbours
from nsa_layer.context_parallel.rows import pieces
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.host_numbers import numbers_on
from nsa_layer.derivatives import ReverseMode

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


class _Pooled(ReverseMode):
    """Means of complete blocks, by the kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, options: dict[str, Any], total: int | None) -> Tensor:
        from nsa_layer.kernels.pooling.mean_pool import pool

        ctx.options, ctx.like = options, (x.shape, x.dtype)
        more = dict(total_blocks=total) if total is not None else {}
        return pool(x, None, k_dtypes=(dtype,), v_dtype=dtype, **options, **more)[0][0]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        from nsa_layer.kernels.pooling.mean_pool import unpool

        dx = d.new_empty(ctx.like[0], dtype=ctx.like[1])
        unpool(d.contiguous(), None, dx, None, **ctx.options)
        return dx, None, None, None


def pooled(x: Tensor, lengths: tuple[int, ...] | None, *, weight: Tensor | None, config: NSAConfig) -> Tensor:
    """Blocks compressed by the kernels, in the dtype of x: [B, T, Hkv, D], or packed [total, Hkv, D]."""
    from nsa_layer.kernels.launch import readable

    options, total = dict(block_size=config.span, stride=config.stride), None
    if lengths is not None:
        blocks = [config.compressed_length(length) for length in lengths]
        starts = [tuple(accumulate(each, initial=0)) for each in (lengths, blocks)]
        options |= dict(zip(("cu_seqlens", "cu_blocks"), numbers_on(tuple(starts), x.device)))
        total = sum(blocks)
    means = _Pooled.apply(readable(x), x.dtype if weight is None else torch.float32, options, total)
    return project(means, weight).to(x.dtype)
