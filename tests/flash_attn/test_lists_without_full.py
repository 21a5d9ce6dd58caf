"""Block lists whose full_* is None: forward takes them as backward does."""

from fa_cases import Case, forward, make_inputs
from fa_compile import Worker


def compile_forward(case: Case) -> None:
    forward(case, make_inputs(case))


def test_compiles(compiler: Worker) -> None:
    compiler.trace(compile_forward, Case(mask_mod="thirds", lists="no full"))
