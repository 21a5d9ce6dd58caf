"""Key tiles of SM90 forward in short windows, counted from the end of a query tile's window."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from fa_cases import Case, forward, make_inputs
from fa_compile import Worker, built_kernels
from fa_reference import assert_close, reference

CALL = Case(D=128, T_q=1000, T_k=1000, Hq=8, window=(512, 0))
# What a call has beside that, and the queries and keys of a tile; None: the kernel's own, at multiples of its width.
CALLS: list[tuple[dict[str, Any], tuple[int, int] | None]] = [
    ({}, (192, 80)),
    ({"window": (100, 60)}, (192, 80)),
    ({"window": (2048, 0), "Hkv": 8}, (192, 80)),
    ({"D": 112}, (192, 80)),
    ({"D": 64}, None),
    ({"Dv": 112}, None),
    ({"window": (4096, 0)}, None),
    ({"window": (None, 100)}, None),
    ({"Hq": 5, "Hkv": 1, "pack_gqa": True}, None),
    ({"mask_mod": "thirds"}, None),
    ({"option": "sink"}, None),
    ({"packed": ((333, 333), (667, 667))}, None),
    ({"option": "seqused"}, None),
]
TILES = [(4, 4, 1), (6, 4, 1), (8, 5, 4), (6, 8, 3), (8, 4, 3)]  # queries, keys, packed heads
WINDOWS = [(0, 0), (3, 0), (4, 0), (9, 0), (2, 3), (40, 0)]
LENGTHS = [(1, 1), (9, 9), (33, 33), (33, 20), (20, 33), (1, 33)]
OFFSETS = [None, 0, 13]


def tile_of(case: Case) -> tuple[int, int] | None:
    with built_kernels("FlashAttentionForwardSm90") as kernels:
        forward(case, make_inputs(case))
    return (kernels[0].tile_m, kernels[0].tile_n) if kernels[0].ends_windows else None


@pytest.mark.parametrize("asked,expected", CALLS, ids=str)
def test_who_counts_from_the_end(
    asked: dict[str, Any], expected: tuple[int, int] | None, compiler_sm90: Worker
) -> None:
    assert compiler_sm90.trace(tile_of, replace(CALL, **asked)) == expected


def kernel_ranges(cases: torch.Tensor, tile_m: int, tile_n: int, group: int) -> torch.Tensor:
    """For (seqlen_q, seqlen_k, left, right, q_offset or -1, m tile): the origin, the key of query 0 and the number of
    keys counted from there, the first tile and the end of all; in a worker."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack
    from torch._subclasses.fake_tensor import unset_fake_temporarily

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
        out = torch.full((len(cases), 5), -1, dtype=torch.int32)
        given = cases[:, 4] >= 0
        for offsets in (False, True):
            some = cases[given == offsets], torch.full((int((given == offsets).sum()), 5), -1, dtype=torch.int32)
            args = [from_dlpack(t).mark_layout_dynamic() for t in some]
            cute.compile(ranges, *args, group, offsets, options="--enable-tvm-ffi")(*some)
            out[given == offsets] = some[1]
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
    case = replace(CALL, T_q=1200, T_k=1200, seed=1, **asked)
    x = make_inputs(case)
    o, lse = forward(case, x)
    exact, rough = (reference(case, x, dtype) for dtype in (torch.float64, x.q.dtype))
    assert_close(f"o of {case!r}", o, exact["o"], rough["o"])
    for T in (1, 65, 600, 1111):
        short = replace(case, T_q=T, T_k=T)
        got, _ = forward(short, replace(x, q=x.q[:, :T], k=x.k[:, :T], v=x.v[:, :T]))
        whole = T - case.window[1]  # rows that see no key past the end
        assert torch.equal(got[:, : max(whole, 0)], o[:, : max(whole, 0)]), f"{T} tokens of {case!r}"
