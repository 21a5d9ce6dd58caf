"""SM90 forward whose CTAs walk many tiles: when the kernels do, and that not a bit of the result depends on it."""

from __future__ import annotations

import pytest
import torch
from fa_compile import Worker, built_kernels

OPTIONS = dict(causal=True, compress_factor=64, compress_offset=63)

# What is asked for beside q, k, v and a factor of 64, and whether tiles overlap.
CALLS: list[tuple[dict[str, object], bool]] = [
    ({}, True),
    ({"Hkv": 1}, True),
    ({"Hkv": 8, "D": 64}, True),
    ({"D": 96}, True),
    ({"D": 112}, True),
    ({"pack_gqa": False}, True),
    ({"sink": True}, True),
    ({"seqused_k": True}, True),
    ({"intra_wg_overlap": False}, True),
    ({"D": 256}, False),
    ({"Dv": 64}, False),
    ({"Hq": 5, "Hkv": 1}, False),
    ({"compress_factor": 1}, False),
    ({"mask_mod": "thirds"}, False),
    ({"softcap": 10.0}, False),
    ({"packed": True}, False),
    ({"seqused_q": True}, False),
]


def call(asked: dict[str, object], T: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward of two sequences of T queries: o and the log-sum-exp."""
    from fa_mask_mods import MASK_MODS

    from flash_attn.cute.interface import _flash_attn_fwd

    asked = dict(asked)
    Hq, Hkv, D = asked.pop("Hq", 8), asked.pop("Hkv", 2), asked.pop("D", 128)
    Dv, keys = asked.pop("Dv", D), T // 64 + 3
    packed = asked.pop("packed", False)
    batch = () if packed else (2,)
    q, k, v = (
        torch.randn((*batch, *shape), dtype=torch.bfloat16, device="cuda")
        for shape in ((T, Hq, D), (keys, Hkv, D), (keys, Hkv, Dv))
    )
    options = dict(OPTIONS, return_lse=True)
    if packed:
        options |= {"cu_seqlens_q": _int32(0, T // 3, T), "cu_seqlens_k": _int32(0, keys // 3, keys)}
        options |= {"max_seqlen_q": T, "max_seqlen_k": keys}
    if asked.pop("sink", False):
        options["learnable_sink"] = torch.randn(Hq, dtype=torch.bfloat16, device="cuda")
    for which, length in (("seqused_q", T // 2), ("seqused_k", keys // 2)):
        if asked.pop(which, False):
            options[which] = _int32(length, length + 1)
    if "mask_mod" in asked:
        options["mask_mod"] = MASK_MODS[asked.pop("mask_mod")][0]
    o, lse, *_ = _flash_attn_fwd(q, k, v, **options | asked)
    return o, lse


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def overlaps(asked: dict[str, object]) -> bool:
    """Whether the tiles of a call's kernel overlap."""
    with built_kernels("FlashAttentionForwardSm90") as kernels:
        call(asked)
    return kernels[0].overlap_tiles


@pytest.mark.parametrize("asked,expected", CALLS, ids=lambda value: str(value))
def test_who_overlaps(asked: dict[str, object], expected: bool, compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(overlaps, asked) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [asked for asked, expected in CALLS if expected], ids=str)
def test_not_a_bit_of_the_result_depends_on_it(asked: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import interface

    for T in (1, 1000, 16384):  # fewer tiles than multiprocessors, about as many, and many rounds
        results = []
        for overlap in (True, False, True, True):
            with monkeypatch.context() as patch:
                if not overlap:
                    patch.setattr(interface.persistence, "overlapped_stages", lambda *_, **__: 0)
                torch.manual_seed(T)
                results.append(call(asked, T))
        for o, lse in results[1:]:
            assert o.isfinite().all()
            assert torch.equal(o, results[0][0])
            assert torch.equal(lse, results[0][1])


@pytest.mark.gpu
def test_every_tile_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute.interface import _flash_attn_fwd

    q = torch.randn(3, 10000, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(3, 160, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    o, lse = torch.full_like(q, float("nan")), torch.full((3, 8, 10000), float("nan"), device="cuda")
    _flash_attn_fwd(q, k, v, out=o, lse=lse, **OPTIONS)
    assert o.isfinite().all()
    assert not lse.isnan().any()
    # Queries before the first block's last token see nothing.
    assert not o[:, :63].any()
    assert lse[..., :63].eq(float("-inf")).all()


@pytest.mark.parametrize(
    ("asked", "stages"),
    [
        ((128, 128, 192, 80, 4, False), 3),
        ((96, 96, 192, 144, 1, False), 2),
        ((256, 256, 128, 80, 1, False), 0),
        ((128, 64, 128, 128, 1, False), 0),
        ((128, 128, 192, 80, 5, False), 0),
    ],
    ids=str,
)
def test_as_many_stages_as_fit(asked: tuple[int, ...], stages: int) -> None:
    from flash_attn.cute.compressed_causal.mask import CompressArgs
    from flash_attn.cute.fwd_sm90.persistence import SMEM_BYTES, ForwardTile, overlapped_stages

    tile = ForwardTile(*asked)
    assert overlapped_stages(tile, compress=CompressArgs(64, 0)) == stages
    assert overlapped_stages(tile, compress=CompressArgs(1, 5)) == 0, "with a factor of 1 the tiles are upstream's"
    D, Dv, tile_m, tile_n = asked[:4]
    assert 2 * (2 * tile_m * D + stages * tile_n * (D + Dv)) < SMEM_BYTES or not stages
