"""Gradients of SM90 backward: dq without a cleared accumulator, and stages that are freed in time."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels, compile_backward, noted, on_cpu, swept
from fa_compress import FIXED
from fa_reference import one_pass
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute.compressed_causal import schedule as compress_schedule
from fuzz.attention import make_inputs, run
from fuzz.canary import Guarded
from fuzz.case import Attention as Case
from fuzz.oracle import assert_right

BLOCKS, HEADS, SHARES = 5, 3, 4


def launched(shares: int, heads: int = HEADS, name: str = "LastKeysFirstScheduler") -> list[tuple[int, ...]]:
    """(key tile, head, batch, share) of every CTA, in the order of their launch; in a worker."""
    import cutlass.cute as cute
    from cutlass import Int32

    from flash_attn.cute.bwd_sm90 import accumulators
    from flash_attn.cute.tile_scheduler import TileSchedulerArguments

    Scheduler = getattr(accumulators, name)

    @cute.jit
    def loop(num_shares: cute.Tensor, out: cute.Tensor):
        counts, unread = (Int32(BLOCKS), Int32(heads), Int32(2), num_shares[0]), (Int32(0),) * 4
        args = TileSchedulerArguments(*counts, *unread, tile_shape_mn=(64, 128), is_split_kv=shares > 1)
        params = Scheduler.to_underlying_arguments(args)
        for i in range(Scheduler.get_grid_shape(params)[0]):
            tile = Scheduler(params, params.coord(i)).get_current_work().tile_idx
            out[i, 0], out[i, 1], out[i, 2], out[i, 3] = tile[0], tile[1], tile[2], tile[3]

    with unset_fake_temporarily():
        ctas = torch.full((BLOCKS * heads * shares * 2,), shares, dtype=torch.int32)
    return [tuple(row) for row in on_cpu(loop, ctas, (4,)).tolist()]


@pytest.mark.parametrize("shares", [1, SHARES])
def test_later_keys_of_a_share_are_launched_first(compiler_sm90: Worker, shares: int) -> None:
    order = product(range(2), range(shares)[::-1], range(HEADS), range(BLOCKS)[::-1])
    assert compiler_sm90.run(launched, shares) == [(n, head, batch, share) for batch, share, head, n in order]


def key_ranks(ctas: list[tuple[int, ...]], shares: int, group: int) -> list[int]:
    """CTAs that add to the same dk and dv before each one; in a worker."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

    kernel = FlashAttentionBackwardSm90(None, 128, qhead_per_kvhead=group, deterministic=True)
    kernel.planned, kernel.splits_queries = False, True
    where = SimpleNamespace(compress=SimpleNamespace(shares=compress_schedule.QueryShares(shares, 1)))
    return [kernel.dkv_rank(where, head, share) for _, head, _, share in ctas]


