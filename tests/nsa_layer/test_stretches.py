"""Queries that are a stretch of a longer context: together, stretches give what the whole sequence gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, eager, reference
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run
from nsa_tools.testing.stretches import Attend, in_stretches

SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16, block_counts=5)
ATTEND = {"eager": eager.attend, "reference": reference.attend}

# Of two sequences of 70 tokens: a middle stretch among them, single queries, and offsets that differ.
EVEN = [[(0, 21), (49, 70)], [(21, 22), (48, 49)], [(22, 70), (0, 48)]]
# Of sequences of 40, 0, 3 and 57 tokens; one has no query in one of the stretches.
RAGGED = [[(0, 17), (0, 0), (0, 3), (56, 57)], [(17, 40), (0, 0), (3, 3), (0, 56)]]

CASES = {
    "batch": (Case(B=2, T=70, config=SMALL), EVEN),
    "packed": (Case(lengths=(40, 0, 3, 57), config=SMALL), RAGGED),
    "overlapping": (Case(B=2, T=70, config=OVERLAPPING, compress_weights=True), EVEN),
    "overlapping, packed": (Case(lengths=(40, 0, 3, 57), config=OVERLAPPING, gate="given"), RAGGED),
    "not causal": (Case(B=2, T=70, config=SMALL, causal=False), EVEN),
    "not causal, packed": (Case(lengths=(40, 0, 3, 57), config=OVERLAPPING, causal=False), RAGGED),
    "own keys": (Case(B=2, T=70, config=SMALL, own_keys=OWN_KEYS), EVEN),
    "own keys, packed": (Case(lengths=(40, 0, 3, 57), config=SMALL, own_keys=OWN_KEYS), RAGGED),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("attend", ATTEND.values(), ids=list(ATTEND))
def test_stretches_are_the_whole(attend: Attend, name: str) -> None:
    """Outputs, lists, and the gradients' sums, of all keys."""
    case, stretches = CASES[name]
    assert_close_to_reference(replace(case, D=8, Dv=6, dtype=torch.float64), in_stretches(attend, stretches))


@pytest.mark.parametrize("attend", ATTEND.values(), ids=list(ATTEND))
@pytest.mark.parametrize("causal", [True, False])
def test_lists_that_are_given_may_be_of_tiles(causal: bool, attend: Attend) -> None:
    """Tiles count from a stretch's first query."""
    case = Case(T=70, D=8, dtype=torch.float64, config=SMALL.replace(q_tile=16), causal=causal)
    inputs, stretches = make_inputs(case), [[(0, 16)], [(16, 48)], [(48, 70)]]
    lists = run("reference", inputs).aux.block_indices
    whole, parts = (run(f, inputs, block_indices=lists) for f in (reference.attend, in_stretches(attend, stretches)))
    for name, x in whole.tensors().items():
        torch.testing.assert_close(parts.tensors()[name], x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attend", ATTEND.values(), ids=list(ATTEND))
def test_tiles_choose_for_whole_sequences_alone(attend: Attend) -> None:
    case = Case(B=2, T=70, D=8, config=SMALL.replace(q_tile=16))
    with pytest.raises(NotImplementedError, match="q_offset with q_tile=16"):
        run(in_stretches(attend, EVEN), make_inputs(case))
