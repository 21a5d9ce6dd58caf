"""The kernels by token as SM100 has them, with products warp by warp: a Hopper GPU runs them as well."""

from typing import Any

import fa_pairs
import pytest
import test_dkdv_pass
import test_dq_pass
import test_query_bits
import torch
from fa_bits import TokenCase, listed_blocks, union_lists
from fa_compile import Worker, built_kernels
from fa_cubin import cubins, frames
from fa_dq import call, layout

from flash_attn.cute.multiply import form
from fuzz.attention import make_inputs
from fuzz.attention_lists import on_gpu

PACK = ((0, 0), (1, 1), (129, 129), (500, 700), (63, 63), (64, 200))
GROUPS = (1, 2, 3, 4, 8, 16)
LENGTHS = (8193, 1, 63, 64, 65, 127, 129, 1000, 4096)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "FORCED", True)


def forward(case: TokenCase, x: tuple[torch.Tensor, ...], lists: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `test_query_bits.attend`, by the kernel for SM100."""
    from flash_attn.cute.fwd_unions.interface import forward_unions

    options: dict[str, Any] = dict(causal=case.causal)
    if case.form is not None:
        for name, starts in zip(("cu_seqlens_q", "cu_seqlens_k"), case.starts):
            options[name] = torch.tensor(starts, dtype=torch.int32, device="cuda")
        options["max_seqlen_q"] = max(pair[0] for pair in case.lengths)
    return forward_unions(*x, lists, **options)


@pytest.fixture
def forced_forward(monkeypatch: pytest.MonkeyPatch, forced: None) -> None:
    monkeypatch.setattr(test_query_bits, "attend", forward)


def cases_of(G: int) -> list[TokenCase]:
    """Every length with some group size, and three with each."""
    at = GROUPS.index(G)
    return [
        TokenCase(((T, T),), G=G, Hkv=1 if T > 4000 else 2, n=16 if T > 4000 else 4, seed=T)
        for T in {LENGTHS[at], LENGTHS[(at + 6) % len(LENGTHS)], 1000}
    ]


MORE = [
    (TokenCase(((300, 700),) * 2, D=64, causal=False, dtype=torch.float16), {}),
    (TokenCase(((1000, 1000),), block=16), dict(add=True)),
    (TokenCase(((500, 500),) * 2, G=160), dict(sums=True)),
    (TokenCase(PACK, G=3, form="compact"), dict(start=128, add=True)),
    (TokenCase(PACK, G=1, form="stacked", D=64), dict(start=128)),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("forced_forward")
@pytest.mark.parametrize("G", GROUPS)
def test_forward(G: int) -> None:
    for case in cases_of(G):
        test_query_bits.assert_right(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("forced_forward")
@pytest.mark.parametrize("case", [case for case, _ in MORE], ids=str)
def test_forward_of_other_calls(case: TokenCase) -> None:
    test_query_bits.assert_right(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("forced_forward")
@pytest.mark.parametrize("case", test_query_bits.LATER, ids=str)
def test_later_tokens_change_no_bit_of_forward(case: TokenCase) -> None:
    test_query_bits.test_later_tokens_change_no_bit(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("G", GROUPS)
def test_dq(G: int) -> None:
    for case in cases_of(G):
        test_dq_pass.assert_dq_of_unions(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("case, given", MORE, ids=str)
def test_dq_of_other_calls(case: TokenCase, given: dict[str, Any]) -> None:
    test_dq_pass.assert_dq_of_unions(case, **given)


PAIRS = [
    *(fa_pairs.TokenCase((T,), GROUPS[i % len(GROUPS)], n=16 if T > 4000 else 4) for i, T in enumerate(LENGTHS)),
    *(fa_pairs.TokenCase((1000, 1000), G, Hkv=2, n=6, cap=100, D=64) for G in (2, 8)),
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
    test_dkdv_pass.assert_gradients(case)


SPILLED = 32  # bytes of the stack: a few addresses that are the same in all steps


def stack_bytes(case: TokenCase) -> list[int]:
    """The stack frames of the dq pass and of forward; in a worker."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    same = test_dq_pass.call_of(case)
    x, accum = make_inputs(same), layout(same)
    rows = tuple(torch.empty(*accum.heads, accum.rows, device="cuda") for _ in range(2))
    with unset_fake_temporarily():
        lists = union_lists(case, listed_blocks(case, "cpu"))

    def both() -> None:
        call(same, x, rows, on_gpu(lists), dq=torch.empty_like(x.q))
        forward(case, (x.q, x.k, x.v), on_gpu(lists))

    return [size for cubin in cubins(both) for size in frames(cubin)]


def kernels_of_layer() -> set[tuple[str, bool | None]]:
    """The kernels of the selected branch and of the choice by token that a call of the layer asks for; in a worker."""
    from nsa_layer import NSAConfig
    from nsa_layer.warm_up.lookup import make_call
    from nsa_tools.shape import Shape

    static = dict(dtype=torch.bfloat16, config=NSAConfig(q_tile=1))
    with built_kernels("") as kernels:
        make_call(Shape(B=1, T=300, Hq=4, Hkv=2, D=64, Dv=64, **static).signature())
    return {(type(kernel).__name__, getattr(getattr(kernel, "spec", None), "by_warp", None)) for kernel in kernels}


def test_the_layer_asks_for_them(compiler_sm100: Worker) -> None:
    passes = ("ForwardUnions", "BackwardDqSm90", "BackwardDkdvSm90")
    expected = {("TokenTopK", True), *((f"FlashAttention{name}", True) for name in passes)}
    assert expected <= compiler_sm100.trace(kernels_of_layer)


def test_registers_suffice(compiler_sm100: Worker) -> None:
    assert compiler_sm100.run(stack_bytes, TokenCase()) == [0, 0]


@pytest.mark.sweep
@pytest.mark.parametrize("G", [16, 3])
def test_registers_of_dk_and_dv_suffice(G: int, compiler_sm100: Worker) -> None:
    of_keys, of_sums = compiler_sm100.run(test_dkdv_pass.stack_bytes, fa_pairs.TokenCase((1000,), G))
    assert of_keys <= SPILLED and of_sums == 0
