"""Block lists of a batch and of packs: made, transposed, ordered, merged, planned and checked, against tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import torch

from flash_attn.cute.block_lists import lists_from_blocks, lists_from_dense, packed_write_order, transpose_lists
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.formats import cu_total_blocks
from flash_attn.cute.lists.validate_calls import validate_call, validate_lists
from flash_attn.cute.lists.write_order import compute_dq_write_order, merged_lists
from fuzz import strategies
from fuzz.attention import make_inputs
from fuzz.attention_lists import before, block_tables, blocks, both_directions, lists_of, sides, tables
from fuzz.blocks import POISON, each_tensor, launch_order, lists_of_rows, locks_of, table_of
from fuzz.case import Blocks, Packed
from fuzz.corrupt import LOCAL, spoil
from fuzz.prop import GPU, Skip, holds, refused

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
    for lists in ((forward, backward), (forward, None), (None, backward), (None, None)):
        validate_lists(*lists, **sizes, ascending=not case.shuffle)
    spt = case.launch == "right to left"
    order, order_full = compute_dq_write_order(*forward[:4], *backward[:4], spt=spt)
    backward = backward._replace(dq_write_order=order, dq_write_order_full=order_full, spt=spt)
    spoilt = spoil(case.fault, forward, backward, case.seed)
    if spoilt is None:
        raise Skip
    validate_lists(forward, backward, **sizes)
    ways = [[spoilt], [(spoilt[0], None), (None, spoilt[1])]]  # of some faults one direction alone tells
    for way in ways if case.fault in LOCAL else ways[:1]:
        with refused("ward", ValueError):  # forward, or backward
            for lists in way:
                validate_lists(*lists, **sizes)


def made_from(forward: Any, backward: Any, case: Blocks, device: str) -> dict[str, torch.Tensor]:
    """All that is made of lists on a device, as tensors of the CPU."""
    forward, backward = (each_tensor(lists, lambda t: t.to(device)) for lists in (forward, backward))
    order = torch.tensor(launch_order(case, block_tables(case)[0]), device=device)
    sizes = dict(num_heads=case.H, num_heads_kv=case.H // case.group, num_q_blocks=case.M, longest=case.longest)
    made = {
        "transposed": transpose_lists(forward, case.N),
        "locks": compute_dq_write_order(*forward[:4], *backward[:4], order=order),
        "merged": merged_lists(backward, order=order, num_q_blocks=case.M),
        "plan": plan_backward(backward, **sizes),
        "deterministic plan": plan_backward(backward, deterministic=True, schedule=order, **sizes),
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


HEADS = Packed.Hq


def call(case: Packed, Hkv: int = 2) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """q and k, and where their sequences start."""
    x = make_inputs(replace(case, Hkv=Hkv), "cpu")
    return (x.q, x.k), dict(zip(("cu_seqlens_q", "cu_seqlens_k"), x.cu_seqlens))


@holds("packed.blocks before a sequence", strategies.packed)
def blocks_before_a_sequence(case: Packed) -> None:
    _, starts = call(case)
    for side, cu_seqlens in enumerate(starts.values()):
        got, expected = cu_total_blocks(cu_seqlens, case.block[side]), [0, *accumulate(blocks(case, side))]
        assert got.dtype == torch.int32 and got.tolist() == expected, f"{got.tolist()}, expected {expected}"


@holds("packed.wrong ones are refused", lambda: strategies.packed(faults=True), pr=30)
def wrong_ones_are_refused_of_packs(case: Packed) -> None:
    """And right ones pass, of one direction alone too."""
    tensors, starts = call(case)
    forward, backward = sides(case)
    for lists in ((forward, backward), (forward, None), (None, backward)):
        validate_call(True, *lists, *tensors, **starts)
    spoilt = spoil(case.fault, forward, backward, case.seed)
    if spoilt is None:
        raise Skip
    with refused("", ValueError):
        validate_call(True, *spoilt, *tensors, **starts)


def rows_of_backward(case: Packed) -> tuple[dict[str, Any], int]:
    """The arguments that give the number of query blocks, and a bound of the blocks that a head lists."""
    if case.form == "padded":
        raise Skip
    M, N = blocks(case, 0), blocks(case, 1)
    starts = dict(cu_total_m_blocks=before(case)) if case.form == "stacked" else {}
    return dict(num_q_blocks=max(1, *M), **starts), sum(m * n for m, n in zip(M, N, strict=True))


@holds("packed.write order", strategies.packed, pr=60)
def write_order_of_packs(case: Packed) -> None:
    """Semaphore values count within each sequence, in the lists' form; stacked rows of one width need no offsets."""
    rows, most = rows_of_backward(case)
    parts, (_, lists) = tables(case), sides(case)
    kinds = {"mask": [listed & ~full for listed, full in parts], "full": [full for _, full in parts]}
    names = dict(list(zip(kinds, ("dq_write_order", "dq_write_order_full")))[: 1 + (case.lists == "both")])
    for spt in (False, True):
        launches = (range(listed.shape[2])[:: -1 if spt else 1] for listed, _ in parts)
        locks = [locks_of(listed[None], order)[0] for (listed, _), order in zip(parts, launches, strict=True)]
        # The values as lists of the same rows.
        values = {
            kind: [
                [[lock[h, :, n][t[h, :, n]].tolist() for n in range(t.shape[2])] for lock, t in zip(locks, kinds[kind])]
                for h in range(case.list_heads)
            ]
            for kind in names
        }
        expected = lists_of_rows(values, case.form, blocks(case, 0), "cu_total_n_blocks")
        found = [packed_write_order(lists, spt=spt, listed=bound, **rows) for bound in (None, case.list_heads * most)]
        if case.form == "stacked" and len({listed.shape[1] for listed, _ in parts}) == 1:
            found.append(packed_write_order(lists._replace(cu_block_idx_offsets=None), spt=spt, **rows))
        for got in found:
            assert got.spt is spt and got.mask_block_idx.equal(lists.mask_block_idx)
            for kind, name in names.items():
                mine, true = getattr(got, name), getattr(expected, f"{kind}_block_idx")
                assert mine.dtype == torch.int32 and mine.shape == true.shape
                used = true != POISON
                assert mine[used].equal(true[used]), f"{name}: {mine.tolist()}, expected {true.tolist()}"


