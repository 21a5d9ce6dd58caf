"""Faults in what decides about tiles and lists: classification, transpose, semaphore values, plans, checks, codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuzz.mutations import always, fault, faults, given, instead, result

faults(
    ("first tile off by one", "flash_attn.cute.compressed_causal.schedule:first_query_tile", "compress",
     "Backward starts one tile late for every key.", result(lambda tile: tile + 1)),
    ("shares overlap", "flash_attn.cute.compressed_causal.schedule:query_shares", "compress",
     "The last of several shares of the queries is left out.",
     result(lambda plan: plan._replace(count=plan.count - (plan.count > 1)))),
    ("swapped write order", "flash_attn.cute.lists.write_order:compute_dq_write_order",
     ("lists.write order", "lists.merged"),
     "The first two key blocks that add to a query block have each other's semaphore value.",
     result(lambda orders: tuple(None if t is None else torch.where(t < 2, 1 - t, t) for t in orders))),
    ("launch order ignored", "flash_attn.cute.lists.write_order:as_launch_order",
     ("schedule.right orders", "lists.write order"),
     "Semaphore values follow the key blocks' numbers whatever their launch is: the GPU would hang.", always(None)),
    ("merged by block", "flash_attn.cute.lists.write_order:sorted_entries", "lists.merged",
     "Among equal semaphore values the merged list goes the other way.",
     given(descending=lambda descending: not descending)),
    ("ranks forgotten", "flash_attn.cute.lists.backward_plan:_work_tiles", ("schedule.plans", "lists.plan"),
     "All work tiles that add to the same dk and dv have the first rank.",
     result(lambda plan: plan.index_fill(1, torch.tensor([5]), 0))),
    ("window one too wide", "flash_attn.cute.block_lists:_ranges", "windows.lists",
     "The full blocks of a window begin one block early.", given(skip=lambda skip: (skip - 1).clamp(min=0))),
    ("blind to duplicates", "flash_attn.cute.lists.validate:_check_duplicates", ("lists.wrong", "packed.wrong"),
     "The check of lists overlooks a block that is listed twice.", always(None)),
    ("blind to semaphore values", "flash_attn.cute.lists.validate:_check_locks", "lists.wrong",
     "The check of lists takes any semaphore values.", always(None)),
    ("tails cut off", "flash_attn.cute.lists.formats:cu_total_blocks", "packed",
     "Blocks of a packed sequence are counted without its short last one.",
     instead(lambda original, starts, size: torch.tensor([0, *starts.diff() // size]).cumsum(0, dtype=torch.int32))),
    ("a line lost", "patches.codec:_span", "patches", "A copy of more than two lines loses its last.",
     given(count=lambda count: count - (count > 2))),
)  # fmt: skip


@fault("dropped last block", "flash_attn.cute.block_lists:transpose_lists", "lists.transposed")
@instead
def _dropped(original: Callable, lists: Any, *args: Any, **more: Any) -> Any:
    """The transpose loses the last entry of a full row."""
    turned = original(lists, *args, **more)
    full = turned.mask_block_cnt == lists.mask_block_cnt.shape[2]
    return turned._replace(mask_block_cnt=turned.mask_block_cnt - full.int())


@fault("plan loses the remainder", "flash_attn.cute.lists.backward_plan:_work_tiles", "lists.plan", "schedule.plans")
@instead
def _remainder(original: Callable, counts: Any, pieces: Any, *args: Any) -> Any:
    """The last entry of the last work tile of a list that is cut is left out."""
    plan = original(counts, pieces, *args).clone()
    last = plan[:, 4] == counts[plan[:, 0].long(), plan[:, 1].long(), plan[:, 2].long()]
    plan[:, 4] -= ((plan[:, 3] > 0) & last).int()
    return plan


@fault("full across the end", "flash_attn.cute.block_lists:lists_from_blocks", "windows.dense", "lists.made")
@instead
def _across(original: Callable, listed: Any, full: Any = None, **more: Any) -> Any:
    """The last block of keys counts as full wherever the one before it is: a missing tail mask."""
    if full is not None and full.shape[-1] > 1:
        full = full.clone()
        full[..., -1] |= full[..., -2]
    return original(listed, full, **more)


@fault("codec hangs", "patches.codec:_shift", "patches", seconds=180.0)
@instead
def _hang(original: Callable, line: str, indent: int) -> str:
    """Indenting a line never ends: what the watchdog is for."""
    while indent:
        pass
    return original(line, indent)
