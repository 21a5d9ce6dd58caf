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
from fuzz.attention_lists import forward_lists, tables
from fuzz.canary import Guarded
from fuzz.case import Attention as Case


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
WINDOW_CALL = Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(512, 0))

WIDE, MIDDLE = (192, 80), (192, 112)


def calls(call: Case, *rows: tuple[Any, ...]) -> list[tuple[Case, int, tuple[int, int] | None]]:
    """Calls, changed by rows; how many stages of keys and values forward has beside two tiles of queries, 0: a CTA to a
    tile; and the queries and keys of tiles that are counted from a window's end, None: the kernel's own."""
    return [(replace(call, **changes), stages, *(tile or [None])) for changes, stages, *tile in rows]


COMPRESSED = calls(
    CALL,
    ({}, 3),
    ({"Hkv": 1}, 3),
    ({"Hkv": 8, "D": 64}, 3),
    ({"D": 96}, 3),
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
)
LISTED = calls(
    Case(D=128, T_q=700, T_k=700, lists="both"),
    ({"lists": "full"}, 2),
    ({"lists": "no full", "mask_mod": "thirds"}, 2),
    ({"causal": True, "Hq": 8, "list_heads": 2}, 2),
    ({"causal": True, "Hq": 8, "list_heads": 2, "pack_gqa": False}, 2),
    ({"Hq": 8, "list_heads": 8}, 2),
    ({"mask_mod": "keyed", "causal": True}, 2),
    ({"window": (100, 0)}, 2),
    ({"overlap": False}, 2),
    ({"block": (128, 64), "causal": True}, 2),
    ({"block": (256, 64), "mask_mod": "thirds"}, 2),
    ({"block": (64, 64), "list_heads": 2}, 3),
    ({"block": (64, 128)}, 3),
    ({"q_tiles": 2, "causal": True, "pack_gqa": False}, 2),
    ({"D": 64, "Hq": 6, "list_heads": 2, "pack_gqa": False}, 3),
    ({"D": 64, "causal": True}, 3),
    ({"D": 64, "block": (128, 64), "mask_mod": "thirds"}, 3),
    ({"D": 96, "causal": True}, 3),
    # Heads of a group that do not divide a tile, other values than keys, no shared memory or registers left, packed
    # sequences, wide rows.
    ({"Hq": 6}, 0),
    ({"D": 192, "Dv": 128, "block": (64, 96), "Hkv": 4}, 0),
    ({"D": 256, "block": (128, 64)}, 0),
    ({"D": 256, "block": (64, 64)}, 0),
    ({"packed": ((100, 130), (600, 200))}, 0),
    ({"T_q": 300, "T_k": 128 * 33}, 0),
    ({"T_q": 300, "T_k": 128 * 32}, 2),
)
WINDOWS = calls(
    WINDOW_CALL,
    ({}, 3, WIDE),
    ({"pack_gqa": False}, 3, WIDE),
    ({"window": (100, 60)}, 3, WIDE),
    ({"window": (0, 0)}, 3, WIDE),
    ({"Hkv": 8}, 3, WIDE),
    ({"D": 64}, 3, MIDDLE),
    ({"D": 64, "window": (0, 700), "pack_gqa": True}, 3, MIDDLE),
    ({"D": 96}, 3, MIDDLE),
    ({"D": 112}, 3, WIDE),
    ({"dtype": "float16"}, 3, WIDE),
    ({"overlap": False}, 3, WIDE),
    ({"window": (2048, 0)}, 3, WIDE),
    # Long windows, no window or half of one, no registers, other values than keys, heads that do not divide a tile.
    ({"window": (4096, 0)}, 0),
    ({"window": (1500, 1500)}, 0),
    ({"window": (None, None), "causal": True}, 0),
    ({"window": (None, 100)}, 0),
    ({"window": (100, None)}, 0),
    ({"D": 192}, 0),
    ({"D": 256}, 0),
    ({"Dv": 112}, 0),
    ({"Hq": 5, "Hkv": 1, "pack_gqa": True}, 0),
    ({"mask_mod": "thirds"}, 0),
    ({"option": "softcap"}, 0),
    ({"option": "sink"}, 0),
    ({"packed": ((333, 333), (667, 667))}, 0),
    ({"option": "seqused_q"}, 0),
    ({"option": "seqused"}, 0),
)


