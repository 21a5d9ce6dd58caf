"""SM90 forward of compressed-causal calls with CTAs of many tiles: when they have them, and that bits stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fa_cases import Case, forward, make_inputs
from fa_compile import Worker
from fa_persistent import assert_same_bits, stages

CALL = Case(D=128, T_q=4096, T_k=67, Hq=8, compress=(64, 63))
# What a call has beside that, and whether tiles overlap.
CALLS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"Hkv": 1}, True),
    ({"Hkv": 8, "D": 64}, True),
    ({"D": 96}, True),
    ({"D": 112}, True),
    ({"pack_gqa": False}, True),
    ({"option": "sink"}, True),
    ({"option": "seqused"}, True),
    ({"overlap": False}, True),
    ({"D": 256}, False),
    ({"Dv": 64}, False),
    ({"Hq": 5, "Hkv": 1}, False),
    ({"compress": (1, 63)}, False),
    ({"mask_mod": "thirds"}, False),
    ({"option": "softcap"}, False),
    ({"packed": ((1365, 22), (2731, 45))}, False),
    ({"option": "seqused_q"}, False),
]


@pytest.mark.parametrize("asked,expected", CALLS, ids=str)
def test_who_overlaps(asked: dict[str, Any], expected: bool, compiler_sm90: Worker) -> None:
    assert bool(compiler_sm90.trace(stages, replace(CALL, **asked))) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [asked for asked, expected in CALLS if expected], ids=str)
def test_not_a_bit_of_the_result_depends_on_it(asked: dict[str, Any]) -> None:
    for T in (1, 1000, 16384):  # fewer tiles than multiprocessors, about as many, and many rounds
        case = replace(CALL, T_q=T, T_k=T // 64 + 3, seed=T, **asked)
        x = make_inputs(case)
        o, lse = assert_same_bits(lambda: forward(case, x))
        # Queries before the first block's last token see nothing.
        assert not o[:, :63].any() and (case.option == "sink" or lse[..., :63].isneginf().all())


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
