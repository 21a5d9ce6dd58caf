"""Deterministic backward: the same bits in any launch order, ordered adds to dq, dk and dv, and orders refused."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fa_catalogue import SHORT, SM90
from fa_compile import Worker, compile_backward, kernel_fields, noted, on_cpu, only_hosts, operations_around
from fa_compress import KINDS as COMPRESSED
from fa_compress import with_edges
from fa_cubin import machine_code
from fa_reference import assert_bits_repeat
from test_query_offset import KINDS as OFFSETS
from test_query_offset import with_edges as with_offsets
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flash_attn.cute.lists.deterministic_lists import prepare, require_write_order
from flash_attn.cute.lists.write_order import merged_lists
from fuzz.attention import compile_case
from fuzz.attention_lists import sides, tables
from fuzz.case import Attention as Case
from fuzz.case import Packed

LISTED = Case(D=128, T_q=700, T_k=700, Hkv=4, causal=True, lists="both", deterministic=True)
# Both directions of launch, planned, packed, head dimensions 64, 96 and 128, with and without groups of heads.
ORDERED = [case for case in SM90 if case.lists and case.deterministic]


BACKWARD = "FlashAttentionBackwardSm90"


def test_a_kernel_for_each_direction(compiler_sm90: Worker) -> None:
    calls = [replace(LISTED, launch=launch) for launch in ("left to right", "right to left") * 2]
    found = compiler_sm90.trace(kernel_fields, "spt", compile_backward, *calls, kind=BACKWARD)
    assert found == [(False,), (True,)]


def cpu_lists(**changes: object):
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    cnt, idx = torch.ones(2, 1, 5, dtype=torch.int32), torch.zeros(2, 1, 5, 3, dtype=torch.int32)
    return BlockSparseTensorsTorch(cnt, idx, spt=False, dq_write_order=idx.clone())._replace(**changes)


def test_order_may_be_broadcast() -> None:
    one = torch.arange(15, dtype=torch.int32).view(1, 1, 5, 3)
    assert require_write_order(cpu_lists(dq_write_order=one)).dq_write_order.equal(one.expand(2, 1, 5, 3))
    every_row = one[:, :, :1]
    assert require_write_order(cpu_lists(dq_write_order=every_row)).dq_write_order.equal(every_row.expand(2, 1, 5, 3))


def test_lists_may_be_broadcast_to_the_order() -> None:
    """One list for all heads, and semaphore values for each of them."""
    of_heads = torch.arange(3, dtype=torch.int32).expand(2, 4, 5, 3).contiguous()
    lists = require_write_order(cpu_lists(dq_write_order=of_heads))
    assert lists.dq_write_order is of_heads or lists.dq_write_order.equal(of_heads)
    assert lists.mask_block_idx.equal(cpu_lists().mask_block_idx.expand(2, 4, 5, 3))
    loop = merged_lists(lists, num_q_blocks=3)
    assert loop.mask_block_cnt.shape == (2, 4, 5) and loop.dq_write_order[..., 0].eq(0).all()


def test_an_order_of_full_blocks_that_are_not_there_is_dropped() -> None:
    """Upstream's kernels want one to compile."""
    order = torch.zeros(2, 1, 5, 3, dtype=torch.int32)
    assert require_write_order(cpu_lists(dq_write_order_full=order)).dq_write_order_full is None


# Query and key blocks of each sequence: no keys, no queries, more of either, as many.
SHAPES = ((4, 3), (2, 0), (0, 2), (1, 5), (3, 3))


def formed(heads: int, form: str, shapes: tuple[tuple[int, int], ...]) -> Any:
    """Backward lists in a form, with semaphore values."""
    from flash_attn.cute.block_lists import packed_write_order

    _, lists = sides(Packed(packed=shapes, form=form, block=(1, 1), list_heads=heads, density=0.6))
    queries = [M for M, _ in shapes]
    before = torch.tensor([0, *accumulate(queries)])
    return packed_write_order(lists, num_q_blocks=max(queries), cu_total_m_blocks=before)


