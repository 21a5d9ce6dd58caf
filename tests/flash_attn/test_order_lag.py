"""Which deterministic plans keep walks whole and say that one pass is faster, beside the model of the launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_backward_plan import packed_lists

from flash_attn.cute import order_lag
from flash_attn.cute.backward_plan import plan_backward
from flash_attn.cute.block_lists import lists_from_blocks, transpose_lists
from flash_attn.cute.list_schedule import launch_rows, simulate
from flash_attn.cute.write_order import deterministic_walk, merged_walk

N, HQ, HKV = 80, 32, 8
SHAPE = dict(num_heads=HQ, num_heads_kv=HKV, num_q_blocks=N)
m, n = torch.arange(N).view(-1, 1), torch.arange(N)
CHANCE = torch.rand(N, N, generator=torch.Generator().manual_seed(0))
REGULAR = {
    "causal": n <= m,
    "window": (n <= m) & (m - n < 50),
    "full": (n >= 0) & (m >= 0),
    "documents": (m < 50) == (n < 50),
    "prefix": (n < 30) | (n <= m),
    "dilated": (n % 2 == m % 2) | (n == m),
    "a few holes": (n <= m) & (CHANCE > 0.002),
}
IRREGULAR = {
    "random": CHANCE < 0.6,
    "random causal": (n <= m) & (CHANCE < 0.7),
    "rows at random": CHANCE[:, :1].expand(N, N) + CHANCE / 4 < 0.7,
    "one row, and columns at random": (m == N // 2) | (CHANCE < 0.8) & (n % 2 == 0),
}


def backward_lists(table: torch.Tensor, heads: int = HKV, **fields: Any) -> Any:
    forward = lists_from_blocks(table.expand(1, heads, N, N), table.expand(1, heads, N, N), block_size=(128, 128))
    return transpose_lists(forward, N)._replace(**fields)


def in_the_model(table: torch.Tensor, spt: bool) -> float:
    """Deterministic time in one pass, over the default's."""
    lists, order = backward_lists(table, HQ), range(N)
    rows = launch_rows(order[::-1] if spt else order, 1, HQ, group=HQ // HKV)
    took = simulate(deterministic_walk(lists, spt=spt), rows, group=HQ // HKV).time
    return took / simulate(merged_walk(lists), range(HQ * N)).time


@pytest.mark.parametrize("name", [*REGULAR, *IRREGULAR])
def test_lists_that_would_not_wait_say_one_pass(name: str) -> None:
    """And only those; the walks of a plan that says so are whole."""
    table = (REGULAR | IRREGULAR)[name]
    lists = backward_lists(table)
    planned = plan_backward(lists, deterministic=True, schedule="right to left", **SHAPE)
    whole = planned.plan[:, 4] - planned.plan[:, 3] == table.sum(0)[planned.plan[:, 2].long()]
    if name in REGULAR:
        assert planned.passes == 1 and whole.all()
        assert in_the_model(table, spt=True) < 1.1
    else:
        assert planned.passes is None and not whole.all()
        assert in_the_model(table, spt=True) > 1.12


def test_the_order_of_the_launch_counts() -> None:
    """A hole in a causal list holds up a launch from the left, by a walk's end, and not one from the right."""
    table = (n <= m) & (CHANCE > 0.01)
    said = [
        plan_backward(backward_lists(table), deterministic=True, schedule=schedule, **SHAPE).passes
        for schedule in ("right to left", "left to right")
    ]
    assert said == [1, None]
    assert in_the_model(table, spt=True) < 1.1 and in_the_model(table, spt=False) > 1.5


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"deterministic": False}),
        ({}, {"listed": N * N}),  # it would have to ask the device
        ({}, {"longest": 32}),  # cut walks are launched together, and wait
        ({}, {"per_group": True}),
        ({"block_size": (128, 64)}, {}),  # two passes are faster whatever the order
    ],
    ids=str,
)
def test_nothing_is_said(fields: dict[str, Any], options: dict[str, Any]) -> None:
    lists = backward_lists(REGULAR["causal"], **fields)
    options = dict(deterministic=True, schedule="right to left") | options
    assert plan_backward(lists, **SHAPE, **options).passes is None
    kept = plan_backward(lists._replace(passes=1), **SHAPE, **options)
    assert kept.passes == 1  # what the caller said


