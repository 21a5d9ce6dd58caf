"""Refused calls of what makes, orders, checks and plans block lists."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flash_attn.cute.block_lists import (
    compute_dq_write_order,
    cu_total_blocks,
    draw_lists,
    lists_from_block_mask,
    lists_from_blocks,
    lists_from_dense,
    lists_from_window,
    packed_write_order,
    transpose_lists,
    validate_lists,
)
from flash_attn.cute.lists.backward_plan import plan_backward
from flash_attn.cute.lists.write_order import merged_lists
from fuzz.attention_lists import both_directions
from fuzz.attention_lists import sides as packed_sides
from fuzz.case import Blocks, Packed
from fuzz.wrong_calls import NOT_A_BOOL, NOT_A_TENSOR, Row, Table, Together, changed, not_a_size

Tensor = torch.Tensor
CASE = Blocks(B=1, H=2, M=4, N=5, pattern="full", group=2)
PACKED = Packed(packed=((300, 200), (0, 64), (129, 256)), block=(128, 128), list_heads=2, pattern="full")
SIZES = dict(seqlen_q=4 * 128, seqlen_k=5 * 128, num_heads=2)
BLOCK_SIZE = (
    ("block_size", TypeError, r"block_size must be \(queries, keys\), got", 128, "128", (128,), (1, 2, 3), None),
    ("block_size", ValueError, "block_size must be two ints of at least 1", (128, 0), (-128, 128), (128.0, 128.0)),
)
WIDTH = (
    ("width", ValueError, "width must be at least 1, got", 0, -3),
    ("width", ValueError, "width must be an int or two, of mask and full lists", (5, 5, 5)),
    ("width", TypeError, "width must be an int, got", "5", 5.0),
)
NO_MASKS = (torch.zeros(8, 8), torch.zeros(8, 8).int(), torch.zeros(8).bool(), torch.zeros(1, 8, 8).bool())
NO_LISTS: Row = (
    "lists", TypeError, "lists must be a BlockSparseTensorsTorch, got", None, torch.zeros(2, 2), (1, 2), "x",
)  # fmt: skip
EITHER = (
    ("lists", ValueError, "mask_block_cnt and mask_block_idx .* given together", changed(mask_block_idx=None)),
    ("lists", ValueError, "full_block_cnt and full_block_idx .* given together", changed(full_block_idx=None)),
    ("lists", ValueError, r"_block_cnt.*\(.*_block_idx.*\(", changed(mask_block_cnt=lambda x: x[..., 1:])),
    ("lists", TypeError, "mask_block_cnt must be int32, got", changed(mask_block_cnt=Tensor.float)),
    ("lists", TypeError, "mask_block_idx must be int32, got", changed(mask_block_idx=Tensor.float)),
)  # fmt: skip
BROKEN = (
    NO_LISTS,
    *EITHER,
    ("lists", ValueError, r"mask_block_idx \(\d+,\) must be", changed(mask_block_idx=Tensor.flatten)),
)  # fmt: skip
BROKEN_PACK = (
    NO_LISTS,
    *EITHER,
    ("lists", ValueError, "cu_total_n_blocks, and cu_block_idx_offsets", changed(cu_total_n_blocks=None)),
    ("cu_total_m_blocks", TypeError, "cu_total_m_blocks must be a torch.Tensor, got list", [0, 3, 3, 5]),
    ("cu_total_m_blocks", ValueError, r"cu_total_m_blocks has shape \(3,\)", torch.zeros(3).int()),
    ("cu_total_m_blocks", ValueError, "cu_total_m_blocks is torch.float32", torch.zeros(4)),
    ("cu_total_m_blocks", ValueError, "is torch.int32 on meta", torch.zeros(4, dtype=torch.int32, device="meta")),
    ("lists", ValueError, r"full_block_cnt.* \(2, 4\)", changed(full_block_cnt=lambda x: x[..., 1:])),
)  # fmt: skip
ORDER = (
    ("order", ValueError, r"order has shape .*, expected \[N\]", torch.arange(4), torch.zeros(1, 1, 1, 5).long()),
    ("order", TypeError, "order must be a torch.Tensor, got list", [0, 1, 2, 3, 4]),
    ("order", ValueError, "spt=True and order are both given", Together(order=torch.arange(5), spt=True)),
)
LISTED = (
    ("listed", ValueError, "listed must be at least 0, got -1", -1),
    ("listed", TypeError, "listed must be an int, got", 4.0, "4"),
)


@lru_cache(maxsize=1)
def sides() -> tuple[Any, Any]:
    return both_directions(CASE)


def stacked() -> Any:
    return packed_sides(replace(PACKED, form="stacked"))


def backward(**more: Any) -> Any:
    return lambda device: dict(lists=sides()[1]) | more


def order_arguments(device: str) -> dict[str, Any]:
    names = [f"{side}_{kind}_{what}" for side in ("fwd", "bwd") for kind in ("mask", "full") for what in ("cnt", "idx")]
    return dict(zip(names, (*sides()[0][:4], *sides()[1][:4]), strict=True)) | dict(order=torch.arange(5))


MADE = (
    Table(
        "lists_from_dense", lists_from_dense, lambda device: dict(mask=torch.ones(8, 8).bool(), block_size=(4, 4)),
        (("mask", *NOT_A_TENSOR, None), ("mask", ValueError, "expected bool", *NO_MASKS), *BLOCK_SIZE, *WIDTH),
    ),
    Table(
        "lists_from_blocks", lists_from_blocks, lambda device: dict(listed=torch.ones(8, 8).bool(), block_size=(4, 4)),
        (
            ("listed", *NOT_A_TENSOR, None),
            ("listed", ValueError, "listed is .*, expected bool", *NO_MASKS),
            ("full", ValueError, "full has shape .*, expected that of listed", torch.ones(8, 7).bool()),
            ("full", ValueError, "full is torch.float32", torch.ones(8, 8)),
            ("full", TypeError, "full must be a torch.Tensor, got list", [1]),
            *BLOCK_SIZE,
            *WIDTH,
        ),
    ),
    Table(
        "lists_from_window", lists_from_window,
        lambda device: dict(seqlen_q=16, seqlen_k=16, window_left=4, window_right=0, block_size=(4, 4)),
        (
            *not_a_size("seqlen_q seqlen_k", least=0),
            ("window_left window_right", ValueError, "{}=.*, expected at least 0, or None or -1 for no limit", -2, -7),
            ("window_left window_right", TypeError, "{} must be an int or None, got", 1.5, "4"),
            *BLOCK_SIZE,
        ),
    ),
    Table(
        "lists_from_block_mask", lists_from_block_mask, lambda device: {},
        (("block_mask", TypeError, "{} must be a FlexAttention BlockMask, got", None, torch.ones(3), sides()[0]),),
    ),
    Table(
        "transpose_lists", transpose_lists, lambda device: dict(lists=sides()[0], num_kv_blocks=5),
        (*BROKEN, *not_a_size("num_kv_blocks", least=0), *WIDTH),
    ),
    Table(
        "draw_lists", draw_lists, lambda device: dict(lists=sides()[0], num_columns=5),
        (
            NO_LISTS,
            *not_a_size("num_columns"),
            ("batch", ValueError, "batch must be in 0 .. 0, got 1", 1),
            ("head", ValueError, "head must be in 0 .. 1, got 2", 2),
        ),
    ),
    Table(
        "cu_total_blocks", cu_total_blocks,
        lambda device: dict(cu_seqlens=torch.tensor([0, 4, 9]).int(), block_size=4),
        (
            ("cu_seqlens", *NOT_A_TENSOR),
            ("cu_seqlens", ValueError, r"expected integers \[B \+ 1\]", torch.zeros(3), torch.zeros(1, 3).int()),
            *not_a_size("block_size"),
        ),
    ),
)  # fmt: skip
ORDERED = (
    Table(
        "compute_dq_write_order", compute_dq_write_order, order_arguments,
        (
            *ORDER,
            ("bwd_mask_cnt bwd_mask_idx", ValueError, "mask_block_cnt and mask_block_idx must be given together", None),
            ("bwd_mask_cnt bwd_mask_idx", ValueError, r"_block_cnt \(.*_block_idx \(", lambda x: x[0, ..., 1:]),
            ("bwd_full_idx", ValueError, "full_block_cnt and full_block_idx must be given together", None),
        ),
    ),
    Table(
        "packed_write_order", packed_write_order, lambda device: dict(lists=packed_sides(PACKED)[1], num_q_blocks=3),
        (
            *BROKEN_PACK,
            ("lists", ValueError, "mask_block_cnt .* and mask_block_idx .* must be", sides()[1]),
            ("lists", ValueError, "cu_total_m_blocks is None: rows of stacked lists", stacked()[1]),
            *not_a_size("num_q_blocks"),
            ("spt", *NOT_A_BOOL),
            *LISTED,
        ),
    ),
    Table(
        "merged_lists", merged_lists, backward(order=torch.arange(5)),
        (
            *(row for row in ORDER if row[1] is not ValueError or "spt" not in row[2]),
            *BROKEN,
            ("num_q_blocks", ValueError, "num_q_blocks=.* rows and 5 key blocks", 1 << 60),
        ),
    ),
    Table(
        "plan_backward", plan_backward, backward(num_heads=2, num_heads_kv=1, num_q_blocks=4),
        (
            *BROKEN,
            ("num_heads num_heads_kv", ValueError, "lists have 2 heads, expected 1, .*{}=3", 3),
            *not_a_size("num_q_blocks num_heads num_heads_kv"),
            *not_a_size("longest", optional=True),
            ("per_group", ValueError, "per_group=True with lists of 2 heads", True),
            ("schedule", ValueError, "{} is .*, expected a permutation", torch.arange(4), torch.arange(5).float()),
            ("schedule", ValueError, "schedule must be one of 'left to right'", "upwards", 3),
            ("schedule", ValueError, "schedule, sorted, has 1", torch.tensor([0, 1, 1, 3, 4]), torch.arange(5) + 1),
            *LISTED,
        ),
    ),
    Table(
        "plan_backward, stacked lists", plan_backward,
        lambda device: dict(
            lists=stacked()[1], cu_total_m_blocks=stacked()[0].cu_total_m_blocks, num_heads=2, num_heads_kv=1,
            num_q_blocks=3, deterministic=True,
        ),
        (
            *BROKEN_PACK,
            ("cu_total_m_blocks", ValueError, "cu_total_m_blocks is None: rows of stacked lists", None),
            ("num_heads num_heads_kv", ValueError, "lists have 2 heads", 3),
            ("lists", ValueError, r"cu_block_idx_offsets has shape \(2,\)",
             changed(cu_block_idx_offsets=torch.zeros(2).int())),
            ("lists", ValueError, "cu_block_idx_offsets is torch.float32",
             changed(cu_block_idx_offsets=Tensor.float)),
        ),
    ),
)  # fmt: skip
SIDES = ("forward", "backward")
NOT_THOSE = "(forward|backward) mask_block_(cnt|idx) is torch.int32 .*, expected"
CHECK = (
    ("seqlen_q seqlen_k", ValueError, NOT_THOSE, 10 * 128, 128),
    ("num_heads", ValueError, NOT_THOSE, 3),
)
TABLES = (
    *MADE,
    *ORDERED,
    Table("validate_lists", validate_lists, lambda device: dict(zip(SIDES, sides())) | SIZES, CHECK),
)
