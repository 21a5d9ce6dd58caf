"""Deterministic backward in the model: right orders never get stuck, and the model knows which wrong ones do."""

from __future__ import annotations

import random

import torch

from flash_attn.cute.backward_plan import plan_backward
from flash_attn.cute.list_schedule import launch_order as best_launch
from flash_attn.cute.list_schedule import launch_rows, long_rows_first, simulate, waits_for_earlier_launches
from flash_attn.cute.write_order import Walk, deterministic_walk
from fuzz import strategies
from fuzz.attention import launched, make, run
from fuzz.blocks import both_directions, launch_order, lists_of, tables
from fuzz.case import Attention, Blocks
from fuzz.kinds import EXACT
from fuzz.prop import GPU, holds

ORDERED = tuple(kind for kind in EXACT if kind.passes == 1 and not kind.packed and not kind.plan)
Item = tuple[list[tuple[object, int]], tuple[object, int]]  # locks to take in turn; the turn at dk and dv


def ends(items: list[Item], slots: int) -> bool:
    """Whether work launched in this order ends, whatever its timing: nobody who can go on is ever held up by that."""
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


def items_of(walk: Walk, rows: list[int], group: int) -> list[Item]:
    """CTAs, one a key block and query head, as items."""
    B, H, N = walk.cnt.shape
    items = []
    for row in rows:
        head, block = divmod(row, N)
        b, h = divmod(head, H)
        count = int(walk.cnt[b, h, block])
        entries, locks = (t[b, h, block, :count].tolist() for t in (walk.entries, walk.locks))
        steps = [((head, entry // 2), lock) for entry, lock in zip(entries, locks, strict=True)]
        turn = (("dk", head // group, block), head % group) if group > 1 else (("dk", row), 0)
        items.append((steps, turn))
    return items


@holds("schedule.right orders end", strategies.blocks)
def right_orders_end(case: Blocks) -> None:
    """Lock values that follow the launch never get stuck, for any number of slots and of heads in flight."""
    listed, _ = tables(case)
    _, backward = both_directions(case)
    order = launch_order(case, listed)
    walk = deterministic_walk(backward, order=torch.tensor(order))
    for ahead in {0, min(2, case.N)}:
        rows = launch_rows(order, case.B, case.H, interleave=case.interleave, group=case.group, ahead=ahead)
        assert waits_for_earlier_launches(walk, rows, group=case.group), f"a wait for a later launch, ahead={ahead}"
        said = simulate(walk, rows, group=case.group, slots=case.slots)
        assert said.stuck is None, f"stuck, ahead={ahead}: {said.stuck}"
        assert ends(items_of(walk, rows.tolist(), case.group), case.slots)


@holds("schedule.the model knows what gets stuck", strategies.blocks)
def the_model_knows_what_gets_stuck(case: Blocks) -> None:
    """CTAs launched in any order at all: the model says stuck where they are, and only there."""
    listed, _ = tables(case)
    _, backward = both_directions(case)
    walk = deterministic_walk(backward, order=torch.tensor(launch_order(case, listed)))
    rows = list(range(case.B * case.H * case.N))
    random.Random(case.seed).shuffle(rows)
    said = simulate(walk, rows, group=case.group, slots=case.slots)
    good = ends(items_of(walk, rows, case.group), case.slots)
    assert (said.stuck is None) == good, f"the model says {said.stuck}, but it {'ends' if good else 'gets stuck'}"
    if waits_for_earlier_launches(walk, rows, group=case.group):
        assert good, "every wait is for an earlier launch, and yet it gets stuck"


@holds("schedule.the best launch is one", strategies.blocks, pr=8)
def the_best_launch_is_one(case: Blocks) -> None:
    _, backward = both_directions(case)
    best = best_launch(backward, group=case.group, interleave=[1, case.interleave], slots=case.slots)
    assert sorted(best.order.tolist()) == list(range(case.N)) and best.simulated.stuck is None
    walk = deterministic_walk(backward, order=best.order)
    assert waits_for_earlier_launches(walk, best.rows, group=case.group)
    counts = walk.cnt
    assert sorted(long_rows_first(counts).tolist()) == list(range(counts.numel()))


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


@holds("schedule.the GPU ends as the model says", strategies.attention, kinds=ORDERED, needs=GPU)
def the_gpu_ends(case: Attention) -> None:
    """The model of a deterministic launch, with a slot for each multiprocessor, ends; so does the launch.

    Where it does not, the watchdog says so. What the model takes for stuck is not launched: it would be.
    """
    call, kind = make(case), case.kind
    listed = torch.cat([part[0] for part in call.blocks])
    listed = listed.expand(len(case.lengths), *listed.shape[1:]).repeat_interleave(kind.Hq // listed.shape[1], 1)
    group, order = kind.Hq // kind.Hkv, launched(case, listed)
    walk = deterministic_walk(lists_of(listed.mT, None, random.Random(0)), order=torch.tensor(order))
    rows = launch_rows(order, *listed.shape[:2], group=group)
    slots = torch.cuda.get_device_properties().multi_processor_count if call.q.is_cuda else 132
    said = simulate(walk, rows, group=group, slots=slots)
    assert said.stuck is None, f"the model is stuck: {said.stuck}"
    run(call)
