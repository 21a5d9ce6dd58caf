"""The dq pass of SM90 backward without a GPU: that it fits the registers, and what it refuses."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from fa_cases import Case, make_inputs, swept
from fa_compile import Worker, WorkerError
from fa_dq import HALVES, LENGTHS, LISTS, call, layout

SPILLS = [
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "dq"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "add"),
    (Case(D=128, window=(100, 30), mask_mod="keyed", **HALVES), "add"),
    (Case(D=128, packed=LENGTHS, lists="both", form="ragged", causal=True), "store"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "end, add"),
    (Case(D=128, causal=True, block=(128, 64), lists="no full", Hq=8, list_heads=2), "sums"),
    (Case(D=128, packed=LENGTHS, lists="both", form="compact", causal=True), "sums"),
    (Case(D=96, **LISTS), "dq"),
    (Case(D=96, mask_mod="thirds", **LISTS), "end"),
    (Case(D=64, causal=True, packed=LENGTHS, lists="both", form="stacked"), "add"),
]


def stack_bytes(case: Case, output: str) -> list[int]:
    """The stack frames of a case's kernel, which hold what did not fit its registers; in a worker."""
    import tempfile

    from flash_attn.cute.bwd_dq_sm90 import interface as bwd_dq_interface

    bwd_dq_interface._compiled.compile_cache.clear()
    x = make_inputs(case)
    rows = tuple(torch.empty(*layout(case).heads, layout(case).rows, device="cuda") for _ in range(2))
    accum = torch.empty(layout(case).shape, device="cuda")
    dq, natural = torch.empty_like(x.q), (*x.q.shape[:-3], case.Hq, x.q.shape[-3])
    written = {
        "dq": dict(dq=dq),
        "add": dict(accum=accum),
        "store": dict(accum=accum, first=True),
        "end": dict(accum=accum, dq=dq),
        "end, add": dict(accum=accum, dq=dq, add=True),
        "sums": dict(accum=accum, out=torch.empty_like(x.q), lse=torch.empty(natural, device="cuda")),
    }[output]
    with tempfile.TemporaryDirectory() as dumps, pytest.MonkeyPatch.context() as patch:
        import cutlass.cute as cute

        compile_ = cute.compile

        def kept(*args: Any, options: str) -> Any:
            return compile_(*args, options=f"{options} --keep-cubin --dump-dir {dumps}")

        patch.setattr(cute, "compile", kept)
        call(case, x, rows, **written)
        return [size for path in Path(dumps).rglob("*.cubin") for size in frames(path.read_bytes())]


def frames(cubin: bytes) -> list[int]:
    """Bytes of stack of every function in an ELF file: attribute 0x11 in the sections of type 0x70000000."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    found = []
    for i in range(count):
        _, kind, _, _, at, length = struct.unpack_from("<IIQQQQ", cubin, table + size * i)
        end = at + length
        while kind == 0x70000000 and at < end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if (form, attribute) == (4, 0x11):
                found.append(struct.unpack_from("<I", cubin, at + 8)[0])
            at += 4 + (value if form == 4 else 0)
    return found


@pytest.mark.parametrize("spilled", swept(SPILLS), ids=str)
def test_registers_suffice(spilled: tuple[Case, str], compiler_sm90: Worker) -> None:
    assert compiler_sm90.run(stack_bytes, *spilled) == [0]


def refused(changes: dict[str, Any]) -> None:
    """A call that cannot be; in a worker."""
    case = Case(**{**dict(D=128, T_q=300, T_k=300, lists="full"), **changes.pop("case", {})})
    x = make_inputs(case)
    accum = layout(case)
    rows = torch.empty(*accum.heads, changes.pop("rows", accum.rows), device="cuda")
    output = {"dq": torch.empty_like(x.q)}
    if "out" in changes:
        output["out"] = x.q.new_empty(2, changes.pop("out"), 4, 128)
    if "lse" in changes:
        output["lse"] = torch.empty(2, 4, changes.pop("lse"), device="cuda")
    if "accum" in changes:
        output["accum"] = torch.empty(*accum.heads, changes.pop("accum"), device="cuda")
    call(case, x, (rows, rows), **(output | changes))


REFUSED = [
    ({"case": {"D": 80}}, "NotImplementedError", "head dimensions 80 and 80"),
    ({"case": {"Dv": 64}}, "NotImplementedError", "head dimensions 128 and 64"),
    ({"case": {"block": (64, 128)}}, "NotImplementedError", "blocks of 64 queries and 128 keys"),
    ({"case": {"block": (128, 32)}}, "NotImplementedError", "blocks of 128 queries and 32 keys"),
    ({"dq": None}, "ValueError", "dq and accum are None"),
    ({"first": True}, "ValueError", "first is for accum alone"),
    ({"first": True, "accum": 320 * 128}, "ValueError", "first is for accum alone"),
    ({"add": True, "dq": None, "accum": 320 * 128}, "ValueError", "add is for dq"),
    ({"rows": 299}, "ValueError", "dpsum is torch.float32 (2, 4, 299)"),
    ({"accum": 256 * 128}, "ValueError", "too few for 320 rows"),
    ({"accum": 256 * 128, "dq": None}, "ValueError", "too few for 320 rows"),
    ({"start": 32}, "ValueError", "start is 32"),
    ({"out": 300}, "ValueError", "both out and lse"),
    ({"out": 299, "lse": 300}, "ValueError", "out is torch.bfloat16 (2, 299, 4, 128)"),
    ({"out": 300, "lse": 299}, "ValueError", "lse is torch.float32 (2, 4, 299)"),
    ({"out": 300, "lse": 300, "start": 192}, "ValueError", "start is 192"),
]


@pytest.mark.parametrize("changes,kind,said", REFUSED, ids=lambda x: str(x))
def test_what_is_refused(changes: dict[str, Any], kind: str, said: str, compiler_sm90: Worker) -> None:
    with pytest.raises(WorkerError) as error:
        compiler_sm90.trace(refused, changes)
    assert error.value.kind == kind and said in str(error.value)


def test_blackwell_is_refused(compiler_sm100: Worker) -> None:
    with pytest.raises(WorkerError, match="sm_100: the dq pass is for sm_90"):
        compiler_sm100.trace(refused, {})


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
    from flash_attn.cute.bwd_dq_sm90.interface import stays

    full = {}
    if width_of_full is not None:
        full = {"full_block_cnt": torch.empty(counts), "full_block_idx": torch.empty(*indices[:-1], width_of_full)}
    assert stays(BlockSparseTensorsTorch(torch.empty(counts), torch.empty(indices), **full)) is stay
