"""causal, or a window, and a mask_mod: a key is visible where both say so, forward and backward."""

import pytest
from fa_cases import Case, backward, forward, make_inputs
from fa_compile import MaskCall, Worker, recorded_masks

CASES = [Case(causal=True, mask_mod="thirds"), Case(D=128, T_q=700, T_k=700, window=(150, 0), mask_mod="thirds")]


def traced(case: Case) -> list[tuple[list[MaskCall], int]]:
    """For forward and for backward: the masks in the kernel's code, and how often it asked the mask_mod."""
    import cutlass.cute as cute
    import fa_mask_mods

    asked = []
    original = fa_mask_mods.MASK_MODS["thirds"]

    @cute.jit
    def counted(batch, head, q, kv, seqlen_info, aux_tensors):
        asked.append(kv)
        return kv < q

    fa_mask_mods.MASK_MODS["thirds"] = (counted, None)
    try:
        x = make_inputs(case)
        with recorded_masks() as forwards:
            o, lse = forward(case, x)
        once = len(asked)
        with recorded_masks() as backwards:
            backward(case, x, o, lse)
        return [(forwards, once), (backwards, len(asked) - once)]
    finally:
        fa_mask_mods.MASK_MODS["thirds"] = original


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_masks_reach_both_kernels(compiler: Worker, case: Case) -> None:
    for calls, asked in compiler.trace(traced, case):
        assert asked, "the mask_mod is in the code"
        # The kernel wants both at once; inside, the one is applied and then the other.
        wanted = [call for call in calls if call.mask_mod and (call.mask_causal or call.mask_local)]
        applied = [call for call in calls if not call.mask_mod]
        assert wanted and len(wanted) == len(applied) == len(calls) / 2
        assert {call.mask_causal for call in applied} == {case.causal}
        assert {call.mask_local for call in applied} == {not case.causal}
