"""The kernels by token as SM100 has them, with products warp by warp: a Hopper GPU runs them as well."""

from __future__ import annotations

from typing import Any

import fa_pairs
import pytest
import test_backward_dkdv
import test_backward_dq_bits
import torch
from fa_bits import TokenCase, listed_blocks, union_lists
from fa_cases import make_inputs
from fa_compile import Worker
from fa_cubin import cubins, frames
from fa_dq import call, layout
from fa_lists import on_gpu

from flash_attn.cute.multiply import form

PACK = ((0, 0), (1, 1), (129, 129), (500, 700), (63, 63), (64, 200))
GROUPS = (1, 2, 3, 4, 8, 16)
LENGTHS = (8193, 1, 63, 64, 65, 127, 129, 1000, 4096)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "FORCED", True)


def cases_of(G: int) -> list[TokenCase]:
    """Every length with some group size, and three with each."""
    at = GROUPS.index(G)
    return [
        TokenCase(((T, T),), G=G, Hkv=1 if T > 4000 else 2, n=16 if T > 4000 else 4, seed=T)
        for T in {LENGTHS[at], LENGTHS[(at + 6) % len(LENGTHS)], 1000}
    ]


MORE = [
    (TokenCase(((300, 700),) * 2, D=64, causal=False, dtype=torch.float16), {}),
    (TokenCase(((1000, 1000),), words=4), dict(add=True)),
    (TokenCase(((500, 500),) * 2, G=160), dict(sums=True)),
    (TokenCase(PACK, G=3, form="compact"), dict(start=128, add=True)),
    (TokenCase(PACK, G=1, form="stacked", D=64), dict(start=128)),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("G", GROUPS)
def test_dq(G: int) -> None:
    for case in cases_of(G):
        test_backward_dq_bits.assert_dq(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("case, given", MORE, ids=str)
def test_dq_of_other_calls(case: TokenCase, given: dict[str, Any]) -> None:
    test_backward_dq_bits.assert_dq(case, **given)


PAIRS = [
    *(fa_pairs.TokenCase((T,), GROUPS[i % len(GROUPS)], n=16 if T > 4000 else 4) for i, T in enumerate(LENGTHS)),
    *(fa_pairs.TokenCase((1000, 1000), G, Hkv=2, n=6, cap=100, D=64 if G in (2, 8) else 128) for G in GROUPS),
    fa_pairs.TokenCase((700,), 160, n=3),
    fa_pairs.TokenCase((900,), 4, causal=False, cap=200, dtype="float16"),
    fa_pairs.TokenCase((1000,), 8, block=192, add=True),
    fa_pairs.TokenCase((100, 129, 600, 1, 64), 16, packed=True, cap=50, start=128),
    fa_pairs.TokenCase((100, 1, 300), 3, packed=True, past=100, Hkv=2, block=128, D=64),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_dk_and_dv(case: fa_pairs.TokenCase) -> None:
    test_backward_dkdv.assert_gradients(case)


SPILLED = 128  # bytes of a thread's stack: addresses that stay the same in all steps


def dq_frames(case: TokenCase) -> list[int]:
    """The stack frames of the dq pass; in a worker."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    same = test_backward_dq_bits.call_of(case)
    x, accum = make_inputs(same), layout(same)
    rows = tuple(torch.empty(*accum.heads, accum.rows, device="cuda") for _ in range(2))
    with unset_fake_temporarily():
        lists = union_lists(case, listed_blocks(case, "cpu"))
    code = cubins(lambda: call(same, x, rows, on_gpu(lists), dq=torch.empty_like(x.q)))
    return [size for cubin in code for size in frames(cubin)]


def test_registers_suffice(compiler_sm100: Worker) -> None:
    assert compiler_sm100.run(dq_frames, TokenCase())[0] <= SPILLED
    of_keys, of_sums = compiler_sm100.run(test_backward_dkdv.stack_bytes, fa_pairs.TokenCase((1000,), 16))
    assert of_keys <= SPILLED and of_sums == 0
