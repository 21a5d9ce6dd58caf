"""SM90 forward with persistent CTAs: compressed keys, short lists, short windows; no bit depends on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_compile import Worker, compile_forward, in_order, kernel_fields
from fa_reference import assert_forward

from fuzz.attention import forward, make_inputs
from fuzz.canary import Guarded
from fuzz.case import Attention as Case


def assert_overlap(compiler: Worker, case: Case, expected: int, tile: tuple[int, int] | None = None) -> None:
    """The forward kernel has so many stages of keys and values beside two tiles of queries; 0: a CTA to each tile.

    tile: of queries and keys, where windows end with one; None: they do not.
    """
    names = "overlap_tiles num_stages ends_windows tile_m tile_n"
    ((overlaps, stages, *ends),) = compiler.trace(kernel_fields, names, compile_forward, case)
    assert (stages if overlaps else 0) == expected and ends[0] is (tile is not None)
    assert tile is None or tuple(ends[1:]) == tile


@contextmanager
def one_cta_a_tile() -> Iterator[None]:
    from flash_attn.cute import interface

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface.persistence, "overlapped_stages", lambda *_, **__: 0)
        yield


def assert_same_bits(call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a call, which are those of a CTA to each tile: all of it is written, every time."""
    with one_cta_a_tile():
        expected = call()
    assert expected[0].isfinite().all() and not expected[1].isnan().any()
    for _ in range(3):
        with Guarded("cuda"):
            got = call()
        assert all(map(torch.equal, got, expected))
    return expected


CALL = Case(D=128, T_q=4096, T_k=67, Hq=8, compress=(64, 63))
# What a call has beside that, and how many stages of keys and values beside two tiles of queries; 0: a CTA to a tile.
CALLS: list[tuple[dict[str, Any], int]] = [
    ({}, 3),
    ({"Hkv": 1}, 3),
    ({"Hkv": 8, "D": 64}, 3),
    ({"D": 96}, 2),
    ({"D": 112}, 3),
    ({"pack_gqa": False}, 3),
    ({"option": "sink"}, 3),
    ({"option": "seqused"}, 3),
    ({"overlap": False}, 3),
    ({"D": 256}, 0),
    ({"Dv": 64}, 0),
    ({"Hq": 5, "Hkv": 1}, 0),
    ({"compress": (1, 63)}, 0),
    ({"mask_mod": "thirds"}, 0),
    ({"option": "softcap"}, 0),
    ({"packed": ((1365, 22), (2731, 45))}, 0),
    ({"option": "seqused_q"}, 0),
]


@pytest.mark.parametrize("asked,expected", CALLS, ids=str)
def test_who_overlaps(asked: dict[str, Any], expected: int, compiler_sm90: Worker) -> None:
    assert_overlap(compiler_sm90, replace(CALL, **asked), expected)


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


LISTS = dict(T_q=700, T_k=700, lists="both")
# A case and the stages.
CASES: list[tuple[Case, int]] = [
    (Case(D=128, T_q=700, T_k=700, lists="full"), 2),
    (Case(D=128, T_q=700, T_k=700, lists="no full", mask_mod="thirds"), 2),
    (Case(D=128, causal=True, Hq=8, list_heads=2, **LISTS), 2),
    (Case(D=128, causal=True, Hq=8, list_heads=2, pack_gqa=False, **LISTS), 2),
    (Case(D=128, Hq=8, list_heads=8, **LISTS), 2),
    (Case(D=128, mask_mod="keyed", causal=True, **LISTS), 2),
    (Case(D=128, window=(100, 0), **LISTS), 2),
    (Case(D=128, overlap=False, **LISTS), 2),
    (Case(D=128, block=(128, 64), causal=True, **LISTS), 2),
    (Case(D=128, block=(256, 64), mask_mod="thirds", **LISTS), 2),
    (Case(D=128, block=(64, 64), list_heads=2, **LISTS), 3),
    (Case(D=128, block=(64, 128), **LISTS), 3),
    (Case(D=128, q_tiles=2, causal=True, pack_gqa=False, **LISTS), 2),
    (Case(D=64, Hq=6, list_heads=2, pack_gqa=False, **LISTS), 3),
    (Case(D=64, causal=True, **LISTS), 3),
    (Case(D=64, block=(128, 64), mask_mod="thirds", **LISTS), 3),
    (Case(D=96, causal=True, **LISTS), 3),
    # Heads of a group that do not divide a tile, other values than keys, no room, no registers, packed sequences,
    # wide rows.
    (Case(D=128, Hq=6, **LISTS), 0),
    (Case(D=192, Dv=128, block=(64, 96), Hkv=4, **LISTS), 0),
    (Case(D=256, block=(128, 64), **LISTS), 0),
    (Case(D=256, block=(64, 64), **LISTS), 0),
    (Case(D=128, packed=((100, 130), (600, 200)), lists="both"), 0),
    (Case(D=128, T_q=300, T_k=128 * 33, lists="both"), 0),
    (Case(D=128, T_q=300, T_k=128 * 32, lists="both"), 2),
]


