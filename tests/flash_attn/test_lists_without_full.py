"""Block lists whose full_* is None: forward takes them as backward does."""

from fa_cases import Case, compile_case
from fa_compile import Worker


def test_compiles(compiler: Worker) -> None:
    compiler.trace(compile_case, Case(mask_mod="thirds", lists="no full"))
