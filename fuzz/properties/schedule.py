"""Deterministic backward never gets stuck: semaphore values follow the launch, whatever its timing."""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.write_order import merged_lists
from fuzz import strategies
from fuzz.blocks import both_directions, launch_order, tables
from fuzz.case import Blocks
from fuzz.prop import holds

Item = tuple[list[tuple[object, int]], tuple[object, int]]  # locks to take in turn; the turn at dk and dv


def ends(items: list[Item], slots: int) -> bool:
    """True if work launched in this order ends, whatever its timing: nobody who can go on is ever held up by that."""
    released: dict[object, int] = {}
    waiting, running, done = list(reversed(items)), [], 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(), 0])
        moved = False
        for state in list(running):
            (steps, turn), at = state
            while at < len(steps) and released.get(steps[at][0], 0) == steps[at][1]:
                released[steps[at][0]] = steps[at][1] + 1
                at += 1
            moved |= at != state[1]
            state[1] = at
            if at == len(steps) and released.get(turn[0], 0) == turn[1]:
                released[turn[0]] = turn[1] + 1
                running.remove(state)
                done, moved = done + 1, True
        if not moved:
            return False
    return done == len(items)


def items_of(walk: BlockSparseTensorsTorch, rows: list[int], group: int) -> list[Item]:
    """CTAs, one a key block and query head, as items."""
    B, H, N = walk.mask_block_cnt.shape
    items = []
    for row in rows:
        head, block = divmod(row, N)
        b, h = divmod(head, H)
        count = int(walk.mask_block_cnt[b, h, block])
        entries, locks = (t[b, h, block, :count].tolist() for t in (walk.mask_block_idx, walk.dq_write_order))
        steps = [((head, entry // 2), lock) for entry, lock in zip(entries, locks, strict=True)]
        turn = (("dk", head // group, block), head % group) if group > 1 else (("dk", row), 0)
        items.append((steps, turn))
    return items


@holds("schedule.right orders end", strategies.blocks)
def right_orders_end(case: Blocks) -> None:
    """Semaphore values that follow the launch never get stuck, for any number of slots and heads launched together."""
    listed, _ = tables(case)
    _, backward = both_directions(case)
    order = launch_order(case, listed)
    walk = merged_lists(backward, order=torch.tensor(order))
    heads = range(case.B * case.H)
    together = [heads[first : first + case.interleave] for first in range(0, len(heads), case.interleave)]
    rows = [head * case.N + block for some in together for block in order for head in some]
    assert ends(items_of(walk, rows, case.group), case.slots)


@holds("schedule.plans end", strategies.blocks)
def plans_end(case: Blocks) -> None:
    """A deterministic plan's items, launched in their order, never get stuck."""
    listed, _ = tables(case)
    _, backward = both_directions(case)
    schedule = case.launch if case.launch != "shuffled" else torch.tensor(launch_order(case, listed))
    Hkv = case.H // case.group
    options = dict(num_heads=case.H, num_heads_kv=Hkv, num_q_blocks=case.M, longest=case.longest)
    planned = plan_backward(backward, deterministic=True, schedule=schedule, **options)
    walk = [t.expand(case.B, case.H, *t.shape[2:]) for t in (planned.mask_block_idx, planned.dq_write_order)]
    items = []
    for b, h, n, begin, end, turn in planned.plan.tolist():
        entries, locks = (t[b, h, n, begin:end].tolist() for t in walk)
        steps = [((b, h, entry // 2), lock) for entry, lock in zip(entries, locks, strict=True)]
        own = ("dk", b, h // case.group, n) if case.group > 1 else ("dk", b, h, n, begin)
        items.append((steps, (own, turn if case.group > 1 else 0)))
    assert ends(items, case.slots), "the plan gets stuck"
