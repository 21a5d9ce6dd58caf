"""Compressed keys and values that a call completes: means of cached tokens, read and written in the caches."""

from __future__ import annotations

import torch

from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.pooling.mean_pool import PoolKernel
from nsa_layer.kernels.pooling.tiling import Pooling

Tensor = torch.Tensor
Pair = tuple[Tensor | None, Tensor | None]


def complete_blocks(
    caches: Pair,
    compressed: Pair,
    tables: Pair,
    slots: Tensor,
    *,
    block_size: int,
    stride: int,
    most: int,
    scales: Pair = (None, None),
    compressed_scales: Pair = (None, None),
) -> None:
    """Write the means of the blocks that a call completes, summed in fp32, in one launch.

    Args:
        caches: k and v, [rows, S, H, D], or [pages, page, H, D] with a table; rows are aligned, see `rows_aligned`.
        compressed: caches of compressed keys and values, written; either may be None.
        tables: int32 [B, n], pages of each sequence, of tokens and of compressed keys; None: row b.
        slots: of `locate`.
        most: blocks that a sequence can complete.
        scales, compressed_scales: fp32 [H], of caches and of compressed ones in FP8.
    """
    every = zip(caches, compressed, scales, compressed_scales, strict=True)
    present = [each for each in every if each[1] is not None and 0 not in each[1].shape]
    if present and most:
        (k, v), (k_cmp, v_cmp), *scales = zip(*(present + [(None,) * 4])[:2])
        static = (Pooling(block_size, stride), k.shape[-1], 0 if v is None else v.shape[-1], True)
        tensors = (k, v, k_cmp, None, v_cmp, *tables, slots, *scales[0], *scales[1])
        launch("complete_blocks", PoolKernel, static, *tensors, most)
