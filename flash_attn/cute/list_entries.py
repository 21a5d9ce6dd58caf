"""Listed blocks one after the other, without the padding of the tensors that list them.

A row lists blocks of the other side: key blocks for a query block in forward lists, query blocks for a key block in
backward lists.

`FlatEntries` is what transposing lists, ordering the adds to dq and merging lists have in common. Everything takes
time and memory in proportion to an upper bound of the blocks listed, and never synchronises with the host.
PyTorch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flash_attn.cute.list_arguments import padded_lists

OptionalTensor = torch.Tensor | None


@dataclass(frozen=True)
class DistinctLists:
    """Mask and full lists with equal leading dimensions, contiguous, and without the dimensions that repeat them."""

    mask_cnt: torch.Tensor
    mask_idx: torch.Tensor
    full_cnt: OptionalTensor
    full_idx: OptionalTensor
    repeated: tuple[int, int]  # (B, H) of the caller's tensors

    @property
    def heads(self) -> int:
        return self.mask_cnt.shape[0] * self.mask_cnt.shape[1]

    @property
    def width(self) -> int:
        return self.mask_idx.shape[3] + (0 if self.full_idx is None else self.full_idx.shape[3])

    def counts(self) -> torch.Tensor:
        """int32 [rows], over all heads."""
        return (self.mask_cnt if self.full_cnt is None else self.mask_cnt + self.full_cnt).flatten()

    def repeat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(*self.repeated, *tensor.shape[2:])


@dataclass(frozen=True)
class FlatEntries:
    """The listed blocks, one after the other: heads, their rows in launch order, mask blocks before full ones.

    Attributes (all [E], E at least the number listed; what lies past it is not `listed`):
        row: head * N + the row's number in its head.
        place: in the row, mask blocks first.
        block: what the row lists there.
        is_full, listed: bool.
    """

    row: torch.Tensor
    place: torch.Tensor
    block: torch.Tensor
    is_full: torch.Tensor
    listed: torch.Tensor
    lists: DistinctLists

    @property
    def N(self) -> int:
        return self.lists.mask_cnt.shape[2]

    def take(self, mask: torch.Tensor, full: OptionalTensor) -> torch.Tensor:
        """The entries' values in two tensors that are laid out like the index lists."""
        return _take(self.row, self.place, self.is_full, self.lists, mask, full)

    def put(self, values: torch.Tensor, *, full: bool) -> torch.Tensor:
        """A tensor like the mask (or full) index list with the entries' values in it, 0 elsewhere."""
        like = self.lists.full_idx if full else self.lists.mask_idx
        place = self.place - _mask_counts(self.row, self.lists) if full else self.place
        own = self.listed & (self.is_full if full else self.is_full.logical_not())
        return scatter(values, self.row.long() * like.shape[3] + place, own, like.shape)


def flat_entries(lists: DistinctLists, order: OptionalTensor, most: int) -> FlatEntries:
    """The listed blocks, without a look at the padding: `most` is at least their number.

    Args:
        order: [1 or B, 1 or H, N], the rows of each head in the order wanted. None: from the first to the last.
    """
    N = lists.mask_cnt.shape[2]
    counts = lists.counts()
    rows = torch.arange(lists.heads * N, device=counts.device, dtype=torch.int32)
    if order is not None and N:
        rows = rows.view(-1, N)
        # Repeated like the lists it may have more heads than is left of them.
        order = narrow(order, lists.mask_cnt.shape[:2])
        rows = (rows.narrow(1, 0, 1) + order.flatten(0, 1)).flatten().int()
        counts = counts.index_select(0, rows)
    most = min(most, lists.heads * N * lists.width)
    ends = counts.cumsum(0)
    at = torch.arange(most, device=counts.device)
    number = torch.searchsorted(ends, at, right=True, out_int32=True)  # rows that end before the entry
    listed = number < rows.numel()
    number = number.clamp(max=max(rows.numel() - 1, 0))
    row = rows.index_select(0, number) if rows.numel() else number
    place = (at - (ends - counts).index_select(0, number)).int() if rows.numel() else number
    place = torch.where(listed, place, 0)
    is_full = place >= _mask_counts(row, lists) if lists.full_idx is not None else torch.zeros_like(listed)
    block = _take(row, place, is_full, lists, lists.mask_idx, lists.full_idx)
    return FlatEntries(row, place, block, is_full, listed, lists)


def _take(
    row: torch.Tensor,
    place: torch.Tensor,
    is_full: torch.Tensor,
    lists: DistinctLists,
    mask: torch.Tensor,
    full: OptionalTensor,
) -> torch.Tensor:
    parts = []
    for tensor, start, own in ((mask, None, is_full.logical_not()), (full, lists.mask_cnt, is_full)):
        if tensor is None or tensor.numel() == 0:
            continue
        at = place if start is None else place - start.flatten().index_select(0, row)
        at = torch.where(own, row.long() * tensor.shape[3] + at, 0)
        parts.append(tensor.flatten().index_select(0, at))
    if not parts:
        return torch.zeros_like(place)
    return parts[0] if len(parts) == 1 else torch.where(is_full, parts[1], parts[0])


def _mask_counts(row: torch.Tensor, lists: DistinctLists) -> torch.Tensor:
    return lists.mask_cnt.flatten().index_select(0, row)


def scatter(values: torch.Tensor, at: torch.Tensor, own: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of `shape` with the values that are `own` at their places; the others go to one place past the end."""
    size = torch.Size(shape).numel()
    spread = torch.zeros(size + 1, dtype=torch.int32, device=values.device)
    spread.scatter_(0, torch.where(own, at, size), values.int())
    return spread.narrow(0, 0, size).view(shape)


def distinct_lists(
    tensors: Sequence[OptionalTensor], order: OptionalTensor, locks: Sequence[OptionalTensor] | None = None
) -> DistinctLists:
    """The lists without what is repeated over batches and heads: computed once, and repeated as they were."""
    padded_lists(tensors)
    given = [t for t in tensors if t is not None]
    repeated = tuple(torch.broadcast_shapes(*(t.shape[:2] for t in given)))
    distinct = [t for t in (*given, order, *(locks or ())) if t is not None]
    shape = [
        1 if all(t.shape[d] == 1 or t.stride(d) == 0 for t in distinct) else max(t.shape[d] for t in distinct)
        for d in (0, 1)
    ]
    repeated = tuple(max(r, s) for r, s in zip(repeated, shape, strict=True))
    return DistinctLists(*(None if t is None else narrow(t, shape) for t in tensors), repeated)


def narrow(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Batch and head dimensions of the given sizes: either cut to 1 or repeated."""
    for d in (0, 1):
        if shape[d] == 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor.expand(*shape, *tensor.shape[2:]).contiguous()
