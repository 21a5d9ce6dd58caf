"""The dq pass of SM90 backward: its numbers in every form of lists and output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fa_cases import Case, in_order, make_inputs
from fa_dq import HALVES, LENGTHS, LISTS, as_rows, call, layout, queries, rounded_sums, row_sums
from fa_lists import forward_lists
from fa_reference import assert_close, attention

CASES = [
    Case(D=128, **LISTS),
    Case(D=128, causal=True, **HALVES),
    Case(D=128, causal=True, Hq=8, list_heads=2, **HALVES),
    Case(D=128, causal=True, Hq=8, list_heads=8, **LISTS),
    Case(D=128, window=(100, 30), **HALVES),
    Case(D=128, mask_mod="thirds", block=(256, 64), **LISTS),
    Case(D=128, mask_mod="keyed", causal=True, **LISTS),
    Case(D=128, mask_mod="keyed", T_q=130, T_k=333, lists="no full", block=(128, 64)),
    Case(D=128, T_q=400, T_k=200, causal=True, lists="full", block=(128, 64)),
    Case(D=128, T_q=1, T_k=1, lists="full"),
    Case(D=64, causal=True, **HALVES),
    Case(D=64, Hq=6, Hkv=1, q_tiles=2, **LISTS),
    Case(D=64, Hq=2, Hkv=2, T_q=300, T_k=128 * 70, lists="both"),
    Case(D=96, causal=True, window=(200, None), **HALVES),
    Case(D=96, mask_mod="thirds", **LISTS),
]
PACKED = [
    Case(D=128, packed=LENGTHS, lists="both", form=form, causal=causal, list_heads=heads)
    for form, causal, heads in (
        ("padded", True, 1),
        ("shared", True, 2),
        ("compact", False, 4),
        ("stacked", True, 1),
        ("ragged", True, 2),
    )
] + [Case(D=64, packed=LENGTHS, lists="both", form="compact", mask_mod="thirds", q_tiles=2)]
# What ends a chain of calls is three more kernels for each of these.
ENDS = [(CASES[4], 64), (CASES[10], 64), (PACKED[0], 64), (PACKED[4], 128)]
SUMS = [(CASES[1], 64), (CASES[8], 128), (CASES[13], 64), (PACKED[4], 128)]


def assert_dq(case: Case, start: int = 64) -> None:
    """dq, also where it starts from an accumulator, against dense attention; and the same bits twice."""
    x = make_inputs(case)
    exact, plain = (attention(case, x, dtype)[1] for dtype in (torch.float64, torch.bfloat16))
    rows, rounding = row_sums(case, x, start), rounded_sums(case, x)
    dq, again = (torch.full_like(x.q, torch.nan) for _ in range(2))
    call(case, x, rows, dq=dq, start=start)
    assert_close(f"dq of {case!r}", dq, exact, plain, rounding)
    call(case, x, rows, dq=again, start=start)
    assert dq.equal(again), f"other bits: {case!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("case,start", ENDS, ids=str)
def test_end_of_a_chain(case: Case, start: int) -> None:
    """dq on top of what the accumulator holds, which `convert` gives alone, and of what it holds itself."""
    from flash_attn.cute.shared_backward import convert

    x = make_inputs(case)
    rows, cu_seqlens = row_sums(case, x, start), None if x.cu_seqlens is None else x.cu_seqlens[0]
    accum = torch.randn(layout(case, start).shape, device="cuda")
    before, alone, kept, held = torch.randn_like(x.q), torch.empty_like(x.q), torch.empty_like(x.q), accum.clone()
    call(case, x, rows, dq=alone, start=start)
    convert(accum, layout(case, start), kept, scale=case.D**-0.5, cu_seqlens=cu_seqlens)
    for parts, more in (
        ((alone, kept), dict(accum=accum)),
        ((alone, kept, before), dict(accum=accum, add=True)),
        ((alone, before), dict(add=True)),
    ):
        dq = before.clone() if "add" in more else torch.full_like(x.q, torch.nan)
        call(case, x, rows, dq=dq, start=start, **more)
        exact = sum(part.double() for part in parts)
        assert_close(f"dq of {len(parts)} parts of {case!r}", dq, exact, sum(parts[1:], start=parts[0]))
    assert accum.equal(held), f"the accumulator changed: {case!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("case,start", SUMS, ids=str)
def test_row_sums(case: Case, start: int) -> None:
    """Row sums that the pass computes are those of o, in all rows of the sequences' tiles, and dq is of them."""
    x, accum = make_inputs(case), layout(case, start)
    o = torch.randn_like(x.q)
    lse = torch.randn((*accum.heads, x.q.shape[-3]), device="cuda") + 8
    lse[..., ::7] = -torch.inf
    sums = tuple(torch.full((*accum.heads, accum.rows), torch.nan, device="cuda") for _ in range(2))
    dq, again = (torch.full_like(x.q, torch.nan) for _ in range(2))
    call(case, x, sums, dq=dq, start=start, out=o, lse=lse)
    expected = as_rows(o, x.do, lse, queries(case), (*accum.heads, accum.rows), start)
    error = torch.finfo(torch.float32).eps * float((o.double().norm(dim=-1) * x.do.double().norm(dim=-1)).max())
    torch.testing.assert_close(sums[0], expected[0], atol=error, rtol=0, equal_nan=True)
    torch.testing.assert_close(sums[1], expected[1], equal_nan=True)
    call(case, x, sums, dq=again, start=start)
    assert dq.isfinite().all() and dq.equal(again), f"dq is not of the sums: {case!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    assert_dq(case)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "start"), in_order(PACKED, 64, 128), ids=str)
