"""Masks over block lists and mask_mods: the end of the keys, causal and windows; masks only where something hides."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fa_compile import MaskCall, Worker, compile_backward, compile_forward, recorded_masks

from fuzz.case import Attention as Case

TAIL = [Case(D=64, T_k=700, lists="both"), Case(D=64, T_k=700, Hkv=4, lists="both", mask_mod="keyed", overlap=False)]
CUT = [Case(T_q=700, T_k=700, lists="both", causal=True), Case(T_q=700, T_k=700, lists="both", window=(200, 0))]


def masks(case: Case, direction: str) -> tuple[list[MaskCall], int]:
    """The masks in the code of the forward or backward kernel, and how often it asks "thirds"; in a worker."""
    import cutlass.cute as cute

    from fuzz import mask_mods

    asked = []

    @cute.jit
    def counted(batch, head, q, kv, seqlen_info, aux_tensors):
        asked.append(kv)
        return kv < q

    with patch.dict(mask_mods.MASK_MODS, thirds=(counted, None)), recorded_masks() as calls:
        (compile_forward if direction == "forward" else compile_backward)(case)
    return calls, len(asked)


def in_loop(call: MaskCall) -> bool:
    """Straight in a loop's body: it masks every block that the loop visits."""
    return call.inside[0] == "scf.for"


def in_branch_of_loop(call: MaskCall) -> bool:
    return call.inside[:2] == ("scf.if", "scf.for")


@pytest.mark.parametrize("case", TAIL, ids=str)
def test_tail_is_masked_wherever_it_stands(compiler: Worker, case: Case) -> None:
    """On SM90 in a loop of its own, beside one for keys that end with a block (test_forward_steps.py)."""
    calls, _ = compiler.trace(masks, case, "forward")
    own_loop = compiler.arch == "sm_90"
    at_tail = [call for call in calls if (in_loop if own_loop else in_branch_of_loop)(call) and call.mask_seqlen]
    # One for the partial blocks, with the mask_mod if there is one, and one for the full blocks.
    assert {False, bool(case.mask_mod)} == {call.mask_mod for call in at_tail}
    assert len(at_tail) >= 2
    without = [call for call in calls if in_loop(call) and not call.mask_seqlen]
    assert len(without) == (own_loop and bool(case.mask_mod))


@pytest.mark.parametrize("case", CUT, ids=str)
def test_full_blocks_are_cut_by_causal_and_local(compiler: Worker, case: Case) -> None:
    """On SM90 in a branch over the step, beside one for blocks that no edge runs through."""
    cut = in_branch_of_loop if compiler.arch == "sm_90" else in_loop
    calls = [call for call in compiler.trace(masks, case, "forward")[0] if cut(call)]
    assert len(calls) >= 2, "the loops over partial and over full blocks both mask every block"
    for call in calls:
        assert (call.mask_causal, call.mask_local) == (case.causal, not case.causal)
        assert call.mask_seqlen, "no branch is needed for the end of the keys: the limit takes it in"


@pytest.mark.parametrize(("tile_n", "keys"), [(128, 300), (128, 256), (112, 1), (80, 80), (128, 129)])
def test_at_tail(tile_n: int, keys: int) -> None:
    from flash_attn.cute.fwd_sm90.masks import TailMask

    mask = TailMask(None, SimpleNamespace(tile_n=tile_n, seqlen_k=keys))
    for block in range(6):
        holds_padding = any(key >= keys for key in range(block * tile_n, (block + 1) * tile_n))
        assert mask.at_tail(block) == holds_padding


CASES = [Case(causal=True, mask_mod="thirds"), Case(D=128, T_q=700, T_k=700, window=(150, 0), mask_mod="thirds")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_masks_reach_both_kernels(compiler: Worker, case: Case) -> None:
    for calls, asked in (compiler.trace(masks, case, of) for of in ("forward", "backward")):
        assert asked, "the mask_mod is in the code"
        # The kernel wants both at once; inside, the one is applied and then the other.
        wanted = [call for call in calls if call.mask_mod and (call.mask_causal or call.mask_local)]
        applied = [call for call in calls if not call.mask_mod]
        assert wanted and len(wanted) == len(applied) == len(calls) / 2
        assert {call.mask_causal for call in applied} == {case.causal}
        assert {call.mask_local for call in applied} == {not case.causal}


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
    calls, _ = compiler_sm90.trace(masks, case, "backward")
    # One mask for each kind of entry, none of them straight in the loop's body but for the branch
    # that skips tiles past the end.
    assert sorted(call.mask_mod for call in calls) == with_mod
    for call in calls:
        assert call.inside[:2] == ("scf.if", "scf.if"), "the end of the queries, and what needs no mask"
        assert call.inside.count("scf.for") == 1
