"""Shapes of the tensors that forward saves for backward. They follow from the shapes of a call's tensors: packed
sequences have as many lists and compressed keys as any lengths need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_layer.call import LSES, Call, Saved, accumulation_dtype, lse_shape
from nsa_layer.config import BRANCHES
from nsa_layer.support import reads_unions

Tensor, Shape = torch.Tensor, tuple[int, ...]


def saved_shapes(call: Call, *, kept: Sequence[bool]) -> Saved:
    """(shape, dtype) of each tensor, for all heads; None for one that is not saved."""
    (q, k, v), spec, config, lead = call[:3], call.spec, call.config, call.q.shape[:-3]
    Hkv, D, Dv, exactly, whole = k.shape[-2], q.shape[-1], v.shape[-1], accumulation_dtype(q.dtype), torch.int32
    lse = (lse_shape(q), exactly)
    tiles = config.num_tiles(q.shape[-3], call.B if call.packed else 1)
    of_lists = (*lead, tiles, q.shape[-2] if config.rule == "seed" else Hkv, config.list_width(k.shape[-3]))
    shapes = {name: lse for branch, name in LSES.items() if config.computes(branch)}
    if call.gate != "none":
        shapes["g"] = ((*q.shape[:-1], len(config.branches)), exactly)
    if call.block_indices is None and config.computes("selected"):
        shapes["block_indices"] = (of_lists, whole)
        if spec.index_scores:
            shapes["index_scores"] = (of_lists, exactly)
        if spec.index_loss:
            shapes |= dict(index_dz=(of_lists, exactly), index_sums=((2,), exactly))
            shapes |= dict(index_tokens=(of_lists, whole)) if spec.backend != "cute" else {}
    if spec.backend != "cute" or call.one_branch:
        return Saved(**shapes)
    if config.computes("selected") and not reads_unions(config, D, listed=spec.listed):
        shapes["block_counts"] = ((*lead, Hkv, tiles), whole)
    for name, size in (("k", D), ("v", Dv)) if config.computes("compressed") else ():
        if getattr(call, f"{name}_cmp") is None:
            shapes[f"{name}_cmp"] = ((*lead, call.num_compressed, Hkv, size), q.dtype)
            if getattr(call, f"compress_{name}_weight") is not None:
                shapes[f"{name}_mean"] = ((*lead, call.num_compressed, Hkv, size), exactly)
    outputs = zip(BRANCHES, ("o_cmp", "o_slc", "o_swa"), kept)
    shapes |= {name: ((*q.shape[:-1], Dv), q.dtype) for of, name, keep in outputs if keep and config.computes(of)}
    return Saved(**shapes)


def fitted(x: Tensor | None, of: tuple[Shape, torch.dtype] | None) -> Tensor | None:
    """x cut or padded to a shape: with 0 in floating point, else (lists) with -1."""
    if x is None or of is None or x.shape == of[0]:
        return None if of is None else x
    whole = x.new_full(of[0], 0 if x.is_floating_point() else -1)
    part = tuple(map(slice, map(min, x.shape, of[0])))
    whole[part] = x[part]
    return whole
