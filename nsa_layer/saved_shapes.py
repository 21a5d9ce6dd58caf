"""Shapes of the tensors that forward saves for backward, and their capacity for any lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_layer.call import LSES, Call, Saved, accumulation_dtype, lse_shape
from nsa_layer.support import reads_unions

Tensor, Shape = torch.Tensor, tuple[int, ...]


def saved_shapes(call: Call, *, kept: Sequence[bool], exact: bool = False) -> Saved:
    """(shape, dtype) in the place of each tensor, for all heads; None where there is nothing.

    Args:
        exact: for the lengths of ``spec``; otherwise with the capacity for any.
    """
    (q, k, v), spec, config, lead = call[:3], call.spec, call.config, call.q.shape[:-3]
    Hkv, D, Dv, exactly, whole = k.shape[-2], q.shape[-1], v.shape[-1], accumulation_dtype(q.dtype), torch.int32
    lse = (lse_shape(q), exactly)
    if call.alone:
        return Saved(lse_slc=lse)
    tiles, blocks, n = _counts(call, exact=exact)
    found = {name: lse for branch, name in LSES.items() if config.computes(branch)}
    if call.gate != "none":
        found["g"] = ((*q.shape[:-1], len(config.branches)), exactly)
    if config.rule == "index" and call.block_indices is None and spec.backend != "cute":
        of_lists = (*lead, tiles, Hkv, n)
        found["index_scores"] = (of_lists, exactly)
        if spec.index_loss:
            found |= dict(index_mass=(of_lists, exactly), index_tokens=(of_lists, whole), index_sums=((2,), exactly))
    if call.block_indices is None and config.computes("selected"):
        found["block_indices"] = ((*lead, tiles, q.shape[-2] if config.rule == "seed" else Hkv, n), whole)
    if spec.backend != "cute" or call.one_branch:
        return Saved(**found)
    if not reads_unions(config, listed=spec.listed):
        found["block_counts"] = ((*lead, Hkv, tiles), whole)
    for name, size in (("k", D), ("v", Dv)):
        if getattr(call, f"{name}_cmp") is None:
            found[f"{name}_cmp"] = ((*lead, blocks, Hkv, size), q.dtype)
            if getattr(call, f"compress_{name}_weight") is not None:
                found[f"{name}_mean"] = ((*lead, blocks, Hkv, size), exactly)
    outputs = zip(("o_cmp", "o_slc", "o_swa"), (*kept[:2], kept[2] and config.window_size > 0))
    return Saved(**found | {name: ((*q.shape[:-1], Dv), q.dtype) for name, keep in outputs if keep})


def _counts(call: Call, *, exact: bool) -> tuple[int, int, int]:
    """Tiles, compressed blocks and chosen blocks of a tile, as for `saved_shapes`."""
    spec, config, (tokens, keys) = call.spec, call.config, (x.shape[-3] for x in call[:2])
    if exact and spec.lengths is not None:
        tiles, blocks = sum(map(config.num_tiles, spec.lengths)), sum(map(config.compressed_length, spec.key_lengths))
        return tiles, blocks, config.list_width(max(spec.key_lengths))
    n = config.list_width(keys) if exact else config.list_capacity(keys)
    if call.cu_seqlens is None:
        return config.num_tiles(tokens), config.compressed_length(keys), n
    return config.num_tiles(tokens, call.cu_seqlens.shape[0] - 1), config.compressed_capacity(keys), n


def exact_saved(saved: Sequence[Tensor | None], call: Call, *, kept: Sequence[bool]) -> Saved:
    """What was saved with any capacity, cut to the lengths of the call: first rows and columns, contiguous."""

    def cut(x: Tensor, shape: Shape) -> Tensor:
        return x if x.shape == shape else x[tuple(map(slice, shape))].contiguous()

    shapes = saved_shapes(call, kept=kept, exact=True)
    return Saved(*(None if of is None else cut(x, of[0]) for x, of in zip(saved, shapes, strict=True)))


def with_capacity(x: Tensor | None, of: tuple[Shape, torch.dtype] | None) -> Tensor | None:
    """x at the beginning of a tensor of this shape; lists end with -1."""
    if x is None:
        return None
    shape = of[0]
    if tuple(x.shape) == tuple(shape):
        return x
    whole = x.new_full(shape, 0 if x.is_floating_point() else -1)
    whole[tuple(map(slice, x.shape))] = x
    return whole
