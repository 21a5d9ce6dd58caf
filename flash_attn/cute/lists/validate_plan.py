"""Checks of a backward plan's items, which name the first wrong one. Waits for the device.

Items add to dk and dv by their turns and, in deterministic mode, to dq by lock values. Whoever waits has to wait for an
item that is launched before it: one that is launched later may get no room until the others are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.cute.lists.backward_plan import check_form, row_counts
from flash_attn.cute.lists.csr import is_packed, packed_rows


@dataclass(frozen=True)
class _Items:
    """int64 [items], in the order of their launch.

    Attributes:
        plan: as given, to name items.
        counts: [B, H, N], what key blocks list; B is 1 where rows of all packed sequences are rows of one, and H
            the query heads or, in plans per group, the key/value heads.
        batch, head, row: of `counts`. sequence: `batch`, or the packed sequence.
        key_block: the item's place in `counts`, flat.
        begin, end: of its entries, in its key block's list.
    """

    plan: torch.Tensor
    counts: torch.Tensor
    sequence: torch.Tensor
    batch: torch.Tensor
    head: torch.Tensor
    row: torch.Tensor
    key_block: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    def named(self, at: int) -> str:
        return f"plan[{at}] = {self.plan[at].tolist()}"


def check_items(lists: Any, num_heads: int, num_heads_kv: int) -> None:
    """Check that items deal out what key blocks list, each entry once, and that none waits for one launched later.

    Args:
        lists: backward lists with a plan.

    Raises:
        ValueError: naming the first item that is wrong.
    """
    check_form(lists)
    heads = num_heads_kv if lists.plan_per_group else num_heads
    packed = packed_rows(lists) if is_packed(lists) else None
    counts = row_counts(lists) if packed is None else packed.rows.total().unsqueeze(0)
    counts = counts.long().repeat_interleave(heads // counts.shape[1], dim=1)
    if counts.numel() == 0:
        return
    items = _within_lists(lists, packed, counts)
    _each_entry_once(items)
    if num_heads == num_heads_kv:
        used = counts.shape[2] if packed is None else int(lists.cu_total_n_blocks[-1])
        _stored_once(items, used)
    _turns(items, heads // num_heads_kv)
    if lists.dq_write_order is not None and not lists.plan_per_group:
        _locks(lists, packed, items)


def _within_lists(lists: Any, packed: Any, counts: torch.Tensor) -> _Items:
    """Items are of key blocks that there are, and of entries that these list."""
    plan, (B, H, N) = lists.plan.long(), counts.shape
    sequence, head, block, begin, end = plan[:, :5].unbind(-1)
    wrong, batch, row = block < 0, sequence, block
    if packed is not None:
        before = lists.cu_total_n_blocks.long()
        known = sequence.clamp(0, packed.sequences - 1)
        wrong |= (sequence != known) | (block >= before.diff()[known])
        batch, row = torch.zeros_like(batch), before[known] + block
    place, limits = torch.stack([batch, head, row], dim=-1), torch.tensor([B, H, N], device=plan.device)
    wrong |= ((place < 0) | (place >= limits)).any(-1) | (begin < 0) | (begin > end)
    key_block = ((batch * H + head) * N + row).clamp(0, counts.numel() - 1)
    wrong |= end > counts.flatten()[key_block]
    if lists.mask_block_idx.ndim == 1:
        starts = packed.rows.starts[0].repeat_interleave(H // packed.rows.heads, dim=0)
        low, high = plan[:, 6] & 0xFFFFFFFF, plan[:, 7]
        wrong |= (end > begin) & (starts.flatten()[key_block] != ((high << 32) | low))
    wrong &= plan.any(-1)  # what a plan has room for beyond its items is zeros
    items = _Items(lists.plan, counts, sequence, batch, head, row, key_block, begin, end)
    if wrong.any():
        raise ValueError(
            f"backward {items.named(int(wrong.int().argmax()))}, expected batch, head and key block within "
            f"{[B, H, N]} and entries within what the key block lists"
        )
    return items


def _each_entry_once(items: _Items) -> None:
    counts, (_, H, N) = items.counts.flatten(), items.counts.shape
    planned = torch.zeros_like(counts).scatter_add_(0, items.key_block, items.end - items.begin)
    short = planned != counts
    # Stretches of one list that begin elsewhere than the one before ends overlap, or leave a gap.
    used = items.end > items.begin
    order = (items.key_block * (int(items.end.max()) + 1) + items.begin)[used].argsort()
    key_block, begin, end = (t[used][order] for t in (items.key_block, items.begin, items.end))
    same = torch.nn.functional.pad(key_block.diff() == 0, (1, 0)) if key_block.numel() else key_block.bool()
    short[key_block[begin != end.roll(1).where(same, 0)]] = True
    if short.any():
        at = int(short.int().argmax())
        raise ValueError(
            f"backward plan deals out {int(planned[at])} entries of key block {at % N} for batch {at // (H * N)} and "
            f"head {at // N % H}, expected the {int(counts[at])} that it lists, each once"
        )


def _stored_once(items: _Items, used: int) -> None:
    """Without GQA an item stores dk and dv of its key block, zeros where nothing is listed: each needs exactly one."""
    found = torch.bincount(items.key_block, minlength=items.counts.numel()).view_as(items.counts)[..., :used]
    if (found != 1).any():
        b, h, row = (found != 1).nonzero()[0].tolist()
        raise ValueError(
            f"backward plan has {int(found[b, h, row])} items for key block {row} of batch {b} and head {h}, expected "
            "one, which stores its dk and dv"
        )


def _turns(items: _Items, group: int) -> None:
    """An item's turn is how many items before it add to the same dk and dv, as `group` heads in a row do."""
    _, H, N = items.counts.shape
    shared = (items.batch * H + items.head // group) * N + items.row
    busy = (items.end > items.begin).nonzero().flatten()  # others add nothing
    own, order = shared[busy].sort(stable=True)
    expected = torch.empty_like(own).scatter_(0, order, torch.arange(own.numel(), device=own.device))
    expected -= torch.searchsorted(own, shared[busy])
    wrong = items.plan[:, 5].long()[busy] != expected
    if wrong.any():
        first = int(wrong.int().argmax())
        raise ValueError(
            f"backward {items.named(int(busy[first]))}, expected turn {int(expected[first])}: so many items "
            "launched before it add to the same dk and dv, or the GPU hangs"
        )


def _locks(lists: Any, packed: Any, items: _Items) -> None:
    """The items that add to a query block of a head have lock values that rise with their launch."""
    count, H = items.end - items.begin, items.counts.shape[1]
    item = torch.arange(count.numel(), device=count.device).repeat_interleave(count)
    step = torch.arange(item.numel(), device=item.device) - (count.cumsum(0) - count - items.begin)[item]
    batch, head, row = items.batch[item], items.head[item], items.row[item]
    idx, locks = lists.mask_block_idx, lists.dq_write_order
    if packed is not None:
        starts = packed.rows.starts[0]
        at = (starts[head // (H // starts.shape[0]), row] + step,)
    else:
        at = (batch.clamp(max=idx.shape[0] - 1), head // (H // idx.shape[1]), row, step)
    block, lock = idx[at].long() >> 1, locks.expand(idx.shape)[at]
    query = (items.sequence[item] * H + head) * (int(block.max()) + 1 if block.numel() else 1) + block
    order = lock.argsort(stable=True)
    order = order[query[order].argsort(stable=True)]
    query, item, block = query[order], item[order], block[order]
    wrong = (query.diff() == 0) & (item.diff() < 0)
    if wrong.any():
        first = int(wrong.int().argmax())
        before, after = int(item[first]), int(item[first + 1])
        raise ValueError(
            f"backward {items.named(after)} waits at query block {int(block[first])} for {items.named(before)}, which "
            "is launched later: lock values have to rise with the launch, or the GPU hangs"
        )
