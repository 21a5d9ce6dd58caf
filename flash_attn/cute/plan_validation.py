"""Whether a plan for SM90 (`backward_plan`) can be launched in its order: nothing waits for ever or is left out.

Items add to dk and dv by their turns and, in deterministic mode, to dq by lock values. Whoever waits has to wait for an
item that is launched before it: one that is launched later may get no room until the others are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.cute.packed_entries import is_packed, packed_rows


@dataclass(frozen=True)
class _Items:
    """int64 [items], in the order of their launch.

    Attributes:
        sequence, head: `head` is a key/value head in plans per group.
        row: the key block, counted over the rows of all packed sequences, or over those of one.
        batch: 0 where those of all are counted.
        count: entries.
        begin: of an item's entries, in its key block's walk.
    """

    sequence: torch.Tensor
    head: torch.Tensor
    row: torch.Tensor
    batch: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor

    @staticmethod
    def of(lists: Any) -> _Items:
        sequence, head, block, begin, end, _ = lists.plan[:, :6].long().unbind(-1)
        if not is_packed(lists):
            return _Items(sequence, head, block, sequence, begin, end - begin)
        row = block + lists.cu_total_n_blocks.long().index_select(0, sequence)
        return _Items(sequence, head, row, torch.zeros_like(row), begin, end - begin)


def check_launch(lists: Any, num_heads: int, num_heads_kv: int) -> None:
    """Check the order of a plan's items, each of which is known to be of a key block and of entries that it lists.

    Args:
        lists: backward lists with a plan.

    Raises:
        ValueError: naming the first item that is wrong.
    """
    items = _Items.of(lists)
    heads = num_heads_kv if lists.plan_per_group else num_heads
    rows = lists.mask_block_cnt.shape[-1]
    if rows == 0:
        return
    if num_heads == num_heads_kv:
        _stored_once(lists, items, heads, rows)
    kv_head = items.head // (heads // num_heads_kv)
    _turns(lists, items, (items.batch * num_heads_kv + kv_head) * rows + items.row)
    if lists.dq_write_order is not None and not lists.plan_per_group:
        _locks(lists, items, heads, rows)


def _stored_once(lists: Any, items: _Items, heads: int, rows: int) -> None:
    """Without GQA an item stores dk and dv of its key block, zeros where nothing is listed: each needs exactly one."""
    batch = 1 if is_packed(lists) else lists.mask_block_cnt.shape[0]
    used = int(lists.cu_total_n_blocks[-1]) if is_packed(lists) else rows
    place = (items.batch * heads + items.head) * rows + items.row
    found = torch.bincount(place, minlength=batch * heads * rows).view(batch, heads, rows)[..., :used]
    if (found != 1).any():
        b, h, row = (found != 1).nonzero()[0].tolist()
        raise ValueError(
            f"backward plan has {int(found[b, h, row])} items for key block {row} of batch {b} and head {h}, expected "
            "one, which stores its dk and dv"
        )


def _turns(lists: Any, items: _Items, shared: torch.Tensor) -> None:
    """shared: what dk and dv an item adds to."""
    busy = (items.count > 0).nonzero().flatten()  # others add nothing
    own, order = shared[busy].sort(stable=True)
    expected = torch.empty_like(own).scatter_(0, order, torch.arange(own.numel(), device=own.device))
    expected -= torch.searchsorted(own, shared[busy])
    wrong = lists.plan[:, 5].long()[busy] != expected
    if wrong.any():
        first = int(wrong.int().argmax())
        at = int(busy[first])
        raise ValueError(
            f"backward plan[{at}] = {lists.plan[at].tolist()}, expected turn {int(expected[first])}: so many items "
            "launched before it add to the same dk and dv, or the GPU hangs"
        )


def _locks(lists: Any, items: _Items, heads: int, rows: int) -> None:
    """The items that add to a query block of a head have lock values that rise with their launch."""
    item = torch.arange(items.count.numel(), device=items.count.device).repeat_interleave(items.count)
    step = (
        torch.arange(item.numel(), device=item.device) - (items.count.cumsum(0) - items.count)[item] + items.begin[item]
    )
    idx, locks = lists.mask_block_idx, lists.dq_write_order
    if idx.ndim == 1:
        starts = packed_rows(lists).rows.starts[0]
        own_head = items.head[item] // (heads // starts.shape[0])
        place = starts[own_head, items.row[item]] + step
        block, lock = idx[place], locks[place]
    else:
        own_head = items.head[item] // (heads // idx.shape[1])
        at = (items.batch[item].clamp(max=idx.shape[0] - 1), own_head, items.row[item], step)
        block, lock = idx[at], locks.expand(idx.shape)[at]
    block = block.long() >> 1
    query = (items.sequence[item] * heads + items.head[item]) * (int(block.max()) + 1 if block.numel() else 1) + block
    order = lock.argsort(stable=True)
    order = order[query[order].argsort(stable=True)]
    query, item, block = query[order], item[order], block[order]
    wrong = (query.diff() == 0) & (item.diff() < 0)
    if wrong.any():
        first = int(wrong.int().argmax())
        before, after = int(item[first]), int(item[first + 1])
        raise ValueError(
            f"backward plan[{after}] = {lists.plan[after].tolist()} waits at query block {int(block[first])} for "
            f"plan[{before}] = {lists.plan[before].tolist()}, which is launched later: lock values have to rise with "
            "the launch, or the GPU hangs"
        )
