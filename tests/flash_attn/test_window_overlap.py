"""SM90 forward in short sliding windows, whose CTAs walk many tiles: when they do, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fa_cases import in_turn
from fa_compile import Worker, built_kernels

# A call of forward, and how many stages of keys and values it has beside two tiles of queries; 0: a CTA to a tile.
CALLS: list[tuple[dict[str, Any], int]] = [
    ({}, 2),
    ({"pack_gqa": False}, 2),
    ({"window": (100, 60)}, 2),
    ({"window": (0, 0)}, 2),
    ({"Hkv": 8}, 2),
    ({"D": 64}, 3),
    ({"D": 64, "window": (0, 700), "pack_gqa": True}, 3),
    ({"D": 96}, 2),
    ({"D": 112}, 3),
    ({"dtype": torch.float16}, 2),
    ({"intra_wg_overlap": False}, 2),
    ({"window": (2048, 0)}, 2),
    # Long windows, no window or half of one, no registers, other values than keys, heads that do not divide a tile.
    ({"window": (4096, 0)}, 0),
    ({"window": (1500, 1500)}, 0),
    ({"window": (None, None), "causal": True}, 0),
    ({"window": (None, 100)}, 0),
    ({"window": (100, None)}, 0),
    ({"D": 192}, 0),
    ({"D": 256}, 0),
    ({"Dv": 64}, 0),
    ({"Hq": 5, "Hkv": 1, "pack_gqa": True}, 0),
    ({"mask_mod": "thirds"}, 0),
    ({"softcap": 10.0}, 0),
    ({"sink": True}, 0),
    ({"packed": True}, 0),
    ({"seqused_q": True}, 0),
    ({"seqused_k": True}, 0),
]


def call(asked: dict[str, Any], T_q: int = 1000, T_k: int | None = None) -> tuple[tuple[torch.Tensor, ...], Any, Any]:
    """Forward of two sequences: q, k and v, then o and the log-sum-exp, of which every value was NaN before."""
    from fa_mask_mods import MASK_MODS

    from flash_attn.cute.interface import _flash_attn_fwd

    asked = dict(asked)
    T_k = T_q if T_k is None else T_k
    Hq, Hkv, D, dtype = (asked.pop(*pair) for pair in (("Hq", 8), ("Hkv", 2), ("D", 128), ("dtype", torch.bfloat16)))
    Dv, B, left_right = asked.pop("Dv", D), asked.pop("B", 2), asked.pop("window", (512, 0))
    batch = () if asked.pop("packed", False) else (B,)
    shapes = (T_q, Hq, D), (T_k, Hkv, D), (T_k, Hkv, Dv)
    q, k, v = (torch.randn((*batch, *shape), dtype=dtype, device="cuda") for shape in shapes)
    options: dict[str, Any] = dict(window_size_left=left_right[0], window_size_right=left_right[1])
    if not batch:
        options |= {"cu_seqlens_q": _int32(0, T_q // 3, T_q), "cu_seqlens_k": _int32(0, T_k // 3, T_k)}
        options |= {"max_seqlen_q": T_q, "max_seqlen_k": T_k}
    if asked.pop("sink", False):
        options["learnable_sink"] = torch.randn(Hq, dtype=torch.bfloat16, device="cuda")
    for which, length in (("seqused_q", T_q // 2), ("seqused_k", T_k // 2)):
        if asked.pop(which, False):
            options[which] = _int32(length, length + 1)
    if "mask_mod" in asked:
        options["mask_mod"] = MASK_MODS[asked.pop("mask_mod")][0]
    o = torch.full((*batch, T_q, Hq, Dv), float("nan"), dtype=dtype, device="cuda")
    lse = None
    if asked.pop("with_lse", True):
        shape = (B, Hq, T_q) if batch else (Hq, T_q)
        lse = torch.full(shape, float("nan"), dtype=torch.float32, device="cuda")
    _flash_attn_fwd(q, k, v, out=o, lse=lse, **options | asked)
    return (q, k, v), o, lse


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def stages(*calls: dict[str, Any]) -> list[int]:
    """What each call's new kernel is: its stages where tiles overlap, else 0."""
    with built_kernels("FlashAttentionForwardSm90") as kernels:
        for asked in calls:
            call(asked)
    return [kernel.num_stages if kernel.overlap_tiles else 0 for kernel in kernels]


