"""`NSAConfig.seed()` against the seed's rule in a few lines of its own."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from nsa_layer import NSAConfig
from nsa_tools.testing.cases import BRANCHES, Case, Inputs, make_inputs, run

SMALL = NSAConfig.seed(block_size=8, block_counts=3, q_tile=32, window_size=11)
DEFAULT = NSAConfig.seed(block_counts=3, window_size=100)
WANTED = ("q", "k", "v", "gate_weight")


def seed_list(q: torch.Tensor, k_cmp: torch.Tensor, first: int, last: int, case: Case) -> list[int]:
    """The blocks of the tile of queries `first` to `last`, for one query head: q [T, D], k_cmp [complete blocks, D]."""
    started = [j for j in range(len(k_cmp)) if j * case.config.block_size <= last or not case.causal]
    scores = {j: float((q[first : last + 1] @ k_cmp[j]).mean().detach()) for j in started}
    return sorted(sorted(started, key=lambda j: (-scores[j], j))[: case.config.block_counts])


def seed_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> tuple[list[torch.Tensor], list]:
    """One query head of one sequence, q, k, v [T, D]: the three branches' outputs [T, D], and each tile's blocks."""
    T, config = len(q), case.config
    size, tile, w = config.block_size, config.q_tile, config.window_size
    starts = range(0, T - size + 1, size)
    k_cmp, v_cmp = (torch.stack([x[s : s + size].mean(0) for s in starts]) if starts else x[:0] for x in (k, v))
    lists = [seed_list(q, k_cmp, t, min(t + tile, T) - 1, case) for t in range(0, T, tile)]
    seen = {name: torch.zeros(T, len(starts) if name == "cmp" else T, dtype=torch.bool) for name in BRANCHES}
    for t in range(T):
        past = t if case.causal else T
        seen["cmp"][t, [j for j in range(len(starts)) if j * size <= past]] = True
        seen["slc"][t, [s for j in lists[t // tile] for s in range(j * size, (j + 1) * size) if s <= past]] = True
        seen["swa"][t, [s for s in range(T) if t - w < s < t + w and s <= past]] = True
    outputs = []
    for (keys, values), mask in zip(((k_cmp, v_cmp), (k, v), (k, v)), seen.values(), strict=True):
        weights = (q @ keys.T * case.D**-0.5).masked_fill(~mask, -1e300).softmax(-1)
        outputs.append((weights * mask) @ values)
    return outputs, lists


def seed(inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[list[list[list[int]]]]]:
    """The whole operator: o, gradients by name, and lists by sequence, query head and tile."""
    case = inputs.case
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in WANTED}
    tokens = [leaves[name].split(case.lengths) if case.lengths else leaves[name].unbind() for name in "qkv"]
    sequences, lists = [], []
    for q, k, v in zip(*tokens, strict=True):
        heads = []
        lists.append([])
        for h in range(case.Hq):
            kv = h // (case.Hq // case.Hkv)
            outputs, of_tiles = seed_head(q[:, h], k[:, kv], v[:, kv], case)
            gates = (q[:, h] @ leaves["gate_weight"][h].T).sigmoid()
            heads.append(sum(gates[:, i, None] * outputs[i] for i in range(3)))
            lists[-1].append(of_tiles)
        sequences.append(torch.stack(heads, dim=1))
    o = torch.cat(sequences) if case.lengths else torch.stack(sequences)
    return o, dict(zip(WANTED, torch.autograd.grad(o, list(leaves.values()), inputs.do), strict=True)), lists


def assert_the_seeds(case: Case, backend: str) -> None:
    inputs = make_inputs(case)
    got = run(backend, inputs)
    o, grads, lists = seed(inputs)
    choice = got.aux.block_indices
    assert choice.shape[-3] == case.Hq, "a list for every query head"
    of_sequences = choice.unbind()
    if case.lengths:
        of_sequences = choice.split([case.config.num_tiles(T) for T in case.lengths], dim=1)
    for own, expected in zip(of_sequences, lists, strict=True):
        listed = [[[j for j in tile if j >= 0] for tile in head] for head in own.tolist()]
        assert listed == expected
    for name, x, true in [("o", got.o, o), *((name, got.grads[name], grad) for name, grad in grads.items())]:
        torch.testing.assert_close(x, true, rtol=1e-11, atol=1e-11, msg=lambda said, name=name: f"{name}: {said}")


def test_what_it_says() -> None:
    assert asdict(NSAConfig.seed()) == asdict(NSAConfig()) | {
        "rule": "seed",
        "compress_offset": 0,
        "q_tile": 256,
        "force_blocks": False,
    }


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("T", [1, 7, 8, 31, 32, 33, 96, 100])
def test_against_the_rule(backend: str, T: int, G: int) -> None:
    for causal in (True, False):
        case = Case(B=2, T=T, Hq=2 * G, Hkv=2, D=4, dtype=torch.float64, config=SMALL, causal=causal)
        assert_the_seeds(case, backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("G", [1, 2])
def test_packed(backend: str, G: int) -> None:
    case = Case(lengths=(100, 0, 1, 64, 39), Hq=2 * G, Hkv=2, D=4, dtype=torch.float64, config=SMALL)
    assert_the_seeds(case, backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("T", [512, 600])
def test_with_the_seeds_own_sizes(backend: str, T: int) -> None:
    assert_the_seeds(Case(T=T, Hq=2, Hkv=1, D=4, dtype=torch.float64, config=DEFAULT), backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_exact_scores(backend: str) -> None:
    """Means of small integers over powers of two: many blocks have equal scores."""
    assert_the_seeds(Case(T=256, D=4, dtype=torch.float64, config=SMALL, integers=True), backend)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_the_earlier_of_equal_blocks(backend: str) -> None:
    """Queries of 0 rank all blocks alike; a first tile may list its own, and no tile a short last block."""
    inputs = make_inputs(Case(T=39, Hq=2, Hkv=1, D=4, config=SMALL))
    choice = run(backend, replace(inputs, q=torch.zeros_like(inputs.q))).aux.block_indices
    assert choice[0].tolist() == [[[0, 1, 2], [0, 1, 2]]] * 2
    few = run(backend, make_inputs(Case(T=39, Hq=2, Hkv=1, D=4, config=SMALL.replace(block_counts=9))))
    assert few.aux.block_indices[0].tolist() == [[[0, 1, 2, 3, -1]] * 2] * 2
