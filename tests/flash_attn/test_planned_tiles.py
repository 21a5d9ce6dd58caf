"""Plans on SM100: CTAs in the order that is asked for, each tile once, and nothing that waits for a later launch.

The kernels are compiled. What their scheduler launches and what their CTAs wait for is run on the CPU (`planned_walk`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from fa_cases import Case, backward, backward_lists, make_inputs
from fa_compile import Worker, WorkerError
from fa_reference import assert_case, is_blackwell
from planned_walk import Launch, Ran, run, tiles_of
from test_backward_plan import packed_lists, random_lists

from flash_attn.cute import planned_calls, query_halves
from flash_attn.cute.backward_plan import plan_backward
from flash_attn.cute.list_schedule import simulate, waits_for_earlier_launches
from flash_attn.cute.write_order import merged_walk

FIXED = {"T_q": 700, "T_k": 700, "lists": "both", "plan": 1}
LENGTHS = ((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900))
PACKED = {"packed": LENGTHS, "lists": "both", "plan": 1}
CASES = [  # and whether pairs of CTAs walk a list
    (Case(D=64, **FIXED, Hkv=4, launch="middle first"), False),
    (Case(D=64, **FIXED, list_heads=4, deterministic=True, launch="longest first", mask_mod="thirds"), False),
    (Case(D=128, **FIXED, Hkv=4, deterministic=True, causal=True, launch="right to left"), False),
    (Case(D=128, **FIXED, block=(256, 256), Hkv=4, launch="middle first"), True),
    (Case(D=128, **FIXED, block=(128, 512), list_heads=2, deterministic=True, launch="middle first"), True),
    (Case(D=128, **FIXED, block=(256, 384), Hkv=1, mask_mod="keyed", deterministic=True), False),
    (Case(D=128, **FIXED, block=(64, 256), deterministic=True, launch="middle first"), True),
    (Case(D=128, **PACKED, form="ragged", list_heads=2, deterministic=True, launch="longest first"), False),
    (Case(D=64, **PACKED, form="compact", Hkv=4, window=(200, 0)), False),
    (Case(D=64, **PACKED, form="stacked", list_heads=2, mask_mod="thirds"), False),
]
ORDERS = ["left to right", "right to left", "longest first", "drawn"]


def call_backward(case: Case, lists: Any = None) -> None:
    x = make_inputs(case)
    lse = torch.empty(*((case.Hq, x.q.shape[0]) if case.packed else (case.B, case.Hq, case.T_q)), device="cuda")
    backward(case, x, x.do, lse, lists)


def built(case: Case) -> tuple[str, bool, bool]:
    """Compile backward, for a worker: its scheduler, whether CTAs work in pairs, and its spt."""
    from flash_attn.cute import interface
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100

    kernels, original = [], FlashAttentionBackwardSm100.__init__

    def build(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        kernels.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashAttentionBackwardSm100, "__init__", build)
        patch.setattr(interface._flash_attn_bwd, "compile_cache", {})
        call_backward(case)
    (kernel,) = kernels
    return kernel.tile_scheduler_cls.__name__, kernel.use_2cta_instrs, kernel.spt


@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize(("case", "pairs"), CASES, ids=str)
def test_compiles(compiler_sm100: Worker, case: Case, pairs: bool) -> None:
    assert compiler_sm100.run(built, case) == ("PlannedScheduler", pairs, case.deterministic)


@pytest.mark.xdist_group("sm_100")
def test_without_a_plan_the_scheduler_is_upstreams(compiler_sm100: Worker) -> None:
    case = replace(CASES[1][0], plan=0, launch="left to right")
    assert compiler_sm100.trace(built, case) == ("SingleTileLPTBwdScheduler", False, False)
    assert compiler_sm100.trace(built, replace(case, deterministic=False)) == ("SingleTileScheduler", False, False)


def kernels_asked_for(cases: list[Case]) -> int:
    """How many kernels calls of backward would compile; for a worker."""
    from flash_attn.cute import interface

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.cute, "compile", lambda *args, **options: None)
        patch.setattr(interface._flash_attn_bwd, "compile_cache", cache := {})
        for case in cases:
            call_backward(case)
    return len(cache)


@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize("case", [CASES[i][0] for i in (0, 1, 6, 7)], ids=str)
def test_calls_with_and_without_a_plan_are_of_two_kernels(compiler_sm100: Worker, case: Case) -> None:
    other = "right to left" if case.launch == "middle first" else "left to right"
    calls = [case, replace(case, launch=other), replace(case, plan=0, launch="left to right")]
    if case.packed and case.deterministic:  # without a plan lists bring no lock values here
        calls = [replace(call, deterministic=False) for call in calls]
    assert compiler_sm100.trace(kernels_asked_for, calls) == 2


@dataclass(frozen=True)
class Drawn:
    """Random lists; key blocks of `subtiles` tiles, sequences of `keys` of them."""

    heads: int = 2  # that have lists of their own
    Hkv: int = 2
    subtiles: int = 1
    pair: int = 1
    query_tiles: int = 1
    order: str = "drawn"
    full: bool = True
    seed: int = 0
    Hq: int = 4

    def schedule(self, N: int) -> Any:
        if self.order != "drawn":
            return self.order
        return torch.randperm(N, generator=torch.Generator().manual_seed(self.seed))


SHAPES = [Drawn(order=order) for order in ORDERS] + [
    Drawn(heads=4, query_tiles=2, full=False),
    Drawn(heads=1, Hkv=4),
    Drawn(heads=4, Hkv=1, subtiles=2, pair=2, order="longest first"),
    Drawn(subtiles=3, seed=1),
    Drawn(subtiles=3, seed=2, order="right to left", heads=4),
    Drawn(subtiles=4, pair=2, query_tiles=2, seed=3),
    Drawn(subtiles=6, pair=2, seed=4, order="left to right"),
]


def planned(case: Drawn, lists: Any, N: int, M: int) -> Any:
    return plan_backward(
        lists, num_heads=case.Hq, num_heads_kv=case.Hkv, num_q_blocks=M, deterministic=True,
        schedule=case.schedule(N), arch=100,
    )  # fmt: skip


def assert_ran(ran: Ran, launch: Launch, listed: dict[tuple[int, int, int], set[int]]) -> None:
    """Every tile once, nothing waited, and to each query tile those added that list it, as the plan has them.

    listed: {(sequence, head, query tile): key blocks}.
    """
    assert ran.waited == []
    rounded = [-(-tiles_of(keys) // launch.pair) * launch.pair for _, keys in launch.lengths]
    every = [(t, h, b) for b, tiles in enumerate(rounded) for h in range(launch.heads) for t in range(tiles)]
    assert sorted(ran.tiles) == sorted(every)
    place = {}
    for item, (sequence, head, block) in enumerate(launch.lists.plan[:, :3].tolist()):
        place.setdefault((sequence, head, block), item)
    by_item = [place[b, h, t // launch.subtiles] for t, h, b in ran.tiles]
    assert by_item == sorted(by_item), "CTAs are not launched in the order of the plan's items"
    assert {where: {t // launch.subtiles for t in tiles} for where, tiles in ran.adds.items()} == listed
    for (sequence, head, _), tiles in ran.adds.items():
        own = {t // launch.subtiles for t in tiles}
        ends = {n: min((n + 1) * launch.subtiles, rounded[sequence]) for n in own}
        assert sorted(tiles) == sorted(t for n in own for t in range(n * launch.subtiles, ends[n], launch.pair))


def listed_by(lists: Any, case: Drawn, sequence: int, queries: int) -> dict[tuple, set[int]]:
    found: dict[tuple[int, int, int], set[int]] = {}
    for head, n in product(range(case.Hq), range(lists.mask_block_cnt.shape[2])):
        own = head * lists.mask_block_cnt.shape[1] // case.Hq
        for kind in ("mask", "full"):
            cnt, idx = (getattr(lists, f"{kind}_block_{of}") for of in ("cnt", "idx"))
            for m in [] if cnt is None else idx[sequence, own, n, : cnt[sequence, own, n]].tolist():
                for tile in range(m * case.query_tiles, min((m + 1) * case.query_tiles, queries)):
                    found.setdefault((sequence, head, tile), set()).add(n)
    return found


@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize("cut", [0, 130, 200])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_ctas_of_a_plan_wait_for_nothing_later(compiler_sm100: Worker, case: Drawn, cut: int) -> None:
    """`cut`: keys that the last block lacks; the last one lacks tiles where blocks have several."""
    N, M = 5, 6
    lists = random_lists(case.heads, N, M, case.seed, full=case.full)
    keys, queries = N * case.subtiles * 128 - min(cut, case.subtiles * 128 - 1), M * case.query_tiles * 128 - 1
    launch = Launch(
        planned(case, lists, N, M), case.Hq, case.Hq // case.Hkv, ((queries, keys),) * 2,
        subtiles=case.subtiles, pair=case.pair, query_tiles=case.query_tiles,
    )  # fmt: skip
    listed = listed_by(lists, case, 0, tiles_of(queries)) | listed_by(lists, case, 1, tiles_of(queries))
    assert_ran(compiler_sm100.run(run, launch), launch, listed)


@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("form", ["compact", "ragged"])
@pytest.mark.parametrize("case", [SHAPES[2], SHAPES[5], SHAPES[7], SHAPES[9]], ids=str)
def test_packed_sequences(compiler_sm100: Worker, case: Drawn, form: str, used: bool) -> None:
    rows, M = (5, 0, 1, 6), 6
    parts = [random_lists(case.heads, N, M, case.seed + N, full=case.full) for N in rows]
    parts = [part._replace(**{k: t[:1] for k, t in part._asdict().items() if t is not None}) for part in parts]
    cut = 130 if case.subtiles > 1 else 60
    lengths = tuple((M * case.query_tiles * 128, max(0, N * case.subtiles * 128 - cut)) for N in rows)
    launch = Launch(
        planned(case, packed_lists(parts, form), sum(rows), M), case.Hq, case.Hq // case.Hkv, lengths,
        packed=not used, used=used, subtiles=case.subtiles, pair=case.pair, query_tiles=case.query_tiles,
    )  # fmt: skip
    listed: dict[tuple[int, int, int], set[int]] = {}
    for b, part in enumerate(parts):
        of = listed_by(part, case, 0, M * case.query_tiles)
        listed |= {(b, head, tile): blocks for (_, head, tile), blocks in of.items()}
    ran = compiler_sm100.run(run, launch)
    assert_ran(ran, launch, listed)
    assert {b for _, _, b in ran.tiles} == {0, 2, 3}


@pytest.mark.xdist_group("sm_100")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("form", ["padded", "compact", "ragged"])
@pytest.mark.parametrize("case", [SHAPES[2], SHAPES[3], SHAPES[5], SHAPES[6], SHAPES[7]], ids=str)
def test_tiles_of_two_blocks_of_queries(compiler_sm100: Worker, case: Drawn, form: str, asked: bool) -> None:
    """Lists of 64 queries, which every call joins: their lock values follow the plan too."""
    rows, M = (5, 5) if form == "padded" else (5, 0, 1, 6), 6
    whole = [random_lists(case.heads, N, M, case.seed + N, full=case.full) for N in rows]
    parts = [part._replace(**{k: t[:1] for k, t in part._asdict().items() if t is not None}) for part in whole]
    lists = whole[0] if form == "padded" else packed_lists(parts, form)
    made = planned(case, lists._replace(block_size=(64, 128 * case.subtiles)), lists.mask_block_cnt.shape[-1], M)
    groups = case.subtiles // case.pair
    joined = query_halves.merged_backward(made, across=None, asked=asked, ordered=True, groups=groups)
    lengths = tuple((M * 64, max(0, N * case.subtiles * 128 - (130 if case.subtiles > 1 else 60))) for N in rows)
    launch = Launch(
        joined, case.Hq, case.Hq // case.Hkv, lengths, packed=form != "padded", subtiles=case.subtiles, pair=case.pair,
        halves=True,
    )  # fmt: skip
    listed: dict[tuple[int, int, int], set[int]] = {}
    for b, part in enumerate(whole if form == "padded" else parts):
        of = listed_by(part, replace(case, query_tiles=1), b if form == "padded" else 0, M)
        for (_, head, m), blocks in of.items():
            listed.setdefault((b, head, m // 2), set()).update(blocks)
    ran = compiler_sm100.run(run, launch)
    if asked and case.full:  # a tile's halves may list a block as different kinds: it adds twice
        ran = replace(ran, adds={place: list(dict.fromkeys(tiles)) for place, tiles in ran.adds.items()})
    assert_ran(ran, launch, listed)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_nothing_gets_stuck_in_the_model(order: str, heads: int) -> None:
    """`list_schedule` on as many slots as there are: the launch is the plan's, or it is stuck."""
    case, N, M = Drawn(heads=heads, order=order), 5, 6
    stuck = 0
    for seed in range(6):
        made = planned(replace(case, seed=seed), random_lists(heads, N, M, seed, full=True), N, M)
        rows = (made.plan[:, 0] * case.Hq + made.plan[:, 1]) * N + made.plan[:, 2]
        repeated = made._replace(
            **{k: t.repeat_interleave(case.Hq // heads, 1) for k, t in made._asdict().items()
               if torch.is_tensor(t) and k != "plan"}
        )  # fmt: skip
        walk = merged_walk(repeated, sort=False)
        assert waits_for_earlier_launches(walk, rows, group=2)
        assert all(simulate(walk, rows, group=2, slots=slots).stuck is None for slots in (1, 3, 148))
        stuck += simulate(walk, rows.flip(0), group=2, slots=1).stuck is not None
    assert stuck, "a launch against the plan is found"


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_has_an_item_for_every_walk(deterministic: bool, heads: int, full: bool) -> None:
    N, M, Hq = 5, 7, 4
    options = dict(num_heads=Hq, num_heads_kv=2, num_q_blocks=M, schedule="right to left", arch=100)
    for seed in range(6):
        lists = random_lists(heads, N, M, seed, full=full)
        made = plan_backward(lists, deterministic=deterministic, **options)
        assert made.plan[:, :3].tolist() == [[*of] for of in product(range(2), range(Hq), reversed(range(N)))]
        counts = lists.mask_block_cnt + (lists.full_block_cnt if full else 0)
        assert not made.plan[:, 3].any()
        assert made.plan[:, 4].view(2, Hq, N).equal(counts.repeat_interleave(Hq // heads, 1).flip(2))
        assert made.plan_whole is True and made.plan_per_group is None and made.passes is None
        assert made.plan.equal(plan_backward(lists, deterministic=deterministic, listed=0, **options).plan)
        assert (made.full_block_cnt is None) == (not full)
        for kind, order in (("mask", "dq_write_order"), ("full", "dq_write_order_full")):
            cnt, idx, locks = (getattr(made, name) for name in (f"{kind}_block_cnt", f"{kind}_block_idx", order))
            assert (locks is None) == (not deterministic or cnt is None)
            for b, h, n in product(range(2), range(heads), range(N)) if cnt is not None else ():
                theirs = getattr(lists, f"{kind}_block_idx")[b, h, n, : getattr(lists, f"{kind}_block_cnt")[b, h, n]]
                own = idx[b, h, n, : cnt[b, h, n]]
                assert own.sort().values.equal(theirs.sort().values)
                if deterministic:
                    assert locks[b, h, n, : cnt[b, h, n]].diff().ge(0).all()
                else:
                    assert own.equal(theirs)


def test_rows_behind_the_last_sequence_are_items_of_nothing() -> None:
    parts = [random_lists(2, N, 4, N, full=True) for N in (3, 2)]
    parts = [part._replace(**{k: t[:1] for k, t in part._asdict().items() if t is not None}) for part in parts]
    lists = packed_lists([*parts, parts[1]._replace(mask_block_cnt=parts[1].mask_block_cnt * 0)], "compact")
    lists = lists._replace(cu_total_n_blocks=lists.cu_total_n_blocks[:3])
    lists.full_block_cnt[:, 5:] = 0
    made = plan_backward(lists, num_heads=2, num_heads_kv=1, num_q_blocks=4, arch=100)
    assert made.plan[:7, 0].tolist() == [0, 0, 0, 1, 1, 1, 1] and made.plan[:7, 2].tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"per_group": True}, "per_group=True on sm_100: only SM90 leaves dq out"),
        ({"longest": 6}, "longest=6 on sm_100, whose kernel walks a key block's list whole"),
        ({"arch": 120}, "a plan for sm_120: only backward on SM90 and SM100"),
    ],
)
def test_what_sm100_cannot_is_refused(options: dict[str, Any], said: str) -> None:
    lists = random_lists(2, 5, 7, 0, full=True)
    shape = dict(num_heads=4, num_heads_kv=2, num_q_blocks=7)
    with pytest.raises(NotImplementedError, match=said):
        plan_backward(lists, **(shape | {"arch": 100} | options))
    assert plan_backward(lists, **shape, arch=110, longest=7).plan_whole
    one_head = plan_backward(lists, **(shape | {"num_heads": 2}), arch=100, longest=1)
    assert one_head.plan_whole and one_head.plan.shape[0] == 2 * 2 * 5


