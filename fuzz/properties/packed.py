"""Block lists of packed sequences, in every form: their check, their semaphore values and their plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import torch

from flash_attn.cute.block_lists import packed_write_order
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.formats import cu_total_blocks
from flash_attn.cute.lists.validate_calls import validate_call
from fuzz import strategies
from fuzz.attention_lists import before, blocks, lists_of, sides, tables
from fuzz.blocks import POISON, lists_of_rows, locks_of
from fuzz.case import Packed
from fuzz.corrupt import spoil
from fuzz.prop import Skip, holds, refused

HEADS = 4


def call(case: Packed, Hkv: int = 2) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """q and k that have shapes only, and where their sequences start."""
    starts = [torch.tensor([0, *accumulate(pair[side] for pair in case.packed)]).int() for side in (0, 1)]
    tensors = [
        torch.zeros(1).expand(int(ends[-1]), heads, 64) for ends, heads in zip(starts, (HEADS, Hkv), strict=True)
    ]
    return tensors, dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])


@holds("packed.blocks before a sequence", strategies.packed)
def blocks_before_a_sequence(case: Packed) -> None:
    _, starts = call(case)
    for side, cu_seqlens in enumerate(starts.values()):
        got, expected = cu_total_blocks(cu_seqlens, case.block[side]), [0, *accumulate(blocks(case, side))]
        assert got.dtype == torch.int32 and got.tolist() == expected, f"{got.tolist()}, expected {expected}"


@holds("packed.wrong ones are refused", lambda: strategies.packed(faults=True), pr=30)
def wrong_ones_are_refused(case: Packed) -> None:
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
def write_order(case: Packed) -> None:
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
def plan(case: Packed) -> None:
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
