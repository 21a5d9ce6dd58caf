"""Plans and lock values of packed sequences' lists: those of each sequence alone, in every form."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import pytest
import torch
from fa_lists import unpack
from fa_packed_lists import lists_of_rows
from test_backward_plan import random_lists


def packed_lists(parts: list, form: str) -> Any:
    """Lists [1, H, N, M] of several sequences as lists of a pack."""
    kinds = {
        kind: list(zip(*(unpack(getattr(p, f"{kind}_block_cnt"), getattr(p, f"{kind}_block_idx"))[0] for p in parts)))
        for kind in ("mask", "full")
        if getattr(parts[0], f"{kind}_block_cnt") is not None
    }
    return lists_of_rows(kinds, form, [p.mask_block_idx.shape[3] for p in parts], "cu_total_n_blocks")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", ["compact", "stacked", "ragged"])
@pytest.mark.parametrize("Hkv,heads", [(2, 1), (2, 2), (2, 6), (6, 1), (6, 6)])
def test_a_pack_has_the_items_and_walks_of_its_sequences(form: str, heads: int, deterministic: bool, Hkv: int) -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward

    M, options = 7, dict(num_heads=6, num_heads_kv=Hkv, schedule="right to left", longest=3)
    options["deterministic"] = deterministic
    before = {"cu_total_m_blocks": torch.arange(5) * M} if form == "stacked" else {}
    for seed in range(8):
        parts = [random_lists(heads, N, M, seed * 4 + N, full=seed % 2 == 0) for N in (5, 0, 1, 6)]
        parts = [part._replace(**{k: t[:1] for k, t in part._asdict().items() if t is not None}) for part in parts]
        planned = plan_backward(packed_lists(parts, form), num_q_blocks=M, **options, **before)
        bounded = plan_backward(packed_lists(parts, form), num_q_blocks=M, listed=12 * M, **options, **before).plan
        assert bounded[: len(planned.plan)].equal(planned.plan) and not bounded[len(planned.plan) :].any()
        first = planned.cu_total_n_blocks.tolist()
        for b, part in enumerate(parts):
            if not part.mask_block_cnt.shape[2]:
                assert not (planned.plan[:, 0] == b).any()
                continue
            alone = plan_backward(part, num_q_blocks=M, **options)
            own = planned.plan[planned.plan[:, 0] == b]
            theirs = alone.plan
            if Hkv < 6:  # items of nothing stand for a plan of nothing
                own, theirs = (items[items[:, 4] > items[:, 3]] for items in (own, theirs))
            assert own[:, 1:6].equal(theirs[:, 1:])
            assert planned.mask_block_cnt[:, first[b] : first[b + 1]].equal(alone.mask_block_cnt[0])
            assert planned.plan.shape[1] == 8, "packed lists are ragged inside, whatever their form"
            for _, head, n, begin, end, _, *start in own.tolist():
                head = head * heads // 6
                assert start == [int(planned.cu_block_idx_offsets[head, first[b] + n]), 0]
                count = int(alone.mask_block_cnt[0, head, n])
                for name in ("mask_block_idx", "dq_write_order"):
                    if getattr(alone, name) is not None:
                        walked = getattr(planned, name)[start[0] : start[0] + count]
                        assert walked.equal(getattr(alone, name)[0, head, n, :count])


@pytest.mark.parametrize("spt", [False, True])
@pytest.mark.parametrize("form", ["compact", "ragged"])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_pack_has_the_lock_values_of_its_sequences(form: str, heads: int, spt: bool) -> None:
    from flash_attn.cute.block_lists import compute_dq_write_order, packed_write_order

    M = 7
    for seed in range(8):
        parts = [random_lists(heads, N, M, seed * 4 + N, full=seed % 2 == 0) for N in (5, 0, 1, 6)]
        parts = [part._replace(**{k: t[:1] for k, t in part._asdict().items() if t is not None}) for part in parts]
        given = packed_lists(parts, form)
        ordered = packed_write_order(given, num_q_blocks=M, spt=spt)
        bounded = packed_write_order(given, num_q_blocks=M, spt=spt, listed=heads * 12 * M)
        first = given.cu_total_n_blocks.tolist()
        assert ordered.spt is spt
        for kind, name in (("mask", "dq_write_order"), ("full", "dq_write_order_full")):
            idx, order = getattr(ordered, f"{kind}_block_idx"), getattr(ordered, name)
            assert (order is None) == (getattr(given, f"{kind}_block_idx") is None)
            if order is None:
                continue
            assert idx.equal(getattr(given, f"{kind}_block_idx")) and order.dtype == torch.int32
            assert order.shape == idx.shape and order.equal(getattr(bounded, name))
            for b, part in enumerate(parts):
                alone = compute_dq_write_order(*forward_shape(part, M), *part[:4], spt=spt)[kind == "full"]
                for head in range(heads):
                    for n, count in enumerate(getattr(part, f"{kind}_block_cnt")[0, head].tolist()):
                        assert row_of(ordered, kind, order, head, first[b] + n)[:count].equal(alone[0, head, n, :count])


def forward_shape(part: Any, M: int) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """Forward lists with room for every block: of them `compute_dq_write_order` reads the shapes."""
    _, heads, N = part.mask_block_cnt.shape
    return torch.zeros(1, heads, M).int(), torch.zeros(1, heads, M, 2 * N).int(), None, None


def row_of(lists: Any, kind: str, values: torch.Tensor, head: int, row: int) -> torch.Tensor:
    if values.ndim == 3:
        return values[head, row]
    offsets = lists.cu_full_block_idx_offsets if kind == "full" else lists.cu_block_idx_offsets
    return values[int(offsets[head, row]) :]


def test_lock_values_where_one_kind_has_a_list_for_all_heads() -> None:
    from flash_attn.cute.block_lists import packed_write_order

    one, many = (packed_lists([random_lists(H, 5, 4, 3, full=True)], "compact") for H in (1, 3))
    mixed = many._replace(mask_block_cnt=one.mask_block_cnt, mask_block_idx=one.mask_block_idx)
    repeated = {
        n: getattr(one, n).repeat(3, *[1] * (getattr(one, n).ndim - 1)) for n in ("mask_block_cnt", "mask_block_idx")
    }
    mine, other = (packed_write_order(lists, num_q_blocks=4) for lists in (mixed, many._replace(**repeated)))
    for name in ("mask_block_cnt", "mask_block_idx", "dq_write_order", "dq_write_order_full"):
        assert getattr(mine, name).equal(getattr(other, name))
    ragged = packed_lists([random_lists(3, 5, 4, 3, full=True)], "ragged")
    with pytest.raises(ValueError, match="cannot share places"):
        packed_write_order(ragged._replace(cu_block_idx_offsets=ragged.cu_block_idx_offsets[:1]), num_q_blocks=4)


@pytest.mark.parametrize("spt", [False, True])
@pytest.mark.parametrize("rows", [(7, 3, 2, 4), (5, 5, 5, 5)])
def test_stacked_lists_have_the_lock_values_of_their_sequences(rows: tuple[int, ...], spt: bool) -> None:
    """Without offsets, where all sequences have as many queries."""
    from flash_attn.cute.block_lists import compute_dq_write_order, packed_write_order

    offsets, before = len(set(rows)) > 1, torch.tensor([0, *accumulate(rows)]).int()
    for seed in range(8):
        parts = [random_lists(3, N, M, seed * 4 + N, full=True) for N, M in zip((5, 0, 1, 6), rows)]
        given = packed_lists(parts, "stacked")
        given = given if offsets else given._replace(cu_block_idx_offsets=None)
        ordered = packed_write_order(given, num_q_blocks=max(rows), spt=spt, cu_total_m_blocks=before)
        first = given.cu_total_n_blocks.tolist()
        for kind, name in (("mask", "dq_write_order"), ("full", "dq_write_order_full")):
            order = getattr(ordered, name)
            assert order.shape == getattr(given, f"{kind}_block_idx").shape and order.dtype == torch.int32
            for b, (part, M) in enumerate(zip(parts, rows)):
                alone = compute_dq_write_order(*forward_shape(part, M), *part[:4], spt=spt)[kind == "full"]
                start = int(given.cu_block_idx_offsets[b]) if offsets else first[b] * M
                for head, n in product(range(3), range(part.mask_block_cnt.shape[2])):
                    count = int(getattr(part, f"{kind}_block_cnt")[0, head, n])
                    at = start + n * M
                    assert order[head, at : at + count].equal(alone[0, head, n, :count])


def test_starts_of_queries_that_do_not_fit() -> None:
    from flash_attn.cute.block_lists import packed_write_order

    lists = packed_lists([random_lists(1, 3, 4, 0, full=True)], "stacked")
    for starts, said in ((torch.tensor([0, 4, 8]), r"shape \(3,\)"), (torch.tensor([0.0, 4.0]), "expected integers")):
        with pytest.raises(ValueError, match=f"cu_total_m_blocks .*{said}"):
            packed_write_order(lists, num_q_blocks=4, cu_total_m_blocks=starts)


def test_a_start_may_pass_31_bits() -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward

    lists = packed_lists([random_lists(1, 3, 4, 0, full=False)], "ragged")
    starts = torch.tensor([[1, 1 << 31, (5 << 32) + (1 << 31) + 7]])
    options = dict(num_heads=1, num_heads_kv=1, num_q_blocks=4)
    plan = plan_backward(lists._replace(cu_block_idx_offsets=starts), **options).plan
    low, high = plan[:, 6].long() & 0xFFFFFFFF, plan[:, 7].long()
    assert ((high << 32) | low).equal(starts[0])


def test_a_list_that_all_heads_share_is_walked_once() -> None:
    """As in lists of one head, though a head dimension says that there are more: in stacked lists and ragged ones."""
    from flash_attn.cute.lists.backward_plan import plan_backward

    parts = [random_lists(1, N, 7, N, full=True) for N in (5, 1, 6)]
    given = dict(num_heads=6, num_heads_kv=2, num_q_blocks=7, deterministic=True)
    given["cu_total_m_blocks"] = torch.arange(4) * 7
    for form in ("stacked", "ragged"):
        lists = packed_lists(parts, form)
        repeated = {
            name: t.expand(6, *t.shape[1:]) for name, t in lists._asdict().items() if t is not None and t.ndim > 1
        }
        one, many = (plan_backward(each, **given) for each in (lists, lists._replace(**repeated)))
        assert many.mask_block_idx.equal(one.mask_block_idx) and many.plan.equal(one.plan)


def test_stacked_lists_need_the_width_of_their_rows() -> None:
    from flash_attn.cute.block_lists import packed_write_order
    from flash_attn.cute.lists.backward_plan import plan_backward

    lists = packed_lists([random_lists(1, 3, 4, 0, full=True)], "stacked")
    said, sizes = "cu_total_m_blocks is None: rows of stacked lists", dict(num_heads=1, num_heads_kv=1, num_q_blocks=4)
    for deterministic in (False, True):
        with pytest.raises(ValueError, match=said):
            plan_backward(lists, deterministic=deterministic, **sizes)
    with pytest.raises(ValueError, match=said):
        packed_write_order(lists, num_q_blocks=4)


@pytest.mark.parametrize(
    ("changes", "starts", "said"),
    [
        ({}, torch.tensor([0, 4, 8]), r"cu_total_m_blocks has shape \(3,\)"),
        ({}, torch.tensor([0.0, 4.0]), "expected integers"),
        ({}, torch.zeros(2, dtype=torch.int32, device="meta"), "cu_total_m_blocks is torch.int32 on meta"),
        ({"cu_block_idx_offsets": torch.zeros(3).int()}, torch.tensor([0, 4]), r"cu_block_idx_offsets has shape"),
        ({"full_block_cnt": torch.zeros(1, 4).int()}, torch.tensor([0, 4]), r"full_block_cnt \(1, 4\)"),
        ({"full_block_idx": torch.zeros(40).int()}, torch.tensor([0, 4]), r"full_block_idx \(40,\)"),
        ({"full_block_idx": None}, torch.tensor([0, 4]), "have to be given together"),
        ({"mask_block_cnt": torch.zeros(3, 3).int()}, torch.tensor([0, 4]), "lists of 3 heads"),
    ],
    ids=str,
)
def test_stacked_lists_that_do_not_fit(changes: dict, starts: torch.Tensor, said: str) -> None:
    from flash_attn.cute.lists.backward_plan import plan_backward

    lists = packed_lists([random_lists(2, 3, 4, 0, full=True)], "stacked")
    one_head = {name: t[:1] for name, t in lists._asdict().items() if name.startswith("full")}
    lists = lists._replace(**(one_head | changes))
    with pytest.raises(ValueError, match=said):
        plan_backward(lists, num_heads=6, num_heads_kv=2, num_q_blocks=4, cu_total_m_blocks=starts)