@pytest.mark.parametrize("case,expected", CASES, ids=str)
def test_lists_that_overlap(case: Case, expected: int, compiler_sm90: Worker) -> None:
    assert_overlap(compiler_sm90, case, expected)


@pytest.mark.parametrize(
    ("counts", "indices", "full", "words", "short"),
    [
        ((2, 1, 6), (2, 1, 6, 40), 24, 0, True),
        ((2, 1, 6), (2, 1, 6, 40), 25, 0, False),
        ((2, 1, 6), (2, 1, 6, 64), None, 0, True),
        ((4, 9), (4, 9, 16), 16, 0, True),
        ((4, 9), (4, 100), None, 0, False),
        ((4, 9), (100,), None, 0, False),
        # Unions have twice as much: 16 blocks for each of 8 tokens.
        ((1, 2, 5), (1, 2, 5, 128), None, 1, True),
        ((1, 2, 5), (1, 2, 5, 129), None, 1, False),
        ((1, 2, 5), (1, 2, 5, 128), None, 0, False),
    ],
)
def test_ctas_stay_where_rows_are_short(
    counts: tuple[int, ...], indices: tuple[int, ...], full: int | None, words: int, short: bool
) -> None:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.fwd_sm90.persistence import ForwardTile, has_short_rows, overlapped_stages

    more = {}
    if full is not None:
        more = {"full_block_cnt": torch.empty(counts), "full_block_idx": torch.empty(*indices[:-1], full)}
    bits = torch.empty(*indices, words) if words else None
    lists = BlockSparseTensorsTorch(torch.empty(counts), torch.empty(indices), **more, mask_block_bits=bits)
    assert has_short_rows(lists) is short
    if bits is None and len(counts) == 3:
        tile = ForwardTile(128, 128, 128, 128, packed_heads=1, p_in_smem=False)
        assert overlapped_stages(tile, lists=lists) == (2 if short else 0)


# Random lists of up to 20 blocks, and which part of their rows, about, has none: all, in one case.
RANDOM = [
    (Case(D=128, T_q=1, T_k=1, B=1, Hq=8), 0.3),
    (Case(D=128, T_q=128, T_k=128, B=1, Hq=1, Hkv=1), 0.3),
    (Case(D=128, T_q=200, T_k=200, Hq=8), 1.0),
    (Case(D=128, T_q=2100, T_k=2100, B=3, Hq=8), 0.3),
    (Case(D=128, T_q=20000, T_k=20000, Hq=8), 0.3),
    (Case(D=64, T_q=20000, T_k=20000, B=1, Hq=8, causal=True), 0.3),
    (Case(D=128, T_q=70000, T_k=70000, B=1, Hq=16, Hkv=4), 0.9),
]