def test_numbers_of_packed_sequences(case: Case, start: int) -> None:
    assert_dq(case, start)


@pytest.mark.gpu
@pytest.mark.parametrize("block_k", [64, 128])
def test_rows_that_list_nothing(block_k: int) -> None:
    """dq is 0, or what the accumulator and dq hold."""
    case = Case(D=128, **{**LISTS, "block": (128, block_k)})
    x = make_inputs(case)
    lists = forward_lists(case)
    for counts in (lists.mask_block_cnt, lists.full_block_cnt):
        counts[:, :, 1::2] = 0
    rows = tuple(sums.nan_to_num(0.5) for sums in row_sums(case, x, 64))
    dq = torch.full_like(x.q, torch.nan)
    call(case, x, rows, lists, dq=dq)
    empty = torch.arange(700, device="cuda") // 128 % 2 == 1
    assert dq.isfinite().all() and dq[:, empty].eq(0).all() and dq[:, ~empty].ne(0).any()
    accum = torch.full(layout(case).shape, 3.0, device="cuda")
    for add in (False, True):
        dq = torch.full_like(x.q, 0.5 if add else torch.nan)
        call(case, x, rows, lists, accum=accum, dq=dq, add=add)
        alone = (3 * case.D**-0.5 + add * 0.5 * torch.ones_like(dq)).to(dq.dtype)
        assert dq[:, empty].equal(alone[:, empty]) and dq.isfinite().all() and not dq[:, ~empty].equal(alone[:, ~empty])


@pytest.mark.gpu
def test_rows_that_are_not_used() -> None:
    """Nothing is written past seqused_q, and what comes before does not change."""
    case = CASES[11]
    x, used = make_inputs(case), (333, 700)
    rows = row_sums(case, x, 64)
    whole, dq = (torch.full_like(x.q, torch.nan) for _ in range(2))
    call(case, x, rows, dq=whole)
    call(case, x, rows, dq=dq, seqused_q=torch.tensor(used, dtype=torch.int32, device="cuda"))
    for b, rows_used in enumerate(used):
        assert dq[b, :rows_used].equal(whole[b, :rows_used]) and dq[b, rows_used:].isnan().all()


@pytest.mark.gpu
def test_ctas_that_stay_and_ctas_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.bwd_dq_sm90 import interface as bwd_dq_interface

    case = replace(CASES[2], T_q=3000, T_k=3000)
    x = make_inputs(case)
    rows = row_sums(case, x, 64)
    found = []
    for stay in (True, False):
        monkeypatch.setattr(bwd_dq_interface, "has_short_rows", lambda lists, stay=stay: stay)
        found.append(torch.full_like(x.q, torch.nan))
        call(case, x, rows, dq=found[-1])
    assert found[0].equal(found[1]) and found[0].isfinite().all()