def test_a_call_has_to_fit_its_plan() -> None:
    lists = random_lists(2, 5, 7, 0, full=True)
    shape = dict(num_heads=4, num_heads_kv=2, num_q_blocks=7)
    hopper, blackwell = (plan_backward(lists, deterministic=True, **shape, arch=arch) for arch in (90, 100))
    call = dict(deterministic=True, batch=2, varlen_k=False, packed_k=False)
    planned_calls.check_plan(hopper, 90, **call)
    planned_calls.check_plan(blackwell, 100, **call)
    planned_calls.check_plan(blackwell, 100, **(call | {"varlen_k": True, "deterministic": False}))
    planned_calls.check_plan(hopper, 90, **(call | {"varlen_k": True}))
    for made, arch, said in ((hopper, 100, "SM90, .* arch=100"), (blackwell, 90, "SM100, .* arch=90")):
        with pytest.raises(NotImplementedError, match=f"it was made for {said}"):
            planned_calls.check_plan(made, arch, **call)
    for made, arch in ((hopper, 90), (blackwell, 100)):
        with pytest.raises(ValueError, match="lists for 2 sequences, the call has 3"):
            planned_calls.check_plan(made, arch, **(call | {"batch": 3}))
    packed = {"varlen_k": True, "packed_k": True}
    with pytest.raises(NotImplementedError, match="True and a plan of padded lists for sequences of varying length"):
        planned_calls.check_plan(blackwell, 100, **(call | packed))
    for deterministic in (False, True):  # on SM90 a plan launches the rows past a sequence's end too
        with pytest.raises(NotImplementedError, match="^a plan of padded lists for sequences of varying length"):
            planned_calls.check_plan(hopper, 90, **(call | packed | {"deterministic": deterministic}))


def of_another_architecture(case: Case, arch: int) -> None:
    """Backward with a plan for `arch`; in a worker for another one."""
    from unittest.mock import patch

    from flash_attn.cute import interface

    own = interface._get_device_arch()
    with patch.object(interface, "_get_device_arch", lambda: arch):
        lists = backward_lists(replace(case, block=(256, 128)))
    assert own != arch
    call_backward(case, lists)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_is_of_one_architecture(compiler_sm90: Worker, compiler_sm100: Worker, deterministic: bool) -> None:
    case = replace(CASES[0][0], deterministic=deterministic)
    for worker, other in ((compiler_sm90, 100), (compiler_sm100, 90)):
        with pytest.raises(WorkerError, match="it was made for SM") as refusal:
            worker.run(of_another_architecture, case, other)
        assert refusal.value.kind == "NotImplementedError"


@pytest.mark.gpu
@pytest.mark.skipif(not is_blackwell(), reason="blocks of several tiles of keys are SM100's")
@pytest.mark.parametrize("case", [case for case, _ in CASES], ids=str)
def test_numbers(case: Case) -> None:
    assert_case(case)
