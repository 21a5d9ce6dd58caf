"""The order in which key blocks add to a query block's dq, and the walk over query blocks that waits least for it.

Backward runs one CTA a key block, and every CTA adds to the dq of the query blocks that its key block lists. For the
same bits twice, the adds to a query block must come in a fixed order: an entry's *semaphore value* says how many adds
to the same query block come before it. Semaphore values follow the launch order of the key blocks, so every wait points
to a CTA that was launched earlier, and the earliest CTA in flight never waits: there is no deadlock.

The order in which a CTA walks its own list is free. By rising semaphore value, each CTA starts where it is first in
line, and its neighbours follow like a wavefront; that needs the mask blocks and the full blocks in one list
(`merged_walk`).

Everything here takes time and memory in proportion to the blocks listed (an upper bound of them, known without asking
the device) besides its padded outputs, reads nothing past a row's count, and never synchronises with the host. PyTorch
only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flash_attn.cute.lists.entries import (
    DistinctLists,
    FlatEntries,
    check_lists,
    distinct_lists,
    fields,
    flat_entries,
    narrow,
    scatter,
    tensor,
)

MOST_QUERY_BLOCKS = 1 << 20  # of one head, where the caller does not say how many there are

OptionalTensor = torch.Tensor | None


class CompactWalk(NamedTuple):
    """Mask and full blocks of each row in one list, by rising semaphore value; a row's entries follow the row before.

    Attributes:
        ends: int64 [H, N], the place after a row's last entry, counted over all rows.
        entries: int32 [listed], ``query_block * 2 + is_full``.
        locks: int32 [listed], adds to the same query block that come first. Both are 0 after the last row's end.
    """

    ends: torch.Tensor
    entries: torch.Tensor
    locks: torch.Tensor

    def in_place_of(self, lists: Any, **fields: torch.Tensor) -> Any:
        """`lists` with this walk, formed as `fields` say, as their one list."""
        none = ("full_block_cnt", "full_block_idx", "cu_full_block_idx_offsets", "dq_write_order_full")
        return lists._replace(**dict.fromkeys(none), **fields)


def compute_dq_write_order(
    fwd_mask_cnt: torch.Tensor,
    fwd_mask_idx: torch.Tensor,
    fwd_full_cnt: OptionalTensor,
    fwd_full_idx: OptionalTensor,
    bwd_mask_cnt: torch.Tensor,
    bwd_mask_idx: torch.Tensor,
    bwd_full_cnt: OptionalTensor,
    bwd_full_idx: OptionalTensor,
    spt: bool = False,
    *,
    order: OptionalTensor = None,
    listed: int | None = None,
) -> tuple[torch.Tensor, OptionalTensor]:
    """Semaphore values for deterministic backward: of each backward entry, the adds to its query block before it.

    Backward lists may come in any order within a row. Of the forward lists only the shapes are used, as an upper bound
    of the number of blocks listed.

    Args:
        fwd_mask_cnt, fwd_full_cnt: int32 [B, H, M]; fwd_mask_idx, fwd_full_idx: int32 [B, H, M, width].
        bwd_mask_cnt, bwd_full_cnt: int32 [B, H, N]; bwd_mask_idx, bwd_full_idx: int32 [B, H, N, width].
        spt: key blocks are launched from the last to the first.
        order: the key blocks in the order of their launch, integers [N], [H, N] or [B, H, N], instead of `spt`.
        listed: upper bound of the blocks listed, all heads and batches together; worth giving when both lists are
            padded to full width.

    Returns:
        (dq_write_order, dq_write_order_full): int32, shaped like the backward index lists (the second is None without
        full lists); 0 after the entries in use.

    Raises:
        ValueError: `spt` and `order` are both given, or a shape does not fit.
    """
    check_lists((bwd_mask_cnt, bwd_mask_idx, bwd_full_cnt, bwd_full_idx))
    order = as_launch_order(spt, order, bwd_mask_cnt.shape[2], bwd_mask_cnt.device)
    lists = distinct_lists((bwd_mask_cnt, bwd_mask_idx, bwd_full_cnt, bwd_full_idx), order)
    M, N = fwd_mask_idx.shape[2], bwd_mask_idx.shape[2]
    forward_width = fwd_mask_idx.shape[3] + (0 if fwd_full_idx is None else fwd_full_idx.shape[3])
    room = min(M * min(forward_width, N), N * min(lists.width, M))  # a head's: no block is listed twice
    most = _at_most(lists.heads * room, listed)
    entries = flat_entries(lists.rows(), lists.launch_order(order), most)
    locks = ranks(entries, M)
    write_order = lists.repeat(entries.put(locks, full=False).view(lists.mask_idx.shape))
    if lists.full_idx is None:
        return write_order, None
    return write_order, lists.repeat(entries.put(locks, full=True).view(lists.full_idx.shape))


def merged_walk(
    lists: Any,
    *,
    order: OptionalTensor = None,
    descending: bool = True,
    width: int | None = None,
    num_q_blocks: int | None = None,
    listed: int | None = None,
) -> Any:
    """Padded `lists` with each key block's mask and full blocks in one list, by rising semaphore value.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`.
        order: as in `compute_dq_write_order`: semaphore values follow from it. None: take those in the lists.
        descending: among equal semaphore values the later query block comes first; right for a launch from the first
            key block to the last. False for the opposite (``spt``).
        width: of the rows of the result, at least the longest row. None: the widths of both lists together.
        num_q_blocks: query blocks of a head, for the sort's keys. None: `MOST_QUERY_BLOCKS`.
        listed: upper bound of the blocks listed, all heads and batches together. None: every place of the lists.

    Returns:
        The lists: entries, ``query_block * 2 + is_full``, in mask_block_idx, their semaphore values in dq_write_order,
        both 0 after the entries in use.

    Raises:
        ValueError: the sort's keys would pass 63 bits (give `num_q_blocks`), or a shape does not fit.
    """
    check_lists(fields(lists))
    N, M = lists.mask_block_cnt.shape[2], MOST_QUERY_BLOCKS if num_q_blocks is None else num_q_blocks
    launch = as_launch_order(False, order, N, lists.mask_block_cnt.device)
    locks = [t for t in (lists.dq_write_order, lists.dq_write_order_full) if t is not None and order is None]
    own = distinct_lists(fields(lists), launch, locks)
    most = _at_most(own.heads * N * min(own.width, M), listed)
    entries = flat_entries(own.rows(), own.launch_order(launch), most)
    if order is None:
        values = entries.pick([narrow(t, own.mask_idx.shape[:2]).flatten() for t in locks])
    else:
        values = ranks(entries, M)
    return _padded(sorted_walk(entries, values, descending, M), own, width, lists)


def ranks(entries: FlatEntries, M: int) -> torch.Tensor:
    """For each entry the number of entries of the same head and query block before it."""
    head = torch.div(entries.row, entries.rows.N, rounding_mode="floor")
    last = entries.rows.heads * M
    key = torch.where(entries.listed, head.long() * M + entries.block, last)
    if last < 1 << 31:
        key = key.int()  # half the passes of a radix sort
    ordered, source = key.sort(stable=True)
    at = torch.arange(key.numel(), device=key.device)
    # Where each run begins, by search: a scan for the latest start (cummax) of one row runs in a single block on a GPU.
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(key, dtype=torch.int32).scatter_(0, source, (at - first).int())


def sorted_walk(entries: FlatEntries, locks: torch.Tensor, descending: bool, M: int) -> CompactWalk:
    """The order in which backward visits query blocks: entries by row, then semaphore value, then query block.

    All of it is in one key, from which the result is read again. `query_loop` follows it.

    M: query blocks are below it.
    """
    rows, N = entries.rows.heads * entries.rows.N, entries.rows.N
    most_locks = max(N, 1)
    if rows * most_locks * M * 2 >= 1 << 63:
        raise ValueError(
            f"num_q_blocks={M} with {rows} rows and {N} key blocks makes keys past 63 bits; give the number of query "
            f"blocks, if there are fewer"
        )
    block = M - 1 - entries.block if descending else entries.block
    key = ((entries.row.long() * most_locks + locks) * M + block) * 2 + entries.is_full
    key = torch.where(entries.listed, key, rows * most_locks * M * 2).sort().values
    entry = key % (2 * M)
    if descending:
        entry = 2 * (M - 1) - entry + 2 * (entry % 2)
    lock = torch.div(key, 2 * M, rounding_mode="floor") % most_locks
    counts = entries.rows.total()
    ends = counts.flatten().cumsum(0).view(counts.shape)
    entry, lock = (
        torch.where(entries.listed, t.int(), 0) for t in (entry, lock)
    )  # listed ones come first, sorted or not
    return CompactWalk(ends, entry, lock)


def _padded(walk: CompactWalk, own: DistinctLists, width: int | None, lists: Any) -> Any:
    width = own.width if width is None else width
    counts, ends = own.counts(), walk.ends.flatten()
    at = torch.arange(walk.entries.numel(), device=ends.device)
    row = torch.searchsorted(ends, at, right=True)
    listed = row < ends.numel()
    row = row.clamp(max=max(ends.numel() - 1, 0))
    place = at - (ends - counts).index_select(0, row) if ends.numel() else at
    shape = (*own.mask_cnt.shape, width)
    entries, locks = (
        own.repeat(scatter(t, row * width + place, listed & (place < width), shape)) for t in (walk.entries, walk.locks)
    )
    counts = own.repeat(counts.view(own.mask_cnt.shape))
    return walk.in_place_of(lists, mask_block_cnt=counts, mask_block_idx=entries, dq_write_order=locks)


def as_launch_order(spt: bool, order: OptionalTensor, N: int, device: torch.device) -> OptionalTensor:
    """[1 or B, 1 or H, N], or None for 0 .. N - 1."""
    if order is None:
        return torch.arange(N - 1, -1, -1, device=device, dtype=torch.int32).view(1, 1, N) if spt else None
    if spt:
        raise ValueError("spt=True and order are both given: an order says which key block is launched first")
    if not 1 <= tensor("order", order).ndim <= 3 or order.shape[-1] != N:
        raise ValueError(f"order has shape {tuple(order.shape)}, expected [N], [H, N] or [B, H, N] with N = {N}")
    return order.to(device).view(*(1,) * (3 - order.ndim), *order.shape)


def _at_most(bound: int, listed: int | None) -> int:
    return bound if listed is None else min(bound, listed)
