"""Block lists in any order: the end of the keys is masked in every block, causal and local in full ones too."""

import pytest
from fa_cases import Case, forward, make_inputs
from fa_compile import MaskCall, Worker, recorded_masks

TAIL = [
    Case(D=64, T_k=700, lists="both"),
    Case(D=64, T_k=700, Hkv=4, lists="both", mask_mod="keyed", overlap=False),
]
CUT = [
    Case(T_q=700, T_k=700, lists="both", causal=True),
    Case(T_q=700, T_k=700, lists="both", window=(200, 0)),
]


def masks(case: Case) -> list[MaskCall]:
    with recorded_masks() as calls:
        forward(case, make_inputs(case))
    return calls


def in_loop(call: MaskCall) -> bool:
    """Straight in a loop's body: it masks every block that the loop visits."""
    return call.inside[0] == "scf.for"


def in_branch_of_loop(call: MaskCall) -> bool:
    return call.inside[:2] == ("scf.if", "scf.for")


@pytest.mark.parametrize("case", TAIL, ids=str)
def test_tail_is_masked_wherever_it_stands(compiler: Worker, case: Case) -> None:
    """On SM90 in a loop of its own, beside one for keys that end with a block (test_unmasked_steps.py)."""
    calls = compiler.trace(masks, case)
    own_walk = compiler.arch == "sm_90"
    at_tail = [call for call in calls if (in_loop if own_walk else in_branch_of_loop)(call) and call.mask_seqlen]
    # One for the partial blocks, with the mask_mod if there is one, and one for the full blocks.
    assert {False, bool(case.mask_mod)} == {call.mask_mod for call in at_tail}
    assert len(at_tail) >= 2
    without = [call for call in calls if in_loop(call) and not call.mask_seqlen]
    assert len(without) == (own_walk and bool(case.mask_mod))


@pytest.mark.parametrize("case", CUT, ids=str)
def test_full_blocks_are_cut_by_causal_and_local(compiler: Worker, case: Case) -> None:
    """On SM90 in a branch over the step, beside one for blocks that no edge runs through."""
    cut = in_branch_of_loop if compiler.arch == "sm_90" else in_loop
    calls = [call for call in compiler.trace(masks, case) if cut(call)]
    assert len(calls) >= 2, "the loops over partial and over full blocks both mask every block"
    for call in calls:
        assert (call.mask_causal, call.mask_local) == (case.causal, not case.causal)
        assert call.mask_seqlen, "no branch is needed for the end of the keys: the limit takes it in"


@pytest.mark.parametrize(("tile_n", "keys"), [(128, 300), (128, 256), (112, 1), (80, 80), (128, 129)])
def test_at_tail(tile_n: int, keys: int) -> None:
    from types import SimpleNamespace

    from flash_attn.cute.fwd_sm90.masks import TailMask

    mask = TailMask(None, SimpleNamespace(tile_n=tile_n, seqlen_k=keys))
    for block in range(6):
        holds_padding = any(key >= keys for key in range(block * tile_n, (block + 1) * tile_n))
        assert mask.at_tail(block) == holds_padding
