"""The selection of blocks, by token, by tile and by the seed's rule: against the definition in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from layer_calls import forced_blocks

from nsa_layer import NSAConfig
from nsa_tools.testing.assertions import assert_same_choice
from nsa_tools.testing.cases import Case, Inputs, make_inputs, run

SMALL = NSAConfig(block_size=8, block_counts=5, q_tile=16, window_size=8)
TOKENS = dict(q_tile=1, block_counts=4)
FREE = dict(init_blocks=0, local_blocks=0)
BACKENDS = ["eager", "reference"]


def oracle_scores(inputs: Inputs, heads: range, first: int, last: int) -> dict[int, float]:
    """The score of each block that the tile of tokens `first` to `last` may choose, summed over query heads."""
    case, config, (q, k) = inputs.case, inputs.case.config, (x[0].double() for x in (inputs.q, inputs.k))
    size, complete_at, own = config.block_size, first if case.causal else case.T - 1, range(first, last + 1)
    until_first = range(max(0, first - config.q_tile + 1), first + 1)
    seed = config.rule == "seed"
    asking = own if seed or not case.causal and not config.by_token else until_first
    scores = {j: 0.0 for j in range(case.T // size) if j * size + size - 1 <= complete_at}
    if seed:
        scores = {j: 0.0 for j in range(case.T // size) if j * size <= last or not case.causal}
    elif case.causal and config.chooses_own:
        scores |= {j: 0.0 for j in range(first // size, last // size + 1)}
    for h in heads:
        kv = h * case.Hkv // case.Hq
        keys, given = k[:, kv], None if inputs.k_cmp is None else inputs.k_cmp[0, :, kv].double()
        # A tile asks the key that lies wholly inside a block that is complete; a token every key that it sees.
        begins = range(0, case.T - config.span + 1, config.stride)
        if config.by_token:
            begins = [s for s in begins if s + config.offset <= first or not case.causal]
        else:
            begins = [j * size for j in scores if j * size + size - 1 <= complete_at or seed]
        query = q[asking.start : asking.stop, h].mean(0)
        compressed = [keys[s : s + config.span].mean(0) if given is None else given[s // config.stride] for s in begins]
        logits = [case.spec.softmax_scale * float(query @ key) for key in compressed]
        total = math.fsum(map(math.exp, logits))
        for s, logit in zip(begins, logits):
            for t in range(s, s + config.span, config.stride) if config.by_token else (s,):
                if t // size in scores:
                    scores[t // size] += logit if seed else math.exp(logit) / total
    return scores


def oracle_list(inputs: Inputs, heads: range, tile: int) -> list[int]:
    case, config, T = inputs.case, inputs.case.config, inputs.case.T
    first, last = tile * config.q_tile, min(T, (tile + 1) * config.q_tile) - 1
    own = range(first // config.block_size, last // config.block_size + 1)
    forced = (
        set() if config.rule == "seed" else set(forced_blocks(own, config.num_blocks(T), config, causal=case.causal))
    )
    scores = oracle_scores(inputs, heads, first, last)
    best = sorted((j for j in scores if j not in forced), key=lambda j: (-scores[j], j))
    return sorted(forced | set(best[: max(0, config.block_counts - len(forced))]))


def assert_oracle_choice(case: Case, backend: str) -> None:
    inputs = make_inputs(case)
    choice = run(backend, inputs).aux.block_indices[0]
    lists = case.Hq if case.config.rule == "seed" else case.Hkv
    assert choice.shape[:2] == (case.config.num_tiles(case.T), lists)
    group = case.Hq // lists
    for h in range(lists):
        for tile in range(choice.shape[0]):
            got, expected = choice[tile, h].tolist(), oracle_list(inputs, range(h * group, (h + 1) * group), tile)
            assert got == expected + [-1] * (len(got) - len(expected)), f"list {h} of tile {tile}: {case!r}"


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
        FREE | {"block_counts": 3},
        FREE | {"q_tile": 4},
        {"init_blocks": 3, "local_blocks": 1, "block_counts": 6},
        {"init_blocks": 0, "local_blocks": 3},
        {"init_blocks": 2, "local_blocks": 0, "q_tile": 32},
        {"init_blocks": 4, "local_blocks": 3, "block_counts": 5},
        {"init_blocks": 4, "local_blocks": 3, "block_counts": 2, "q_tile": 4},
        {"block_counts": 1},
        {"block_counts": 1000},
        TOKENS,
        TOKENS | FREE,
        TOKENS | FREE | {"compress_offset": 50, "block_counts": 3},
        TOKENS | {"compress_offset": 1000},
        TOKENS | {"compress_offset": 0, "init_blocks": 3, "local_blocks": 0},
        TOKENS | {"init_blocks": 4, "local_blocks": 3},
    ],
    ids=repr,
)
def test_exact_scores(causal: bool, changes: dict[str, object]) -> None:
    config = EXACT.config.replace(**changes)
    # Not causal, the last tile asks with a mean over its own tokens: as many as a power of two.
    T = 152 if config.q_tile in (1, 16) or causal else 160
    for backend in BACKENDS:
        assert_oracle_choice(replace(EXACT, T=T, causal=causal, config=config), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL.replace(compress_stride=4),
        SMALL.replace(**FREE, block_counts=18),
        SMALL.replace(**TOKENS),
        SMALL.replace(**TOKENS, compress_size=4, compress_stride=2),  # the sizes of `NSAConfig.paper` over 8
        SMALL.replace(**TOKENS | FREE, compress_size=16, compress_stride=4),
        NSAConfig.seed(block_size=8, block_counts=3, q_tile=64, window_size=11),
    ],
    ids=["tiles", "stride", "unforced", "tokens", "paper", "long keys", "seed"],
)
def test_softmax_scores(backend: str, config: NSAConfig) -> None:
    """Real scores, no ties: heads of a group with very different softmaxes are summed after them.

    A short last block is listed only if forced.
    """
    sizes = [(1, 1, True), (7, 1, False), (8, 3, True), (32, 1, False), (99, 3, True), (155, 3, False)]
    for T, G, causal, *own in (*sizes, (40, 3, True, "k_cmp")):
        case = Case(T=T, Hq=2 * G, Hkv=2, D=8, dtype=torch.float64, config=config, causal=causal, own_keys=tuple(own))
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
