"""Dense deterministic backward on SM90 adds key blocks from the left and walks queries from the far end."""

import pytest
from fa_cases import Case, compile_case
from fa_compile import Worker, noted, only_hosts
from fa_reference import assert_bits_repeat

CASES = [
    Case(D=128, T_q=1000, T_k=1000, causal=True, deterministic=True),
    Case(D=128, T_q=1500, T_k=1500, window=(300, 0), deterministic=True),
    Case(D=64, packed=((300, 300), (5, 70), (0, 40), (700, 650), (90, 0)), causal=True, deterministic=True),
    Case(D=128, packed=((300, 300), (700, 650)), window=(100, 0), deterministic=True, Hkv=1),
]


def launched_from_the_right(case: Case) -> bool:
    """The order that backward tells its tile scheduler."""
    from flash_attn.cute import flash_bwd_sm90

    asked: list[bool] = []
    with only_hosts(), noted(flash_bwd_sm90, "TileSchedulerArguments", lambda *args, **named: named["lpt"], asked):
        compile_case(case)
    (lpt,) = asked
    return lpt


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_key_blocks_are_launched_from_the_left(compiler_sm90: Worker, case: Case) -> None:
    assert not compiler_sm90.trace(launched_from_the_right, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_bits_repeat(case: Case) -> None:
    assert_bits_repeat(case, 30)
