"""The choice of `NSAConfig.seed()` against the seed's rule in a few lines of its own."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from nsa_layer import NSAConfig
from nsa_tools.testing.cases import Case, make_inputs, run

SMALL = NSAConfig.seed(block_size=8, block_counts=3, q_tile=64, window_size=11)


def seed_list(q: torch.Tensor, k_cmp: torch.Tensor, first: int, last: int, case: Case) -> list[int]:
    """The blocks of the tile of queries `first` to `last`, for one query head: q [T, D], k_cmp [complete blocks, D]."""
    started = [j for j in range(len(k_cmp)) if j * case.config.block_size <= last or not case.causal]
    scores = {j: float((q[first : last + 1] @ k_cmp[j]).mean().detach()) for j in started}
    return sorted(sorted(started, key=lambda j: (-scores[j], j))[: case.config.block_counts])


def assert_the_seeds_choice(case: Case, backend: str) -> None:
    """A list for every query head and tile; what is attended to is that of every rule, as `test_reference` has it."""
    inputs = make_inputs(case)
    choice, size = run(backend, inputs).aux.block_indices, case.config.block_size
    assert choice.shape[-2] == case.Hq
    for own, q, k in zip(choice, inputs.q, inputs.k, strict=True):
        T, tile = len(q), case.config.q_tile
        k_cmp = k[: T // size * size].unflatten(0, (-1, size)).mean(1)
        for h in range(case.Hq):
            mine = q[:, h], k_cmp[:, h // (case.Hq // case.Hkv)]
            expected = [seed_list(*mine, t, min(t + tile, T) - 1, case) for t in range(0, T, tile)]
            assert [[j for j in row if j >= 0] for row in own[:, h].tolist()] == expected


def test_what_it_says() -> None:
    changed = dict(rule="seed", compress_offset=0, q_tile=256, init_blocks=0, local_blocks=0)
    assert asdict(NSAConfig.seed()) == asdict(NSAConfig()) | changed


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("T", [1, 7, 8, 31, 32, 33, 96, 100])
def test_against_the_rule(backend: str, T: int, G: int) -> None:
    for causal in (True, False):
        case = Case(B=2, T=T, Hq=2 * G, Hkv=2, D=4, dtype=torch.float64, config=SMALL, causal=causal)
        assert_the_seeds_choice(case, backend)
