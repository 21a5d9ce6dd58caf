"""Block lists of packed sequences, in every form: their check, their semaphore values and their plans."""

from __future__ import annotations

from itertools import accumulate, product
from random import Random
from typing import Any

import torch

from flash_attn.cute.block_lists import packed_write_order
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.formats import cu_total_blocks
from flash_attn.cute.lists.validate_calls import validate_call
from fuzz import strategies
from fuzz.blocks import POISON, lists_of, locks_of, pack, packed_lists, packed_tables
from fuzz.case import Packed
from fuzz.corrupt import spoil
from fuzz.prop import Skip, holds

HEADS = 4


def call(case: Packed, Hkv: int = 2) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """q and k that have shapes only, and where their sequences start."""
    starts = [torch.tensor([0, *accumulate(pair[side] for pair in case.lengths)]).int() for side in (0, 1)]
    tensors = [
        torch.zeros(1).expand(int(ends[-1]), heads, 64) for ends, heads in zip(starts, (HEADS, Hkv), strict=True)
    ]
    return tensors, dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])


@holds("packed.blocks before a sequence", strategies.packed)
def blocks_before_a_sequence(case: Packed) -> None:
    _, starts = call(case)
    for side, cu_seqlens in enumerate(starts.values()):
        size = case.block[side]
        blocks = [-(-pair[side] // size) for pair in case.lengths]
        got = cu_total_blocks(cu_seqlens, size)
        assert got.dtype == torch.int32 and got.tolist() == [0, *accumulate(blocks)], f"{got.tolist()} for {blocks}"


@holds("packed.right ones pass", strategies.packed)
def right_ones_pass(case: Packed) -> None:
    tensors, starts = call(case)
    forward, backward = packed_lists(case)
    for sides in ((forward, backward), (forward, None), (None, backward)):
        validate_call(True, *sides, *tensors, **starts)


@holds("packed.wrong ones are refused", lambda: strategies.packed(faults=True), pr=30)
def wrong_ones_are_refused(case: Packed) -> None:
    tensors, starts = call(case)
    forward, backward = packed_lists(case)
    spoilt = spoil(case.fault, forward, backward, case.seed)
    if spoilt is None:
        raise Skip
    try:
        validate_call(True, *spoilt, *tensors, **starts)
    except ValueError:
        return
    raise AssertionError(f"{case.fault}: nobody noticed")


def rows_of_backward(case: Packed) -> tuple[dict[str, Any], int]:
    """The arguments that give the number of query blocks, and a bound of the blocks that a head lists."""
    if case.form == "padded":
        raise Skip
    M, N = ([-(-pair[side] // case.block[side]) for pair in case.lengths] for side in (0, 1))
    before = dict(cu_total_m_blocks=torch.tensor([0, *accumulate(M)])) if case.form == "stacked" else {}
    return dict(num_q_blocks=max(1, *M), **before), sum(m * n for m, n in zip(M, N, strict=True))


@holds("packed.write order", strategies.packed, pr=60)
def write_order(case: Packed) -> None:
    """Semaphore values count within each sequence, in the lists' form; stacked rows of one width need no offsets."""
    rows, most = rows_of_backward(case)
    parts, (_, lists) = packed_tables(case), packed_lists(case)
    turned, has_full = [(listed.mT, full.mT) for listed, full in parts], case.full is not None
    for spt in (False, True):
        launches = (range(listed.shape[3])[:: -1 if spt else 1] for listed, _ in parts)
        locks = [locks_of(listed, order).mT for (listed, _), order in zip(parts, launches, strict=True)]
        expected = pack(turned, case.form, "cu_total_n_blocks", case.block, has_full=has_full, locks=locks)
        found = [packed_write_order(lists, spt=spt, listed=bound, **rows) for bound in (None, case.heads * most)]
        if case.form == "stacked" and len({listed.shape[2] for listed, _ in parts}) == 1:
            found.append(packed_write_order(lists._replace(cu_block_idx_offsets=None), spt=spt, **rows))
        for got in found:
            assert got.spt is spt and got.mask_block_idx.equal(lists.mask_block_idx)
            for name in ("dq_write_order", "dq_write_order_full")[: 1 + has_full]:
                mine, true = getattr(got, name), getattr(expected, name)
                assert mine.dtype == torch.int32 and mine.shape == true.shape
                used = true != POISON
                assert mine[used].equal(true[used]), f"{name}: {mine.tolist()}, expected {true.tolist()}"


@holds("packed.plan", strategies.packed, pr=60)
def plan(case: Packed) -> None:
    """A pack has the items and the walks of its sequences, each as a batch of its own."""
    (rows, most), (forward, lists) = rows_of_backward(case), packed_lists(case)
    for Hkv, deterministic in product((2,) if case.heads == 2 else (2, 4), (False, True)):
        tensors, starts = call(case, Hkv)
        options = dict(num_heads=HEADS, num_heads_kv=Hkv, schedule="right to left", longest=3)
        options |= dict(deterministic=deterministic, num_q_blocks=rows["num_q_blocks"])
        planned, bounded = (plan_backward(lists, listed=bound, **options | rows) for bound in (None, most))
        for each in (planned, bounded):
            validate_call(True, forward, each, *tensors, **starts)
        count = len(planned.plan)
        assert bounded.plan[:count].equal(planned.plan) and not bounded.plan[count:].any()
        for b, (listed, full) in enumerate(packed_tables(case)):
            own = planned.plan[planned.plan[:, 0] == b]
            if not listed.shape[3]:
                assert not own.any()
                continue
            alone = plan_backward(lists_of(listed.mT, None if case.full is None else full.mT, Random(0)), **options)
            items, theirs = own, alone.plan
            if Hkv < HEADS:  # items of nothing stand for a plan of nothing
                items, theirs = (x[x[:, 4] > x[:, 3]] for x in (items, theirs))
            assert items[:, 1:6].equal(theirs[:, 1:]), f"{items.tolist()}, alone {theirs.tolist()}"
            for _, head, n, _, _, _, low, high in items.tolist():
                head, row = head * case.heads // HEADS, n + int(planned.cu_total_n_blocks[b])
                start, entries = (high << 32) + (low & 0xFFFFFFFF), int(alone.mask_block_cnt[0, head, n])
                assert start == planned.cu_block_idx_offsets[head, row]
                assert entries == planned.mask_block_cnt[head, row]
                for name in ("mask_block_idx", "dq_write_order")[: 1 + deterministic]:
                    walked = getattr(planned, name)[start : start + entries]
                    assert walked.equal(getattr(alone, name)[0, head, n, :entries]), f"{name} of {b, head, n}"
