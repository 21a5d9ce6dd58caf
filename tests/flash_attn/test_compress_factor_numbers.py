"""Compressed-causal attention on a GPU: numbers against fp64, bits that repeat, nothing from later tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_cases import in_turn
from fa_compress import (
    KINDS,
    OPTIONS,
    Data,
    Kind,
    assert_data,
    at_most_seen,
    fixed_data,
    make,
    packed_data,
    reference,
    run,
)
from fa_reference import assert_close

from flash_attn.cute.compressed_causal.mask import forced

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers(kind: Kind) -> None:
    for seed, data in enumerate(packed_data() if kind.packed else fixed_data()):
        assert_data(kind, data, seed)


@pytest.mark.parametrize(("option", "D"), in_turn(OPTIONS, 64, 128, 128, 64))
def test_numbers_with_options(option: str, D: int) -> None:
    for seed, data in enumerate(fixed_data()[::5]):
        assert_data(Kind(D=D, option=option), data, seed)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.deterministic], ids=str)
def test_deterministic_repeats_its_bits(kind: Kind) -> None:
    for seed, data in enumerate((packed_data() if kind.packed else fixed_data())[::3]):
        first, *others = run(kind, data, make(kind, data.lengths, seed), times=4)
        assert all(first[name].equal(again[name]) for again in others for name in first), f"{kind}, {data}"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.deterministic], ids=str)
def test_forced_path_has_the_default_paths_bits(kind: Kind) -> None:
    """At (1, 0), with equal lengths, the compressed path computes what plain causal masking does."""
    packs = [((100, 100), (513, 513), (1, 1))] if kind.packed else [((T, T),) * 2 for T in (1, 100, 128, 500, 1000)]
    for lengths in packs:
        data, x = Data(lengths, 1, 0), make(kind, lengths)
        (plain,) = run(kind, data, x)
        with forced():
            (compressed,) = run(kind, data, x)
        assert all(plain[name].equal(compressed[name]) for name in plain), f"{kind}, {data}"


def test_later_tokens_change_no_bit() -> None:
    """Keys of blocks of 64 that later tokens are part of: no output before them knows."""
    kind, data = Kind(), Data(((1000, 15),), 64, 63)
    x = make(kind, data.lengths)
    (before,) = run(kind, data, x)
    for key in (0, 7, 14):
        x.k[:, key:], x.v[:, key:] = 5.0, -5.0
        (after,) = run(kind, data, x)
        row = key * 64 + 63
        assert before["o"][:, :row].equal(after["o"][:, :row]) and not before["o"].equal(after["o"])
        x = make(kind, data.lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_public_functions_and_their_gradients(packed: bool) -> None:
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    kind, data = Kind(packed=packed), Data(((300, 18), (300, 18)), 16, 31)
    x = make(kind, data.lengths)
    exact, plain = reference(kind, data, x, torch.float64), reference(kind, data, x, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    pair: dict[str, Any] = {"causal": True, "compress_factor": 16, "compress_offset": 31}
    if packed:
        cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 300, 600], [0, 18, 36]))
        o = flash_attn_varlen_func(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **pair)[0]
    else:
        o = flash_attn_func(*leaves, **pair)[0]
    for name, mine in zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, x.do))):
        assert_close(name, mine, exact[name], plain[name])


@pytest.mark.parametrize("page_size", [64, 128])
def test_paged_keys(page_size: int) -> None:
    """Decoding: few queries, the last of a longer context, over pages in no order."""
    from flash_attn.cute.interface import _flash_attn_fwd

    kind = Kind()
    for seed, (T_q, past, factor) in enumerate([(1, 700, 4), (5, 0, 4), (130, 400, 3), (40, 3000, 16), (64, 5, 2)]):
        T_k = at_most_seen(T_q, factor, factor - 1 - past) + 3
        data = Data(((T_q, T_k),) * 2, factor, factor - 1 - past)
        x = make(kind, data.lengths, seed)
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
            causal=True, compress_factor=data.factor, compress_offset=data.offset, return_lse=True,
        )  # fmt: skip
        exact, plain = reference(kind, data, x, torch.float64), reference(kind, data, x, torch.bfloat16)
        assert lse.isneginf().equal(exact["lse"].isneginf())
        assert_close(f"o of {data}, pages of {page_size}", o, exact["o"], plain["o"])


def test_split_keys() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("SM90 has no SplitKV")
    from flash_attn.cute.interface import _flash_attn_fwd

    kind = Kind()
    for seed, (T_q, T_k, factor, offset) in enumerate([(8, 2000, 1, -1990), (8, 2000, 1, 3), (300, 900, 2, -1000)]):
        data = Data(((T_q, T_k),) * 2, factor, offset)
        x = make(kind, data.lengths, seed)
        o, *_ = _flash_attn_fwd(
            x.q, x.k, x.v, causal=True, compress_factor=factor, compress_offset=offset, num_splits=4
        )
        exact, plain = reference(kind, data, x, torch.float64), reference(kind, data, x, torch.bfloat16)
        assert_close(f"o of {data}", o, exact["o"], plain["o"])
