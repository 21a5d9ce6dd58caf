"""The dk and dv pass of SM90 backward over lists by token: its numbers, its registers, and what it refuses."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fa_compile import Worker, WorkerError, swept
from fa_cubin import cubins, frames
from fa_pairs import TokenCase, call, make_inputs, pairs_of, reference, rounded_sums, row_sums
from fa_reference import assert_close

TOKENS = (1, 63, 64, 65, 127, 129, 1000, 4096, 8193)
GROUPS = (16, 3, 4, 8, 1, 2)
CASES = (
    [TokenCase((T,), GROUPS[i % len(GROUPS)]) for i, T in enumerate(TOKENS)]
    + [TokenCase((1000, 1000), G, Hkv=2, n=6, cap=100, D=64 if G in (2, 8) else 128) for G in GROUPS]
    + [
        TokenCase((700,), 160, n=3),
        TokenCase((300,), 67, cap=64),
        TokenCase((900,), 4, causal=False, cap=200),
        TokenCase((1000,), 16, block=128, cap=150, Hkv=2),
        TokenCase((1000,), 8, block=192, add=True),
        TokenCase((1000,), 4, cap=100, add=True, D=64),
        TokenCase((1000,), 16, dtype="float16"),
        TokenCase((2000,), 16, n=16),
        TokenCase((300, 300), 4, past=77, cap=100),
        TokenCase((1,), 16, past=999, Hkv=2),
        TokenCase((200,), 8, past=130, causal=False),
        TokenCase((1000,), 4, Hkv=2, by_head=True, cap=100, past=77),
        TokenCase((300, 300), 3, by_head=True, D=64, causal=False, dtype="float16"),
        TokenCase((300, 300), 4, Hkv=2, block=16, n=8, cap=30),
    ]
)
PACKED = [
    TokenCase((100, 0, 600, 1, 65), 4, packed=True, Hkv=2),
    TokenCase((100, 129, 600, 1, 64), 16, packed=True, cap=50, start=128),
    TokenCase((257, 1, 600), 3, packed=True, block=128, add=True, D=64),
    TokenCase((100, 300), 2, packed=True, causal=False, Hkv=3),
    TokenCase((100, 1, 300), 2, packed=True, past=100, Hkv=2, block=128),
    TokenCase((100, 1, 300), 16, packed=True, past=100, by_head=True, add=True),
    TokenCase((100, 1, 300), 8, packed=True, past=20, block=32, add=True),
]


def assert_gradients(case: TokenCase) -> None:
    """dk and dv against dense attention, and the same bits twice."""
    x = make_inputs(case)
    exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, x.q.dtype))
    rows = row_sums(case, exact | {"do": x.do})
    before = [torch.randn_like(t) if case.add else torch.full_like(t, torch.nan) for t in (x.k, x.v)]
    found = [[t.clone() for t in before] for _ in range(2)]
    for dk, dv in found:
        call(case, x, rows, dk, dv)
    for name, got, again, held in zip(("dk", "dv"), *found, before, strict=True):
        added = held.double() if case.add else 0.0
        rounding = rounded_sums(case, x)
        assert_close(f"{name} of {case!r}", got, exact[name] + added, (rough[name] + added).to(got.dtype), rounding)
        assert got.equal(again), f"other bits of {name}: {case!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + PACKED, ids=str)
def test_gradients(case: TokenCase) -> None:
    assert_gradients(case)


SPILLS = [
    TokenCase((1000,), 16),
    TokenCase((1000,), 4, add=True, causal=False),
    TokenCase((1000,), 3, packed=True, block=128),
    TokenCase((1000,), 1, D=64),
    TokenCase((1000,), 160, dtype="float16"),
    TokenCase((1000,), 4, packed=True, by_head=True),
    TokenCase((1000,), 4, block=16),
]


def stack_bytes(case: TokenCase) -> list[int]:
    """The stack frames of a case's kernels, which hold what did not fit their registers; in a worker."""
    return [size for cubin in cubins(partial(compile_only, case)) for size in frames(cubin)]


def compile_only(case: TokenCase) -> None:
    """The call of a case, on tensors without memory."""
    from flash_attn.cute.bwd_dkdv_sm90.interface import backward_dkdv
    from flash_attn.cute.bwd_dkdv_sm90.spec import KeyPairs

    lead = () if case.packed else (1,)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    q, k = (
        empty(*lead, case.lengths[0], heads, case.D, dtype=getattr(torch, case.dtype))
        for heads in (case.G * case.Hkv, case.Hkv)
    )
    rows = empty(*lead, case.G * case.Hkv, 1024, dtype=torch.float32)
    cu = empty(2) if case.packed else None
    pairs = KeyPairs(empty(9), empty(9, 4), empty(17), 1, case.block, cu, case.by_head)
    backward_dkdv(
        q, k, k, q, rows, rows, pairs, dk=k, dv=k, causal=case.causal, add=case.add, cu_seqlens_q=cu, cu_seqlens_k=cu
    )


@pytest.mark.parametrize("case", swept(SPILLS), ids=str)
def test_registers_suffice(case: TokenCase, compiler_sm90: Worker) -> None:
    assert compiler_sm90.run(stack_bytes, case) == [0, 0]


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
        compiler_sm90.trace(compile_only, replace(TokenCase((300,), 4), **change))
    assert error.value.kind == "NotImplementedError"


def test_pairs_are_those_of_the_lists() -> None:
    """The tests' own builder: every row has the tokens that list its block, and is dealt out whole."""
    case = TokenCase((200, 70), 2, Hkv=2, cap=30, packed=True)
    lists = make_inputs(case, "cpu").lists
    pairs = pairs_of(case, lists)
    found = {}
    for row, begin, end, _ in pairs.items[: pairs.row_items[-1]].tolist():
        found.setdefault(row, []).extend(pairs.tokens[begin:end].tolist())
    for row, tokens in found.items():
        head, block = row // 6, row % 6
        b, block = (0, block) if block < 4 else (1, block - 4)
        listing = (lists[b][:, head] == block).any(-1) & (torch.arange(len(lists[b])) >= 64 * block)
        assert tokens == listing.nonzero().flatten().tolist()
