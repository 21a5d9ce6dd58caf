"""Steps of SM90 forward: two blocks of 64 keys, masks at edges only, tiles counted from a window's end."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from fa_compile import Worker, compile_forward, kernel_fields, noted, on_cpu, recorded_masks, swept
from fa_reference import assert_forward
from test_persistent_forward import WINDOW_CALL
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuzz.attention import forward, make_inputs
from fuzz.case import Attention as Case

HALVES = dict(T_q=700, T_k=700, lists="both", block=(128, 64))
BY_GROUP = Case(D=128, **HALVES, causal=True, list_heads=2)
COMPRESSED = replace(BY_GROUP, causal=False, compress=(2, 1))
PACKED = dict(packed=((300, 300), (0, 0), (1, 1), (700, 700), (64, 200)), block=(128, 64))
# Blocks of a step and keys of a tile. Steps of two blocks of 64 keys, ...
STEPS: list[tuple[Case, tuple[int, int]]] = [
    (BY_GROUP, (2, 128)),
    (replace(BY_GROUP, D=64, pack_gqa=False), (2, 128)),
    (Case(D=96, **HALVES, window=(200, 30), list_heads=2), (2, 128)),
    (Case(D=128, **HALVES, Hq=6, list_heads=2, window=(100, None), mask_mod="thirds"), (2, 128)),
    (Case(D=128, **HALVES, Hq=6, list_heads=6, causal=True, mask_mod="thirds"), (2, 128)),
    (Case(D=128, **(HALVES | dict(lists="no full")), Hq=8, Hkv=1, causal=True), (2, 128)),
    (Case(D=128, lists="both", form="compact", list_heads=2, mask_mod="thirds", **PACKED), (2, 128)),
    (Case(D=64, lists="both", form="stacked", window=(100, 20), **PACKED), (2, 128)),
    (Case(D=128, lists="no full", form="ragged", causal=True, **PACKED), (2, 128)),
    # ... which other blocks and head dimensions do not fit, and score_mods and compressed masks do without.
    (Case(D=128, lists="both"), (0, 128)),
    (Case(D=256, lists="both", block=(128, 64)), (0, 64)),
    (Case(D=192, Dv=128, Hkv=4, lists="both", block=(64, 96)), (0, 96)),
    (replace(BY_GROUP, option="softcap"), (0, 64)),
    (COMPRESSED, (0, 64)),
    (replace(COMPRESSED, block=(64, 64)), (0, 64)),
]


@pytest.mark.parametrize(("case", "expected"), STEPS, ids=str)
def test_two_blocks_of_64_are_a_step(compiler_sm90: Worker, case: Case, expected: tuple[int, int]) -> None:
    assert compiler_sm90.trace(kernel_fields, "list_parts tile_n", compile_forward, case) == [expected]


LISTED = dict(D=128, T_q=700, T_k=700, lists="both")
UNMASKED_PACK = ((300, 300), (1, 129), (0, 200), (700, 640), (130, 0))
OPEN, MOD, MOD_AND_EDGES, EDGES = "open", "mod", "mod, edges", "edges"


def masks(case: Case) -> Counter[str]:
    """The number of steps with each mask in the code of a forward kernel; in a worker."""
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90 as Forward

    with recorded_masks() as calls, ExitStack() as stack:
        for name in ("mma_one_n_block_intrawg_overlap", "first_half_block_overlap"):
            stack.enter_context(noted(Forward, name, lambda *args, **options: None, calls))
        compile_forward(case)
    steps: list[set[str]] = []
    inner = False  # where there are both masks, the edges' is applied within the other
    for call in calls:
        if call is None:
            steps.append(set())
        elif not inner:
            edges = call.mask_seqlen or call.mask_causal or call.mask_local
            steps[-1].add((MOD_AND_EDGES if edges else MOD) if call.mask_mod else EDGES)
        inner = call is not None and call.mask_mod and (call.mask_causal or call.mask_local)
    return Counter(" or ".join(sorted(step)) or OPEN for step in steps)


def test_a_length_of_whole_blocks_needs_no_mask(compiler_sm90: Worker) -> None:
    """The loop is there twice; in the first one nothing is masked but by a mask_mod."""
    case = Case(**LISTED)
    found = compiler_sm90.trace(masks, case)
    # A loop has two first steps, the first full block after mask ones, and the steps of either list.
    assert found == {OPEN: 5, EDGES: 5}
    found = compiler_sm90.trace(masks, replace(case, mask_mod="thirds"))
    assert found == {OPEN: 3, MOD: 2, EDGES: 3, MOD_AND_EDGES: 2}


def test_blocks_past_the_end_of_a_packed_sequence_stay_hidden(compiler_sm90: Worker) -> None:
    found = compiler_sm90.trace(masks, Case(D=128, packed=UNMASKED_PACK, lists="both"))
    assert found[OPEN] == 0 and sum(found.values()) == 5


CAUSAL, WINDOW = Case(**LISTED, causal=True), Case(**LISTED, window=(200, 30))
PLAIN, MODIFIED = {OPEN: 2, EDGES: 5}, {OPEN: 1, MOD: 1, EDGES: 3, MOD_AND_EDGES: 2}
INSIDE = [(CAUSAL, PLAIN), (replace(CAUSAL, mask_mod="thirds"), MODIFIED)]
INSIDE += [(replace(WINDOW, mask_mod="thirds"), MODIFIED), (WINDOW, PLAIN)]


@pytest.mark.parametrize("inside", swept(INSIDE), ids=str)
def test_steps_inside_the_edges_need_no_mask(compiler_sm90: Worker, inside: tuple[Case, dict[str, int]]) -> None:
    case, expected = inside
    assert compiler_sm90.trace(masks, case) == expected


TILES = [(4, 4, 1), (6, 4, 1), (8, 5, 4), (6, 8, 3), (8, 4, 3)]  # queries, keys, packed heads
WINDOWS = [(0, 0), (3, 0), (4, 0), (9, 0), (2, 3), (40, 0)]
LENGTHS = [(1, 1), (9, 9), (33, 33), (33, 20), (20, 33), (1, 33)]
OFFSETS = [None, 0, 13]


def kernel_ranges(cases: torch.Tensor, tile_m: int, tile_n: int, group: int) -> torch.Tensor:
    """For (seqlen_q, seqlen_k, left, right, q_offset or -1, m tile): the origin, the key of query 0 and the number of
    keys counted from there, the first tile and the end of all; in a worker."""
    import cutlass
    import cutlass.cute as cute

    from flash_attn.cute.block_info import BlockInfo
    from flash_attn.cute.fwd_sm90.window_tiles import from_origin
    from flash_attn.cute.seqlen_info import SeqlenInfoQK

    @cute.jit
    def ranges(cases: cute.Tensor, out: cute.Tensor, group: cutlass.Constexpr, offsets: cutlass.Constexpr):
        for i in range(cute.size(cases, mode=[0])):
            seqlen = SeqlenInfoQK.create(0, cases[i, 0], cases[i, 1])
            if cutlass.const_expr(offsets):
                seqlen = replace(seqlen, q_offset=cases[i, 4])
            info = BlockInfo(
                tile_m, tile_n, False, True, False, cases[i, 2], cases[i, 3], qhead_per_kvhead_packgqa=group
            )
            seqlen, origin = from_origin(info, seqlen, cases[i, 5])
            n_min, n_max = info.get_n_block_min_max(seqlen, cases[i, 5])
            out[i, 0], out[i, 1], out[i, 2] = origin, seqlen.seqlen_k - seqlen.seqlen_q + seqlen.shift, seqlen.seqlen_k
            out[i, 3], out[i, 4] = n_min, n_max

    with unset_fake_temporarily():
        out, given = torch.full((len(cases), 5), -1, dtype=torch.int32), cases[:, 4] >= 0
        for offsets in (False, True):
            out[given == offsets] = on_cpu(ranges, cases[given == offsets], (5,), group, offsets)
        return out


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_hold_what_the_queries_see(tile: tuple[int, int, int], compiler_sm90: Worker) -> None:
    tile_m, tile_n, heads = tile
    cases = [
        (T_q, T_k, left, right, -1 if offset is None else offset, m)
        for (T_q, T_k), (left, right), offset in product(LENGTHS, WINDOWS, OFFSETS)
        for m in range(-(-T_q * heads // tile_m))
    ]
    found = compiler_sm90.run(kernel_ranges, torch.tensor(cases, dtype=torch.int32), *tile).tolist()
    fewest = 0
    for (T_q, T_k, left, right, offset, m), (origin, own, keys, n_min, n_max) in zip(cases, found):
        place = f"{(T_q, T_k, left, right, offset, m)}: {(origin, own, keys, n_min, n_max)}"
        first = T_k - T_q if offset < 0 else offset
        assert 0 <= origin < tile_n and own == first - origin and keys == T_k - origin, place
        rows = range(m * tile_m // heads, min(-(-(m + 1) * tile_m // heads), T_q))
        seen = {key for row in rows for key in range(row + first - left, row + first + right + 1) if 0 <= key < T_k}
        loaded = range(origin + n_min * tile_n, origin + n_max * tile_n)
        assert not seen or (min(seen) >= loaded.start and max(seen) < loaded.stop), place
        tokens = -(-(m + 1) * tile_m // heads) - m * tile_m // heads
        if seen and rows[0] + first - left >= tile_n and rows[0] + tokens + first + right <= T_k:
            assert n_max - n_min == -(-(tokens + left + right) // tile_n), place
            fewest += 1
    assert fewest


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [{}, {"Hq": 16, "Hkv": 1}, {"window": (100, 60)}, {"pack_gqa": False}], ids=str)
def test_numbers_and_no_bit_of_a_row_depends_on_what_follows(asked: dict[str, Any]) -> None:
    case = replace(WINDOW_CALL, T_q=1200, T_k=1200, seed=1, **asked)
    x = make_inputs(case)
    o, lse = forward(case, x)
    assert_forward(case, x, o, lse)
    for T in (1, 65, 600, 1111):
        short = replace(case, T_q=T, T_k=T)
        got, _ = forward(short, replace(x, q=x.q[:, :T], k=x.k[:, :T], v=x.v[:, :T]))
        whole = T - case.window[1]  # rows that see no key past the end
        assert torch.equal(got[:, : max(whole, 0)], o[:, : max(whole, 0)]), f"{T} tokens of {case!r}"
