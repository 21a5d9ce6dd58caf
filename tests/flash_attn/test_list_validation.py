"""Block lists that are wrong in one place: an error that names the place and the value."""

from typing import Any

import pytest
import torch

from flash_attn.cute.block_lists import lists_from_blocks, lists_from_dense, transpose_lists
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.validate_calls import validate_lists
from flash_attn.cute.lists.write_order import compute_dq_write_order

# 5 query blocks of 128, 4 key blocks of 64; what is listed shows in the lists below.
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [2, 1, 1, 0], [0, 0, 0, 0], [2, 0, 2, 1]])
SIZES: dict[str, Any] = dict(seqlen_q=600, seqlen_k=256, num_heads=4, num_heads_kv=2, batch_size=3)


def lists() -> tuple[BlockSparseTensorsTorch, BlockSparseTensorsTorch]:
    """Writable lists [1, 4, ...] with semaphore values, two places wider than needed where there is room."""
    dense = MASK.repeat_interleave(128, 0)[:600].repeat_interleave(64, 1)
    dense = (dense == 2) | ((dense == 1) & (torch.arange(256) % 64 == 0))
    forward = lists_from_dense(dense.expand(1, 4, -1, -1), (128, 64), width=4)
    backward = transpose_lists(forward, 4, width=5)
    order = compute_dq_write_order(*forward[:4], *backward[:4])
    return copied(forward), copied(backward._replace(dq_write_order=order[0], dq_write_order_full=order[1]))


def copied(lists_: BlockSparseTensorsTorch) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(*(t.contiguous().clone() if torch.is_tensor(t) else t for t in lists_))


