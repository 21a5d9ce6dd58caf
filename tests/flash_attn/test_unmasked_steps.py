"""SM90 forward over block lists masks where an edge may be, and has code without a mask for where none is."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
from fa_cases import Case, forward, make_inputs, swept
from fa_compile import Worker, noted

LISTED = dict(D=128, T_q=700, T_k=700, lists="both")
PACK = ((300, 300), (1, 129), (0, 200), (700, 640), (130, 0))
OPEN, MOD, MOD_AND_EDGES, EDGES = "open", "mod", "mod, edges", "edges"


def masks(case: Case) -> Counter[str]:
    """The number of steps with each mask in the code of a forward kernel; in a worker."""
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90 as Forward
    from flash_attn.cute.mask import AttentionMask

    said: list[list[str]] = []

    original_mask, inside = AttentionMask.apply_mask, []

    @wraps(original_mask)
    def masked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not inside and "mask_seqlen" in kwargs:  # not the calls that it makes itself
            edges = kwargs["mask_seqlen"] or kwargs["mask_causal"] or kwargs["mask_local"]
            mod = kwargs.get("mask_mod") is not None
            said[-1].append(MOD_AND_EDGES if mod and edges else MOD if mod else EDGES)
        inside.append(True)
        try:
            return original_mask(self, *args, **kwargs)
        finally:
            inside.pop()

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(AttentionMask, "apply_mask", masked)
        for name in ("mma_one_n_block_intrawg_overlap", "first_half_block_overlap"):
            stack.enter_context(noted(Forward, name, lambda *args, **options: [], said))
        forward(case, make_inputs(case))
    return Counter(" or ".join(sorted(set(of_step))) or OPEN for of_step in said)


def test_a_length_of_whole_blocks_needs_no_mask(compiler_sm90: Worker) -> None:
    """The loop is there twice; in the first one nothing is masked but by a mask_mod."""
    case = Case(**LISTED)
    found = compiler_sm90.trace(masks, case)
    # A loop has two first steps, the first full block after mask ones, and the steps of either list.
    assert found == {OPEN: 5, EDGES: 5}
    found = compiler_sm90.trace(masks, replace(case, mask_mod="thirds"))
    assert found == {OPEN: 3, MOD: 2, EDGES: 3, MOD_AND_EDGES: 2}


def test_blocks_past_the_end_of_a_packed_sequence_stay_hidden(compiler_sm90: Worker) -> None:
    found = compiler_sm90.trace(masks, Case(D=128, packed=PACK, lists="both"))
    assert found[OPEN] == 0 and sum(found.values()) == 5


CAUSAL, WINDOW = Case(**LISTED, causal=True), Case(**LISTED, window=(200, 30))
PLAIN, MODIFIED = {OPEN: 2, EDGES: 5}, {OPEN: 1, MOD: 1, EDGES: 3, MOD_AND_EDGES: 2}
INSIDE = [(CAUSAL, PLAIN), (replace(CAUSAL, mask_mod="thirds"), MODIFIED)]
INSIDE += [(replace(WINDOW, mask_mod="thirds"), MODIFIED), (WINDOW, PLAIN)]


@pytest.mark.parametrize("inside", swept(INSIDE, 2), ids=str)
def test_steps_inside_the_edges_need_no_mask(compiler_sm90: Worker, inside: tuple[Case, dict[str, int]]) -> None:
    case, expected = inside
    assert compiler_sm90.trace(masks, case) == expected
