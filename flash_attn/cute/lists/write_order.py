"""Semaphore values: the order in which key blocks add to a query block's dq, and lists sorted to wait least.

A CTA of backward adds to the dq of every query block that its key block lists. An entry's *semaphore value* is the
number of key blocks that add to the same query block before. Values follow the launch order of the key blocks, so a CTA
only waits for CTAs launched earlier, and there is no deadlock. A CTA loops over its list by ascending semaphore value:
it starts where it is first, and its neighbours follow as a wavefront. That needs mask and full blocks in one list
(`merged_lists`).

Time and memory are proportional to an upper bound of the blocks listed; nothing synchronises with the host. PyTorch
only.
"""

from types import SimpleNamespace
from typing import Any

import torch

from flash_attn.cute.lists.csr import is_packed, packed_rows, refuse_shared_entries, with_heads
from flash_attn.cute.lists.entries import (
    LIST_KINDS,
    LISTS,
    FlatEntries,
    Rows,
    check_lists,
    fields,
    flat_entries,
    integer,
    padded_rows,
    scatter,
    tensor,
)

MOST_QUERY_BLOCKS = 1 << 20  # of one head, where the caller does not say how many there are

OptionalTensor = torch.Tensor | None


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
    """Semaphore values for deterministic backward: of each backward entry the number of adds to its query block before.

    Backward rows may be in any order. Of the forward lists only the shapes are used, as an upper bound of the number of
    blocks listed.

    Args:
        fwd_mask_cnt, fwd_full_cnt: int32 [B, H, M]; fwd_mask_idx, fwd_full_idx: int32 [B, H, M, width].
        bwd_mask_cnt, bwd_full_cnt: int32 [B, H, N]; bwd_mask_idx, bwd_full_idx: int32 [B, H, N, width].
        spt: key blocks are launched from the last to the first.
        order: launch order of the key blocks, integers [N], [H, N] or [B, H, N], instead of `spt`.
        listed: upper bound of the blocks listed, all heads and batches together; saves time if both lists are padded to
            full width.

    Returns:
        (dq_write_order, dq_write_order_full): int32, shaped like the backward index lists (the second is None without
        full lists); 0 after the entries in use.

    Raises:
        ValueError: `spt` and `order` are both given, or a shape does not fit.
    """
    backward = (bwd_mask_cnt, bwd_mask_idx, bwd_full_cnt, bwd_full_idx)
    check_lists(backward)
    order = as_launch_order(spt, order, bwd_mask_cnt.shape[2], bwd_mask_cnt.device)
    rows = padded_rows(SimpleNamespace(**dict(zip(LISTS, backward, strict=True))), order)
    M, N = fwd_mask_idx.shape[2], bwd_mask_idx.shape[2]
    forward_width = fwd_mask_idx.shape[3] + (0 if fwd_full_idx is None else fwd_full_idx.shape[3])
    capacity = min(M * min(forward_width, N), N * min(rows.width, M))  # of a head, which lists no block twice
    flat = _semaphore_values(rows, rows.launch_order(order), M, _at_most(rows.heads * capacity, listed))
    widths = [idx.shape[-1] for idx in (bwd_mask_idx, bwd_full_idx) if idx is not None]
    values = [rows.padded(x.view(rows.heads, N, width)) for x, width in zip(flat, widths, strict=True)]
    return values[0], values[1] if len(values) > 1 else None


def packed_write_order(
    lists: Any,
    *,
    num_q_blocks: int,
    spt: bool = False,
    listed: int | None = None,
    cu_total_m_blocks: OptionalTensor = None,
) -> Any:
    """Backward lists of packed sequences with semaphore values: `compute_dq_write_order` of packed lists.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`; semaphore values in them are replaced.
        num_q_blocks: of the longest sequence.
        spt: key blocks are launched from the last to the first.
        listed: upper bound of the blocks listed, all heads and sequences together. None: the capacity of the lists.
        cu_total_m_blocks: integers [B + 1], of the forward lists, which stacked lists need.

    Returns:
        The lists with `spt`, dq_write_order and, if there are full lists, dq_write_order_full, 0 after the entries in
        use. Compact and stacked lists of one head are repeated where others have more heads.

    Raises:
        TypeError, ValueError: lists of another form, stacked ones without `cu_total_m_blocks`, ragged ones whose heads
            share entries, or a wrong number.
    """
    check_lists(fields(lists), packed=True)
    integer("num_q_blocks", num_q_blocks)
    if listed is not None:
        integer("listed", listed, least=0)
    if not isinstance(spt, bool):
        raise TypeError(f"spt must be a bool, got {spt!r}")
    heads = max(t.shape[0] for t in with_heads(lists).values())
    if lists.mask_block_idx.ndim == 1:
        refuse_shared_entries(lists, heads)
    else:  # semaphore values are per head
        of_heads = {name: t for name, t in with_heads(lists).items() if name in LISTS}
        lists = lists._replace(**{name: t.expand(heads, *t.shape[1:]).contiguous() for name, t in of_heads.items()})
    rows = packed_rows(lists._replace(dq_write_order=None, dq_write_order_full=None), cu_total_m_blocks)
    order = torch.arange(rows.N, device=rows.sequence.device).flip(0) if spt else None
    flat = _semaphore_values(rows, order, num_q_blocks, rows.capacity if listed is None else listed)
    values = {kind.order: x.view(getattr(lists, kind.idx).shape) for kind, x in zip(LIST_KINDS, flat, strict=False)}
    return lists._replace(**{"dq_write_order_full": None, **values, "spt": spt})


