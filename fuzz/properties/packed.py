"""Block lists of packed sequences, in every form: what the check of lists takes, and what it refuses."""

from __future__ import annotations

from itertools import accumulate

import torch

from flash_attn.cute.lists.formats import cu_total_blocks
from flash_attn.cute.lists.validate_calls import validate_call
from fuzz import strategies
from fuzz.blocks import packed_lists
from fuzz.case import Packed
from fuzz.corrupt import spoil
from fuzz.prop import Skip, holds

HEADS = 4


def call(case: Packed) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """q and k that have shapes only, and where their sequences start."""
    starts = [torch.tensor([0, *accumulate(pair[side] for pair in case.lengths)]).int() for side in (0, 1)]
    tensors = [torch.zeros(1).expand(int(ends[-1]), heads, 64) for ends, heads in zip(starts, (HEADS, 2), strict=True)]
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
