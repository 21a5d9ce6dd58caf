"""Block-sparse backward on SM90 loops mask and full blocks in one loop, and masks only where something hides."""

import pytest
from fa_cases import Case, backward, make_inputs
from fa_compile import MaskCall, Worker, recorded_masks


def masks(case: Case) -> list[MaskCall]:
    import torch

    x = make_inputs(case)
    lse = torch.empty(case.B, case.Hq, case.T_q, device="cuda")
    with recorded_masks() as calls:
        backward(case, x, torch.empty_like(x.q), lse)
    return calls


@pytest.mark.parametrize(
    ("case", "with_mod"),
    [
        (Case(D=128, T_q=700, T_k=700, lists="both"), [False]),
        (Case(D=128, T_q=700, T_k=640, lists="both", mask_mod="thirds", Hkv=4), [False, True]),
        (Case(D=64, T_q=300, T_k=700, lists="both", causal=True), [False]),
        (Case(D=128, T_q=1, T_k=129, lists="no full", mask_mod="thirds"), [True]),
    ],
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