def _semaphore_values(rows: Rows, order: OptionalTensor, M: int, most: int) -> list[torch.Tensor]:
    """Semaphore values per kind, flat and laid out like the indices. most: upper bound of the entries."""
    entries = flat_entries(rows, order, most, M)
    values = ranks(entries, rows.sequences * M)
    return [entries.put(values, full=bool(full)) for full in range(len(rows.counts))]


def merged_lists(
    lists: Any,
    *,
    order: OptionalTensor = None,
    descending: bool = True,
    width: int | None = None,
    num_q_blocks: int | None = None,
    listed: int | None = None,
    cu_total_m_blocks: OptionalTensor = None,
) -> Any:
    """Lists with each key block's mask and full blocks merged, by ascending semaphore value; packed lists get ragged.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`.
        order: launch order as in `compute_dq_write_order`, of packed lists [1 or H, rows], for new semaphore values.
            None: keep those in the lists.
        descending: order of query blocks with equal semaphore values; False for ``spt``.
        width: of padded rows, at least the longest row. None: that of both lists, at most `num_q_blocks`.
        num_q_blocks: query blocks of a head, in the longest sequence. None: `MOST_QUERY_BLOCKS`.
        listed: upper bound of the blocks listed, all heads and batches together. None: the capacity of the lists.
        cu_total_m_blocks: as in `packed_write_order`.

    Returns:
        The lists: entries, ``block * 2 + is_full``, in mask_block_idx, their semaphore values in dq_write_order,
        both 0 after the entries in use.

    Raises:
        ValueError: sort keys would exceed 63 bits (give `num_q_blocks`), or a shape does not fit.
    """
    fields(lists)
    M, packed, launch = MOST_QUERY_BLOCKS if num_q_blocks is None else num_q_blocks, is_packed(lists), order
    if packed:
        rows = packed_rows(lists, cu_total_m_blocks)
        most = rows.capacity if listed is None else listed
    else:
        check_lists(fields(lists))
        order = as_launch_order(False, order, lists.mask_block_cnt.shape[2], lists.mask_block_cnt.device)
        rows = padded_rows(lists, order, locks=order is None)
        most, launch = _at_most(rows.heads * rows.N * min(rows.width, M), listed), rows.launch_order(order)
    entries = flat_entries(rows, launch, most, M)
    locks = entries.pick(rows.locks) if launch is None else ranks(entries, rows.sequences * M)
    entry, locks = sorted_entries(entries, locks, descending, rows.sequences * M)
    counts = rows.total()
    ends = counts.flatten().cumsum(0).view(counts.shape)
    if packed:
        starts = ends - counts
        merged = dict(mask_block_cnt=counts.int(), mask_block_idx=entry % (2 * M), cu_block_idx_offsets=starts)
    else:
        width = min(rows.width, M) if width is None else width
        at = torch.arange(entry.numel(), device=ends.device)
        row = torch.searchsorted(ends.flatten(), at, right=True)
        listed_here = row < ends.numel()
        row = row.clamp(max=max(ends.numel() - 1, 0))
        position = at - (ends - counts).flatten().index_select(0, row) if ends.numel() else at
        shape, kept = (rows.heads, rows.N, width), listed_here & (position < width)
        entry, locks = (rows.padded(scatter(t, row * width + position, kept, shape)) for t in (entry, locks))
        merged = dict(mask_block_cnt=rows.padded(counts), mask_block_idx=entry)
    none = ("full_block_cnt", "full_block_idx", "cu_full_block_idx_offsets", "dq_write_order_full")
    return lists._replace(**dict.fromkeys(none), **merged, dq_write_order=locks)


def ranks(entries: FlatEntries, M: int) -> torch.Tensor:
    """For each entry the number of entries of the same head and query block before it."""
    head = torch.div(entries.row, entries.rows.N, rounding_mode="floor")
    last = entries.rows.heads * M
    key = torch.where(entries.listed, head.long() * M + entries.block, last)
    if last < 1 << 31:
        key = key.int()  # half the passes of a radix sort
    ordered, source = key.sort(stable=True)
    at = torch.arange(key.numel(), device=key.device)
    # Start of each run by binary search: a cummax over one row would run in a single CTA.
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(key, dtype=torch.int32).scatter_(0, source, (at - first).int())


def sorted_entries(
    entries: FlatEntries, locks: torch.Tensor, descending: bool, M: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries ``block * 2 + is_full`` and semaphore values, sorted by row, then semaphore value, then query block.

    One sort of keys that hold all of these, and are decoded again; 0 past the last entry. M: exclusive bound of query
    blocks.
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
    # `listed` holds for the sorted entries too: unlisted ones are last in both.
    return tuple(torch.where(entries.listed, t.int(), 0) for t in (entry, lock))


def as_launch_order(spt: bool, order: OptionalTensor, N: int, device: torch.device) -> OptionalTensor:
    """The launch order as [1 or B, 1 or H, N]; None for 0 .. N - 1."""
    if order is None:
        return torch.arange(N - 1, -1, -1, device=device, dtype=torch.int32).view(1, 1, N) if spt else None
    if spt:
        raise ValueError("spt=True and order are both given: an order says which key block is launched first")
    if not 1 <= tensor("order", order).ndim <= 3 or order.shape[-1] != N:
        raise ValueError(f"order has shape {tuple(order.shape)}, expected [N], [H, N] or [B, H, N] with N = {N}")
    return order.to(device).view(*(1,) * (3 - order.ndim), *order.shape)


def _at_most(bound: int, listed: int | None) -> int:
    return bound if listed is None else min(bound, listed)
