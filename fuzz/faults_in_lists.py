"""Faults in what decides about tiles and lists: classification, transpose, semaphore values, plans, checks, codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuzz.mutations import fault, instead, wrong_result


@wrong_result("first tile off by one", "flash_attn.cute.compressed_causal.schedule:first_query_tile", "compress")
def _first_tile(tile: int) -> int:
    """Backward starts one tile late for every key."""
    return tile + 1


@wrong_result("shares overlap", "flash_attn.cute.compressed_causal.schedule:query_shares", "compress")
def _shares(plan: Any) -> Any:
    """The last of several shares of the queries is left out."""
    return plan._replace(count=plan.count - 1) if plan.count > 1 else plan


@instead("dropped last block", "flash_attn.cute.block_lists:transpose_lists", "lists.transposed")
def _dropped(original: Callable, lists: Any, *args: Any, **more: Any) -> Any:
    """The transpose loses the last entry of a full row."""
    turned = original(lists, *args, **more)
    cnt = turned.mask_block_cnt.clone()
    cnt[cnt == lists.mask_block_cnt.shape[2]] -= 1
    return turned._replace(mask_block_cnt=cnt)


@wrong_result(
    "swapped write order", "flash_attn.cute.lists.write_order:compute_dq_write_order", "lists.write order", "lists.walk"
)
def _swapped(orders: Any) -> Any:
    """The first two key blocks that add to a query block have each other's semaphore value."""
    return tuple(None if t is None else torch.where(t < 2, 1 - t, t) for t in orders)


@wrong_result(
    "launch order ignored",
    "flash_attn.cute.lists.write_order:as_launch_order",
    "schedule.right orders",
    "lists.write order",
)
def _ignored(order: Any) -> None:
    """Semaphore values follow the key blocks' numbers whatever their launch is: the GPU would hang."""


@fault("walk by block", "flash_attn.cute.lists.write_order:sorted_entries", "lists.walk")
def _by_block(original: Callable) -> Callable:
    """Among equal semaphore values the walk goes the other way."""
    return lambda entries, locks, descending, M: original(entries, locks, not descending, M)


@instead("plan loses the remainder", "flash_attn.cute.lists.backward_plan:_work_tiles", "lists.plan", "schedule.plans")
def _remainder(original: Callable, counts: Any, pieces: Any, *args: Any) -> Any:
    """The last entry of the last item of a walk that is cut is not dealt out."""
    plan = original(counts, pieces, *args).clone()
    last = plan[:, 4] == counts[plan[:, 0].long(), plan[:, 1].long(), plan[:, 2].long()]
    cut = (plan[:, 3] > 0) & last
    plan[cut, 4] -= 1
    return plan


@wrong_result("turns forgotten", "flash_attn.cute.lists.backward_plan:_work_tiles", "schedule.plans", "lists.plan")
def _turns(plan: torch.Tensor) -> torch.Tensor:
    """All items that add to the same dk and dv believe to be first."""
    return plan.index_fill(1, torch.tensor([5]), 0)


@fault("window one too wide", "flash_attn.cute.block_lists:_ranges", "windows.lists")
def _window(original: Callable) -> Callable:
    """The full blocks of a window begin one block early."""
    return lambda begin, skip, resume, end: original(begin, (skip - 1).clamp(min=0), resume, end)


@instead("full across the end", "flash_attn.cute.block_lists:lists_from_blocks", "windows.dense", "lists.made")
def _across(original: Callable, listed: Any, full: Any = None, **more: Any) -> Any:
    """The last block of keys counts as full wherever the one before it is: a missing tail mask."""
    if full is not None and full.shape[-1] > 1:
        full = full.clone()
        full[..., -1] |= full[..., -2]
    return original(listed, full, **more)


@fault("blind to duplicates", "flash_attn.cute.lists.validate:_check_duplicates", "lists.wrong", "packed.wrong")
def _blind(original: Callable) -> Callable:
    """The check of lists overlooks a block that is listed twice."""
    return lambda *_: None


@fault("blind to semaphore values", "flash_attn.cute.lists.validate:_check_locks", "lists.wrong")
def _blind_locks(original: Callable) -> Callable:
    """The check of lists takes any semaphore values."""
    return lambda *_: None


@fault("tails cut off", "flash_attn.cute.lists.formats:cu_total_blocks", "packed")
def _tails(original: Callable) -> Callable:
    """Blocks of a packed sequence are counted without its short last one."""
    return lambda starts, size: torch.nn.functional.pad((starts.diff() // size).cumsum(0, dtype=torch.int32), (1, 0))


@fault("a line lost", "patches.codec:_span", "patches")
def _line(original: Callable) -> Callable:
    """A copy of more than two lines loses its last."""
    return lambda lines, start, count: original(lines, start, count - (count > 2))


@instead("codec hangs", "patches.codec:_shift", "patches", seconds=90.0)
def _hang(original: Callable, line: str, indent: int) -> str:
    """Indenting a line never ends: what the watchdog is for."""
    while indent:
        pass
    return original(line, indent)
