"""Compressed-causal attention on a GPU: numbers against fp64, bits that repeat, nothing from later tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fa_cases import OPTIONS, Case, attend, in_order, make_inputs
from fa_compress import FIXED, KINDS, at_most_seen, with_edges
from fa_reference import assert_bits_repeat, assert_case, assert_close, reference, results

from flash_attn.cute.compressed_causal.mask import CompressArgs
from fuzz.case import Attention, Kind
from fuzz.properties.relations import causality

pytestmark = pytest.mark.gpu
DETERMINISTIC = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.deterministic], ids=str)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers(kind: Case) -> None:
    for case in with_edges(kind):
        assert_case(case)


MORE = [dict(option=option) for option in OPTIONS] + [dict(mask_mod="thirds"), dict(lists="both")]


@pytest.mark.parametrize(("more", "D"), in_order(MORE, 64, 128, 128, 64), ids=str)
def test_numbers_with_options(more: dict[str, str], D: int) -> None:
    for case in with_edges(replace(FIXED, D=D, **more))[::5]:
        assert_case(case)


@DETERMINISTIC
def test_deterministic_repeats_its_bits(kind: Case) -> None:
    for case in with_edges(kind)[::3]:
        assert_bits_repeat(case, 3)


@DETERMINISTIC
def test_compressed_path_has_the_default_paths_bits(kind: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At (1, 0), with equal lengths, the compressed path computes what plain causal masking does."""
    from flash_attn.cute import interface

    sizes = [dict(T_q=T, T_k=T) for T in (1, 100, 128, 500, 1000)]
    for more in [dict(packed=((100, 100), (513, 513), (1, 1)))] if kind.packed else sizes:
        case = replace(kind, compress=(1, 0), **more)
        x = make_inputs(case)
        plain = results(case, x)
        with monkeypatch.context() as patch:
            patch.setattr(interface, "compression", lambda *_: CompressArgs(1, 0))
            compressed = results(case, x)
        assert all(plain[name].equal(compressed[name]) for name in plain), case


@pytest.mark.parametrize("key", [0, 7, 14])
def test_later_tokens_change_no_bit(key: int) -> None:
    """Keys of blocks of 64: no output before a block's last token knows of it."""
    kind = Kind(D=128, mask="compressed", deterministic=True)
    causality(Attention(kind=kind, lengths=((1000, 15),) * 2, factor=64, offset=63, seed=64 * key + 62))


@pytest.mark.parametrize("packed", [False, True])
def test_public_functions_and_their_gradients(packed: bool) -> None:
    lengths = dict(packed=((300, 18),) * 2) if packed else dict(T_q=300, T_k=18)
    case = replace(FIXED, compress=(16, 31), **lengths)
    x = make_inputs(case)
    exact, plain = (reference(case, x, dtype) for dtype in (torch.float64, torch.bfloat16))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    o, _ = attend(case, x, leaves)
    for name, mine in zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, x.do))):
        assert_close(name, mine, exact[name], plain[name])


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
        stores = []
        for t in (x.k, x.v):
            store = torch.zeros(2 * per_sequence, page_size, *t.shape[2:], dtype=t.dtype, device="cuda")
            padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, per_sequence * page_size - T_k))
            store[pages.flatten().long()] = padded.view(2 * per_sequence, page_size, *t.shape[2:])
            stores.append(store)
        o, lse, *_ = _flash_attn_fwd(
            x.q, *stores, page_table=pages, seqused_k=torch.full((2,), T_k, dtype=torch.int32, device="cuda"),
            causal=True, compress_factor=factor, compress_offset=case.compress[1], return_lse=True,
        )  # fmt: skip
        exact, plain = reference(case, x, torch.float64), reference(case, x, torch.bfloat16)
        assert lse.isneginf().equal(exact["lse"].isneginf())
        assert_close(f"o of {case!r}, pages of {page_size}", o, exact["o"], plain["o"])


def test_split_keys() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("SM90 has no SplitKV")
    from flash_attn.cute.interface import _flash_attn_fwd

    for seed, (T_q, T_k, factor, offset) in enumerate([(8, 2000, 1, -1990), (8, 2000, 1, 3), (300, 900, 2, -1000)]):
        case = replace(FIXED, T_q=T_q, T_k=T_k, compress=(factor, offset), seed=seed)
        x = make_inputs(case)
        o, *_ = _flash_attn_fwd(
            x.q, x.k, x.v, causal=True, compress_factor=factor, compress_offset=offset, num_splits=4
        )
        exact, plain = reference(case, x, torch.float64), reference(case, x, torch.bfloat16)
        assert_close(f"o of {case!r}", o, exact["o"], plain["o"])
