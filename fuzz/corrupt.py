"""Right block lists made wrong in one place, each in a way that the checks of lists have to notice."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

from fuzz.blocks import each_tensor

FAULTS = (
    "count too large", "count negative", "index past the end", "index negative", "listed twice",
    "entry lost in backward", "entry lost in forward", "another block in backward", "lock off by one",
    "locks swapped", "int64", "a row short",
)  # fmt: skip
PACKED_FAULTS = (
    "count too large", "count negative", "index past the end", "listed twice", "entry lost in backward",
    "starts shifted", "starts cut", "no block size",
)  # fmt: skip
# One direction alone shows these; the others only show beside the other direction, or need the semaphore values.
LOCAL = (
    "count too large", "count negative", "index past the end", "index negative", "listed twice", "int64", "a row short",
)  # fmt: skip
BIG = 1 << 15


def spoil(fault: str, forward: Any, backward: Any, seed: int) -> tuple[Any, Any] | None:
    """The lists with one fault in them, or None where these lists have no place for it. The arguments stay whole."""
    draw = random.Random(seed)
    # Without repeated strides, so that one place can be written.
    copied = partial(torch.clone, memory_format=torch.contiguous_format)
    sides = [each_tensor(lists, copied) for lists in (forward, backward)]
    at = 0 if "forward" in fault else 1 if "backward" in fault or "lock" in fault else draw.randrange(2)
    sides[at] = _spoilt(fault, sides[at], draw)
    return None if sides[at] is None else tuple(sides)


def _spoilt(fault: str, lists: Any, draw: random.Random) -> Any:
    if "lock" in fault:
        return _with_wrong_locks(fault, lists, draw)
    if fault.startswith("starts"):
        name = "cu_total_n_blocks" if lists.cu_total_m_blocks is None else "cu_total_m_blocks"
        starts = getattr(lists, name)
        spoilt = {"starts cut": lambda: starts[:-1], "starts shifted": lambda: starts + BIG}
        return None if starts is None else lists._replace(**{name: spoilt[fault]()})
    if fault == "int64":
        return lists._replace(mask_block_idx=lists.mask_block_idx.long())
    if fault == "a row short":
        cnt, idx = lists.mask_block_cnt[..., 1:], lists.mask_block_idx[..., 1:, :]
        return lists._replace(mask_block_cnt=cnt, mask_block_idx=idx)
    if fault == "no block size":
        return lists._replace(block_size=None)
    kind = draw.choice([k for k in ("mask", "full") if getattr(lists, f"{k}_block_cnt") is not None])
    cnt = getattr(lists, f"{kind}_block_cnt").view(-1)
    rows = range(len(cnt)) if fault.startswith("count") else cnt.nonzero().flatten().tolist()
    if not rows:
        return None
    row = draw.choice(rows)
    if fault.startswith("count"):
        cnt[row] = BIG if fault == "count too large" else -1 - draw.randrange(3)
        return lists
    entries = _row(lists, kind, row, int(cnt[row]))
    if fault == "listed twice" and len(entries) < 2:
        return None
    if fault.startswith("entry lost"):
        cnt[row] -= 1
    elif fault == "listed twice":
        entries[0] = int(entries[-1])
    else:
        unlisted = min({*range(int(entries.max()) + 2)} - {*entries.tolist()})
        wrong = {"index past the end": BIG, "index negative": -1, "another block in backward": unlisted}
        entries[draw.randrange(len(entries))] = wrong[fault]
    return lists


def _row(lists: Any, kind: str, row: int, count: int) -> torch.Tensor:
    """A view of a row's entries in use."""
    cnt, idx = getattr(lists, f"{kind}_block_cnt"), getattr(lists, f"{kind}_block_idx")
    if idx.ndim == cnt.ndim + 1:
        return idx.view(-1, idx.shape[-1])[row, :count]
    if idx.ndim == 1:
        starts = lists.cu_full_block_idx_offsets if kind == "full" else lists.cu_block_idx_offsets
        return idx[int(starts.flatten()[row]) :][:count]
    head, row = divmod(row, cnt.shape[1])  # stacked
    before = lists.cu_total_n_blocks if lists.cu_total_m_blocks is None else lists.cu_total_m_blocks
    b = int((before[1:] <= row).sum())
    width = lists.cu_block_idx_offsets.diff()[b] // before.diff()[b]
    return idx[head, int(lists.cu_block_idx_offsets[b] + (row - before[b]) * width) :][:count]


def _with_wrong_locks(fault: str, lists: Any, draw: random.Random) -> Any:
    pairs = ((lists.dq_write_order, lists.mask_block_cnt), (lists.dq_write_order_full, lists.full_block_cnt))
    used = [
        (order.view(-1), int(at))
        for order, cnt in pairs
        if order is not None
        for at in (torch.arange(order.shape[-1]) < cnt.unsqueeze(-1)).flatten().nonzero()
    ]
    if not used:
        return None
    order, at = draw.choice(used)
    value = int(order[at])
    if fault == "lock off by one":
        order[at] = value + 1
        return lists
    others = [(other, there) for other, there in used if int(other[there]) != value]
    if not others:
        return None
    other, there = draw.choice(others)
    order[at], other[there] = int(other[there]), value
    return lists
