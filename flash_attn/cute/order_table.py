"""Lock values from a table of all pairs of blocks: what lists with room for most of them are faster and smaller by.

`write_order` sorts the blocks listed, some 65 bytes for each that there is room for. A table takes 5 bytes a pair of
blocks and about 16 a place in the lists. Nothing waits for the device. PyTorch only.
"""

from __future__ import annotations

import torch

from flash_attn.cute.list_entries import DistinctLists, narrow

PAIRS = 8  # pairs of blocks for each one that there is room for, up to which a table is smaller

OptionalTensor = torch.Tensor | None


def pays(lists: DistinctLists, M: int, most: int) -> bool:
    """Whether a table is the smaller way, of lists with M query blocks that list so many blocks at most."""
    return 0 < lists.heads * M * lists.mask_cnt.shape[2] <= PAIRS * most


def locks_by_table(lists: DistinctLists, order: OptionalTensor, M: int) -> list[OptionalTensor]:
    """Lock values of mask and full lists, int32 like their indices; 0 after the entries in use.

    Args:
        lists: backward lists in which no block stands twice.
        order: [1 or B, 1 or H, N], the key blocks in the order of their launch. None: from the first to the last.
        M: query blocks.
    """
    B, H, N = lists.mask_cnt.shape
    # The place in the launch of each key block.
    place = torch.arange(N, device=lists.mask_cnt.device).expand(B, H, N)
    if order is not None:
        place = torch.empty_like(place, memory_format=torch.contiguous_format).scatter_(
            2, narrow(order, (B, H)).long(), place
        )
    kinds = [(lists.mask_cnt, lists.mask_idx), (lists.full_cnt, lists.full_idx)]
    pairs = B * H * M * N
    table = torch.zeros(pairs + 1, dtype=torch.int8, device=place.device)
    for cnt, idx in kinds:
        if idx is not None:
            table.scatter_(0, _pairs(cnt, idx, place, M), 1)
    before = table.narrow(0, 0, pairs).view(-1, N).cumsum(1, dtype=torch.int32).flatten()
    del table
    return [None if idx is None else _locks(before, cnt, idx, place, M) for cnt, idx in kinds]


def _pairs(cnt: torch.Tensor, idx: torch.Tensor, place: torch.Tensor, M: int) -> torch.Tensor:
    """Each entry's number in a table [B, H, M, N], and one past it after the entries in use; int64, flat."""
    B, H, N = place.shape
    head = torch.arange(B * H, device=place.device).view(B, H, 1, 1)
    pair = idx.long().clamp_(0, M - 1).add_(head * M).mul_(N).add_(place.unsqueeze(-1))
    return pair.masked_fill_(_unused(cnt, idx), B * H * M * N).flatten()


def _locks(before: torch.Tensor, cnt: torch.Tensor, idx: torch.Tensor, place: torch.Tensor, M: int) -> torch.Tensor:
    pair = _pairs(cnt, idx, place, M).clamp_(max=before.numel() - 1)
    return before.index_select(0, pair).view(idx.shape).sub_(1).masked_fill_(_unused(cnt, idx), 0)


def _unused(cnt: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    return torch.arange(idx.shape[3], device=cnt.device) >= cnt.unsqueeze(-1)
