"""Tensors that forward on the kernels saves for backward, their shapes, and room for any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nsa_layer.call_spec import CallSpec, CallTensors
from nsa_layer.support import reads_unions

Tensor, Shape = torch.Tensor, tuple[int, ...]


class SavedForBackward(NamedTuple):
    """Tensors that a group's forward leaves to its backward.

    Attributes:
        block_indices, block_counts: the selection, int32 [B, Hkv, M, n] and [B, Hkv, M]; packed without B. For tiles
            of less than 128 queries [B, M, Hkv, n], packed [all tiles, Hkv, n], and None.
        k_cmp, v_cmp: compressed keys and values as attention takes them; None where the caller gave them.
        k_mean, v_mean: the means of their blocks in fp32 where these are projected, else None.
        o_cmp, o_slc, o_swa: the branches' outputs; None where backward recomputes them, or there is no window.
        lse_cmp, lse_slc, lse_swa: fp32 [B, Hq, T], packed [Hq, total], natural, -inf where a row sees no key; None
            without a window.
        g: the gates, fp32 [..., Hq, 3]; None for equal shares.
    """

    block_indices: Tensor
    block_counts: Tensor | None
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_mean: Tensor | None
    v_mean: Tensor | None
    o_cmp: Tensor | None
    o_slc: Tensor | None
    o_swa: Tensor | None
    lse_cmp: Tensor
    lse_slc: Tensor
    lse_swa: Tensor
    g: Tensor | None


def saved_shapes(
    tensors: CallTensors, *, spec: CallSpec, kept: Sequence[bool], exact: bool = False
) -> SavedForBackward:
    """(shape, dtype) in the place of each tensor, for all heads; None where there is nothing.

    Args:
        exact: for the lengths of ``spec``; otherwise with room for any.
    """
    (q, k, v), chosen = tensors[:3], tensors.block_indices is None
    tokens, lead = q.shape[-3], q.shape[:-3]
    Hq, Hkv, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    tiles, blocks, n = _counts(tensors, spec, exact=exact)
    if reads_unions(spec.config, listed=spec.listed):
        lists, counts = (*lead, tiles, Hkv, n), None
    else:
        lists, counts = (*lead, Hkv, tiles, n), (*lead, Hkv, tiles)
    low, exactly, whole = q.dtype, torch.float32, torch.int32
    k_made, v_made = tensors.k_cmp is None, tensors.v_cmp is None
    k_projected, v_projected = tensors.compress_k_weight is not None, tensors.compress_v_weight is not None
    rows = ((*lead, Hq, tokens), exactly)
    window = spec.config.window_size > 0
    outputs = (((*lead, tokens, Hq, Dv), low) if keep else None for keep in (*kept[:2], kept[2] and window))
    o_cmp, o_slc, o_swa = outputs
    return SavedForBackward(
        block_indices=(lists, whole) if chosen else None,
        block_counts=(counts, whole) if chosen and counts is not None else None,
        k_cmp=((*lead, blocks, Hkv, D), low) if k_made else None,
        v_cmp=((*lead, blocks, Hkv, Dv), low) if v_made else None,
        k_mean=((*lead, blocks, Hkv, D), exactly) if k_made and k_projected else None,
        v_mean=((*lead, blocks, Hkv, Dv), exactly) if v_made and v_projected else None,
        o_cmp=o_cmp,
        o_slc=o_slc,
        o_swa=o_swa,
        lse_cmp=rows,
        lse_slc=rows,
        lse_swa=rows if window else None,
        g=((*lead, tokens, Hq, 3), exactly) if tensors.gate != "none" else None,
    )


def _counts(tensors: CallTensors, spec: CallSpec, *, exact: bool) -> tuple[int, int, int]:
    """Tiles, compressed blocks and chosen blocks of a tile, as for `saved_shapes`."""
    config, cu_seqlens, (tokens, keys) = spec.config, tensors.cu_seqlens, (x.shape[-3] for x in tensors[:2])
    if exact and spec.lengths is not None:
        tiles, blocks = sum(map(config.num_tiles, spec.lengths)), sum(map(config.compressed_length, spec.key_lengths))
        return tiles, blocks, config.list_width(max(spec.key_lengths))
    n, tiles = config.list_width(keys) if exact else config.list_room(keys), config.num_tiles(tokens)
    if cu_seqlens is not None:
        return tiles if config.q_tile == 1 else tiles + cu_seqlens.shape[0] - 1, keys // config.stride, n
    blocks = (keys - config.span) // config.stride + 1
    return tiles, max(0, blocks) if isinstance(blocks, int) else torch.sym_max(0, blocks), n


def has_room(tensors: CallTensors, spec: CallSpec) -> bool:
    """True if anything that is saved may be larger than the call's lengths ask for."""
    if tensors.cu_seqlens is None:
        T = tensors.q.shape[-3]
        return spec.config.list_width(T) != spec.config.list_room(T)
    return _counts(tensors, spec, exact=True) != _counts(tensors, spec, exact=False)


def first_of(x: Tensor, shape: Shape) -> Tensor:
    """The first rows and columns of x, of this shape, contiguous."""
    return x if x.shape == shape else x[tuple(map(slice, shape))].contiguous()


def with_room(x: Tensor, shape: Shape) -> Tensor:
    """x, contiguous, at the beginning of a tensor of this shape; lists end with -1."""
    if tuple(x.shape) == tuple(shape):
        return x.contiguous()
    whole = x.new_full(shape, 0 if x.is_floating_point() else -1)
    whole[tuple(map(slice, x.shape))] = x
    return whole
