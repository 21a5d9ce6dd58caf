"""Tokens on either side of a rank's chunks, which other ranks hold; and compression of blocks that reach into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.layout import ShardLayout, block_ranges
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import gather
from nsa_layer.cute.host_numbers import numbers_on
from nsa_layer.derivatives import ReverseMode
from nsa_layer.projection import project

Tensor = torch.Tensor


def with_halo(x: Tensor, halos: Sequence[tuple[int, int]], most: tuple[int, int], cp: ContextParallel) -> list[Tensor]:
    """Each of a rank's chunks with the tokens beside it.

    Args:
        x: [B, n, ...], a rank's tokens.
        halos: (before, after) each chunk, in tokens: [B, before + chunk + after, ...].
        most: the largest halo of any rank's chunks, the same on every rank.
    """
    chunks = x.split(x.shape[1] // len(cp.chunks), dim=1)
    before = _gather_ends([chunk[:, chunk.shape[1] - min(chunk.shape[1], most[0]) :] for chunk in chunks], cp)
    after = _gather_ends([chunk[:, : most[1]] for chunk in chunks], cp)
    wider = []
    for chunk, number, (left, right) in zip(chunks, cp.chunks, halos, strict=True):
        # Also an empty slice, so that backward makes the same exchanges on every rank.
        end, first = before.shape[1] // cp.num_chunks * number, after.shape[1] // cp.num_chunks * (number + 1)
        wider.append(torch.cat([before[:, end - left : end], chunk, after[:, first : first + right]], dim=1))
    return wider


def _gather_ends(ends: Sequence[Tensor], cp: ContextParallel) -> Tensor:
    """The ends of every rank's chunks, in order."""
    x = torch.cat(ends, dim=1)
    return gather(x, ShardLayout.of_tokens(cp, x.shape[1]), cp) if x.shape[1] else x


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
    """
    batch = x if lengths is None else x[None]
    chunk = batch.shape[1] // len(cp.chunks)
    ranges = block_ranges(lengths or (batch.shape[1] * cp.size,), chunk, config.span, config.stride)
    after = [max(0, first + sum(tokens) - chunk) for first, tokens, _ in ranges]
    if lengths is None and not any(after) and chunk % config.stride == 0:  # chunks are of whole blocks
        return compress(batch, None)
    chunks = with_halo(batch, [(0, after[number]) for number in cp.chunks], (0, max(after)), cp)
    rows = []
    for wider, number in zip(chunks, cp.chunks, strict=True):
        first, tokens, _ = ranges[number]
        wider = wider[:, first : first + sum(tokens)]
        rows.append(compress(wider, None) if lengths is None else compress(wider[0], tokens))
    return torch.cat(rows, dim=1 if lengths is None else 0)


def mean_pool_on_kernels(
    x: Tensor, lengths: tuple[int, ...] | None, *, weight: Tensor | None, config: NSAConfig
) -> Tensor:
    """Compressed blocks, by the kernels, in the dtype of x: [B, T, Hkv, D], or packed [total, Hkv, D]."""
    from nsa_layer.kernels.launch import readable

    options, total = dict(block_size=config.span, stride=config.stride), {}
    if lengths is not None:
        blocks = [config.compressed_length(length) for length in lengths]
        starts = tuple(tuple(accumulate(counts, initial=0)) for counts in (lengths, blocks))
        options |= dict(zip(("cu_seqlens", "cu_blocks"), numbers_on(starts, x.device)))
        total = dict(total_blocks=sum(blocks))
    means = _MeanPool.apply(readable(x), x.dtype if weight is None else torch.float32, options, total)
    return project(means, weight).to(x.dtype)


class _MeanPool(ReverseMode):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, options: dict[str, Any], total: dict[str, int]) -> Tensor:
        from nsa_layer.kernels.pooling.mean_pool import pool

        ctx.options, ctx.shape, ctx.dtype = options, x.shape, x.dtype
        return pool(x, None, k_dtypes=(dtype,), v_dtype=dtype, **options, **total)[0][0]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        from nsa_layer.kernels.pooling.mean_pool import unpool

        dx = d.new_empty(ctx.shape, dtype=ctx.dtype)
        unpool(d.contiguous(), None, dx, None, **ctx.options)
        return dx, None, None, None