def random_lists(case: Case, part: float) -> tuple[Any, torch.Tensor]:
    """Lists for each key/value head, and which query blocks have none: [B, Hkv, M]."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    torch.manual_seed(case.T_q)
    M = -(-case.T_q // 128)
    shape, width = (case.B, case.Hkv, M), min(20, M)
    empty = torch.rand(shape, device="cuda") < part

    def lists() -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.randint(0, width + 1, shape, device="cuda").masked_fill(empty, 0)
        return counts.int(), torch.rand((*shape, M), device="cuda").topk(width).indices.int()

    made = BlockSparseTensorsTorch(*lists(), *lists(), block_size=(128, 128))
    return made, (made.mask_block_cnt + made.full_block_cnt) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("drawn", "pack_gqa"), in_order(RANDOM, True, False), ids=str)
def test_not_a_bit_depends_on_it(drawn: tuple[Case, float], pack_gqa: bool) -> None:
    """Fewer tiles than multiprocessors and many rounds of them, rows without blocks, every place written."""
    case, (lists, empty) = replace(drawn[0], pack_gqa=pack_gqa), random_lists(*drawn)
    x = make_inputs(case)
    o, lse = assert_same_bits(lambda: forward(case, x, lists))
    unseen = empty.repeat_interleave(case.Hq // case.Hkv, 1).repeat_interleave(128, 2)[..., : case.T_q]
    assert not o[unseen.transpose(1, 2)].any() and lse[unseen].isneginf().all()


WINDOW_CALL = Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(512, 0))
WIDE = (192, 80)
# What a call has beside that; how many stages of keys and values, 0: a CTA to a tile; and the queries and keys of tiles
# that are counted from a window's end, None: tiles of the kernel's own at multiples of its width.
WINDOW_CALLS: list[tuple[dict[str, Any], int, tuple[int, int] | None]] = [
    ({}, 3, WIDE),
    ({"pack_gqa": False}, 3, WIDE),
    ({"window": (100, 60)}, 3, WIDE),
    ({"window": (0, 0)}, 3, WIDE),
    ({"Hkv": 8}, 3, WIDE),
    ({"D": 64}, 3, None),
    ({"D": 64, "window": (0, 700), "pack_gqa": True}, 3, None),
    ({"D": 96}, 2, None),
    ({"D": 112}, 3, WIDE),
    ({"dtype": "float16"}, 3, WIDE),
    ({"overlap": False}, 3, WIDE),
    ({"window": (2048, 0)}, 3, WIDE),
    # Long windows, no window or half of one, no registers, other values than keys, heads that do not divide a tile.
    ({"window": (4096, 0)}, 0, None),
    ({"window": (1500, 1500)}, 0, None),
    ({"window": (None, None), "causal": True}, 0, None),
    ({"window": (None, 100)}, 0, None),
    ({"window": (100, None)}, 0, None),
    ({"D": 192}, 0, None),
    ({"D": 256}, 0, None),
    ({"Dv": 112}, 0, None),
    ({"Hq": 5, "Hkv": 1, "pack_gqa": True}, 0, None),
    ({"mask_mod": "thirds"}, 0, None),
    ({"option": "softcap"}, 0, None),
    ({"option": "sink"}, 0, None),
    ({"packed": ((333, 333), (667, 667))}, 0, None),
    ({"option": "seqused_q"}, 0, None),
    ({"option": "seqused"}, 0, None),
]
OVERLAP = pytest.mark.parametrize("asked", [asked for asked, expected, _ in WINDOW_CALLS if expected], ids=str)


@pytest.mark.parametrize("asked,stages,tile", WINDOW_CALLS, ids=str)
def test_windows_that_overlap(
    asked: dict[str, Any], stages: int, tile: tuple[int, int] | None, compiler_sm90: Worker
) -> None:
    assert_overlap(compiler_sm90, replace(WINDOW_CALL, **asked), stages, tile)


def compile_windows(lefts: tuple[int, ...]) -> None:
    for left in lefts:
        compile_forward(replace(WINDOW_CALL, D=64, window=(left, 0)))


def test_windows_of_either_kind_have_kernels_of_their_own(compiler_sm90: Worker) -> None:
    found = compiler_sm90.trace(kernel_fields, "overlap_tiles", compile_windows, (512, 8192, 100, 5000))
    assert found == [(True,), (False,)]


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
        case = replace(WINDOW_CALL, T_q=T_q, T_k=T_k, seed=T_q, **asked)
        x = make_inputs(case)
        o, lse = assert_same_bits(lambda: forward(case, x))
        if T_q < 70000:
            assert_forward(case, x, o, lse)
