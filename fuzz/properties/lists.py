"""Block lists of a batch: made, transposed, ordered, merged, planned and checked, against tables of blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from flash_attn.cute.block_lists import lists_from_blocks, lists_from_dense, transpose_lists
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.validate_calls import validate_call, validate_lists
from flash_attn.cute.lists.write_order import compute_dq_write_order, merged_lists
from fuzz import strategies
from fuzz.attention_lists import block_tables, both_directions
from fuzz.blocks import each_tensor, launch_order, locks_of, table_of
from fuzz.case import Blocks
from fuzz.corrupt import LOCAL, spoil
from fuzz.prop import GPU, Skip, holds

BLOCK = 128


def same(lists, listed: torch.Tensor, full: torch.Tensor) -> None:
    """Lists hold the blocks of a table, and nothing else."""
    got = table_of(lists, listed.shape[3])
    listed, full = (t.expand(got[0].shape) for t in (listed, full))
    assert got[0].equal(listed), f"listed {got[0].int().tolist()}, expected {listed.int().tolist()}"
    assert got[1].equal(full), f"full {got[1].int().tolist()}, expected {full.int().tolist()}"


@holds("lists.made", strategies.blocks)
def made(case: Blocks) -> None:
    """Lists of a table hold the table; with a width given they are as wide."""
    listed, full = block_tables(case)
    lists = lists_from_blocks(listed, None if case.full is None else full, block_size=(BLOCK, BLOCK))
    same(lists, listed, full)
    assert (lists.full_block_cnt is None) == (case.full is None)
    wide = lists_from_blocks(listed, full, block_size=(BLOCK, BLOCK), width=case.N + case.spare)
    assert wide.mask_block_idx.shape[3] == wide.full_block_idx.shape[3] == case.N + case.spare
    same(wide, listed, full)
    # A mask that is the table at one token a block: full wherever it is listed.
    same(lists_from_dense(listed, (1, 1)), listed, listed)


@holds("lists.transposed", strategies.blocks)
def transposed(case: Blocks) -> None:
    """Backward lists hold the transposed table; transposed again they hold the table."""
    case = replace(case, spare=0)  # the check of lists takes no wider rows
    listed, full = block_tables(case)
    forward, backward = both_directions(case)
    bound = int(listed.sum()) + case.slots
    for width, most in ((None, None), (case.M, None), (case.M, bound)):
        turned = transpose_lists(forward, case.N, width=width, listed=most)
        same(turned, listed.mT, full.mT)
        back = transpose_lists(turned, case.M)
        same(back, listed, full)
        # Of the same blocks in rows of another order, the same lists.
        again = transpose_lists(back, case.N, width=width, listed=most)
        assert all(one is other or one.equal(other) for one, other in zip(turned[:4], again[:4], strict=True))
    same(transpose_lists(backward, case.M), listed, full)
    validate_lists(forward, turned, seqlen_q=case.M * BLOCK, seqlen_k=case.N * BLOCK, num_heads=case.H)


@holds("lists.write order", strategies.blocks)
def write_order(case: Blocks) -> None:
    """An entry's semaphore value is the number of key blocks, launched earlier, that add to the same query block."""
    listed, _ = block_tables(case)
    forward, backward = both_directions(case)
    order = launch_order(case, listed)
    expected = locks_of(listed, order)
    arguments = (*forward[:4], *backward[:4])
    launches = [dict(order=torch.tensor(order))]
    if case.launch in ("left to right", "right to left"):
        launches.append(dict(spt=case.launch == "right to left"))
    for launch in launches:
        locks = compute_dq_write_order(*arguments, **launch)
        for own, cnt, idx in zip(locks, backward[:4:2], backward[1:4:2], strict=True):
            assert (own is None) == (idx is None)
            if idx is None:
                continue
            assert own.shape == idx.shape and own.dtype == torch.int32
            for b, h, n in product(range(case.B), range(case.H), range(case.N)):
                count = int(cnt[b, h, n])
                here = [int(expected[b, h, m, n]) for m in idx[b, h, n, :count].tolist()]
                assert own[b, h, n, :count].tolist() == here, f"locks of {b, h, n}: {own[b, h, n]}, expected {here}"


