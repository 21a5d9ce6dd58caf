"""The dq pass over lists and over unions of tokens' lists: numbers, registers, and what it refuses."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fa_compile import Worker, WorkerError, in_order, swept
from fa_cubin import cubins, frames, serialized, stacks
from fa_dq import HALVES, LENGTHS, LISTS, as_rows, call, layout, queries, rounded_sums, row_sums
from fa_reference import assert_close, attention
from fa_tokens import PACK, TOKENS, TokenCase, both_ways, by_length, listed_blocks, reference, union_lists
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuzz.attention import make_inputs, outputs
from fuzz.attention_lists import forward_lists, on_gpu
from fuzz.canary import Guarded
from fuzz.case import Attention as Case

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


def assert_dq_of_unions(case: TokenCase, sums: bool = False) -> None:
    """dq within twice the error of plain PyTorch in the same dtype, and the same bits twice."""
    same, tables = case.plain, listed_blocks(case)
    x, lists = make_inputs(same), union_lists(case, tables)
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, x.q.dtype))
    before = torch.randn_like(x.q) if case.add else torch.zeros_like(x.q)
    rows, given = row_sums(same, x, case.start, exact), dict(start=case.start, add=case.add)
    if sums:
        of = dict(o=exact["o"].to(x.q.dtype), lse=exact["lse"].float().contiguous())
        expected, known = (row_sums(same, x, case.start, of, fills) for fills in ((0.0, math.inf), (math.nan,) * 2))
        given |= dict(out=of["o"], lse=of["lse"])
        rows = tuple(torch.full_like(t, torch.nan) for t in rows)
    found = []
    for _ in range(2):
        found.append(before.clone() if case.add else torch.full_like(x.q, torch.nan))
        with Guarded("cuda") as guard:
            call(same, x, rows, lists, dq=found[-1], **given)
            torch.cuda.synchronize()
        guard.check()
    dqs = (of["dq"] + before for of in (exact, rough))
    assert_close(f"dq of {case!r}", found[0], *dqs, rounded_sums(same, x), floor=1e-4)
    assert found[0].equal(found[1]), f"other bits: {case!r}"
    for got, want in zip(rows, expected, strict=True) if sums else ():
        own = torch.isfinite(known[0])
        torch.testing.assert_close(got[own], want[own], atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@both_ways([TokenCase(G=G) for G in (1, 2, 3, 4, 8, 16, 128)])
def test_gradients_are_of_the_tokens_own_lists(by_warp: bool, case: TokenCase) -> None:
    for T in TOKENS[case.G % 3 :: 3] if by_warp else TOKENS if case.G < 100 else TOKENS[:-2]:
        assert_dq_of_unions(by_length(case.G, T))


@pytest.mark.gpu
@both_ways(
    [
        TokenCase(((300, 700),) * 2, D=64, causal=False, dtype="float16"),
        TokenCase(((1000, 1000),), block=16, add=True),
        TokenCase(((500, 500),) * 2, G=3, add=True),
        TokenCase(PACK, G=4, form="padded"),
        TokenCase(PACK, G=3, form="compact", start=128, add=True),
        TokenCase(PACK, G=1, form="stacked", D=64, start=128),
    ]
)
def test_packed_and_other_calls(by_warp: bool, case: TokenCase) -> None:
    assert_dq_of_unions(case)


@pytest.mark.gpu
@both_ways(
    [
        TokenCase(((1000, 1000),), G=12, D=96, causal=False),
        TokenCase(((500, 500),) * 2),
        TokenCase(((500, 500),) * 2, G=160),
        TokenCase(PACK, G=16, form="ragged", causal=False),
        TokenCase(((300, 700),) * 2, G=4, by_head=True),
        TokenCase(PACK, G=3, form="compact", D=64, by_head=True),
    ]
)
def test_row_sums_of_unions(by_warp: bool, case: TokenCase) -> None:
    assert_dq_of_unions(case, sums=True)


def compiled(case: TokenCase, output: str, by_warp: bool = False) -> list[tuple[list[int], bool]]:
    """Stack frames of the case's kernel, and whether its products are serialized; in a worker."""
    with unset_fake_temporarily():
        lists = union_lists(case, listed_blocks(case, "cpu"))
    code = cubins(partial(compile_pass, case.plain, output, on_gpu(lists)))
    return [(frames(cubin), by_warp or serialized(cubin)) for cubin in code]


