"""Right block lists made wrong in one place, each in a way that the checks of lists have to notice."""

from __future__ import annotations

import random
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
    sides = [_copy(forward), _copy(backward)]
    at = {"entry lost in forward": 0, "entry lost in backward": 1, "another block in backward": 1}.get(fault)
    at = draw.randrange(2) if at is None else at
    return tuple(sides) if _spoil(fault, sides, at, draw) else None


def _spoil(fault: str, sides: list, at: int, draw: random.Random) -> bool:
    lists = sides[at]
    if fault in ("lock off by one", "locks swapped"):
        return _spoil_locks(fault, sides[1], draw)
    if fault in ("starts shifted", "starts cut"):
        return _spoil_starts(fault, sides, at)
    changes = {
        "int64": lambda: dict(mask_block_idx=lists.mask_block_idx.long()),
        "a row short": lambda: dict(
            mask_block_cnt=lists.mask_block_cnt[..., 1:], mask_block_idx=lists.mask_block_idx[..., 1:, :]
        ),
        "no block size": lambda: dict(block_size=None),
    }
    if fault in changes:
        sides[at] = lists._replace(**changes[fault]())
        return True
    kind = draw.choice([k for k in ("mask", "full") if getattr(lists, f"{k}_block_cnt") is not None])
    cnt = getattr(lists, f"{kind}_block_cnt")
    if fault.startswith("count") and cnt.numel():
        cnt.view(-1)[draw.randrange(cnt.numel())] = BIG if fault == "count too large" else -1 - draw.randrange(3)
        return True
    return _spoil_entry(fault, lists, kind, draw)


def _spoil_entry(fault: str, lists: Any, kind: str, draw: random.Random) -> bool:
    cnt = getattr(lists, f"{kind}_block_cnt")
    used = cnt.flatten().nonzero().flatten().tolist()
    row = draw.choice(used) if used else 0
    count = int(cnt.view(-1)[row]) if used else 0
    entries = _row(lists, kind, row, count) if used else None
    if entries is None or fault == "listed twice" and count < 2:
        return False
    place = draw.randrange(count)
    if fault.startswith("entry lost"):
        cnt.view(-1)[row] -= 1
    elif fault == "listed twice":
        entries[0] = int(entries[-1])
    elif fault == "another block in backward":
        entries[place] = min(set(range(int(entries.max()) + 2)) - set(entries.tolist()))
    else:
        entries[place] = BIG if fault == "index past the end" else -1
    return True


def _row(lists: Any, kind: str, row: int, count: int) -> torch.Tensor | None:
    """A view of a row's entries in use; None for forms whose rows this module does not find."""
    idx = getattr(lists, f"{kind}_block_idx")
    if idx.ndim == getattr(lists, f"{kind}_block_cnt").ndim + 1:
        return idx.view(-1, idx.shape[-1])[row, :count]
    if idx.ndim == 1:
        starts = lists.cu_full_block_idx_offsets if kind == "full" else lists.cu_block_idx_offsets
        start = int(starts.flatten()[row])
        return idx[start : start + count]
    return None


def _spoil_locks(fault: str, lists: Any, draw: random.Random) -> bool:
    orders = [t for t in (lists.dq_write_order, lists.dq_write_order_full) if t is not None]
    entries_used = []
    for order, cnt in zip(orders, (lists.mask_block_cnt, lists.full_block_cnt), strict=False):
        used = torch.arange(order.shape[-1]) < cnt.unsqueeze(-1)
        entries_used += [(order, int(at)) for at in used.flatten().nonzero()]
    if not entries_used:
        return False
    order, at = draw.choice(entries_used)
    value = int(order.view(-1)[at])
    if fault == "lock off by one":
        order.view(-1)[at] = value + 1
        return True
    others = [(o, a) for o, a in entries_used if int(o.view(-1)[a]) != value]
    if not others:
        return False
    other, there = draw.choice(others)
    order.view(-1)[at], other.view(-1)[there] = int(other.view(-1)[there]), value
    return True


def _spoil_starts(fault: str, sides: list, at: int) -> bool:
    name = ("cu_total_m_blocks", "cu_total_n_blocks")[at]
    starts = getattr(sides[at], name)
    if starts is None:
        return False
    spoilt = starts[:-1] if fault == "starts cut" else starts + BIG
    sides[at] = sides[at]._replace(**{name: spoilt})
    return True


def _copy(lists: Any) -> Any:
    """Without repeated strides, so that one place can be written."""
    return each_tensor(lists, lambda t: t.clone(memory_format=torch.contiguous_format))