def assert_same_entries(mine: Any, other: Any) -> None:
    assert mine.full_block_cnt is None and mine.full_block_idx is None and mine.dq_write_order_full is None
    assert mine.mask_block_cnt.equal(other.mask_block_cnt) and mine.mask_block_cnt.sum() > 0
    counts = mine.mask_block_cnt.tolist()
    for head, row in ((h, r) for h, own in enumerate(counts) for r in range(len(own))):
        for name in ("mask_block_idx", "dq_write_order"):
            start, theirs = (int(lists.cu_block_idx_offsets[head, row]) for lists in (mine, other))
            loop = getattr(mine, name)[start : start + counts[head][row]]
            assert loop.equal(getattr(other, name)[theirs : theirs + counts[head][row]]), (name, head, row)


@pytest.mark.parametrize("spt", [False, True])
@pytest.mark.parametrize("lengths", ["cu_seqlens", "in use", "one"])
@pytest.mark.parametrize("heads", [1, 3])
def test_stacked_lists_are_merged_like_ragged_ones(heads: int, lengths: str, spt: bool) -> None:
    """By where the queries start, how many are in use, or the one length that all sequences have."""
    shapes = tuple((4, N) for _, N in SHAPES) if lengths == "one" else SHAPES
    stacked, ragged = (formed(heads, form, shapes)._replace(spt=spt) for form in ("stacked", "ragged"))
    queries = torch.tensor([max(0, M * 128 - at) for at, (M, _) in enumerate(shapes)]).int()
    given: dict[str, Any] = dict(seqlen_q=512, block_q=128)
    if lengths == "one":
        stacked = stacked._replace(cu_block_idx_offsets=None)
    else:  # those in use say it, not where sequences start
        held = queries + 300 if lengths == "in use" else queries
        given["cu_seqlens_q"] = torch.nn.functional.pad(held.cumsum(0), (1, 0)).int()
        given["seqused_q"] = queries if lengths == "in use" else None
    mine, other = (prepare(lists, 90, True, **given) for lists in (stacked, ragged))
    assert_same_entries(mine, other)
    # The capacity for entries is that of one of the two lists.
    assert mine.mask_block_idx.numel() == stacked.mask_block_idx.numel()
    unknown = prepare(stacked, 90, True, **(given | dict(seqlen_q=torch.tensor(512))))  # by the host
    assert_same_entries(unknown, other)


def test_stacked_lists_need_the_queries_of_their_sequences() -> None:
    lists = formed(1, "stacked", SHAPES)
    with pytest.raises(ValueError, match="cu_total_m_blocks is None: rows of stacked lists"):
        merged_lists(lists, num_q_blocks=4)
    with pytest.raises(ValueError, match=r"cu_total_m_blocks has shape \(3,\), cu_total_n_blocks \(6,\)"):
        prepare(lists, 90, True, seqlen_q=512, block_q=128, cu_seqlens_q=torch.tensor([0, 4, 9]).int())


DENSE = [
    Case(D=128, T_q=1000, T_k=1000, causal=True, deterministic=True),
    Case(D=128, T_q=1500, T_k=1500, window=(300, 0), deterministic=True),
    Case(D=64, packed=((300, 300), (5, 70), (0, 40), (700, 650), (90, 0)), causal=True, deterministic=True),
    Case(D=128, packed=((300, 300), (700, 650)), window=(100, 0), deterministic=True, Hkv=1),
]


def compile_hosts(case: Case) -> None:
    with only_hosts():
        compile_case(case)


def launched_from_the_right(case: Case) -> bool:
    """The order that backward tells its tile scheduler."""
    from flash_attn.cute import flash_bwd_sm90

    asked: list[bool] = []
    with noted(flash_bwd_sm90, "TileSchedulerArguments", lambda *args, **named: named["lpt"], asked):
        compile_hosts(case)
    (lpt,) = asked
    return lpt


@pytest.mark.parametrize("case", DENSE[:3], ids=str)
def test_key_blocks_are_launched_from_the_left(compiler_sm90: Worker, case: Case) -> None:
    assert not compiler_sm90.trace(launched_from_the_right, case)