@holds("packed.plan", strategies.packed, pr=60)
def plan_of_packs(case: Packed) -> None:
    """A pack has the work tiles and the entries of its sequences, each as a batch of its own."""
    (rows, most), (forward, lists) = rows_of_backward(case), sides(case)
    for Hkv, deterministic in product((2,) if case.list_heads == 2 else (2, 4), (False, True)):
        tensors, starts = call(case, Hkv)
        options = dict(num_heads=HEADS, num_heads_kv=Hkv, schedule="right to left", longest=3)
        options |= dict(deterministic=deterministic, num_q_blocks=rows["num_q_blocks"])
        planned, bounded = (plan_backward(lists, listed=bound, **options | rows) for bound in (None, most))
        for each in (planned, bounded):
            validate_call(True, forward, each, *tensors, **starts)
        count = len(planned.plan)
        assert bounded.plan[:count].equal(planned.plan) and not bounded.plan[count:].any()
        for b, (listed, full) in enumerate(tables(case)):
            own = planned.plan[planned.plan[:, 0] == b]
            if not listed.shape[2]:
                assert not own.any()
                continue
            T_q, T_k = case.packed[b]
            by_itself = replace(case, packed=(), form="padded", B=1, T_q=T_q, T_k=T_k)
            alone = plan_backward(lists_of(by_itself, [(listed, full)], backward=True), **options)
            tiles, theirs = own, alone.plan
            if Hkv < HEADS:  # empty work tiles stand for a plan of nothing
                tiles, theirs = (x[x[:, 4] > x[:, 3]] for x in (tiles, theirs))
            assert tiles[:, 1:6].equal(theirs[:, 1:]), f"{tiles.tolist()}, alone {theirs.tolist()}"
            for _, head, n, _, _, _, low, high in tiles.tolist():
                head, row = head * case.list_heads // HEADS, n + int(planned.cu_total_n_blocks[b])
                start, entries = (high << 32) + (low & 0xFFFFFFFF), int(alone.mask_block_cnt[0, head, n])
                assert start == planned.cu_block_idx_offsets[head, row]
                assert entries == planned.mask_block_cnt[head, row]
                for name in ("mask_block_idx", "dq_write_order")[: 1 + deterministic]:
                    of_row = getattr(planned, name)[start : start + entries]
                    assert of_row.equal(getattr(alone, name)[0, head, n, :entries]), f"{name} of {b, head, n}"
