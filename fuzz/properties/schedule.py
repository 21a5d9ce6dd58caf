"""Deterministic backward never gets stuck: semaphore values follow the launch, whatever its timing."""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.write_order import merged_lists
from fuzz import strategies
from fuzz.attention_lists import block_tables, both_directions
from fuzz.blocks import launch_order
from fuzz.case import Blocks
from fuzz.prop import holds

# Semaphores of dq with the values that it waits for, one after the other; that of dk and dv.
WorkTile = tuple[list[tuple[object, int]], tuple[object, int]]


def ends(tiles: list[WorkTile], slots: int) -> bool:
    """True if work launched in this order ends, whatever its timing: nobody who can go on is ever held up by that."""
    released: dict[object, int] = {}
    waiting, running, done = list(reversed(tiles)), [], 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(), 0])
        moved = False
        for state in list(running):
            (steps, last), at = state
            while at < len(steps) and released.get(steps[at][0], 0) == steps[at][1]:
                released[steps[at][0]] = steps[at][1] + 1
                at += 1
            moved |= at != state[1]
            state[1] = at
            if at == len(steps) and released.get(last[0], 0) == last[1]:
                released[last[0]] = last[1] + 1
                running.remove(state)
                done, moved = done + 1, True
        if not moved:
            return False
    return done == len(tiles)


def tiles_of(merged: BlockSparseTensorsTorch, rows: list[int], group: int) -> list[WorkTile]:
    """CTAs, one a key block and query head, as work tiles."""
    B, H, N = merged.mask_block_cnt.shape
    tiles = []
    for row in rows:
        head, block = divmod(row, N)
        b, h = divmod(head, H)
        count = int(merged.mask_block_cnt[b, h, block])
        entries, locks = (t[b, h, block, :count].tolist() for t in (merged.mask_block_idx, merged.dq_write_order))
        steps = [((head, entry // 2), lock) for entry, lock in zip(entries, locks, strict=True)]
        last = (("dk", head // group, block), head % group) if group > 1 else (("dk", row), 0)
        tiles.append((steps, last))
    return tiles


@holds("schedule.right orders end", strategies.blocks)
def right_orders_end(case: Blocks) -> None:
    """Semaphore values that follow the launch never get stuck, for any number of slots and heads launched together."""
    listed, _ = block_tables(case)
    _, backward = both_directions(case)
    order = launch_order(case, listed)
    merged = merged_lists(backward, order=torch.tensor(order))
    heads = range(case.B * case.H)
    together = [heads[first : first + case.interleave] for first in range(0, len(heads), case.interleave)]
    rows = [head * case.N + block for some in together for block in order for head in some]
    assert ends(tiles_of(merged, rows, case.group), case.slots)


@holds("schedule.plans end", strategies.blocks)
def plans_end(case: Blocks) -> None:
    """A deterministic plan's work tiles, launched in their order, never get stuck."""
    listed, _ = block_tables(case)
    _, backward = both_directions(case)
    schedule = case.launch if case.launch != "shuffled" else torch.tensor(launch_order(case, listed))
    Hkv = case.H // case.group
    options = dict(num_heads=case.H, num_heads_kv=Hkv, num_q_blocks=case.M, longest=case.longest)
    planned = plan_backward(backward, deterministic=True, schedule=schedule, **options)
    both = (planned.mask_block_idx, planned.dq_write_order)
    entries_and_locks, tiles = [t.expand(case.B, case.H, *t.shape[2:]) for t in both], []
    for b, h, n, begin, end, rank in planned.plan.tolist():
        entries, locks = (t[b, h, n, begin:end].tolist() for t in entries_and_locks)
        steps = [((b, h, entry // 2), lock) for entry, lock in zip(entries, locks, strict=True)]
        own = ("dk", b, h // case.group, n) if case.group > 1 else ("dk", b, h, n, begin)
        tiles.append((steps, (own, rank if case.group > 1 else 0)))
    assert ends(tiles, case.slots), "the plan gets stuck"
