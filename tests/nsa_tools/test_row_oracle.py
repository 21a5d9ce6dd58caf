"""The row-wise oracle against the quadratic reference, in fp64, where both are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, reference
from nsa_layer.call import LSES, Call
from nsa_tools.testing import row_oracle
from nsa_tools.testing.assertions import assert_sequence_choice
from nsa_tools.testing.cases import Case, Inputs, Result, make_inputs, run

SMALL = dict(block_size=8, block_counts=4, q_tile=16, window_size=11)
BY_TOKEN = dict(q_tile=1, compress_size=12, compress_stride=4)
BY_INDEX = NSAConfig(**SMALL | dict(q_tile=1), rule="index", branches=("selected",))
CASES = {
    "gated": Case(T=150, config=NSAConfig(**SMALL)),
    "equal shares": Case(T=150, config=NSAConfig(**SMALL), gate="none"),
    "overlap": Case(T=131, config=NSAConfig(**SMALL, compress_stride=4), Dv=8),
    "offset": Case(T=64, config=NSAConfig(**SMALL, compress_offset=3), Hq=3, Hkv=3),
    "by token": Case(T=150, config=NSAConfig(**SMALL | dict(q_tile=1))),
    "by token, other sizes": Case(T=131, config=NSAConfig(**SMALL | BY_TOKEN)),
    "nothing forced": Case(T=150, config=NSAConfig(**SMALL, init_blocks=0, local_blocks=0)),
    "more forced": Case(T=150, config=NSAConfig(**SMALL | dict(q_tile=1), init_blocks=3, local_blocks=2)),
    "no window": Case(T=150, config=NSAConfig(**SMALL | dict(window_size=0))),
    "by an index": Case(T=150, config=BY_INDEX, gate="none", index_dim=16),
    "by an index of one key, with a window": Case(
        T=131, config=BY_INDEX.replace(branches=("selected", "window")), index_dim=32, one_key=True
    ),
    "no block": Case(T=5, config=NSAConfig(**SMALL)),
    "one token": Case(T=1, config=NSAConfig(**SMALL), Hq=2, Hkv=1),
}


def sequence_of(inputs: Inputs, block_indices: torch.Tensor) -> tuple[Call, torch.Tensor]:
    """The one sequence of a batch of one, and its do."""
    (sequence,) = inputs.call(block_indices).sequences()
    return sequence, inputs.do[0]


def truth(case: Case) -> tuple[Inputs, Result, torch.Tensor]:
    """The reference in fp64, and its row sums [T, Hq, branches]."""
    inputs = make_inputs(replace(case, dtype=torch.float64))
    result = run("reference", inputs)
    branches, *_ = reference.attend_branches(inputs.call())
    return inputs, result, torch.stack([(inputs.do * o).sum(-1)[0] for o, _ in branches.values()], dim=-1)


def lses(result: Result, config: NSAConfig) -> torch.Tensor:
    return torch.stack([getattr(result.aux, LSES[branch])[0].mT for branch in config.branches], dim=-1)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, so that sums cross their borders."""
    monkeypatch.setattr(row_oracle, "ELEMENTS", 1 << 11)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows_are_the_reference(case: Case) -> None:
    inputs, result, row_sums = truth(case)
    tokens = torch.randperm(case.T, generator=torch.Generator().manual_seed(1))[: max(1, case.T // 2)]
    rows = row_oracle.rows(*sequence_of(inputs, result.aux.block_indices), tokens, dtype=torch.float64)
    torch.testing.assert_close(rows.o, result.o[0, tokens])
    torch.testing.assert_close(rows.dq, result.grads["q"][0, tokens])
    torch.testing.assert_close(rows.lse, lses(result, case.config)[tokens])
    torch.testing.assert_close(rows.row_sums, row_sums[tokens])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_keys_are_the_reference(case: Case) -> None:
    inputs, result, row_sums = truth(case)
    tokens = torch.randperm(case.T, generator=torch.Generator().manual_seed(2))[: max(1, case.T // 2)]
    sequence = sequence_of(inputs, result.aux.block_indices)
    keys = row_oracle.keys(*sequence, tokens, lse=lses(result, case.config), row_sums=row_sums, dtype=torch.float64)
    torch.testing.assert_close(keys.dk, result.grads["k"][0, tokens])
    torch.testing.assert_close(keys.dv, result.grads["v"][0, tokens])
    if case.gate == "weight":
        torch.testing.assert_close(keys.d_gate_weight, result.grads["gate_weight"])


@pytest.mark.parametrize("name", ["gated", "equal shares", "overlap"])
def test_in_half_precision_it_errs_as_the_reference_does(name: str) -> None:
    """Error of the straight implementation, taken at every row, is that of the reference in the same dtype."""
    case = replace(CASES[name], dtype=torch.bfloat16)
    inputs = make_inputs(case)
    exact = inputs.to(torch.float64)
    choice = run("reference", exact).aux.block_indices

    true, straight = (run(reference.attend, given, choice) for given in (exact, inputs))
    tokens, sequence = torch.arange(case.T), sequence_of(inputs, choice)
    rows = row_oracle.rows(*sequence, tokens, dtype=torch.bfloat16)
    sums = row_oracle.rows(*sequence, tokens, dtype=torch.float64).row_sums
    keys = row_oracle.keys(*sequence, tokens, lse=lses(true, case.config), row_sums=sums, dtype=torch.bfloat16)
    for name, mine, of in [("o", rows.o, "o"), ("q", rows.dq, "dq"), ("k", keys.dk, "dk"), ("v", keys.dv, "dv")]:
        exactly = true.tensors()[of][0]
        error = float((mine.double() - exactly).norm())
        expected = float((straight.tensors()[of][0].double() - exactly).norm())
        # dk takes exact row sums, whose errors would make up for some of the rest: it errs a quarter more.
        assert expected / 1.2 <= error <= 1.4 * expected, (name, error, expected)


@pytest.mark.parametrize("name", ["gated", "overlap", "by token, other sizes", "by an index", "no block", "one token"])
def test_the_choice_of_some_tiles_is_checked(name: str) -> None:
    case = CASES[name]
    inputs, result, _ = truth(case)
    sequence, _ = sequence_of(inputs, result.aux.block_indices)
    tiles = [*range(case.config.num_tiles(case.T))][::-1][:4]
    scores, allowed = row_oracle.choice_scores(sequence, tiles)
    own = reference.select_blocks(scores, config=case.config, width=case.config.list_width(case.T))
    assert torch.equal(own, sequence.block_indices[tiles])
    wrong = own.clone()
    listed = int((wrong[0, 0] >= 0).sum())
    wrong[0, 0, listed - 1] = -1
    with pytest.raises(AssertionError, match="lists"):
        assert_sequence_choice(name, wrong, own, scores, allowed)