@holds("lists.merged", strategies.blocks)
def merged(case: Blocks) -> None:
    """Mask and full blocks in one list: by rising semaphore value, the far end first among equals."""
    listed, full = block_tables(case)
    forward, backward = both_directions(case)
    order = launch_order(case, listed)
    locks = locks_of(listed, order)
    bound = int(listed.sum()) + case.spare
    given = compute_dq_write_order(*forward[:4], *backward[:4], order=torch.tensor(order))
    for descending in (True, False):
        options = dict(descending=descending, num_q_blocks=case.M)
        made = [
            merged_lists(backward, order=torch.tensor(order), **options),
            merged_lists(backward, order=torch.tensor(order), width=case.M, listed=bound, **options),
            merged_lists(backward._replace(dq_write_order=given[0], dq_write_order_full=given[1]), **options),
        ]
        for b, h, n in product(range(case.B), range(case.H), range(case.N)):
            rows = [m for m in range(case.M) if listed[b, h, m, n]]
            rows.sort(key=lambda m: (int(locks[b, h, m, n]), -m if descending else m))
            entries = [2 * m + int(full[b, h, m, n]) for m in rows]
            values = [int(locks[b, h, m, n]) for m in rows]
            for one in made:
                count = int(one.mask_block_cnt[b, h, n])
                assert one.mask_block_idx[b, h, n, :count].tolist() == entries, f"merged list of {b, h, n}"
                assert one.dq_write_order[b, h, n, :count].tolist() == values, f"semaphore values of {b, h, n}"


