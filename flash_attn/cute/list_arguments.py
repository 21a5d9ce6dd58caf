"""What functions on block lists may be called with: a check names the argument, its value, and what was expected.

Nothing here looks into a tensor, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def integer(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} has to be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} has to be at least {least}, got {value}")
    return value


def block_size(value: object) -> tuple[int, int]:
    """(queries, keys) of a block."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"block_size has to be (queries, keys), got {value!r}")
    for part in value:
        if isinstance(part, bool) or not isinstance(part, int) or part < 1:
            raise ValueError(f"block_size has to be two ints of at least 1, got {value!r}")
    return value[0], value[1]


def width(value: object) -> None:
    """Of index lists: None, one number for mask and full lists, or two."""
    if value is None:
        return
    parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(parts) > 2:
        raise ValueError(f"width has to be an int or two, of mask and full lists, got {value!r}")
    for part in parts:
        integer("width", part)


def window_side(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} has to be an int or None, got {value!r}")
    if value < -1:
        raise ValueError(f"{name}={value}, expected at least 0, or None or -1 for no limit")


def tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} has to be a torch.Tensor, got {type(value).__name__}")
    return value


def bool_table(name: str, value: object) -> torch.Tensor:
    """bool with two dimensions or four."""
    mask = tensor(name, value)
    if mask.dtype != torch.bool or mask.ndim not in (2, 4):
        raise ValueError(f"{name} is {mask.dtype} {tuple(mask.shape)}, expected bool with 4 dimensions, or 2")
    return mask


def fields(lists: Any) -> tuple[Any, Any, Any, Any]:
    """Counts and indices, mask and full, of what has the fields of BlockSparseTensorsTorch."""
    try:
        return lists.mask_block_cnt, lists.mask_block_idx, lists.full_block_cnt, lists.full_block_idx
    except AttributeError:
        raise TypeError(f"lists have to be a BlockSparseTensorsTorch, got {type(lists).__name__}") from None


def padded_lists(tensors: Sequence[Any]) -> None:
    """Counts [B, H, N] and indices [B, H, N, width], integers; full ones may be None."""
    for name, cnt, idx in (("mask", *tensors[:2]), ("full", *tensors[2:])):
        if (cnt is None) != (idx is None):
            raise ValueError(f"{name}_block_cnt and {name}_block_idx must be given together")
        if cnt is None and name == "mask":
            raise ValueError("mask_block_cnt and mask_block_idx have to be given, got None")
        if cnt is None:
            continue
        for field, value in ((f"{name}_block_cnt", cnt), (f"{name}_block_idx", idx)):
            if tensor(field, value).dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{field} has to be int32, got {value.dtype}")
        if idx.ndim != 4 or cnt.ndim != 3 or cnt.shape[2] != idx.shape[2]:
            raise ValueError(
                f"{name}_block_cnt {tuple(cnt.shape)} and {name}_block_idx {tuple(idx.shape)} must be [B, H, N] and "
                f"[B, H, N, width]"
            )
    given = dict(zip(("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"), tensors, strict=True))
    sizes = {name: tuple(t.shape[:2]) for name, t in given.items() if t is not None}
    if any(len({size[d] for size in sizes.values()} - {1}) > 1 for d in (0, 1)):
        raise ValueError(f"lists have to have the same batches and heads, or 1, got {sizes}")
