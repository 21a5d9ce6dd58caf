"""SM90 forward in short sliding windows with CTAs of many tiles: when they have them, and that no bit depends on it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_cases import Case, forward, make_inputs
from fa_compile import Worker, built_kernels
from fa_persistent import assert_same_bits, stages
from fa_reference import assert_close, reference

CALL = Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(512, 0))
# What a call has beside that, and how many stages of keys and values; 0: a CTA to a tile.
CALLS: list[tuple[dict[str, Any], int]] = [
    ({}, 3),
    ({"pack_gqa": False}, 3),
    ({"window": (100, 60)}, 3),
    ({"window": (0, 0)}, 3),
    ({"Hkv": 8}, 3),
    ({"D": 64}, 3),
    ({"D": 64, "window": (0, 700), "pack_gqa": True}, 3),
    ({"D": 96}, 2),
    ({"D": 112}, 3),
    ({"dtype": "float16"}, 3),
    ({"overlap": False}, 3),
    ({"window": (2048, 0)}, 3),
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
    ({"option": "softcap"}, 0),
    ({"option": "sink"}, 0),
    ({"packed": ((333, 333), (667, 667))}, 0),
    ({"option": "seqused_q"}, 0),
    ({"option": "seqused"}, 0),
]
OVERLAP = pytest.mark.parametrize("asked", [asked for asked, expected in CALLS if expected], ids=str)


@pytest.mark.parametrize("asked,expected", CALLS, ids=str)
def test_who_overlaps(asked: dict[str, Any], expected: int, compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(stages, replace(CALL, **asked)) == expected


def kernels_of(lefts: tuple[int, ...]) -> list[bool]:
    """The kernels that are compiled for calls with these windows: whether tiles overlap."""
    with built_kernels("FlashAttentionForwardSm90") as kernels:
        for left in lefts:
            case = replace(CALL, D=64, window=(left, 0))
            forward(case, make_inputs(case))
    return [kernel.overlap_tiles for kernel in kernels]


def test_windows_of_either_kind_have_kernels_of_their_own(compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(kernels_of, (512, 8192, 100, 5000)) == [True, False]


@pytest.mark.parametrize("tile,packed_heads", [((128, 128), 1), ((128, 128), 16), ((192, 128), 4), ((192, 80), 1)])
@pytest.mark.parametrize("window", [(0, 0), (127, 0), (512, 0), (100, 300), (2048, 0)])
def test_key_tiles_of_a_tile_are_counted(tile: tuple[int, int], packed_heads: int, window: tuple[int, int]) -> None:
    from flash_attn.cute.fwd_sm90.persistence import ForwardTile

    rows, (left, right) = tile[0] // packed_heads, window
    reached = []
    for first in range(4096, 4096 + tile[1]):  # wherever a tile's first query stands
        reached.append((first + rows - 1 + right) // tile[1] - (first - left) // tile[1] + 1)
    assert ForwardTile(128, 128, *tile, packed_heads, False).keys_reached(left, right) == max(reached)


def ctas_of(tiles: tuple[int, ...]) -> list[int]:
    """CTAs of so many tiles on 10 multiprocessors."""
    from flash_attn.cute.fwd_sm90 import persistent_scheduler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent_scheduler, "target_sm_count", lambda: 10)
        grid_of = persistent_scheduler.PersistentScheduler.get_grid_shape
        return [int(grid_of(SimpleNamespace(total_blocks=each))[0]) for each in tiles]


def test_ctas_of_many_tiles_take_turns(compiler_sm90: Worker) -> None:
    """Up to 8 to a multiprocessor, of 16 tiles at least."""
    assert compiler_sm90.trace(ctas_of, (5, 100, 319, 320, 1279, 1 << 20)) == [5, 10, 10, 20, 70, 80]


# Fewer tiles than multiprocessors, many rounds of them, and several CTAs to each; ends within a tile; shorter than the
# window; more queries than keys, so that some see nothing; fewer.
LENGTHS = [(1, 1), (65, 65), (300, 300), (1000, 1000), (4099, 4099), (1000, 300), (300, 1000), (1, 1000)]


@pytest.mark.gpu
@OVERLAP
def test_numbers_and_not_a_bit_of_them_depends_on_it(asked: dict[str, Any]) -> None:
    for T_q, T_k in [*LENGTHS, (70000, 70000)]:
        case = replace(CALL, T_q=T_q, T_k=T_k, seed=T_q, **asked)
        x = make_inputs(case)
        o, lse = assert_same_bits(lambda: forward(case, x))
        if T_q == 70000:
            continue
        exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, x.q.dtype))
        assert_close(f"o of {case!r}", o, exact["o"], rough["o"])
        assert lse.isneginf().equal(exact["lse"].isneginf())
        seen = ~lse.isneginf()
        torch.testing.assert_close(lse[seen].double(), exact["lse"][seen], atol=1e-3, rtol=1e-4)