PLACED = Case(D=128, T_k=1000, Hkv=4, window=(511, 0), offsets=(0, 611), deterministic=True)


@pytest.mark.parametrize(
    ("case", "apart"), [(DENSE[0], True), (DENSE[1], True), (LISTED, False), (PLACED, False)], ids=str
)
def test_warps_of_their_own_add_without_lists_and_positions(compiler_sm90: Worker, case: Case, apart: bool) -> None:
    """Otherwise one adds dq, and the warpgroups dk and dv."""
    found = compiler_sm90.trace(kernel_fields, "adds_apart", compile_hosts, case, kind=BACKWARD, traced=True)
    assert found == [(apart,)]


TILE_M, TILE_N = 4, 8
WINDOW = 17


def ordered_reduction(cases: torch.Tensor, compressed: bool) -> torch.Tensor:
    """rank_of of (seqlen_q, seqlen_k, factor, offset, key tile, query tile), -1 where they do not meet; in a worker."""
    import cutlass.cute as cute
    from cutlass import Int32, const_expr

    from flash_attn.cute.block_info import BlockInfo
    from flash_attn.cute.bwd_sm90.ordered_reduction import rank_of
    from flash_attn.cute.compressed_causal.mask import CompressArgs, CompressedCausal
    from flash_attn.cute.seqlen_info import SeqlenInfoQK

    @cute.jit
    def all_ranks(cases: cute.Tensor, out: cute.Tensor):
        for i in range(cute.size(cases, mode=[0])):
            info, n, m = SeqlenInfoQK.create(0, cases[i, 0], cases[i, 1]), cases[i, 4], cases[i, 5]
            if const_expr(compressed):
                compress = CompressedCausal.create(CompressArgs(cases[i, 2], cases[i, 3]))
                blocks = BlockInfo(TILE_M, TILE_N, True, compress=compress)
            else:
                blocks = BlockInfo(TILE_M, TILE_N, False, True, False, Int32(WINDOW), Int32(0))
            begin, end = blocks.get_m_block_min_max(info, n)
            if begin <= m and m < end:
                out[i] = rank_of(blocks, info, compressed, n, m)

    return on_cpu(all_ranks, cases, ())


