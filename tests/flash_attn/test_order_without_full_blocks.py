"""Deterministic backward on SM100 takes lists that tell no full blocks apart."""

import pytest
from fa_cases import Case, compile_case
from fa_compile import Worker


@pytest.mark.parametrize("D", [64, pytest.param(128, marks=pytest.mark.sweep)])
def test_compiles(compiler_sm100: Worker, D: int) -> None:
    """With an order of writes for the blocks that are listed, and none for full ones."""
    compiler_sm100.trace(compile_case, Case(D=D, lists="no full", deterministic=True))
