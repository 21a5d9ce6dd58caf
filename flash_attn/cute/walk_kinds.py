"""Walks of key blocks, whose entries say which blocks are full, taken apart into mask and full lists again.

`write_order` sorts a key block's mask and full blocks into one walk by rising lock value, which SM90 follows as it is.
SM100 walks mask blocks first, then full ones: each kind in the walk's order. PyTorch only.
"""

from typing import Any

import torch

MASK = ("mask_block_cnt", "mask_block_idx", "dq_write_order")
FULL = ("full_block_cnt", "full_block_idx", "dq_write_order_full")


def by_kind(lists: Any, full: bool = True) -> Any:
    """Lists of each kind out of lists of one walk a key block, with their lock values.

    Args:
        lists: padded, compact or ragged backward lists without full ones, whose entries are ``2 * block + is_full``;
            rows of ragged ones stand in memory in their order, and nothing between them.
        full: whether any entry may be full; otherwise what comes out has no full lists.
    """
    if not full:
        return lists._replace(mask_block_idx=lists.mask_block_idx >> 1)
    return _ragged(lists) if lists.mask_block_idx.ndim == 1 else _in_rows(lists)


def _in_rows(lists: Any) -> Any:
    cnt, idx, locks = (getattr(lists, name) for name in MASK)
    place = torch.arange(idx.shape[-1], device=idx.device)
    used = place < cnt.unsqueeze(-1)
    mask_first = torch.where(used, idx & 1, 2).argsort(dim=-1, stable=True)
    idx, locks, is_full = (t.gather(-1, mask_first) for t in (idx, locks.expand(idx.shape), used & (idx & 1 == 1)))
    fulls = is_full.sum(-1, dtype=torch.int32)
    masks = cnt - fulls
    shifted = (place + masks.unsqueeze(-1)).clamp(max=max(idx.shape[-1] - 1, 0))
    idx = idx >> 1
    return _of_kinds(lists, (masks, idx, locks), (fulls, idx.gather(-1, shifted), locks.gather(-1, shifted)))


def _ragged(lists: Any) -> Any:
    """Full entries of a row behind its mask entries; both kinds in one tensor."""
    cnt, idx, locks = (getattr(lists, name) for name in MASK)
    ends = cnt.flatten().cumsum(0)
    row = torch.searchsorted(ends, torch.arange(idx.numel(), device=idx.device), right=True)
    is_full = (idx & 1 == 1) & (row < ends.numel())
    order = (row * 2 + is_full).argsort(stable=True)
    fulls = torch.zeros(ends.numel() + 1, dtype=cnt.dtype, device=cnt.device)
    fulls = fulls.scatter_add_(0, row, is_full.to(cnt.dtype)).narrow(0, 0, ends.numel()).view(cnt.shape)
    masks = cnt - fulls
    idx, locks = (idx >> 1).index_select(0, order), locks.index_select(0, order)
    starts = lists.cu_block_idx_offsets + masks
    return _of_kinds(lists, (masks, idx, locks), (fulls, idx, locks))._replace(cu_full_block_idx_offsets=starts)


def _of_kinds(lists: Any, mask: tuple[torch.Tensor, ...], full: tuple[torch.Tensor, ...]) -> Any:
    return lists._replace(**dict(zip(MASK, mask, strict=True)), **dict(zip(FULL, full, strict=True)))
