"""Every case of the catalogue: it compiles to machine code, and its numbers are right.

Of a covering set `make test` compiles the cases with the most pairs of options, and traces the others; `make test-all`
compiles every case.
"""

from __future__ import annotations

import pytest
from fa_cases import Case, compile_case
from fa_catalogue import ONLY_SM100, SM90, covering
from fa_compile import shared_worker
from fa_reference import assert_case, is_blackwell

ALIKE = [case for case in SM90 if case.block is None and not case.plan and case.q_tiles == 1]  # on both architectures
CASES = {"sm_90": SM90, "sm_100": ALIKE + ONLY_SM100}


COVERING, COMPILED = 24, 4  # cases for each architecture


def to_compile(arch: str) -> list:
    few = covering(CASES[arch], COMPILED)
    marks = (pytest.mark.xdist_group(arch), pytest.mark.sweep)
    return [pytest.param(arch, case, marks=marks[: 1 + (case not in few)], id=f"{arch}-{case}") for case in CASES[arch]]


def to_trace(arch: str) -> list:
    group = pytest.mark.xdist_group(arch)
    few = covering(CASES[arch], COVERING)[COMPILED:]
    return [pytest.param(arch, case, marks=group, id=f"{arch}-{case}") for case in few]


@pytest.mark.parametrize(("arch", "case"), [*to_compile("sm_90"), *to_compile("sm_100")])
def test_compiles(arch: str, case: Case) -> None:
    shared_worker(arch).run(compile_case, case)


@pytest.mark.parametrize(("arch", "case"), [*to_trace("sm_90"), *to_trace("sm_100")])
def test_traces(arch: str, case: Case) -> None:
    shared_worker(arch).trace(compile_case, case)


def test_few_cases_have_most_pairs_of_options() -> None:
    """And every option is in one of them."""
    from itertools import combinations

    from fa_catalogue import options

    for cases in CASES.values():
        few = covering(cases, COVERING)
        every, covered = (
            {pair for case in of for pair in combinations(sorted(options(case), key=str), 2)} for of in (cases, few)
        )
        assert len(covered) > 0.7 * len(every)
        assert set().union(*map(options, few)) >= {("D", D) for D in {case.D for case in cases}}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES["sm_100" if is_blackwell() else "sm_90"], ids=str)
def test_numbers(case: Case) -> None:
    assert_case(case)
