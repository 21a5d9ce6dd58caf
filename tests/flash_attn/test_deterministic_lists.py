"""Deterministic block-sparse backward on SM90: same bits, in any launch order; orders that do not fit are refused."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from fa_cases import Case, backward, make_inputs
from fa_compile import Worker, built_kernels
from fa_lists import backward_lists
from fa_reference import assert_bits_repeat

from flash_attn.cute.lists.deterministic_lists import prepare, require_write_order
from flash_attn.cute.lists.write_order import merged_lists
from fuzz.blocks import packed_lists
from fuzz.case import Packed

ORDERED = dict(T_q=700, T_k=700, deterministic=True)
CASES = [
    Case(D=128, lists="both", mask_mod="thirds", **ORDERED),
    Case(D=128, lists="both", causal=True, launch="right to left", Hkv=4, **ORDERED),
    Case(D=64, lists="partial", window=(200, 0), launch="right to left", **ORDERED),
    Case(D=64, lists="full", **ORDERED),
    Case(D=96, lists="no full", mask_mod="keyed", Hq=8, **ORDERED),
]


def kernels(case: Case) -> list[bool]:
    """The direction of each kernel that calls with lists of either direction, twice, are compiled for."""
    x, lists = make_inputs(case), backward_lists(case)
    lse = torch.empty(case.B, case.Hq, case.T_q, device="cuda")
    with built_kernels("FlashAttentionBackwardSm90") as built:
        for spt in (False, True, False, True):
            backward(case, x, torch.empty_like(x.q), lse, lists._replace(spt=spt))
    return [kernel.spt for kernel in built]


def test_a_kernel_for_each_direction(compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(kernels, CASES[0]) == [False, True]


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


def test_one_list_holds_both_kinds_by_semaphore_value() -> None:
    def row(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).expand(1, 1, 5, -1)

    lists = cpu_lists(
        mask_block_cnt=row(2)[..., 0],
        mask_block_idx=row(4, 1, 9),
        full_block_cnt=row(2)[..., 0],
        full_block_idx=row(0, 2),
        dq_write_order=row(3, 0, 4),
        dq_write_order_full=row(1, 0),
    )
    loop = merged_lists(require_write_order(lists), num_q_blocks=12)
    assert loop.mask_block_cnt[0, 0, 0] == 4 and loop.full_block_cnt is None
    assert loop.mask_block_idx[0, 0, 0, :4].tolist() == [2 * 2 + 1, 1 * 2, 0 * 2 + 1, 4 * 2]
    assert loop.dq_write_order[0, 0, 0, :4].tolist() == [0, 0, 1, 3]


# Query and key blocks of each sequence: no keys, no queries, more of either, as many.
SHAPES = ((4, 3), (2, 0), (0, 2), (1, 5), (3, 3))


def formed(heads: int, form: str, shapes: tuple[tuple[int, int], ...]) -> Any:
    """Backward lists in a form, with semaphore values."""
    from flash_attn.cute.block_lists import packed_write_order

    _, lists = packed_lists(Packed(lengths=shapes, form=form, block=(1, 1), heads=heads, density=0.6))
    queries = [M for M, _ in shapes]
    before = torch.tensor([0, *accumulate(queries)])
    return packed_write_order(lists, num_q_blocks=max(queries), cu_total_m_blocks=before)


def assert_same_walk(mine: Any, other: Any) -> None:
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
def test_stacked_lists_are_walked_like_ragged_ones(heads: int, lengths: str, spt: bool) -> None:
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
    assert_same_walk(mine, other)
    # What room there is for entries is that of one of the two lists.
    assert mine.mask_block_idx.numel() == stacked.mask_block_idx.numel()
    unknown = prepare(stacked, 90, True, **(given | dict(seqlen_q=torch.tensor(512))))  # by the host
    assert_same_walk(unknown, other)


def test_stacked_lists_need_the_queries_of_their_sequences() -> None:
    lists = formed(1, "stacked", SHAPES)
    with pytest.raises(ValueError, match="cu_total_m_blocks is None: rows of stacked lists"):
        merged_lists(lists, num_q_blocks=4)
    with pytest.raises(ValueError, match=r"cu_total_m_blocks has shape \(3,\), cu_total_n_blocks \(6,\)"):
        prepare(lists, 90, True, seqlen_q=512, block_q=128, cu_seqlens_q=torch.tensor([0, 4, 9]).int())


# Both directions, head dimensions 64, 96 and 128, with and without groups of heads. Planned ones: test_backward_plan.
REPEATED = [CASES[1], CASES[2], CASES[4]]


@pytest.mark.gpu
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_bits_repeat_beside_other_work(case: Case) -> None:
    assert_bits_repeat(case, 100, beside_other_work=True)
