"""SM100 takes lists of an odd number of 64 queries: the kernels compile, and hide what a half does not list.

What the halves' tiles walk is in test_query_halves. Here the functions that hide scores run on the CPU, over the
threads' own coordinates; the kernels are compiled.
"""

from __future__ import annotations

import math

import pytest
import torch
from fa_cases import Case, backward, compile_case, forward, make_inputs, swept
from fa_compile import Worker, built_kernels, noted
from fa_query_halves import Drawn, Launched, adds, assert_in_order, expected, tensors
from fa_reference import assert_bits_repeat, assert_case, is_blackwell
from half_walk import adds_by_kernel, hidden, walked_by_kernels

from flash_attn.cute.lists.query_halves import merged_backward

LENGTHS = ((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900))
FIXED = {"T_q": 700, "T_k": 700, "lists": "both"}
PACKED = {"packed": LENGTHS, "lists": "both"}
CASES = [
    Case(D=128, **FIXED, block=(64, 128), pack_gqa=False),
    Case(D=64, **FIXED, block=(64, 128), pack_gqa=False, causal=True, deterministic=True),
    Case(D=64, **FIXED, block=(192, 128), Hkv=4, mask_mod="thirds"),
    Case(D=128, **FIXED, block=(192, 128), list_heads=4, mask_mod="keyed", causal=True, deterministic=True),
    Case(D=128, **PACKED, block=(64, 128), form="ragged", list_heads=2, Hq=6, window=(200, 0)),
    Case(D=64, **PACKED, block=(64, 128), form="stacked", Hkv=4, mask_mod="keyed", deterministic=True),
    Case(D=96, packed=LENGTHS, lists="no full", block=(192, 128), form="compact", Hkv=4),
]
PAIRED = Case(D=128, **FIXED, block=(64, 256), Hkv=4, deterministic=True)  # two CTAs walk one list
TWICE = [  # several CTAs, or pairs of them, add for a key block that may be mask block and full block to a tile
    Case(D=64, **FIXED, block=(64, 256), Hkv=4, mask_mod="thirds", deterministic=True),
    Case(D=128, **PACKED, block=(192, 512), form="ragged", pack_gqa=False, mask_mod="keyed", deterministic=True),
]
ALONE = [  # heads are packed into tiles that lie within a block: forward joins nothing
    (Case(D=128, **FIXED, block=(64, 128)), (1, (1, 1))),
    (Case(D=128, **FIXED, block=(64, 128), Hkv=1), (2, (1, 1))),
    (Case(D=64, **PACKED, block=(192, 128), form="compact", Hkv=1, list_heads=1), (2, (1, 3))),
]

WALKED = [
    Drawn(shapes=((3, 4), (0, 2), (2, 5)), form="ragged"),
    Drawn(shapes=((3, 4), (2, 5)), factor=3, form="padded", H=1),
]


def rows_with_halves(case: Case) -> set[bool]:
    """Compile forward and backward: whether the rows that their warps find say which half lists a block."""
    from flash_attn.cute.lists.rows import ListRow

    with noted(ListRow, "blocks", lambda row, *args, **options: row.has_halves) as found:
        compile_case(case)
    return set(found)


@pytest.mark.parametrize("case", swept([CASES[0], PAIRED, CASES[5], TWICE[1]], 4), ids=str)
def test_rows_of_both_kernels_say_which_half_lists_a_block(compiler_sm100: Worker, case: Case) -> None:
    assert compiler_sm100.trace(rows_with_halves, case) == {True}


def stages(case: Case) -> tuple[int, tuple[int, int], bool]:
    """The forward kernel's tiles of a CTA, divisor of a tile's number, and whether its lists are of halves."""
    from flash_attn.cute.lists import query_halves

    with built_kernels() as kernels:
        forward(case, make_inputs(case))
    (kernel,) = kernels
    tile = query_halves.whole_tiles(kernel.qhead_per_kvhead, kernel.q_subtile_factor)
    return kernel.q_stage, tile, kernel.list_halves


@pytest.mark.parametrize(("case", "expected"), ALONE, ids=str)
def test_packed_heads_need_no_halves(compiler_sm100: Worker, case: Case, expected: tuple) -> None:
    assert compiler_sm100.trace(stages, case) == (*expected, False)


def groups(case: Case) -> tuple[int, int]:
    """CTAs, or pairs of them, of a key block: as its semaphore values are made for, and in the backward kernel."""
    from flash_attn.cute.lists import query_halves

    x = make_inputs(case)
    merges = noted(query_halves, "merged_backward", lambda *args, **options: options["groups"])
    with merges as asked, built_kernels("FlashAttentionBackwardSm100") as kernels:
        backward(case, x, x.do, torch.empty(case.Hq, x.q.shape[-3], device="cuda").expand(*x.q.shape[:-3], -1, -1))
    (kernel,) = kernels
    return *asked, kernel.kv_subtile_factor // kernel.cta_group_size


@pytest.mark.parametrize("case", TWICE, ids=str)
def test_semaphore_values_are_made_for_as_many_ctas_as_add(compiler_sm100: Worker, case: Case) -> None:
    assert compiler_sm100.trace(groups, case) == (2, 2)


@pytest.mark.parametrize("spt", [False, True])
@pytest.mark.parametrize("number", [9, *(pytest.param(n, marks=pytest.mark.sweep) for n in (8, 7))])
def test_the_kernel_waits_in_turn_for_tiles_listed_twice(compiler_sm100: Worker, spt: bool, number: int) -> None:
    """Three tiles to a key block, the last of which may be cut short."""
    case, launched = Drawn(shapes=((20, 3),), density=0.9), Launched(3, number, spt)
    lists = merged_backward(tensors(case, True), asked=True, ordered=True, spt=spt, groups=3)
    walks = compiler_sm100.run(adds_by_kernel, case, launched)
    assert walks == [adds(lists, head, 0, launched) for head in range(case.H)]
    for walk in walks:
        assert all(len(own) > len({tile for tile, _ in own}) for own in walk), "no tile is listed twice"
        assert_in_order(walk, launched)


@pytest.mark.parametrize("halves", [1, 2, 3])
def test_a_half_that_does_not_list_a_block_sees_nothing_of_it(compiler_sm100: Worker, halves: int) -> None:
    scores = [{1.0} if halves >> query // 64 & 1 else {-math.inf} for query in range(128)]
    assert compiler_sm100.run(hidden, halves) == {"forward": scores, "backward": scores}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", WALKED, ids=str)
def test_kernels_walk_what_either_half_lists(compiler_sm100: Worker, case: Drawn, backward: bool) -> None:
    walked = compiler_sm100.run(walked_by_kernels, case, backward)
    assert walked == expected(case, backward, asked=True)
    assert set(walked.values()) == {1, 2, 3}


@pytest.mark.gpu
@pytest.mark.skipif(not is_blackwell(), reason="tiles that hold two blocks of queries are SM100's")
@pytest.mark.parametrize("case", TWICE, ids=str)
def test_tiles_listed_twice_repeat_their_bits(case: Case) -> None:
    assert_case(case)
    assert_bits_repeat(case, runs=20, beside_other_work=True)
