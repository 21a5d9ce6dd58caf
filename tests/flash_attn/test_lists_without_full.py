"""Block lists whose full_* is None: forward takes them as backward does."""

import pytest
from fa_cases import Case, compile_case
from fa_compile import Worker
from fa_reference import assert_case

CASES = [Case(T_q=T, T_k=T, mask_mod=mod, lists="no full") for T, mod in ((700, None), (300, "thirds"))]


def test_compiles(compiler: Worker) -> None:
    compiler.run(compile_case, CASES[1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    assert_case(case)
