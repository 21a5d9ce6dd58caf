"""compress_factor and compress_offset: what is refused, and what compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_cases import Case, backward, compile_case, make_inputs, outputs
from fa_compile import Worker, built_kernels, noted
from fa_compress import FIXED, KINDS

from flash_attn.cute.compressed_causal.mask import UNSUPPORTED, compression, refuse_unsupported


def test_the_default_asks_for_nothing() -> None:
    assert compression(False, 1, 0) is compression(True, 1, 0) is None
    assert compression(True, 64, -5) == (64, -5)
    assert compression(True, 1, 1) == (1, 1)


@pytest.mark.parametrize("feature", sorted(UNSUPPORTED))
def test_unsupported_is_refused_by_name(feature: str) -> None:
    arch = {"sm80": 80, "sm120": 120}.get(feature, 90)
    asked = {} if arch != 90 else {feature: True}
    refuse_unsupported(None, arch, **asked)
    with pytest.raises(NotImplementedError, match=feature):
        refuse_unsupported(compression(True, 2, 1), arch, **asked)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_backward_gets_what_forward_got(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import interface

    asked = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple:
        asked.append((options["causal"], options["compress_factor"], options["compress_offset"]))
        return q + 0, q[..., 0].float(), None, None, None

    def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> tuple:
        asked.append((args[4], options["compress_factor"], options["compress_offset"]))
        return q + 1, k + 2, v + 3

    monkeypatch.setattr(interface, "_flash_attn_fwd", forward)
    monkeypatch.setattr(interface, "_flash_attn_bwd", backward)
    q, k, v = (torch.zeros(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    o, _ = getattr(interface, name)(q, k, v, causal=True, compress_factor=7, compress_offset=-2)
    o.sum().backward()
    assert asked == [(True, 7, -2)] * 2
    assert [int(t.grad.unique()) for t in (q, k, v)] == [1, 2, 3]


COMPILED = [KINDS[i] for i in (1, 5, 9)]


def compile_kind(kind: Case) -> tuple[int, int]:
    """Forward and backward for one pair, then for another; how many kernels were compiled after each of them."""
    made = []
    with built_kernels(traced=True) as kernels:
        for factor, offset in ((64, 63), (3, -20)):
            case = replace(kind, T_k=300, packed=((1000, 300),) * 2 if kind.packed else (), compress=(factor, offset))
            compile_case(case)
            made.append(len(kernels))
    return made[0], made[1]


@pytest.mark.parametrize("kind", COMPILED, ids=str)
def test_compiles_once_for_all_factors(compiler: Worker, kind: Case) -> None:
    one, two = compiler.trace(compile_kind, kind)
    assert one == two > 1


def test_compiles_with_a_mask_mod(compiler: Worker) -> None:
    compiler.trace(compile_kind, replace(FIXED, D=64, mask_mod="thirds"))


def places_that_store_gradients(kind: Case) -> list[int]:
    """Number of times that backward's tracing came by the epilogue that stores dk and dv: plain causal, compressed."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

    counts = []
    for pair in ((1, 0), (64, 63)):
        case = replace(kind, T_k=300, compress=pair)
        x = make_inputs(case)
        with noted(FlashAttentionBackwardSm90, "epilogue_dKV", lambda *args, **options: None) as stores:
            backward(case, x, *outputs(case, x))
        counts.append(len(stores))
    return counts


def test_tiles_that_no_query_sees_store_zeros(compiler_sm90: Worker) -> None:
    """Plain causal attention of fixed lengths has none, and so no place that stores them."""
    assert compiler_sm90.trace(places_that_store_gradients, replace(FIXED, D=64, Hkv=4)) == [1, 2]
