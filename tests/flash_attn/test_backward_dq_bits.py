"""The dq pass of SM90 backward over unions of the tokens' own lists: numbers against the lists themselves, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_bits import TokenCase, dense, listed_blocks, union_lists
from fa_cases import Case, Inputs, make_inputs
from fa_compile import Worker, WorkerError
from fa_cubin import cubins, frames, serialized
from fa_dq import as_rows, call, layout, queries, rounded_sums
from fa_lists import on_gpu

from fuzz.attention import assert_close
from fuzz.canary import Guarded

LENGTHS = (1, 63, 64, 65, 127, 129, 1000, 4096, 8193)
PACK = ((0, 0), (1, 1), (129, 129), (500, 700), (63, 63), (64, 200))


def call_of(case: TokenCase) -> Case:
    """The same call without its lists."""
    (T_q, T_k), *_ = case.lengths
    return Case(
        D=case.D, T_q=T_q, T_k=T_k, B=len(case.lengths), Hq=case.G * case.Hkv, Hkv=case.Hkv,
        packed=case.lengths if case.form else (), causal=case.causal, dtype=str(case.dtype).removeprefix("torch."),
        seed=case.seed,
    )  # fmt: skip


def reference(case: TokenCase, x: Inputs, tables: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """o, lse and dq of all sequences, laid out as the call's."""
    found = []
    for b, table in enumerate(tables):
        spans = [slice(of[b], of[b + 1]) for of in case.starts]
        parts = [t[span] if case.form else t[b] for t, span in ((x.q, spans[0]), (x.k, spans[1]), (x.v, spans[1]))]
        q = parts[0].to(dtype).requires_grad_()
        o, lse = dense(case, q, *parts[1:], table, dtype)
        do = (x.do[spans[0]] if case.form else x.do[b]).to(dtype)
        found.append((o.detach(), lse.detach(), torch.autograd.grad(o, q, do)[0] if len(q) else q.detach()))
    o, lse, dq = zip(*found, strict=True)
    return (torch.cat(o), torch.cat(lse, 1), torch.cat(dq)) if case.form else tuple(map(torch.stack, (o, lse, dq)))


def assert_dq(case: TokenCase, *, start: int = 64, add: bool = False, sums: bool = False) -> None:
    """dq within twice the error of plain PyTorch in the same dtype, and the same bits twice."""
    same, tables = call_of(case), listed_blocks(case, "cuda")
    x, lists = make_inputs(same), union_lists(case, tables)
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, case.dtype))
    accum, before = layout(same, start), torch.randn_like(x.q) if add else torch.zeros_like(x.q)
    rows = as_rows(*(exact[0], x.do, exact[1], queries(same), (*accum.heads, accum.rows), start), (torch.nan,) * 2)
    given: dict[str, Any] = dict(start=start, add=add)
    if sums:
        o, lse = exact[0].to(case.dtype), exact[1].float().contiguous()
        given, expected = given | dict(out=o, lse=lse), as_rows(o, x.do, lse, queries(same), rows[0].shape, start)
        rows = tuple(torch.full_like(t, torch.nan) for t in rows)
    found = []
    for _ in range(2):
        found.append(before.clone() if add else torch.full_like(x.q, torch.nan))
        with Guarded("cuda") as guard:
            call(same, x, rows, lists, dq=found[-1], **given)
            torch.cuda.synchronize()
        guard.check()
    assert_close(f"dq of {case!r}", found[0], *(of[2] + before for of in (exact, rough)), rounded_sums(same, x))
    assert found[0].equal(found[1]), f"other bits: {case!r}"
    if sums:
        for got, want in zip(rows, expected, strict=True):
            own = torch.isfinite(as_rows(o, x.do, lse, queries(same), want.shape, start, (torch.nan,) * 2)[0])
            torch.testing.assert_close(got[own], want[own], atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("G", [1, 2, 3, 4, 8, 16, 128])
def test_gradients_are_of_the_tokens_own_lists(G: int) -> None:
    for T in LENGTHS if G < 100 else LENGTHS[:-2]:
        assert_dq(TokenCase(((T, T),), G=G, Hkv=1 if T > 4000 else 2, n=16 if T > 4000 else 4, seed=T))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case, given",
    [
        (TokenCase(((300, 700),) * 2, D=64, causal=False, dtype=torch.float16), {}),
        (TokenCase(((1000, 1000),), block=16), dict(add=True)),
        (TokenCase(((1000, 1000),), G=12, D=96, causal=False), dict(sums=True)),
        (TokenCase(((500, 500),) * 2), dict(sums=True)),
        (TokenCase(((500, 500),) * 2, G=3), dict(add=True)),
        (TokenCase(PACK, G=4, form="padded"), {}),
        (TokenCase(PACK, G=3, form="compact"), dict(start=128, add=True)),
        (TokenCase(PACK, G=1, form="stacked", D=64), dict(start=128)),
        (TokenCase(PACK, G=16, form="ragged", causal=False), dict(sums=True)),
        (TokenCase(((300, 700),) * 2, G=4, by_head=True), dict(sums=True)),
        (TokenCase(PACK, G=3, form="compact", D=64, by_head=True), dict(sums=True)),
    ],
    ids=str,
)
def test_packed_and_other_calls(case: TokenCase, given: dict[str, Any]) -> None:
    assert_dq(case, **given)


def compiled(case: TokenCase, given: dict[str, Any]) -> list[tuple[list[int], bool]]:
    """Stack frames of the case's kernel, and whether its products are serialized; in a worker."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    same = call_of(case)
    x, accum = make_inputs(same), layout(same)
    rows = tuple(torch.empty(*accum.heads, accum.rows, device="cuda") for _ in range(2))
    with unset_fake_temporarily():
        lists = union_lists(case, listed_blocks(case, "cpu"))
    if given.pop("accum", False):
        given["accum"] = torch.empty(accum.shape, device="cuda")
    if given.pop("sums", False):
        given |= dict(out=x.q, lse=x.q.new_empty(*accum.heads, same.T_q, dtype=torch.float32))
    code = cubins(lambda: call(same, x, rows, on_gpu(lists), dq=torch.empty_like(x.q), **given))
    return [(frames(cubin), serialized(cubin)) for cubin in code]


@pytest.mark.parametrize(
    "case, given",
    [
        (TokenCase(), {}),
        (TokenCase(PACK, G=3, D=64, form="ragged", causal=False), dict(add=True)),
        (TokenCase(G=4, by_head=True), dict(sums=True)),
        (TokenCase(G=4, block=16), {}),
    ],
)
def test_registers_suffice(compiler_sm90: Worker, case: TokenCase, given: dict[str, Any]) -> None:
    """With rows of q and do that TMA loads, and with those that the warpgroups do."""
    assert compiler_sm90.run(compiled, case, given) == [([0], False)]


def test_an_accumulator_is_refused(compiler_sm90: Worker) -> None:
    with pytest.raises(WorkerError, match="accum with mask_block_bits") as error:
        compiler_sm90.trace(compiled, TokenCase(), dict(accum=True))
    assert error.value.kind == "NotImplementedError"
