"""The dq pass of SM90 backward without a GPU: that it fits the registers, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from fa_cases import Case, make_inputs, swept
from fa_compile import Worker, WorkerError
from fa_cubin import cubins, frames
from fa_dq import HALVES, LENGTHS, LISTS, call, layout

SPILLS = [
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "dq"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "add"),
    (Case(D=128, window=(100, 30), mask_mod="keyed", **HALVES), "accum"),
    (Case(D=128, packed=LENGTHS, lists="both", form="ragged", causal=True), "dq"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "accum, add"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "sums"),
    (Case(D=128, packed=LENGTHS, lists="both", form="compact", causal=True), "sums"),
    (Case(D=96, **LISTS), "dq"),
    (Case(D=96, mask_mod="thirds", **LISTS), "accum"),
    (Case(D=64, causal=True, packed=LENGTHS, mask_mod="thirds", lists="both", form="stacked"), "accum"),
]


def stack_bytes(case: Case, output: str) -> list[int]:
    """The stack frames of a case's kernel; in a worker."""
    x = make_inputs(case)
    rows = tuple(torch.empty(*layout(case).heads, layout(case).rows, device="cuda") for _ in range(2))
    accum = torch.empty(layout(case).shape, device="cuda")
    dq, natural = torch.empty_like(x.q), (*x.q.shape[:-3], case.Hq, x.q.shape[-3])
    written = {
        "dq": {},
        "add": dict(add=True),
        "accum": dict(accum=accum),
        "accum, add": dict(accum=accum, add=True),
        "sums": dict(accum=accum, out=torch.empty_like(x.q), lse=torch.empty(natural, device="cuda")),
    }[output]
    return [size for cubin in cubins(lambda: call(case, x, rows, dq=dq, **written)) for size in frames(cubin)]


@pytest.mark.parametrize("spilled", swept(SPILLS), ids=str)
def test_registers_suffice(spilled: tuple[Case, str], compiler_sm90: Worker) -> None:
    assert compiler_sm90.run(stack_bytes, *spilled) == [0]


def refused(D: int, Dv: int | None) -> None:
    """A call with these head dimensions; in a worker."""
    case = Case(D=D, Dv=Dv, T_q=300, T_k=300, lists="full")
    x, accum = make_inputs(case), layout(case)
    rows = torch.empty(*accum.heads, accum.rows, device="cuda")
    call(case, x, (rows, rows), dq=torch.empty_like(x.q))


@pytest.mark.parametrize(("D", "Dv", "said"), [(80, None, "dimensions 80 and 80"), (128, 64, "dimensions 128 and 64")])
def test_head_dimensions_are_refused_by_name(D: int, Dv: int | None, said: str, compiler_sm90: Worker) -> None:
    """Beside what the catalogue of wrong calls has."""
    with pytest.raises(WorkerError, match=said) as error:
        compiler_sm90.trace(refused, D, Dv)
    assert error.value.kind == "NotImplementedError"


def test_blackwell_is_refused(compiler_sm100: Worker) -> None:
    with pytest.raises(
        WorkerError, match="sm_100: the dq pass is for sm_90, and for sm_100 over lists with mask_block_bits"
    ):
        compiler_sm100.trace(refused, 128, None)


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