@pytest.mark.parametrize(("case", "stages", "tile"), COMPRESSED + LISTED + WINDOWS, ids=str)
def test_who_overlaps(case: Case, stages: int, tile: tuple[int, int] | None, compiler_sm90: Worker) -> None:
    names = "overlap_tiles num_stages ends_windows tile_m tile_n"
    ((overlaps, found, ends, *own),) = compiler_sm90.trace(kernel_fields, names, compile_forward, case)
    assert (found if overlaps else 0, ends) == (stages, tile is not None) and tile in (None, tuple(own))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case, stages, _ in COMPRESSED if stages], ids=str)
def test_not_a_bit_of_the_result_depends_on_it(case: Case) -> None:
    for T in (1, 1000, 16384):  # fewer tiles than multiprocessors, about as many, and many rounds
        case = replace(case, T_q=T, T_k=T // 64 + 3, seed=T)
        x = make_inputs(case)
        o, lse = assert_same_bits(lambda: forward(case, x))
        # Queries before the first block's last token see nothing.
        assert not o[:, :63].any() and (case.option == "sink" or lse[..., :63].isneginf().all())


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


# Rows of about 16 blocks at most, some of none.
DRAWN = dict(lists="both", list_heads=2, block=(128, 128), pattern="empty rows", density=0.5, spare=0)
RANDOM = [
    Case(D=128, T_q=1, T_k=1, B=1, Hq=8, **DRAWN),
    Case(D=128, T_q=128, T_k=128, B=1, Hq=1, Hkv=1, **DRAWN | dict(list_heads=1, pattern="full")),
    Case(D=128, T_q=200, T_k=200, Hq=8, **DRAWN | dict(pattern="empty")),
    Case(D=128, T_q=2100, T_k=2100, B=3, Hq=8, **DRAWN),
    Case(D=128, T_q=20000, T_k=20000, Hq=8, **DRAWN | dict(density=0.1)),
    Case(D=64, T_q=20000, T_k=20000, B=1, Hq=8, causal=True, **DRAWN | dict(density=0.1)),
    Case(D=128, T_q=70000, T_k=70000, B=1, Hq=16, Hkv=4, **DRAWN | dict(density=0.03, list_heads=4)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "pack_gqa"), in_order(RANDOM, True, False), ids=str)
def test_not_a_bit_depends_on_it(case: Case, pack_gqa: bool) -> None:
    """Fewer tiles than multiprocessors and many rounds of them, rows without blocks, every place written."""
    case = replace(case, pack_gqa=pack_gqa)
    x, lists = make_inputs(case), forward_lists(case)
    o, lse = assert_same_bits(lambda: forward(case, x, lists))
    empty = torch.stack([~listed.any(2) for listed, _ in tables(case)]).cuda()
    unseen = empty.repeat_interleave(case.Hq // case.list_heads, 1).repeat_interleave(128, 2)[..., : case.T_q]
    assert not o[unseen.transpose(1, 2)].any() and lse[unseen].isneginf().all()


def test_windows_of_either_kind_have_kernels_of_their_own(compiler_sm90: Worker) -> None:
    calls = [replace(WINDOW_CALL, D=64, window=(left, 0)) for left in (512, 8192, 100, 5000)]
    found = compiler_sm90.trace(kernel_fields, "overlap_tiles", compile_forward, *calls)
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
@pytest.mark.parametrize("case", [case for case, stages, _ in WINDOWS if stages], ids=str)
def test_numbers_and_not_a_bit_of_them_depends_on_it(case: Case) -> None:
    for T_q, T_k in [*LENGTHS, (70000, 70000)]:
        case = replace(case, T_q=T_q, T_k=T_k, seed=T_q)
        x = make_inputs(case)
        o, lse = assert_same_bits(lambda: forward(case, x))
        if T_q < 70000:
            assert_forward(case, x, o, lse)