@pytest.mark.parametrize(
    ("case", "output"),
    [
        (TokenCase(), "dq"),
        (TokenCase(PACK, G=3, D=64, form="ragged", causal=False), "add"),
        (TokenCase(G=4, by_head=True), "sums"),
        (TokenCase(G=4, block=16), "dq"),
    ],
)
def test_registers_suffice(compiler_sm90: Worker, case: TokenCase, output: str) -> None:
    """With rows of q and do that TMA loads, and with those that the warpgroups do."""
    assert compiler_sm90.run(compiled, case, output) == [([0], False)]


def test_registers_suffice_by_warp(compiler_sm100: Worker) -> None:
    assert compiler_sm100.run(compiled, TokenCase(), "dq", True) == [([0], True)]


def test_an_accumulator_is_refused(compiler_sm90: Worker) -> None:
    with pytest.raises(WorkerError, match="accum with mask_block_bits") as error:
        compiler_sm90.trace(compiled, TokenCase(), "accum")
    assert error.value.kind == "NotImplementedError"


SPILLS = [
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "dq"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "add"),
    (Case(D=128, window=(100, 30), mask_mod="keyed", **HALVES), "accum"),
    (Case(D=128, packed=LENGTHS, lists="both", form="ragged", causal=True), "dq"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "accum, add"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "accum, sums"),
    (Case(D=128, packed=LENGTHS, lists="both", form="compact", causal=True), "accum, sums"),
    (Case(D=96, **LISTS), "dq"),
    (Case(D=96, mask_mod="thirds", **LISTS), "accum"),
    (Case(D=64, causal=True, packed=LENGTHS, mask_mod="thirds", lists="both", form="stacked"), "accum"),
]


def compile_pass(case: Case, output: str, lists: Any = None) -> None:
    """The call of a case with an output of SPILLS; in a worker."""
    x = make_inputs(case)
    o, lse = outputs(case, x)
    rows = tuple(torch.empty(*layout(case).heads, layout(case).rows, device="cuda") for _ in range(2))
    accum = dict(accum=torch.empty(layout(case).shape, device="cuda"))
    written = {
        "dq": {},
        "add": dict(add=True),
        "accum": accum,
        "accum, add": accum | dict(add=True),
        "sums": dict(out=o, lse=lse),
        "accum, sums": accum | dict(out=o, lse=lse),
    }[output]
    call(case, x, rows, lists, dq=torch.empty_like(x.q), **written)


def stack_bytes(case: Case, output: str) -> list[int]:
    """The stack frames of a case's kernel; in a worker."""
    return sum(stacks(partial(compile_pass, case, output)), [])


@pytest.mark.parametrize("spilled", swept(SPILLS), ids=str)
def test_registers_suffice_for_lists(spilled: tuple[Case, str], compiler_sm90: Worker) -> None:
    assert compiler_sm90.run(stack_bytes, *spilled) == [0]


@pytest.mark.parametrize(("D", "Dv", "said"), [(80, None, "dimensions 80 and 80"), (128, 64, "dimensions 128 and 64")])
def test_head_dimensions_are_refused_by_name(D: int, Dv: int | None, said: str, compiler_sm90: Worker) -> None:
    """Beside what the catalogue of wrong calls has."""
    with pytest.raises(WorkerError, match=said) as error:
        compiler_sm90.trace(compile_pass, Case(D=D, Dv=Dv, lists="full"), "dq")
    assert error.value.kind == "NotImplementedError"


def test_blackwell_is_refused(compiler_sm100: Worker) -> None:
    with pytest.raises(
        WorkerError, match="sm_100: the dq pass is for sm_90, and for sm_100 over lists with mask_block_bits"
    ):
        compiler_sm100.trace(compile_pass, Case(D=128, lists="full"), "dq")


@pytest.mark.parametrize(
    "counts,indices,width_of_full,stay",
    [
        ((2, 1, 6), (2, 1, 6, 40), 24, True),
        ((2, 1, 6), (2, 1, 6, 40), 25, False),
        ((2, 1, 6), (2, 1, 6, 64), None, True),
        ((4, 9), (4, 9, 16), 16, True),
        ((4, 9), (4, 100), None, False),
        ((4, 9), (100,), None, False),
    ],
)
def test_ctas_stay_where_rows_are_short(
    counts: tuple[int, ...], indices: tuple[int, ...], width_of_full: int | None, stay: bool
) -> None:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.fwd_sm90.persistence import has_short_rows

    full = {}
    if width_of_full is not None:
        full = {"full_block_cnt": torch.empty(counts), "full_block_idx": torch.empty(*indices[:-1], width_of_full)}
    assert has_short_rows(BlockSparseTensorsTorch(torch.empty(counts), torch.empty(indices), **full)) is stay
