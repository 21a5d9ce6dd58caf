"""Every case of the catalogue: it compiles to machine code, and its numbers are right.

Of a covering set `make test` compiles the first, which has the most pairs of options, and traces the others;
`make test-all` compiles every case.
"""

from functools import cache

import pytest
from fa_catalogue import ONLY_SM100, SM90, covering, options, pairs
from fa_compile import shared_worker
from fa_reference import assert_case, is_blackwell

from fuzz.attention import compile_case
from fuzz.case import Attention as Case

ALIKE = [  # on both architectures; upstream's kernels for SM100 have no heads of 192, and no window in those of 256
    case
    for case in SM90
    if case.block is None and not case.plan and case.q_tiles == 1
    if (case.D, case.Dv) != (192, None) and (case.D, case.window) != (256, (200, 0))
]
CASES = {"sm_90": SM90, "sm_100": ALIKE + ONLY_SM100}
COVERING = {"sm_90": 23, "sm_100": 17}  # cases until every option is in one
COMPILED = 1


@cache
def few(arch: str) -> list[Case]:
    """Those that `make test` compiles, and then those that it traces."""
    return covering(CASES[arch], COVERING[arch])


def to_compile(arch: str) -> list:
    compiled = few(arch)[:COMPILED]
    marks = (pytest.mark.xdist_group(arch), pytest.mark.sweep)
    return [pytest.param(arch, c, marks=marks[: 1 + (c not in compiled)], id=f"{arch}-{c}") for c in CASES[arch]]


def to_trace(arch: str) -> list:
    group = pytest.mark.xdist_group(arch)
    return [pytest.param(arch, case, marks=group, id=f"{arch}-{case}") for case in few(arch)[COMPILED:]]


@pytest.mark.parametrize(("arch", "case"), [*to_compile("sm_90"), *to_compile("sm_100")])
def test_compiles(arch: str, case: Case) -> None:
    shared_worker(arch).run(compile_case, case)


@pytest.mark.parametrize(("arch", "case"), [*to_trace("sm_90"), *to_trace("sm_100")])
def test_traces(arch: str, case: Case) -> None:
    shared_worker(arch).trace(compile_case, case)


def test_few_cases_have_most_pairs_of_options() -> None:
    """More than 0.8 of all pairs are in one of them, and every option."""
    for arch, cases in CASES.items():
        every, covered = (set().union(*map(pairs, of)) for of in (cases, few(arch)))
        assert len(covered) > 0.8 * len(every)
        assert set().union(*map(options, few(arch))) >= set().union(*map(options, cases))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES["sm_100" if is_blackwell() else "sm_90"], ids=str)
def test_numbers(case: Case) -> None:
    assert_case(case)