@pytest.mark.parametrize("width", [1, 31, 32])
def test_short_rows_take_two_passes(width: int) -> None:
    table = (n - m) % N < width
    planned = plan_backward(backward_lists(table), deterministic=True, schedule="right to left", **SHAPE)
    assert (planned.passes == 1) == (width >= 32)


def test_one_long_row_is_cut() -> None:
    """Whole, it would be one CTA's at the end."""
    table = (n <= m) & (m - n < 50) | (n == 0)
    for heads, expected in ((HQ, 1), (4, None)):
        lists = backward_lists(table, 1)
        shape = SHAPE | dict(num_heads=heads, num_heads_kv=1)
        planned = plan_backward(lists, deterministic=True, schedule="right to left", **shape)
        assert planned.passes == expected
        assert (planned.plan[:, 4] - planned.plan[:, 3]).max() == (N if expected else 32)


@pytest.mark.parametrize("heads", [1, HKV, HQ])
@pytest.mark.parametrize("repeated", [False, True])
def test_heads_share_what_is_said(heads: int, repeated: bool) -> None:
    lists = backward_lists(REGULAR["causal"], heads)
    if repeated:
        tensors = {name: t for name, t in lists._asdict().items() if isinstance(t, torch.Tensor)}
        lists = lists._replace(**{name: t[:, :1].expand(2, HQ, *t.shape[2:]) for name, t in tensors.items()})
    assert plan_backward(lists, deterministic=True, **SHAPE).passes == 1


@pytest.mark.parametrize("form", ["compact", "ragged"])
@pytest.mark.parametrize(("name", "expected"), [("causal", 1), ("random", None)])
def test_packed_sequences(form: str, name: str, expected: int | None) -> None:
    """Blocks of one sequence are not those of another; an empty sequence lists nothing."""
    table = (REGULAR | IRREGULAR)[name].expand(1, HKV, N, N)
    tables = (table, table[..., :0, :0], table)
    parts = [transpose_lists(lists_from_blocks(t, t, block_size=(128, 128)), t.shape[-1], width=N) for t in tables]
    lists = packed_lists(parts, form)._replace(block_size=(128, 128))
    planned = plan_backward(lists, deterministic=True, schedule="right to left", **SHAPE)
    assert planned.passes == expected
    lengths = planned.plan[:, 4] - planned.plan[:, 3]
    assert (lengths.max() == N) == (expected == 1)


def test_lag_of_walks_by_hand() -> None:
    """Three walks over four query blocks: 0 1 2 3, then 3 0, then 0 2."""
    counts = torch.tensor([4, 2, 2])
    blocks = torch.tensor([0, 1, 2, 3, 3, 0, 0, 2])
    locks = torch.tensor([0, 0, 0, 0, 1, 1, 2, 1])
    # Walk 1 wants block 3, which walk 0 has at 3, at 0: a lag of 3, and walk 2 block 0, which walk 1 has at 1: 1, and
    # block 2, which walk 0 has at 2, at 1: 1.
    assert order_lag._mean_lag(counts, blocks, locks).item() == (0 + 3 + 1) / 8


def test_lists_of_nothing() -> None:
    planned = plan_backward(backward_lists(torch.zeros(N, N, dtype=torch.bool)), deterministic=True, **SHAPE)
    assert planned.passes is None


@pytest.mark.gpu
def test_autograd_takes_one_pass_where_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits every time, and up to two roundings what two passes give."""
    from flash_attn.cute import flash_attn_func, interface, two_pass_backward

    tokens, taken = N * 128, []
    takes = two_pass_backward.takes
    monkeypatch.setattr(interface.two_pass_backward, "takes", lambda *a, **k: taken.append(takes(*a, **k)) or taken[-1])
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (HQ, HKV, HKV, HQ)
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    table = REGULAR["causal"].expand(1, HKV, N, N).cuda()
    forward = lists_from_blocks(table, table, block_size=(128, 128))
    backward = transpose_lists(forward, N)
    gradients = []
    for plan in (dict(deterministic=True, schedule="right to left"), {}):
        lists = dict(block_sparse_tensors=forward, block_sparse_tensors_bwd=plan_backward(backward, **plan, **SHAPE))
        o, _ = flash_attn_func(*leaves, causal=True, deterministic=True, **lists)
        results = [torch.autograd.grad(o, leaves, do, retain_graph=True) for _ in range(4)]
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
        gradients.append(results[0])
    assert taken == [False] * 4 + [True] * 4
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 0.01 * theirs.float().abs().max()