@pytest.mark.parametrize("asked,expected", CALLS, ids=str)
def test_who_overlaps(asked: dict[str, Any], expected: int, compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(stages, asked) == [expected]


def test_windows_of_either_kind_have_kernels_of_their_own(compiler_sm90: Worker) -> None:
    calls = [{"window": (left, 0), "D": 64} for left in (512, 8192, 100, 5000)]
    assert compiler_sm90.trace(stages, *calls) == [3, 0]


@pytest.mark.parametrize("tile,packed_heads", [((128, 128), 1), ((128, 128), 16), ((192, 128), 4), ((192, 80), 1)])
@pytest.mark.parametrize("window", [(0, 0), (127, 0), (512, 0), (100, 300), (2048, 0)])
def test_key_tiles_of_a_tile_are_counted(tile: tuple[int, int], packed_heads: int, window: tuple[int, int]) -> None:
    from flash_attn.cute.fwd_sm90.persistence import ForwardTile

    rows, (left, right) = tile[0] // packed_heads, window
    reached = []
    for first in range(4096, 4096 + tile[1]):  # wherever a tile's first query stands
        reached.append((first + rows - 1 + right) // tile[1] - (first - left) // tile[1] + 1)
    assert ForwardTile(128, 128, *tile, packed_heads, False).keys_reached(left, right) == max(reached)


@contextmanager
def one_cta_a_tile() -> Iterator[None]:
    from flash_attn.cute import interface

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.persistence, "overlapped_stages", lambda *_, **__: 0)
        yield


def dense(asked: dict[str, Any], qkv: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the log-sum-exp in fp32 under the window as a mask, a batch and a group of heads at a time."""
    q, k, v = (x.float() for x in qkv)
    T_q, T_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    at = torch.arange(T_q, device="cuda")[:, None] + T_k - T_q
    keys = torch.arange(T_k, device="cuda")
    left, right = asked.get("window", (512, 0))
    seen = (keys >= at - left) & (keys <= at + right)
    o, lse = torch.empty((*q.shape[:3], v.shape[3]), device="cuda"), torch.empty(q.shape[0], q.shape[2], T_q)
    lse = lse.cuda()
    for b in range(q.shape[0]):
        for h in range(k.shape[2]):
            heads = slice(h * group, (h + 1) * group)
            scores = torch.einsum("qhd,kd->hqk", q[b, :, heads], k[b, :, h]) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~seen, float("-inf"))
            o[b, :, heads] = torch.einsum("hqk,kd->qhd", scores.softmax(-1).nan_to_num(0.0), v[b, :, h])
            lse[b, heads] = scores.logsumexp(-1)
    return o, lse


# Fewer tiles than multiprocessors and many rounds of them; ends within a tile; shorter than the window; more queries
# than keys, so that some see nothing; fewer.
LENGTHS = [(1, 1), (65, 65), (300, 300), (1000, 1000), (4099, 4099), (1000, 300), (300, 1000), (1, 1000)]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [asked for asked, expected in CALLS if expected], ids=str)
def test_numbers(asked: dict[str, Any]) -> None:
    for T_q, T_k in LENGTHS:
        torch.manual_seed(T_q)
        qkv, o, lse = call(asked, T_q, T_k)
        true_o, true_lse = dense(asked, qkv)
        limit = 2**-8 if o.dtype == torch.bfloat16 else 2**-10
        assert o.isfinite().all(), (T_q, T_k)
        assert (o.float() - true_o).abs().max() <= 4 * limit * max(true_o.abs().max().item(), 1.0), (T_q, T_k)
        unseen = true_lse.isinf()
        assert torch.equal(lse.eq(float("-inf")), unseen)
        assert torch.allclose(lse[~unseen], true_lse[~unseen], atol=1e-3, rtol=1e-4), (T_q, T_k)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("asked", "with_lse"), in_turn([asked for asked, stages in CALLS if stages], True, False), ids=str
)
def test_not_a_bit_of_the_result_depends_on_it(asked: dict[str, Any], with_lse: bool) -> None:
    asked = asked | {"with_lse": with_lse}
    for T_q, T_k in [*LENGTHS, (20000, 20000)]:
        results = []
        for overlap in (False, True, True, True):
            torch.manual_seed(T_q)
            if overlap:
                results.append(call(asked, T_q, T_k)[1:])
            else:
                with one_cta_a_tile():
                    results.append(call(asked, T_q, T_k)[1:])
        expected_o, expected_lse = results[0]
        assert expected_o.isfinite().all()
        for o, lse in results[1:]:
            assert torch.equal(o, expected_o), (T_q, T_k)
            assert (lse is None) == (expected_lse is None) and (lse is None or torch.equal(lse, expected_lse))
