"""SM90 backward frees a stage of log-sum-exps and row sums once all lanes of a warp have read it.

One lane of a warp arrives for all. What orders the reads of the others before that is a barrier or a sync of the warp;
products and shuffles, which all lanes take part in, order nothing in memory.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from fa_cases import Case, backward, make_inputs, outputs
from fa_compile import Worker, noted
from test_two_pass_backward import without_dq

LISTED = dict(T_q=500, T_k=500, D=128, causal=True, lists="both")
WITHOUT_DQ = [Case(**LISTED), Case(**LISTED, block=(128, 64)), Case(**LISTED | dict(D=64), block=(128, 64))]
WITH_DQ = [Case(D=128, causal=True), Case(**LISTED, block=(128, 64))]


def steps(case: Case, dq: bool) -> list[str]:
    """The operations on stages in the order of the code: "read", "sync", "barrier", "free"; in a worker."""
    import cutlass.cute as cute
    from cutlass.pipeline import NamedBarrier

    from flash_attn.cute import flash_bwd_sm90

    said: list[str] = []

    x = make_inputs(case)
    o, lse = outputs(case, x)
    with ExitStack() as stack:
        for owner, name, what in (
            (flash_bwd_sm90.copy_utils, "load_s2r", "read"),
            (cute.arch, "sync_warp", "sync"),
            (NamedBarrier, "arrive_and_wait", "barrier"),
            (flash_bwd_sm90.pipeline.PipelineTmaAsync, "consumer_release", "free"),
        ):
            stack.enter_context(noted(owner, name, lambda *args, what=what, **options: what, said))
        backward(case, x, o, lse) if dq else without_dq(case, x, o, lse)
    return said


def between(said: list[str]) -> list[set[str]]:
    """For each stage that is freed, what lies between the last read and that."""
    frees = [at for at, what in enumerate(said) if what == "free"]
    reads = [max(i for i in range(at) if said[i] == "read") for at in frees]
    return [set(said[read:at]) - {"read", "free"} for read, at in zip(reads, frees)]


@pytest.mark.parametrize("case", WITHOUT_DQ, ids=str)
def test_a_sync_where_no_barrier_is(compiler_sm90: Worker, case: Case) -> None:
    found = between(compiler_sm90.trace(steps, case, False))
    assert len(found) >= 2 and all("sync" in what for what in found), found


@pytest.mark.parametrize("case", WITH_DQ, ids=str)
def test_a_barrier_where_ds_is_shared(compiler_sm90: Worker, case: Case) -> None:
    found = between(compiler_sm90.trace(steps, case, True))
    assert len(found) >= 2 and all(what == {"barrier"} for what in found), found