@pytest.mark.parametrize("heads,group,name", [(3, 3, "LastKeysFirstScheduler"), (12, 3, "PairedHeadsScheduler")])
def test_deterministic_adds_follow_the_launch(compiler_sm90: Worker, heads: int, group: int, name: str) -> None:
    ctas, added = compiler_sm90.run(launched, SHARES, heads, name), Counter[tuple[int, ...]]()
    assert len(set(ctas)) == len(ctas)
    for (n, head, batch, share), rank in zip(ctas, compiler_sm90.run(key_ranks, ctas, SHARES, group), strict=True):
        keys, queries = (n, head // group, batch), (head, batch, share, "dq")
        assert (rank, BLOCKS - 1 - n) == (added[keys], added[queries])
        added.update([keys, queries])


def kernels(deterministic: bool) -> tuple[bool, str]:
    """True if backward stores first, and the scheduler that it was traced with."""
    from flash_attn.cute import flash_bwd_sm90
    from flash_attn.cute.bwd_sm90.accumulators import LastKeysFirstScheduler

    found: list[tuple[str, bool]] = []

    def note(scheduler: Any, **where: Any) -> tuple[str, bool]:
        return type(built[-1]).__name__ if built else "", isinstance(scheduler, LastKeysFirstScheduler)

    case = replace(FIXED, B=1, T_q=4096, T_k=64, deterministic=deterministic)
    with (
        built_kernels("FlashAttentionBackwardSm90", traced=True) as built,
        noted(flash_bwd_sm90.SingleTileScheduler, "get_current_work", note, found),
        noted(LastKeysFirstScheduler, "get_current_work", note, found),
    ):
        compile_backward(case)
    orders = {of_last for name, of_last in found if name == "FlashAttentionBackwardSm90"}
    return built[0].writes_first, str(sorted(orders))


def test_who_stores_first_is_launched_first(compiler_sm90: Worker) -> None:
    # Every warp role, and every copy of a scheduler that a loop makes, has to count from the same end.
    assert compiler_sm90.trace(kernels, False) == (True, "[True]")
    assert compiler_sm90.trace(kernels, True) == (True, "[True]")


@pytest.mark.gpu
@pytest.mark.parametrize("Hkv", [8, 32])
@pytest.mark.parametrize("deterministic", [False, True])
def test_results_do_not_change_under_load(Hkv: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(FIXED, Hq=32, Hkv=Hkv, B=1, T_q=20000, T_k=600, compress=(32, 31), deterministic=deterministic)
    x, other, busy = make_inputs(case), torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(compress_schedule, "last_keys_first", lambda *_, **__: False)
        expected = one_pass(case, x)
    first = None
    for rank in range(20):
        with torch.cuda.stream(other):
            for _ in range(rank % 5):
                busy @ busy
        with Guarded("cuda"):
            got = one_pass(case, x)
        first = first or got
        for name in ("dq", "dk", "dv"):
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(got[name], expected[name], rtol=1e-2, atol=1e-2 * scale, msg=f"{name}, {rank}")
            assert not deterministic or got[name].equal(first[name]), (name, rank)


GROUPED = Case(D=192, Dv=128, Hq=8, Hkv=2, T_q=500, T_k=500, causal=True)
UNEQUAL = [
    GROUPED,
    replace(GROUPED, deterministic=True),
    replace(GROUPED, causal=False, window=(99, 0), packed=((300, 300), (0, 0), (130, 130))),
    replace(GROUPED, causal=False, T_k=20, compress=(25, 24)),
]


@pytest.mark.parametrize("case", swept(UNEQUAL), ids=str)
def test_groups_at_unequal_head_dimensions_are_traced(compiler_sm90: Worker, case: Case) -> None:
    compiler_sm90.trace(compile_backward, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", UNEQUAL, ids=str)
def test_groups_at_unequal_head_dimensions(case: Case) -> None:
    x = make_inputs(case)
    (got,) = run(case, x)
    assert_right(case, x, got)


LISTED = dict(T_q=500, T_k=500, D=128, causal=True, lists="both")
WITHOUT_DQ = [Case(**LISTED), Case(**LISTED, block=(128, 64)), Case(**LISTED | dict(D=64), block=(128, 64))]
WITH_DQ = [Case(D=128, causal=True), Case(**LISTED, block=(128, 64))]


def steps(case: Case, dq: bool) -> list[str]:
    """The operations on stages in the order of the code: "read", "sync", "barrier", "free"; in a worker."""
    import cutlass.cute as cute
    from cutlass.pipeline import NamedBarrier

    from flash_attn.cute import flash_bwd_sm90

    said: list[str] = []
    with ExitStack() as stack:
        for owner, name, what in (
            (flash_bwd_sm90.copy_utils, "load_s2r", "read"),
            (cute.arch, "sync_warp", "sync"),
            (NamedBarrier, "arrive_and_wait", "barrier"),
            (flash_bwd_sm90.pipeline.PipelineTmaAsync, "consumer_release", "free"),
        ):
            stack.enter_context(noted(owner, name, lambda *args, what=what, **options: what, said))
        compile_backward(case, **({} if dq else dict(without_dq=True)))
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
