"""The dk and dv pass of SM90 backward over lists by token: its numbers, its registers, and what it refuses."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fa_compile import Worker, WorkerError, swept
from fa_cubin import stacks
from fa_dq import rounded_sums, row_sums
from fa_reference import assert_close
from fa_tokens import TOKENS, TokenCase, both_ways, key_pairs, listed_blocks, reference

from fuzz.attention import make_inputs

GROUPS = (16, 3, 4, 8, 1, 2)


def of(*lengths: int, G: int, past: int = 0, Hkv: int = 1, **more: Any) -> TokenCase:
    """Sequences of these lengths, which come after `past` tokens."""
    return TokenCase(tuple((T, T + past) for T in lengths), G=G, Hkv=Hkv, near=True, **more)


CASES = [
    *(of(T, G=GROUPS[i % len(GROUPS)]) for i, T in enumerate(TOKENS)),
    *(of(1000, 1000, G=G, Hkv=2, n=6, cap=100, D=64 if G in (2, 8) else 128) for G in GROUPS),
    of(700, G=160, n=3),
    of(300, G=67, cap=64),
    of(900, G=4, causal=False, cap=200),
    of(1000, G=16, block=128, cap=150, Hkv=2),
    of(1000, G=8, block=192, add=True),
    of(1000, G=4, cap=100, add=True, D=64),
    of(1000, G=16, dtype="float16"),
    of(2000, G=16, n=16),
    of(300, 300, G=4, past=77, cap=100),
    of(1, G=16, past=999, Hkv=2),
    of(200, G=8, past=130, causal=False),
    of(1000, G=4, Hkv=2, by_head=True, cap=100, past=77),
    of(300, 300, G=3, by_head=True, D=64, causal=False, dtype="float16"),
    of(300, 300, G=4, Hkv=2, block=16, n=8, cap=30),
    of(100, 0, 600, 1, 65, G=4, form="compact", Hkv=2),
    of(100, 129, 600, 1, 64, G=16, form="compact", cap=50, start=128),
    of(257, 1, 600, G=3, form="compact", block=128, add=True, D=64),
    of(100, 300, G=2, form="compact", causal=False, Hkv=3),
    of(100, 1, 300, G=3, form="compact", past=100, Hkv=2, block=128, D=64),
    of(100, 1, 300, G=16, form="compact", past=100, by_head=True, add=True),
    of(100, 1, 300, G=8, form="compact", past=20, block=32, add=True),
]


@pytest.mark.gpu
@both_ways(CASES)
def test_gradients(by_warp: bool, case: TokenCase) -> None:
    """dk and dv against dense attention, and the same bits twice."""
    from flash_attn.cute.bwd_dkdv_sm90.interface import backward_dkdv

    x, tables = make_inputs(case.plain), listed_blocks(case)
    exact, rough = (reference(case, x, tables, dtype) for dtype in (torch.float64, x.q.dtype))
    rows = row_sums(case.plain, x, case.start, exact)
    before = [torch.randn_like(t) if case.add else torch.full_like(t, torch.nan) for t in (x.k, x.v)]
    found = [[t.clone() for t in before] for _ in range(2)]
    given: dict[str, Any] = dict(causal=case.causal, add=case.add, start=case.start)
    if case.form:
        given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), x.cu_seqlens))
    if any(T != S for T, S in case.lengths):
        given["q_offset"] = torch.tensor([S - T for T, S in case.lengths], dtype=torch.int32, device="cuda")
    for dk, dv in found:
        backward_dkdv(x.q, x.k, x.v, x.do, *rows, key_pairs(case, tables), dk=dk, dv=dv, **given)
    for name, got, again, held in zip(("dk", "dv"), *found, before, strict=True):
        added, rounding = held.double() if case.add else 0.0, rounded_sums(case.plain, x, "dk")
        assert_close(f"{name} of {case!r}", got, exact[name] + added, (rough[name] + added).to(got.dtype), rounding)
        assert got.equal(again), f"other bits of {name}: {case!r}"


SPILLS = [
    of(1000, G=16),
    of(1000, G=4, add=True, causal=False),
    of(1000, G=3, form="compact", block=128),
    of(1000, G=1, D=64),
    of(1000, G=160, dtype="float16"),
    of(1000, G=4, form="compact", by_head=True),
    of(1000, G=4, block=16),
]


def stack_bytes(case: TokenCase) -> list[int]:
    """The stack frames of a case's kernels, which hold what did not fit their registers; in a worker."""
    return sum(stacks(partial(compile_only, case)), [])


def compile_only(case: TokenCase) -> None:
    """The call of a case, on tensors without memory."""
    from flash_attn.cute.bwd_dkdv_sm90.interface import backward_dkdv
    from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cuda")

    x = make_inputs(case.plain)
    rows = x.q.new_empty(*x.q.shape[:-3], case.G * case.Hkv, 1024, dtype=torch.float32)
    cu = empty(2) if case.form else None
    pairs = KeyPairs(empty(9), empty(9, 4), empty(17), 1, case.block, cu, case.by_head)
    given = dict(causal=case.causal, add=case.add, cu_seqlens_q=cu, cu_seqlens_k=cu)
    backward_dkdv(x.q, x.k, x.v, x.do, rows, rows, pairs, dk=x.k, dv=x.v, **given)


@pytest.mark.parametrize("case", swept(SPILLS), ids=str)
def test_registers_suffice(case: TokenCase, compiler_sm90: Worker) -> None:
    assert compiler_sm90.run(stack_bytes, case) == [0, 0]


SPILLED = 32  # bytes of the stack: a few addresses that are the same in all steps


@pytest.mark.sweep
@pytest.mark.parametrize("G", [16, 3])
def test_registers_suffice_by_warp(G: int, compiler_sm100: Worker) -> None:
    of_keys, of_sums = compiler_sm100.run(stack_bytes, of(1000, G=G))
    assert of_keys <= SPILLED and of_sums == 0


def test_registers_are_there_to_take() -> None:
    """A warpgroup that asks for more than others gave back waits forever."""
    from flash_attn.cute.bwd_dkdv_sm90 import kernel

    at_launch = 65536 // (3 * 128) // 8 * 8
    assert kernel.WARPGROUPS * kernel.CONSUMER_REGISTERS + kernel.PRODUCER_REGISTERS <= 3 * at_launch


@pytest.mark.parametrize(
    ("change", "said"),
    [({"D": 96}, "dimensions 96 and 96"), ({"block": 48}, "blocks of 48 keys"), ({"dtype": "float32"}, "float32")],
)
def test_calls_are_refused_by_name(change: dict[str, Any], said: str, compiler_sm90: Worker) -> None:
    with pytest.raises(WorkerError, match=said) as error:
        compiler_sm90.trace(compile_only, replace(of(300, G=4), **change))
    assert error.value.kind == "NotImplementedError"


def test_pairs_are_those_of_the_lists() -> None:
    """The tests' own builder: every row has the tokens that list its block, and is dealt out whole."""
    case = of(200, 70, G=2, Hkv=2, cap=30, form="compact")
    tables = listed_blocks(case, "cpu")
    pairs, found = key_pairs(case, tables), {}
    for row, begin, end, _ in pairs.items[: pairs.row_items[-1]].tolist():
        found.setdefault(row, []).extend(pairs.tokens[begin:end].tolist())
    assert len(found) == 12
    for row, tokens in found.items():
        head, block = row // 6, row % 6
        table = tables[0][head, :, block] if block < 4 else tables[1][head, :, block - 4]
        assert tokens == table.nonzero().flatten().tolist()
