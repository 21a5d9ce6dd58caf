"""Rows of block lists in every form: where kernels find them, heads that share them, sizes of blocks, pairs of CTAs."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker, compile_backward, kernel_fields, noted, only_hosts

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists import rows as list_rows
from flash_attn.cute.lists.formats import as_ragged
from fuzz.attention import compile_case
from fuzz.attention_lists import sides, tables
from fuzz.blocks import rows_of
from fuzz.case import FORMS, Packed
from fuzz.case import Attention as Case


def list_layouts(case: Case) -> dict[str, set[tuple]]:
    """Shapes of the counts that forward and backward kernels index, static numbers as they are and None for others."""
    from importlib import import_module

    seen: dict[str, list[tuple]] = {"fwd": [], "bwd": []}
    original = list_rows.lists_by_query_head

    def static(extent: Any) -> Any:
        return tuple(map(static, extent)) if isinstance(extent, tuple) else extent if isinstance(extent, int) else None

    def layout(tensors: Any, group: int) -> tuple:
        counts = original(tensors, group).mask_block_cnt
        return static(counts.shape), static(counts.stride)

    with ExitStack() as stack:
        stack.enter_context(only_hosts())
        for direction, arch in product(seen, (90, 100)):
            module = import_module(f"flash_attn.cute.flash_{direction}_sm{arch}")
            stack.enter_context(noted(module, "lists_by_query_head", layout, seen[direction]))
        compile_case(case)
    return {direction: set(layouts) for direction, layouts in seen.items()}


@pytest.mark.parametrize("pack_gqa", [False, True])
def test_heads_of_a_group_find_their_list_without_copies(compiler: Worker, pack_gqa: bool) -> None:
    case = Case(D=128, Hq=6, T_q=700, T_k=700, lists="both", list_heads=2, pack_gqa=pack_gqa)
    shared = {((None, (3, None), None), (None, (0, None), 1))}
    plain = {((None, None, None), (None, None, 1))}
    assert compiler.trace(list_layouts, case) == {"fwd": plain if pack_gqa else shared, "bwd": shared}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup on plain integers and tensors; how wide those of a kernel are: `test_packing.py`."""
    monkeypatch.setattr(list_rows, "Int32", int)
    monkeypatch.setattr(list_rows, "Int64", int)
    monkeypatch.setattr(list_rows, "cute", SimpleNamespace(domain_offset=lambda start, tensor: tensor[start:]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_head", [False, True])
def test_rows_are_found(plain: None, form: str, per_head: bool) -> None:
    for seed in range(20):
        lengths = tuple((seed * b % 4, (seed + b) % 5 + 1) for b in range(6))
        heads = 3 if per_head else 1
        case = Packed(packed=lengths, form=form, block=(1, 1), list_heads=heads, density=0.6, seed=seed)
        lists = sides(case)[0]
        before, across = (torch.tensor([0, *accumulate(pair[side] for pair in lengths)]) for side in (0, 1))
        if form != "padded":
            lists = as_ragged(lists, "cu_total_m_blocks", across)
        for batch, (listed, full) in enumerate(tables(case)):
            for head, block in product(*map(range, listed.shape[:2])):
                row = list_rows.find_row(lists, before, batch, head, block)
                for kind, table in (("mask", listed & ~full), ("full", full)):
                    count = row.count(getattr(lists, f"{kind}_block_cnt"))
                    entries = row.entries(getattr(lists, f"{kind}_block_idx"), full=kind == "full").flatten()[:count]
                    assert entries.tolist() == rows_of(table[head])[block]


@pytest.mark.parametrize("rank", [2, 3])
def test_entries_are_read_in_place_with_their_semaphore_values(rank: int) -> None:
    """Entries of a slice of a wider table, one that heads share; semaphore values of another layout are copied."""
    table = torch.arange(2 * 3 * 8, dtype=torch.int32).view(2, 3, 8)
    idx = table[:, :, 2:6] if rank == 3 else table.view(2, 24)[:, 4:20]
    counts, across = torch.full((2, 3), 4, dtype=torch.int32), torch.tensor([0, 4, 8])
    lists = BlockSparseTensorsTorch(counts, idx, cu_total_m_blocks=torch.tensor([0, 1, 3]))

    def rows(lists: Any, tensor: torch.Tensor) -> list[list[list[int]]]:
        return [[tensor[at : at + 4].tolist() for at in head] for head in lists.cu_block_idx_offsets.tolist()]

    expected = (idx if rank == 3 else idx[:, :12].unflatten(1, (3, 4))).tolist()
    ragged = as_ragged(lists, "cu_total_m_blocks", across)
    assert ragged.mask_block_idx.data_ptr() == idx.data_ptr() and rows(ragged, ragged.mask_block_idx) == expected
    assert ragged.cu_block_idx_offsets.dtype == torch.int64
    locked = as_ragged(lists._replace(dq_write_order=idx.contiguous() + 1), "cu_total_m_blocks", across)
    assert rows(locked, locked.mask_block_idx) == expected and rows(locked, locked.dq_write_order - 1) == expected
    shared = as_ragged(lists._replace(mask_block_idx=idx[:1].expand_as(idx)), "cu_total_m_blocks", across)
    assert rows(shared, shared.mask_block_idx) == expected[:1] * 2 and shared.mask_block_idx.numel() < idx.numel()


def test_ragged_lists_may_share_their_starts(plain: None) -> None:
    entries = torch.tensor([9, 4, 9, 5, 6])
    lists = BlockSparseTensorsTorch(
        torch.tensor([[1, 2]]), entries, cu_block_idx_offsets=torch.tensor([[1, 3]]), cu_full_block_idx_offsets=None
    )
    row = list_rows.find_row(lists, torch.tensor([0, 2]), 0, 0, 1)
    assert row.entries(entries).tolist() == row.entries(entries, full=True).tolist() == [5, 6]


def test_a_plan_knows_where_ragged_rows_start(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.bwd_sm90 import query_loop

    monkeypatch.setattr(query_loop, "Int64", int)
    monkeypatch.setattr(query_loop, "Uint32", lambda low: int(low) & 0xFFFFFFFF)
    start = (3 << 32) + (1 << 31) + 2
    plan = torch.tensor([[0] * 8, [5, 6, 7, 8, 9, 10, 2 - (1 << 31), 3]])
    ragged, padded = (SimpleNamespace(plan=plan, mask_block_idx=SimpleNamespace(shape=s)) for s in ((9,), (1, 1, 3, 3)))
    plan_tile = query_loop.PlanTile.read(ragged, 1)
    assert plan_tile == query_loop.PlanTile(5, 6, 7, 8, 9, 10, start)
    assert query_loop.PlanTile.read(padded, 1).start is None
    tensors = SimpleNamespace(
        mask_block_cnt=SimpleNamespace(shape=(1, 3)),
        mask_block_idx=SimpleNamespace(shape=(9,)),
        cu_block_idx_offsets=None,  # not looked at
        cu_full_block_idx_offsets=None,
    )
    row = list_rows.find_row(tensors, [0, 3], 0, 0, 1, plan_tile.start)
    assert row.starts == (start, start)


@pytest.mark.parametrize("offsets", [None, 2**33])
def test_places_pass_32_bits(offsets: int | None) -> None:
    """47,000 blocks of 128 are 6 million tokens: with a row of them for each, 32 bits do not do."""
    lists = BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros(1, 2 * 47_000, dtype=torch.int32),
        mask_block_idx=torch.zeros(1, 1, dtype=torch.int32),
        cu_total_m_blocks=torch.tensor([0, 47_000, 94_000], dtype=torch.int32),
        cu_block_idx_offsets=None if offsets is None else torch.tensor([0, offsets, 0]),
    )
    starts = as_ragged(lists, "cu_total_m_blocks", torch.tensor([0, 47_000, 94_000])).cu_block_idx_offsets
    first = 47_000 * 47_000 if offsets is None else offsets
    assert starts[0, -1] == first + 46_999 * 47_000


def test_dense_calls_keep_the_kernel_for_256(compiler_sm100: Worker) -> None:
    """It reads no lists: calls with lists take the general one."""
    general, own = "FlashAttentionBackwardSm100", "BlackwellFusedMultiHeadAttentionBackward"
    dense = Case(D=256, T_q=700, T_k=700)
    listed = replace(dense, lists="both", block=(128, 128))
    for case, kind, other in ((dense, own, general), (listed, general, own)):
        assert compiler_sm100.trace(kernel_fields, "", compile_backward, case, kind=kind)
        assert not compiler_sm100.trace(kernel_fields, "", compile_backward, case, kind=other)


LONG = {"T_q": 1500, "T_k": 1500, "lists": "both"}
PAIRED, SINGLE = (256, 256), (256, 128)
CASES = [
    (Case(D=128, **LONG, block=PAIRED), True),
    (Case(D=128, **LONG, block=PAIRED, mask_mod="thirds", Hkv=4, list_heads=4), True),
    (Case(D=128, T_q=300, T_k=129, lists="full", block=PAIRED, Hkv=1), True),
    (Case(D=128, **LONG, block=SINGLE, causal=True), False),
    (Case(D=64, **LONG, block=PAIRED, causal=True), False),
]


def supports(keys: int) -> bool:
    from flash_attn.cute.block_sparsity import block_sparse_bwd_supports_2cta

    lists = BlockSparseTensorsTorch(*(torch.empty(1, 1, 1, dtype=torch.int32),) * 2, block_size=(256, keys))
    return block_sparse_bwd_supports_2cta(lists, 128)


def test_an_odd_factor_has_no_pairs(compiler_sm100: Worker) -> None:
    assert [compiler_sm100.trace(supports, 128 * factor) for factor in (1, 2, 3, 4)] == [False, True, False, True]


@pytest.mark.parametrize(("case", "expected"), CASES, ids=str)
def test_pairs_where_they_are_expected(compiler_sm100: Worker, case: Case, expected: bool) -> None:
    kind = "FlashAttentionBackwardSm100"
    assert compiler_sm100.trace(kernel_fields, "use_2cta_instrs", compile_case, case, kind=kind) == [(expected,)]
