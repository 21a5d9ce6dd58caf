"""Block-sparse backward on SM90 walks mask and full blocks in one loop, and masks only where something hides."""

import pytest
from fa_cases import Case, backward, compile_case, make_inputs
from fa_compile import MaskCall, Worker, recorded_masks
from fa_reference import assert_case

CASES = [
    Case(D=128, T_q=700, T_k=700, lists="both"),
    Case(D=128, T_q=700, T_k=640, lists="both", mask_mod="thirds", Hkv=4),
    Case(D=64, T_q=640, T_k=640, lists="full"),
    Case(D=64, T_q=300, T_k=700, lists="both", causal=True),
    Case(D=128, T_q=700, T_k=300, lists="both", causal=True, mask_mod="keyed"),
    Case(D=96, T_q=700, T_k=700, lists="both", window=(200, 0)),
    Case(D=128, T_q=1, T_k=129, lists="no full", mask_mod="thirds"),
]


def masks(case: Case) -> list[MaskCall]:
    import torch

    x = make_inputs(case)
    lse = torch.empty(case.B, case.Hq, case.T_q, device="cuda")
    with recorded_masks() as calls:
        backward(case, x, torch.empty_like(x.q), lse)
    return calls


@pytest.mark.parametrize(
    ("case", "with_mod"),
    [(CASES[0], [False]), (CASES[1], [False, True]), (CASES[3], [False]), (CASES[6], [True])],
    ids=str,
)
def test_one_loop_masks_only_where_something_hides(compiler_sm90: Worker, case: Case, with_mod: list[bool]) -> None:
    calls = compiler_sm90.trace(masks, case)
    # One mask for each kind of entry, none of them straight in the loop's body but for the branch
    # that skips tiles past the end.
    assert sorted(call.mask_mod for call in calls) == with_mod
    for call in calls:
        assert call.inside[:2] == ("scf.if", "scf.if"), "the end of the queries, and what needs no mask"
        assert call.inside.count("scf.for") == 1


@pytest.mark.parametrize("case", CASES[4:6], ids=str)
def test_compiles(compiler_sm90: Worker, case: Case) -> None:
    compiler_sm90.run(compile_case, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    assert_case(case)