@pytest.mark.parametrize("compressed", [False, True])
def test_ranks_are_in_the_order_of_the_launch(compiler_sm90: Worker, compressed: bool) -> None:
    pairs = [(3, -20), (3, 2), (16, 31)] if compressed else [(1, 0)]
    calls = [(*call, *pair) for call in product((1, 5, 33, 64), (1, 8, 33, 70)) for pair in pairs]
    cases = []
    for seqlen_q, seqlen_k, *pair in calls:
        n_blocks = range(-(-seqlen_k // TILE_N))
        for n, m in product(reversed(n_blocks) if compressed else n_blocks, range(-(-seqlen_q // TILE_M))):
            cases.append((seqlen_q, seqlen_k, *pair, n, m))
    found = compiler_sm90.run(ordered_reduction, torch.tensor(cases, dtype=torch.int32), compressed)
    added: Counter[tuple[int, ...]] = Counter()
    for (*call, _, m), rank in zip(cases, found.tolist()):
        if rank >= 0:
            assert rank == added[(*call, m)], (call, m)
            added[(*call, m)] += 1
    assert added


def test_products_overlap_beside_semaphores(compiler_sm90: Worker) -> None:
    """Semaphores of dk and dv among the products would have the compiler wait for each of these: 1.25 times as long."""
    case = Case(D=128, T_q=1000, T_k=300, Hq=6, compress=(3, 2), deterministic=True)
    (code,) = compiler_sm90.run(machine_code, compile_backward, case, kind=BACKWARD)
    assert code.stack == [0] and code.serialized is False


@pytest.mark.gpu
@pytest.mark.parametrize("case", ORDERED + DENSE, ids=str)
def test_bits_repeat(case: Case) -> None:
    assert_bits_repeat(case, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in COMPRESSED + OFFSETS if kind.deterministic], ids=str)
def test_bits_repeat_at_edges(kind: Case) -> None:
    """Of compressed-causal masking, and of queries with an offset."""
    for case in with_edges(kind)[::3] if kind in COMPRESSED else [*with_offsets(kind)][:3]:
        assert_bits_repeat(case, 3)


CASE = Case(D=64, T_q=700, T_k=700, lists="both", list_heads=4, deterministic=True)


def semaphore_calls(case: Case) -> list[tuple[int, int, tuple[str, ...]]]:
    """For each semaphore that is passed on: heads of a group, flags in use, and the branches around it."""
    from flash_attn.cute import flash_bwd_sm100

    with noted(flash_bwd_sm100, "pass_semaphore", lambda *args: (*args[-2:], operations_around()[:1])) as found:
        compile_backward(case)
    return found


@pytest.mark.parametrize("case", [CASE, replace(CASE, D=128, Hkv=1, block=(256, 256))], ids=str)
def test_both_gradients_pass_on_the_semaphore_of_an_empty_tile(compiler_sm100: Worker, case: Case) -> None:
    """Only where a CTA has nothing to loop, and for the flags of both warpgroups."""
    assert compiler_sm100.trace(semaphore_calls, case) == [(case.Hq // case.Hkv, 2, ("scf.if",))] * 2


@pytest.mark.parametrize("change", [{"deterministic": False}, {"Hkv": 4}], ids=str)
def test_no_semaphores_where_nothing_is_added_in_order(compiler_sm100: Worker, change: dict) -> None:
    assert compiler_sm100.trace(semaphore_calls, replace(CASE, **change)) == []


NOT_YET = -1000  # of a flag, where somebody would have waited


def passed(head: int, group: int, flags: int, before: int) -> list[list[int]]:
    """Both flags of each key tile, key/value head and sequence, after one of them is passed on; in a worker.

    `pass_semaphore` runs on the CPU, in threads one after the other.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32

    from flash_attn.cute.lists import rows as list_rows

    @cute.jit
    def wait_eq(flags: cute.Pointer, thread: Int32, flag: Int32, value: Int32) -> None:
        own = cute.make_tensor(flags + flag, cute.make_layout(1))
        if thread == 0 and own[0] != value:
            own[0] = Int32(NOT_YET)

    @cute.jit
    def arrive_inc(flags: cute.Pointer, thread: Int32, flag: Int32, value: Int32) -> None:
        own = cute.make_tensor(flags + flag, cute.make_layout(1))
        if thread == 0:
            own[0] = own[0] + value

    @cute.jit
    def program(place: cute.Tensor, semaphore: cute.Tensor, group: cutlass.Constexpr, flags: cutlass.Constexpr):
        for thread in cutlass.range(256):
            list_rows.pass_semaphore(semaphore, thread, place[0], place[1], place[2], group, flags)

    with unset_fake_temporarily(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_rows, "barrier", SimpleNamespace(wait_eq=wait_eq, arrive_inc=arrive_inc))
        of = torch.full((2, 3, 4, 2), before, dtype=torch.int32)  # as the interface makes it: [B, Hkv, tiles, 2]
        on_cpu(program, torch.tensor([3, head, 1], dtype=torch.int32), of.permute(2, 3, 1, 0), group, flags)
        return of.flatten(0, 2).tolist()


@pytest.mark.parametrize("flags", [1, 2])
@pytest.mark.parametrize("head", [4, 5])
def test_a_semaphore_is_waited_for_and_passed_on(compiler_sm100: Worker, head: int, flags: int) -> None:
    at, before = (1 * 3 + head // 2) * 4 + 3, head % 2
    expected = [[before, before] for _ in range(24)]
    expected[at] = [before + 1, before + 1 if flags == 2 else before]
    assert compiler_sm100.run(passed, head, 2, flags, before) == expected
    assert compiler_sm100.run(passed, head, 2, flags, before + 1)[at][0] < 0  # it would wait


def test_some_heads_list_nothing() -> None:
    """Of a case of the catalogue, whose numbers `test_cases.py` looks at."""
    listed, _ = tables(replace(SHORT, block=(128, 128)))[0]
    empty = ~listed.any(1)
    assert (empty[::2] & ~empty[1::2]).any(), "of one group"
