"""compress_factor and compress_offset: refusals, kernels, and numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_compile import Worker, built_kernels, in_order
from fa_compress import FIXED, KINDS, at_most_seen, with_edges
from fa_reference import assert_case, assert_forward, in_pages, one_pass

from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn.cute.compressed_causal.mask import UNSUPPORTED, CompressArgs, compression, refuse_unsupported
from fuzz.attention import compile_case, make_inputs
from fuzz.case import OPTIONS
from fuzz.case import Attention as Case


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


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_backward_gets_what_forward_got(function: Any, plain_kernels: list[dict[str, Any]]) -> None:
    q, k, v = (torch.zeros(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    o, _ = function(q, k, v, causal=True, compress_factor=7, compress_offset=-2)
    o.sum().backward()
    names = ("causal", "compress_factor", "compress_offset")
    assert [tuple(call[name] for name in names) for call in plain_kernels] == [(True, 7, -2)] * 2


COMPILED = [*(KINDS[i] for i in (1, 5, 9)), replace(FIXED, D=64, mask_mod="thirds")]


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers(kind: Case) -> None:
    for case in with_edges(kind):
        assert_case(case)


MORE = [dict(option=option) for option in OPTIONS] + [dict(mask_mod="thirds"), dict(lists="both")]
MORE += [dict(lists="both", block=(128, 64), list_heads=heads) for heads in (1, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize(("more", "D"), in_order(MORE, 64, 128, 128, 64, 128, 64, 64, 128), ids=str)
def test_numbers_with_options(more: dict[str, str], D: int) -> None:
    for case in with_edges(replace(FIXED, D=D, **more))[::5]:
        assert_case(case)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.deterministic], ids=str)
def test_compressed_path_has_the_default_paths_bits(kind: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At (1, 0), with equal lengths, the compressed path computes what plain causal masking does."""
    from flash_attn.cute import interface

    sizes = [dict(T_q=T, T_k=T) for T in (1, 100, 128, 500, 1000)]
    for more in [dict(packed=((100, 100), (513, 513), (1, 1)))] if kind.packed else sizes:
        case = replace(kind, compress=(1, 0), **more)
        x = make_inputs(case)
        plain = one_pass(case, x)
        with monkeypatch.context() as patch:
            patch.setattr(interface, "compression", lambda *_: CompressArgs(1, 0))
            compressed = one_pass(case, x)
        assert all(plain[name].equal(compressed[name]) for name in plain), case


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [64, 128])
def test_paged_keys(page_size: int) -> None:
    """Decoding: few queries, the last of a longer context, over pages in no order."""
    from flash_attn.cute.interface import _flash_attn_fwd

    for seed, (T_q, past, factor) in enumerate([(1, 700, 4), (5, 0, 4), (130, 400, 3), (40, 3000, 16), (64, 5, 2)]):
        T_k = at_most_seen(T_q, factor, factor - 1 - past) + 3
        case = replace(FIXED, T_q=T_q, T_k=T_k, compress=(factor, factor - 1 - past), seed=seed)
        x = make_inputs(case)
        per_sequence = -(-T_k // page_size)
        pages = torch.randperm(2 * per_sequence, device="cuda", dtype=torch.int32).view(2, per_sequence)
        stores = [in_pages(t, pages, page_size) for t in (x.k, x.v)]
        o, lse, *_ = _flash_attn_fwd(
            x.q, *stores, page_table=pages, seqused_k=torch.full((2,), T_k, dtype=torch.int32, device="cuda"),
            causal=True, compress_factor=factor, compress_offset=case.compress[1], return_lse=True,
        )  # fmt: skip
        assert_forward(case, x, o, lse)


@pytest.mark.gpu
def test_split_keys() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("SM90 has no SplitKV")
    from flash_attn.cute.interface import _flash_attn_fwd

    for seed, (T_q, T_k, factor, offset) in enumerate([(8, 2000, 1, -1990), (8, 2000, 1, 3), (300, 900, 2, -1000)]):
        case = replace(FIXED, T_q=T_q, T_k=T_k, compress=(factor, offset), seed=seed)
        x = make_inputs(case)
        static = dict(causal=True, compress_factor=factor, compress_offset=offset, num_splits=4)
        o, *_ = _flash_attn_fwd(x.q, x.k, x.v, **static)
        assert_forward(case, x, o)
