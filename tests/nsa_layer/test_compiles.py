"""The kernels that the layer asks for compile for both architectures on a machine without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest
import torch

from nsa_layer.cli.compile import run_cases
from nsa_layer.config import NSAConfig
from nsa_layer.kernel_cases import ENVIRONMENT, all_cases, covering_cases
from nsa_layer.problem import Problem


@pytest.mark.parametrize("arch", sorted(ENVIRONMENT))
def test_covering_cases_compile(arch: int) -> None:
    cases = [case for case in covering_cases() if case.arch == arch]
    outcomes = list(run_cases(cases, jobs=1))
    assert {outcome.case for outcome in outcomes} == set(cases)
    failed = {outcome.case: outcome.error for outcome in outcomes if outcome.error}
    assert not failed


def test_covering_cases_meet_every_pair_of_options() -> None:
    def pairs(cases: list) -> set:
        return {pair for case in cases for pair in itertools.combinations(asdict(case).items(), 2)}

    covering = covering_cases()
    assert len(covering) <= 60
    assert pairs(covering) == pairs(all_cases())


def test_cases_are_distinct() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("q_tile,rows", [(128, 256), (256, 256), (384, 768)])
def test_a_list_entry_is_whole_kernel_tiles_and_whole_query_tiles(q_tile: int, rows: int) -> None:
    from nsa_layer import branches

    problem = Problem(NSAConfig(block_size=128, q_tile=q_tile), True, 1.0)
    indices = torch.zeros(1, 1, problem.config.num_tiles(1000), 1, dtype=torch.int32)
    sparsity = branches.selected_sparsity(indices, 1000, (4, 1), problem=problem, tile=(256, 128), backward=False)
    assert sparsity.tensors.block_size == (rows, 128)
    assert sparsity.tensors.mask_block_cnt.shape[2] == -(-1000 // rows)
