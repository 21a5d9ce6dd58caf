"""Plans: every entry in one item, items in an order that nothing waits against, and the kernel that follows them."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_cases import Case, _masks, backward, backward_lists, compile_case, forward, in_turn, make_inputs
from fa_compile import Worker, WorkerError
from fa_packed_lists import ordered_backward_lists
from fa_reference import assert_bits_repeat

PLANNED = dict(T_q=900, T_k=900, lists="both", plan=3)
CASES = [
    Case(D=128, mask_mod="thirds", deterministic=True, launch="middle first", **PLANNED),
    Case(D=64, causal=True, deterministic=True, launch="right to left", Hq=8, Hkv=1, **PLANNED),
    Case(D=128, mask_mod="thirds", deterministic=True, launch="longest first", Hkv=1, **PLANNED),
    Case(D=64, Hkv=4, causal=True, **(PLANNED | {"lists": "no full"})),
]
# Tails, one query, no queries, no keys, more keys than queries and fewer.
PACK = dict(packed=((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900)), lists="both", plan=2)
CASES += [
    Case(D=128, causal=True, form="ragged", deterministic=True, launch="right to left", **PACK),
    Case(D=64, form="compact", deterministic=True, Hkv=4, list_heads=4, **PACK),
    Case(D=64, mask_mod="thirds", form="stacked", list_heads=2, **PACK),
    Case(D=128, causal=True, form="stacked", list_heads=4, deterministic=True, launch="longest first", **PACK),
]


def random_lists(heads: int, N: int, M: int, seed: int, full: bool):
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    draw = random.Random(seed)
    rows = [[draw.sample(range(M), draw.choice([0, 0, 1, 2, M])) for _ in range(N)] for _ in range(2 * heads)]
    cut = [[draw.randint(0, len(row)) if full else len(row) for row in head] for head in rows]

    def tensors(part: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor([[len(row) for row in head] for head in part], dtype=torch.int32)
        idx = torch.tensor([[row + [0] * (M - len(row)) for row in head] for head in part], dtype=torch.int32)
        return counts.view(2, heads, N), idx.view(2, heads, N, M)

    mask = tensors([[row[:at] for row, at in zip(*pair)] for pair in zip(rows, cut)])
    if not full:
        return BlockSparseTensorsTorch(*mask)
    return BlockSparseTensorsTorch(*mask, *tensors([[row[at:] for row, at in zip(*pair)] for pair in zip(rows, cut)]))


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("schedule", "longest", "deterministic"),
    [("left to right", 1, False), ("right to left", 4, True), ("longest first", 4, False), ("drawn", 1000, True)],
)
def test_items_hold_every_entry_once(heads: int, schedule: str, longest: int, deterministic: bool) -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward

    Hq, Hkv, N, M = 6, 2, 5, 7
    asked = torch.tensor([3, 0, 4, 1, 2]) if schedule == "drawn" else schedule
    for seed in range(8):
        lists = random_lists(heads, N, M, seed, full=seed % 2 == 0)
        options = dict(num_heads=Hq, num_heads_kv=Hkv, num_q_blocks=M, schedule=asked, longest=longest)
        planned = plan_backward(lists, deterministic=deterministic, **options)
        counts = lists.mask_block_cnt + (0 if lists.full_block_cnt is None else lists.full_block_cnt)
        counts = counts.expand(2, max(heads, Hkv), N)
        items = planned.plan.tolist()
        assert planned.plan.dtype == torch.int32
        assert all(0 < end - begin <= longest for *_, begin, end, _ in items)
        of_list = [head * counts.shape[1] // Hq for head in range(Hq)]
        held = sorted((b, h, n, step) for b, h, n, begin, end, _ in items for step in range(begin, end))
        assert held == [
            (b, h, n, step)
            for b in range(2)
            for h in range(Hq)
            for n in range(N)
            for step in range(counts[b, of_list[h], n])
        ]
        assert [(b, h) for b, h, *_ in items] == sorted((b, h) for b, h, *_ in items)
        assert_order(items, schedule, counts, Hq // Hkv)
        bounded = plan_backward(lists, deterministic=deterministic, listed=N * M, **options).plan
        assert bounded[: len(items)].tolist() == items and not bounded[len(items) :].any()


def assert_order(items: list[list[int]], schedule: str, counts: torch.Tensor, group: int) -> None:
    """Key blocks of every head follow the schedule; turns count the launches that add to the same dk and dv."""
    Hkv = 6 // group
    sums = counts.view(2, Hkv, -1, counts.shape[2]).sum(2).tolist()
    launched: dict[tuple[int, int, int], int] = {}
    blocks: dict[tuple[int, int], list[int]] = {}
    for b, h, n, *_, turn in items:
        kv = h // group
        assert turn == launched.get((b, kv, n), 0)
        launched[b, kv, n] = turn + 1
        blocks.setdefault((b, h), []).append(n)
    for (b, h), own in blocks.items():
        key = {
            "left to right": lambda n: n,
            "right to left": lambda n: -n,
            "longest first": lambda n: (-sums[b][h // group][n], n),
            "drawn": [3, 0, 4, 1, 2].index,
        }[schedule]
        assert own == sorted(own, key=key)


def test_every_key_block_is_stored_where_nothing_is_added() -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward

    lists = random_lists(3, 5, 7, seed=1, full=True)
    plan = plan_backward(lists, num_heads=3, num_heads_kv=3, num_q_blocks=7, schedule="right to left", longest=1).plan
    assert plan[:, 2].tolist() == [4, 3, 2, 1, 0] * 6 and not plan[:, 3].any() and not plan[:, 5].any()
    assert plan[:, 4].view(2, 3, 5).flip(2).equal(lists.mask_block_cnt + lists.full_block_cnt)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_heads": 8, "num_heads_kv": 4}, "lists have 6 heads"),
        ({"longest": 0}, "longest has to be at least 1"),
        ({"schedule": "outwards"}, "schedule has to be one of"),
        ({"schedule": torch.arange(4)}, "permutation of the 5 key blocks"),
        ({"schedule": torch.rand(5)}, "torch.float32"),
        ({"schedule": torch.ones(5, dtype=torch.bool)}, "torch.bool"),
        ({"schedule": torch.tensor([0, 1, 1, 3, 4]), "listed": 40}, "schedule, sorted, has 1 in place 2"),
        ({"schedule": torch.tensor([0, 1, 2, 3, 5])}, "schedule, sorted, has 5 in place 4"),
        ({"schedule": torch.tensor([0, 1, 2, 3, -1]), "deterministic": True}, "schedule, sorted, has -1 in place 0"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, said: str) -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward

    lists = random_lists(6, 5, 7, seed=0, full=True)
    with pytest.raises(ValueError, match=said):
        plan_backward(lists, **({"num_heads": 6, "num_heads_kv": 2, "num_q_blocks": 7} | options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(compiler_sm90: Worker, case: Case) -> None:
    compiler_sm90.trace(compile_case, case)


def test_deterministic_backward_needs_a_deterministic_plan() -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward
    from flash_attn.cute.lists.deterministic_lists import prepare

    lists = random_lists(2, 5, 7, seed=0, full=True)
    plan = plan_backward(lists, num_heads=6, num_heads_kv=2, num_q_blocks=7)
    with pytest.raises(ValueError, match="deterministic=True needs a plan"):
        prepare(plan, 90, True, seqlen_q=900, block_q=128)
    assert prepare(plan, 90, False, seqlen_q=900, block_q=128) is plan


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.long(),
        lambda plan: plan.float(),
        lambda plan: plan[0],
        lambda plan: plan[:0],
        lambda plan: plan[:, :5],
        lambda plan: torch.cat([plan, plan[:, :2]], 1),
        lambda plan: plan.t().contiguous().t(),
        lambda plan: plan.to("meta"),
    ],
)
def test_a_plan_of_another_form_is_refused_without_a_look_into_it(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    from flash_attn.cute.lists.backward_plan import check_plan, plan_backward

    call = dict(arch=90, batch=2, packed_k=False)
    lists = plan_backward(random_lists(2, 5, 7, seed=0, full=True), num_heads=6, num_heads_kv=2, num_q_blocks=7)
    check_plan(lists, **call)
    with pytest.raises(ValueError, match=r"plan is torch.* expected torch.int32 \[items, 6\] on cpu"):
        check_plan(lists._replace(plan=change(lists.plan)), **call)


def test_a_plan_that_a_call_cannot_follow_is_refused() -> None:
    from flash_attn.cute.lists.backward_plan import check_plan, plan_backward

    lists = plan_backward(random_lists(2, 5, 7, seed=0, full=True), num_heads=6, num_heads_kv=2, num_q_blocks=7)
    for arch in (100, 110, 120):
        with pytest.raises(NotImplementedError, match=f"plan on sm_{arch}: only backward on SM90 follows a plan"):
            check_plan(lists, arch, batch=2, packed_k=False)
        check_plan(lists._replace(plan=None), arch, batch=2, packed_k=False)
    with pytest.raises(NotImplementedError, match="a plan of padded lists for packed sequences"):
        check_plan(lists, 90, batch=2, packed_k=True)
    with pytest.raises(ValueError, match="lists for 2 sequences, the call has 3"):
        check_plan(lists, 90, batch=3, packed_k=False)


def test_a_call_on_sm100_refuses_a_plan(compiler_sm100: Worker) -> None:
    with pytest.raises(WorkerError, match="only backward on SM90 follows a plan") as refusal:
        compiler_sm100.trace(compile_case, Case(D=64, T_q=700, T_k=700, lists="both", plan=1, Hkv=4))
    assert refusal.value.kind == "NotImplementedError"


# Without a plan, in one pass.
ORDERED = [
    Case(D=128, causal=True, form="compact", **PACK),
    Case(D=64, mask_mod="thirds", form="ragged", list_heads=4, **PACK),
    Case(D=64, form="compact", Hkv=4, list_heads=4, **PACK),
    Case(D=128, causal=True, form="stacked", list_heads=2, **PACK),
    Case(D=64, mask_mod="thirds", form="stacked", list_heads=4, block=(128, 64), **PACK),
]


def compile_ordered(case: Case, in_use: bool) -> set[int]:
    """Deterministic backward in one pass; dimensions of the index lists that the kernel walks.

    in_use: not all queries that sequences have room for are there.
    """
    from unittest.mock import patch

    from flash_attn.cute.interface import _flash_attn_bwd
    from flash_attn.cute.lists import deterministic_lists
    from flash_attn.cute.lists import rows as list_rows

    walked, entries, before = set(), list_rows.ListRow.entries, deterministic_lists.blocks_before

    def recorded(self: Any, tensor: Any, full: bool = False) -> Any:
        walked.add(len(tensor.shape))
        return entries(self, tensor, full)

    x, lse = make_inputs(case), torch.empty(case.Hq, sum(T for T, _ in case.packed), device="cuda")
    lists = ordered_backward_lists(case, spt=True)
    seqused_q = torch.empty_like(lists.cu_total_n_blocks.narrow(0, 1, len(case.packed))) if in_use else None
    with (
        patch.object(list_rows.ListRow, "entries", recorded),
        patch.object(deterministic_lists, "blocks_before", side_effect=before) as asked,
    ):
        _flash_attn_bwd(
            x.q, x.k, x.v, torch.empty_like(x.do), x.do, lse, **_masks(case, x), seqused_q=seqused_q,
            block_sparse_tensors=lists, deterministic=True,
        )  # fmt: skip
    if case.form == "stacked":
        lengths = asked.call_args.args[0]
        assert lengths.starts[0] is x.cu_seqlens[0] and lengths.used[0] is seqused_q
    return walked


@pytest.mark.parametrize("case", ORDERED[1:], ids=str)
def test_one_pass_compiles(compiler_sm90: Worker, case: Case) -> None:
    """Whatever the form, what is walked is one ragged list."""
    assert compiler_sm90.trace(compile_ordered, case, case is ORDERED[-1]) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "plan"), in_turn(ORDERED[3:], 0, 2), ids=str)
def test_stacked_lists_give_the_bits_of_ragged_ones(case: Case, plan: int) -> None:
    case = replace(case, deterministic=True, plan=plan, launch="right to left")
    x = make_inputs(case)
    o, lse = forward(case, x)
    forms = [replace(case, form=form) for form in ("stacked", "ragged")]
    lists = [backward_lists(form) if plan else ordered_backward_lists(form, spt=True) for form in forms]
    got, expected = (backward(case, x, o, lse, each) for each in lists)
    assert all(map(torch.equal, got, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.deterministic], ids=str)
def test_bits_repeat_beside_other_work(case: Case) -> None:
    assert_bits_repeat(case, 100, beside_other_work=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "spt"), in_turn(ORDERED, False, True), ids=str)
def test_lock_values_of_a_pack_order_the_kernel(case: Case, spt: bool) -> None:
    """In one pass without a plan: the default's gradients up to the order of the adds, and the same bits each time."""
    case = replace(case, plan=0, deterministic=False)
    x = make_inputs(case)
    o, lse = forward(case, x)
    expected = backward(case, x, o, lse)
    ordered = ordered_backward_lists(case, spt)
    got = backward(replace(case, deterministic=True), x, o, lse, ordered)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.isfinite().all()
        assert (ours.float() - theirs.float()).abs().max() < 0.01 * theirs.float().abs().max()
    for _ in range(20):
        assert all(map(torch.equal, got, backward(replace(case, deterministic=True), x, o, lse, ordered)))
