"""The kernels that the layer asks for compile for both architectures on a machine without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import pytest

from nsa_layer.cli.compile import run_cases
from nsa_layer.kernel_cases import ENVIRONMENT, all_cases, covering_cases


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
