"""The choice of blocks: against the definition in plain Python, and that nothing else is attended to."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from nsa_layer import NSAConfig
from nsa_tools.testing.assertions import assert_same_choice
from nsa_tools.testing.cases import Case, Inputs, make_inputs, run
from nsa_tools.testing.choices import forced_blocks

SMALL = NSAConfig(block_size=8, block_counts=5, q_tile=16, window_size=8)


def oracle_scores(inputs: Inputs, kv: int, first: int, blocks: list[int]) -> list[dict[int, Fraction | float]]:
    """The logit of some blocks for the tile that starts at a token: one dict for each query head of a group; exact."""
    case, config, size = inputs.case, inputs.case.config, inputs.case.config.block_size
    G = case.Hq // case.Hkv
    if case.causal:
        asking = range(max(0, first - config.q_tile + 1), first + 1)
    else:
        asking = range(first, min(case.T, first + config.q_tile))
    scale = Fraction(case.spec.softmax_scale)
    keys = {
        j: [sum(map(Fraction, x)) / size for x in zip(*inputs.k[0, j * size : (j + 1) * size, kv].tolist())]
        for j in blocks
    }
    heads = []
    for h in range(kv * G, (kv + 1) * G):
        q = [sum(map(Fraction, x)) / len(asking) for x in zip(*inputs.q[0, asking.start : asking.stop, h].tolist())]
        heads.append({j: scale * sum(a * b for a, b in zip(q, key)) for j, key in keys.items()})
    return heads


def oracle_list(inputs: Inputs, kv: int, tile: int) -> list[int]:
    """The list of a tile for one key/value head."""
    case, config, size, T = inputs.case, inputs.case.config, inputs.case.config.block_size, inputs.case.T
    first = tile * config.q_tile
    last = min(T, first + config.q_tile) - 1
    complete_at = first if case.causal else T - 1
    candidates = [j for j in range(T) if j * size + size - 1 <= complete_at]
    own = range(first // size, last // size + 1)
    forced = set(forced_blocks(own, -(-T // size), config, causal=case.causal))
    heads = oracle_scores(inputs, kv, first, candidates)
    heads = [{j: math.exp(x) for j, x in head.items()} for head in heads]
    heads = [{j: x / math.fsum(head.values()) for j, x in head.items()} for head in heads]
    scores = {j: sum(head[j] for head in heads) for j in candidates}
    if case.causal and config.chooses_own:
        scores = dict.fromkeys(own, 0.0) | scores
    best = sorted((j for j in scores if j not in forced), key=lambda j: (-scores[j], j))
    return sorted(forced | set(best[: max(0, config.block_counts - len(forced))]))


def assert_oracle_choice(case: Case, backend: str) -> None:
    inputs = make_inputs(case)
    choice = run(backend, inputs).aux.block_indices[0]
    for kv in range(case.Hkv):
        for tile in range(choice.shape[0]):
            got, expected = choice[tile, kv].tolist(), oracle_list(inputs, kv, tile)
            assert got == expected + [-1] * (len(got) - len(expected)), f"head {kv}, tile {tile}: {case!r}"


# Powers of two: the scale is one, and every mean and score is exact in fp32; a softmax of one head keeps their order.
# Integers also make many ties.
EXACT = Case(T=150, Hq=2, Hkv=2, D=16, config=SMALL, integers=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_tile": 4},
        {"q_tile": 32, "block_counts": 2},
        {"compress_stride": 2},
        {"init_blocks": 0, "local_blocks": 0, "block_counts": 3},
        {"init_blocks": 0, "local_blocks": 0, "q_tile": 4},
        {"init_blocks": 3, "local_blocks": 1, "block_counts": 6},
        {"init_blocks": 0, "local_blocks": 3},
        {"init_blocks": 2, "local_blocks": 0, "q_tile": 32},
        {"init_blocks": 4, "local_blocks": 3, "block_counts": 5},
        {"init_blocks": 4, "local_blocks": 3, "block_counts": 2, "q_tile": 4},
        {"block_counts": 1},
        {"block_counts": 1000},
    ],
    ids=repr,
)
def test_exact_scores(causal: bool, changes: dict[str, object]) -> None:
    config = EXACT.config.replace(**changes)
    # Not causal, the last tile asks with a mean over its own tokens: as many as a power of two.
    T = 152 if config.q_tile == 16 or causal else 160
    for backend in ("eager", "reference"):
        assert_oracle_choice(replace(EXACT, T=T, causal=causal, config=config), backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize(
    "changes", [{}, {"compress_stride": 4}, {"init_blocks": 0, "local_blocks": 0, "block_counts": 18}], ids=repr
)
def test_softmax_scores(backend: str, changes: dict[str, object]) -> None:
    """Real scores, no ties: heads of a group with very different softmaxes are summed after them.

    A short last block is listed only if forced.
    """
    for causal in (True, False):
        config = SMALL.replace(**changes)
        case = Case(T=155, Hq=6, Hkv=2, D=8, dtype=torch.float64, config=config, causal=causal)
        assert_oracle_choice(case, backend)


def test_a_wrong_choice_is_seen() -> None:
    """The helper that the tests of every backend use refuses what it should."""
    inputs = make_inputs(Case(T=150, config=SMALL, seed=1))
    choice = run("reference", inputs).aux.block_indices
    assert choice[0, -1, 0].tolist()[0] == 0 and choice.shape[-1] == 5
    assert_same_choice(inputs, choice)
    chosen = set(choice[0, -1, 0].tolist())
    other = next(j for j in range(1, 17) if j not in chosen)
    free = next(j for j in sorted(chosen) if j not in (0, 17, 18))
    wrong = {
        "should": sorted(chosen - {free} | {other}),
        "forced": sorted(chosen - {0} | {other}),
        "ascending": sorted(chosen, reverse=True),
        "wrong length": [*sorted(chosen - {free}), -1],
    }
    for message, blocks in wrong.items():
        changed = choice.clone()
        changed[0, -1, 0] = torch.tensor(blocks)
        with pytest.raises(AssertionError, match=message):
            assert_same_choice(inputs, changed)