@holds("lists.plan", strategies.blocks)
def plan(case: Blocks) -> None:
    """A plan covers every entry once, in work tiles no longer than asked, and the check of lists accepts it."""
    case = replace(case, spare=0)
    listed, _ = block_tables(case)
    forward, backward = both_directions(case)
    Hkv = case.H // case.group
    schedule = case.launch if case.launch != "shuffled" else torch.tensor(launch_order(case, listed))
    q, k = (torch.zeros(1).expand(case.B, n * BLOCK, h, 64) for n, h in ((case.M, case.H), (case.N, Hkv)))
    most = int(listed.sum((2, 3)).max())
    counts, order = listed.sum(2), launch_order(case, listed)
    of_group = counts.unflatten(1, (Hkv, case.group)).sum(2)
    sizes = dict(num_heads=case.H, num_heads_kv=Hkv, num_q_blocks=case.M)
    for deterministic, bound in product((False, True), (None, most)):
        options = sizes | dict(longest=case.longest)
        planned = plan_backward(backward, deterministic=deterministic, schedule=schedule, listed=bound, **options)
        validate_call(True, forward, planned, q, k)
        if case.repeat:  # a group shares its list
            one = [each_tensor(lists, lambda t: t[:, :1]) for lists in (forward, backward)]
            of_groups = plan_backward(
                one[1], deterministic=deterministic, schedule=schedule, listed=bound, per_group=True, **options
            )
            assert bool(of_groups.plan_per_group) == (case.group > 1)
            validate_call(True, one[0], of_groups, q, k)
        covered: Counter = Counter()
        for b, h, n, begin, end, _ in planned.plan.tolist():
            assert 0 <= begin <= end and (end - begin <= case.longest or case.group == 1), f"work tile {begin} .. {end}"
            covered.update((b, h, n, entry) for entry in range(begin, end))
        for b, h in product(range(case.B), range(case.H)):
            tiles = [tile for tile in planned.plan.tolist() if tile[3] < tile[4] or case.group == 1]
            launched = [n for at, head, n, *_ in tiles if (at, head) == (b, h)]
            by_length = [(-int(of_group[b, h // case.group, n]), n) for n in range(case.N)]
            keys = by_length if case.launch == "longest first" else [order.index(n) for n in range(case.N)]
            assert launched == sorted(launched, key=keys.__getitem__), f"key blocks {launched} of {b, h}"
        rows = [*product(range(case.B), range(case.H), range(case.N))]
        expected = Counter((b, h, n, i) for b, h, n in rows for i in range(int(counts[b, h, n])))
        assert covered == expected, f"{covered - expected} too often, {expected - covered} not at all"


@holds("lists.wrong ones are refused", lambda: strategies.blocks(faults=True), pr=30)
def wrong_ones_are_refused(case: Blocks) -> None:
    """One wrong entry anywhere is a ValueError; right lists pass, of one direction alone too."""
    forward, backward = both_directions(replace(case, spare=0))
    sizes = dict(seqlen_q=case.M * BLOCK, seqlen_k=case.N * BLOCK, num_heads=case.H, batch_size=case.B)
    for sides in ((forward, backward), (forward, None), (None, backward)):
        validate_lists(*sides, **sizes, ascending=not case.shuffle)
    spt = case.launch == "right to left"
    order, order_full = compute_dq_write_order(*forward[:4], *backward[:4], spt=spt)
    backward = backward._replace(dq_write_order=order, dq_write_order_full=order_full, spt=spt)
    spoilt = spoil(case.fault, forward, backward, case.seed)
    if spoilt is None:
        raise Skip
    validate_lists(forward, backward, **sizes)
    assert refused(*spoilt, **sizes), f"{case.fault}: nobody noticed"
    if case.fault in LOCAL:
        alone = refused(spoilt[0], None, **sizes) or refused(None, spoilt[1], **sizes)
        assert alone, f"{case.fault}: nobody noticed without the other direction"


def refused(forward: Any, backward: Any, **sizes: int) -> bool:
    try:
        validate_lists(forward, backward, **sizes)
    except ValueError as error:
        assert "forward" in str(error) or "backward" in str(error), f"the message names no lists: {error}"
        return True
    return False


def made_from(forward: Any, backward: Any, case: Blocks, device: str) -> dict[str, torch.Tensor]:
    """All that is made of lists on a device, as tensors of the CPU."""
    sides = [each_tensor(lists, lambda t: t.to(device)) for lists in (forward, backward)]
    order = torch.tensor(launch_order(case, block_tables(case)[0]), device=device)
    sizes = dict(num_heads=case.H, num_heads_kv=case.H // case.group, num_q_blocks=case.M, longest=case.longest)
    made = {
        "transposed": transpose_lists(sides[0], case.N),
        "locks": compute_dq_write_order(*sides[0][:4], *sides[1][:4], order=order),
        "merged": merged_lists(sides[1], order=order, num_q_blocks=case.M),
        "plan": plan_backward(sides[1], **sizes),
        "deterministic plan": plan_backward(sides[1], deterministic=True, schedule=order, **sizes),
    }
    return {f"{name}, {i}": t.cpu() for name, x in made.items() for i, t in enumerate(x) if isinstance(t, torch.Tensor)}


@holds("lists.on a GPU", strategies.blocks, needs=GPU)
def on_a_gpu(case: Blocks) -> None:
    """Lists on a GPU become what lists on a CPU become, to the last place; and pass the check there."""
    forward, backward = both_directions(replace(case, spare=0))
    here, there = (made_from(forward, backward, case, device) for device in ("cpu", "cuda"))
    assert set(here) == set(there)
    for name, x in here.items():
        assert x.equal(there[name]), f"{name}: {there[name].tolist()}, on a CPU {x.tolist()}"
    moved = [each_tensor(lists, torch.Tensor.cuda) for lists in (forward, backward)]
    validate_lists(*moved, seqlen_q=case.M * BLOCK, seqlen_k=case.N * BLOCK, num_heads=case.H, batch_size=case.B)
