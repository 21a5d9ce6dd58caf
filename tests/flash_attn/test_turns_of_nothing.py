"""Deterministic backward on SM100: a query head that lists nothing at a key block passes its turn at dk and dv on."""

from __future__ import annotations

from dataclasses import replace

import fa_lists
import pytest
import torch
from fa_cases import Case, backward, make_inputs, outputs
from fa_compile import Worker, noted, operations_around

SHORT = Case(D=64, T_q=100, T_k=700, lists="both", list_heads=4, deterministic=True)
CASE = Case(D=64, T_q=700, T_k=700, lists="both", list_heads=4, deterministic=True)


def ordered_reduction(case: Case) -> list[tuple[int, int, tuple[str, ...]]]:
    """For each turn the compiled kernel may pass on: heads of a group, flags in use, and the branches around it."""
    from flash_attn.cute import flash_bwd_sm100

    x = make_inputs(case)
    with noted(flash_bwd_sm100, "pass_turn", lambda *args: (*args[-2:], operations_around()[:1])) as found:
        backward(case, x, *outputs(case, x))
    return found


@pytest.mark.parametrize("case", [CASE, replace(CASE, D=128, Hkv=1, block=(256, 256))], ids=str)
def test_both_gradients_have_a_turn_of_nothing(compiler_sm100: Worker, case: Case) -> None:
    """Only where a CTA has nothing to loop, and for the flags of both warpgroups."""
    assert compiler_sm100.trace(ordered_reduction, case) == [(case.Hq // case.Hkv, 2, ("scf.if",))] * 2


@pytest.mark.parametrize("change", [{"deterministic": False}, {"Hkv": 4}], ids=str)
def test_no_turns_where_nothing_is_added_in_order(compiler_sm100: Worker, change: dict) -> None:
    assert compiler_sm100.trace(ordered_reduction, replace(CASE, **change)) == []


def passed(head: int, group: int, flags: int, before: int) -> list[list[int]]:
    """Both flags of each key tile, key/value head and sequence, after a turn at one of them; in a worker."""
    import cutlass.cute as cute
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from turn_kernels import Flags, list_rows, pass_turns

    with unset_fake_temporarily(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_rows, "barrier", Flags)
        of = torch.full((2, 3, 4, 2), before, dtype=torch.int32)  # as the interface makes it: [B, Hkv, tiles, 2]
        rank = from_dlpack(of.permute(2, 3, 1, 0)), Int32(3), Int32(head), Int32(1)
        cute.compile(pass_turns, *rank, group, flags)(*rank)
        return of.flatten(0, 2).tolist()


@pytest.mark.parametrize("flags", [1, 2])
@pytest.mark.parametrize("head", [4, 5])
def test_a_turn_is_waited_for_and_given_on(compiler_sm100: Worker, head: int, flags: int) -> None:
    at, before = (1 * 3 + head // 2) * 4 + 3, head % 2
    expected = [[before, before] for _ in range(24)]
    expected[at] = [before + 1, before + 1 if flags == 2 else before]
    assert compiler_sm100.run(passed, head, 2, flags, before) == expected
    assert compiler_sm100.run(passed, head, 2, flags, before + 1)[at][0] < 0  # it would wait


def test_some_heads_list_nothing() -> None:
    """The case of the next test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fa_lists, "block", lambda case: (128, 128))
        listed, _ = fa_lists.tables(SHORT)[0]
    empty = ~listed.any(1)
    assert (empty[::2] & ~empty[1::2]).any(), "of one group"


@pytest.mark.gpu
def test_numbers() -> None:
    from fa_reference import assert_case

    assert_case(SHORT)