def message(*lists_: BlockSparseTensorsTorch, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        validate_lists(*lists_, **(SIZES | options))
    return str(error.value)


def test_right() -> None:
    forward, backward = lists()
    validate_lists(forward, backward, ascending=True, **SIZES)
    validate_lists(forward, **SIZES)
    validate_lists(None, backward, **SIZES)
    validate_lists(None, None, **SIZES)
    validate_lists(forward, backward._replace(spt=False), **SIZES)
    validate_lists(forward, backward, order=torch.arange(4), **SIZES)


TWICE = "is listed twice for"
MISTAKES = [
    ("full_block_cnt", (0, 2, 4), -1, "expected 0 .. 4, which its row has room for"),
    ("full_block_cnt", (0, 2, 4), 5, "expected 0 .. 4, which its row has room for"),
    ("mask_block_idx", (0, 1, 2, 1), -3, "expected a key block of 0 .. 3"),
    ("mask_block_idx", (0, 1, 2, 1), 4, "expected a key block of 0 .. 3"),
    ("mask_block_idx", (0, 1, 2, 1), 1 << 30, "expected a key block of 0 .. 3"),
    ("mask_block_idx", (0, 0, 2, 1), 1, f"{TWICE} query block 2, also in forward mask_block_idx[0, 0, 2, 0]"),
]
BACKWARD_MISTAKES = [
    ("full_block_idx", (0, 3, 0, 1), 5, "expected a query block of 0 .. 4"),
    ("full_block_idx", (0, 1, 0, 1), 1, f"{TWICE} key block 0, also in backward mask_block_idx[0, 1, 0, 1]"),
]
EACH = [("forward", *each) for each in MISTAKES] + [("backward", *each) for each in BACKWARD_MISTAKES]


@pytest.mark.parametrize(("side", "field", "at", "value", "expected"), EACH)
def test_one_wrong_number(side: str, field: str, at: tuple[int, ...], value: int, expected: str) -> None:
    forward, backward = lists()
    getattr(backward if side == "backward" else forward, field)[at] = value
    comma = "" if expected.startswith(TWICE) else ","
    said = message(None, backward) if side == "backward" else message(forward)
    assert said == f"{side} {field}[{', '.join(map(str, at))}] = {value}{comma} {expected}"


def test_rising() -> None:
    forward, backward = lists()
    forward.mask_block_idx[0, 3, 2, :2] = torch.tensor([2, 1])
    validate_lists(forward, backward, **SIZES)
    expected = "forward mask_block_idx[0, 3, 2, 1] = 1 comes after 2, expected rising indices"
    assert message(forward, backward, ascending=True) == expected


NOT_THERE = "is not in the {} lists: {}; backward lists must be the transpose of forward lists"


@pytest.mark.parametrize(
    ("block", "more", "expected"),
    [
        (1, -1, ("forward mask_block_idx[0, 2, 2, 0] = 1", "backward", "key block 1 lacks query block 2")),
        (3, 1, ("backward mask_block_idx[0, 2, 3, 1] = 3", "forward", "query block 3 lacks key block 3")),
    ],
)
def test_one_entry_less_or_more_in_backward(block: int, more: int, expected: tuple[str, str, str]) -> None:
    forward, backward = lists()
    backward.mask_block_cnt[0, 2, block] += more
    backward.mask_block_idx[0, 2, 3, 1] = 3
    place, side, lacking = expected
    said = message(forward, backward._replace(dq_write_order=None, dq_write_order_full=None))
    assert said == f"{place} {NOT_THERE.format(side, lacking)}"


def test_full_for_mask() -> None:
    forward, backward = lists()
    forward.full_block_cnt[0, 0, 4] -= 1
    forward.mask_block_cnt[0, 0, 4] += 1
    forward.mask_block_idx[0, 0, 4, 1] = 2
    assert message(forward, backward) == (
        "forward mask_block_idx[0, 0, 4, 1] = 2 is a mask block, but a full block in the backward lists"
    )


def test_block_sizes_that_differ_are_not_compared() -> None:
    forward, _ = lists()
    half = lists_from_dense(torch.ones(600, 256, dtype=torch.bool), (64, 64))
    validate_lists(forward, transpose_lists(half, 4), **SIZES)
    none_full = transpose_lists(half, 4, width=10)._replace(full_block_cnt=torch.zeros(1, 1, 4, dtype=torch.int32))
    assert "is not in the backward lists" in message(half, none_full)
    validate_lists(forward, none_full, **SIZES)


def test_locks() -> None:
    forward, backward = lists()
    assert backward.dq_write_order_full[0, 0, 2, 0] == 1
    backward.dq_write_order_full[0, 0, 2, 0] = 2
    where = "backward dq_write_order_full[0, 0, 2, 0] = 2 for query block 4, expected 1: "
    assert message(forward, backward).endswith(
        "expected 1: the semaphore values of a query block are 0, 1, 2, ..., each once"
    )
    assert message(forward, backward, order=torch.arange(4)) == where + (
        "key blocks add to a query block in the order of their launch, or the GPU hangs"
    )


def test_locks_follow_the_launch() -> None:
    forward, backward = lists()
    right_to_left = compute_dq_write_order(*forward[:4], *backward[:4], spt=True)
    backward = backward._replace(dq_write_order=right_to_left[0], dq_write_order_full=right_to_left[1])
    for options in ({}, {"order": torch.arange(3, -1, -1)}):
        validate_lists(forward, backward, **SIZES, **options)
    validate_lists(forward, backward._replace(spt=True), **SIZES)
    assert "or the GPU hangs" in message(forward, backward._replace(spt=False))
    assert "or the GPU hangs" in message(forward, backward, order=torch.tensor([3, 2, 0, 1]))


def test_lists_for_each_key_head() -> None:
    """Coordinates are those of the tensor, whatever the query heads that share it."""
    forward, backward = lists()
    grouped = [
        BlockSparseTensorsTorch(*(t[:, ::2].clone() if torch.is_tensor(t) else t for t in side))
        for side in (forward, backward)
    ]
    validate_lists(*grouped, **SIZES)
    validate_lists(forward, grouped[1], **SIZES)
    grouped[1].mask_block_idx[0, 1, 2, 0] = 7
    assert message(*grouped).startswith("backward mask_block_idx[0, 1, 2, 0] = 7, expected a query block of")


def test_repeated_lists() -> None:
    forward, backward = lists()
    one = BlockSparseTensorsTorch(*(t[:, :1] if torch.is_tensor(t) else t for t in forward))
    wide = BlockSparseTensorsTorch(*(t[:, :1].expand(3, 4, *t.shape[2:]) if torch.is_tensor(t) else t for t in forward))
    validate_lists(one, backward, **SIZES)
    validate_lists(wide, backward, **SIZES)
    backward.mask_block_idx[0, 3, 1, 0] = 0
    assert message(wide, backward).startswith("forward mask_block_idx[0, 3, 1, 1] = 1 is not in the backward lists")


@pytest.mark.parametrize(
    "change,expected",
    [
        ({"block_size": None}, "forward block_size is None: give block_size=(queries, keys)"),
        ({"block_size": (64, 64)}, "expected B of [1, 3], H of [1, 2, 4] and 10 rows, for seqlen_q=600"),
        ({"block_size": (128, 128)}, "expected a width of at most 2: a row cannot list more blocks"),
        (
            {"mask_block_cnt": torch.zeros(1, 3, 5, dtype=torch.int32)},
            "forward mask_block_cnt is torch.int32 (1, 3, 5) on",
        ),
        ({"mask_block_idx": torch.zeros(1, 1, 5, 4)}, "forward mask_block_idx is torch.float32 (1, 1, 5, 4) on cpu"),
        ({"full_block_idx": None}, "forward full_block_cnt and full_block_idx must be given together"),
        (
            {"dq_write_order": torch.zeros(1, 4, 5, 4, dtype=torch.int32)},
            "forward dq_write_order_full is None, expected the",
        ),
    ],
)
def test_shapes(change: dict[str, Any], expected: str) -> None:
    assert expected in message(lists()[0]._replace(**change))


def test_packed_lists() -> None:
    packed = lists()[0]._replace(cu_total_m_blocks=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="cu_total_m_blocks is given"):
        validate_lists(packed, **SIZES)


def test_lists_of_nothing_are_one_wide() -> None:
    """Kernels want a dimension with stride 1, so lists are made no narrower, even for no keys."""
    lists = lists_from_blocks(torch.zeros(2, 0, dtype=torch.bool), block_size=(128, 128))
    assert lists.mask_block_idx.shape[3] == 1
    backward = transpose_lists(lists, 0)
    validate_lists(lists, backward, seqlen_q=256, seqlen_k=0, num_heads=1)
    for spt in (False, True):  # and in an order of launch
        order, _ = compute_dq_write_order(*lists[:4], *backward[:4], spt=spt)
        ordered = backward._replace(dq_write_order=order, spt=spt)
        validate_lists(lists, ordered, seqlen_q=256, seqlen_k=0, num_heads=1)
