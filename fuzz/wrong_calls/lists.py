"""Wrong calls of what makes, orders, checks and plans block lists."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flash_attn.cute.backward_plan import plan_backward
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
from flash_attn.cute.compress import compression
from flash_attn.cute.write_order import deterministic_walk, merged_walk
from fuzz.blocks import both_directions, packed_lists
from fuzz.case import Blocks, Packed
from fuzz.corrupt import FAULTS, spoil
from fuzz.wrong_calls import NOT_A_BOOL, NOT_A_SIZE, NOT_A_TENSOR, Changed, Spec

CASE = Blocks(B=1, H=2, M=4, N=5, pattern="full", group=2)
PACKED = Packed(lengths=((300, 200), (0, 64), (129, 256)), block=(128, 128), heads=2, pattern="full")
SIZES = dict(seqlen_q=4 * 128, seqlen_k=5 * 128, num_heads=2)
BLOCK_SIZE = {
    "an int": 128, "a string": "128", "one number": (128,), "three numbers": (128, 128, 128), "a zero": (128, 0),
    "negative": (-128, 128), "floats": (128.0, 128.0), "None": None,
}  # fmt: skip
WIDTH = {"too small": 0, "negative": -3, "a string": "5", "a float": 5.0, "three": (5, 5, 5)}
LISTS = {"None": None, "a tensor": torch.zeros(2, 2), "a tuple": (1, 2), "a string": "x"}
BROKEN = {
    "counts without indices": Changed(lambda x: x._replace(mask_block_idx=None)),
    "full counts without indices": Changed(lambda x: x._replace(full_block_idx=None)),
    "counts of another shape": Changed(lambda x: x._replace(mask_block_cnt=x.mask_block_cnt[..., 1:])),
    "float counts": Changed(lambda x: x._replace(mask_block_cnt=x.mask_block_cnt.float())),
    "float indices": Changed(lambda x: x._replace(mask_block_idx=x.mask_block_idx.float())),
    "indices of one dimension": Changed(lambda x: x._replace(mask_block_idx=x.mask_block_idx.flatten())),
}
NAMED = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "BlockSparseTensorsTorch")
MASK = NOT_A_TENSOR | {
    "float": torch.zeros(8, 8), "int": torch.zeros(8, 8, dtype=torch.int32), "one dimension": torch.zeros(8).bool(),
    "three dimensions": torch.zeros(1, 8, 8).bool(), "None": None,
}  # fmt: skip


@lru_cache(maxsize=1)
def sides() -> tuple[Any, Any]:
    return both_directions(CASE)


def forward(device: str) -> dict[str, Any]:
    return dict(lists=sides()[0])


def backward(device: str) -> dict[str, Any]:
    return dict(lists=sides()[1])


def stacked(device: str) -> dict[str, Any]:
    """A deterministic plan of packed sequences' lists in upstream's form."""
    forward, backward = packed_lists(replace(PACKED, form="stacked"))
    sizes = dict(num_heads=2, num_heads_kv=1, num_q_blocks=3, deterministic=True)
    return dict(lists=backward, cu_total_m_blocks=forward.cu_total_m_blocks) | sizes


def order_arguments(device: str) -> dict[str, Any]:
    names = [f"{side}_{kind}_{what}" for side in ("fwd", "bwd") for kind in ("mask", "full") for what in ("cnt", "idx")]
    return dict(zip(names, (*sides()[0][:4], *sides()[1][:4]), strict=True)) | dict(order=torch.arange(5))


ORDER = {"too short": torch.arange(4), "a list": [0, 1, 2, 3, 4], "four dimensions": torch.zeros(1, 1, 1, 5).long()}
PERMUTATION = {"too short": torch.arange(4), "floats": torch.arange(5).float(), "unknown": "upwards", "a number": 3}
PERMUTATION |= {"a block twice": torch.tensor([0, 1, 1, 3, 4]), "a block too far": torch.arange(5) + 1}

MAKING = (
    Spec(
        "lists_from_dense",
        lambda **given: lists_from_dense(**given),
        lambda device: dict(mask=torch.ones(8, 8).bool(), block_size=(4, 4)),
        {"mask": MASK, "block_size": BLOCK_SIZE, "width": WIDTH},
    ),
    Spec(
        "lists_from_blocks",
        lambda **given: lists_from_blocks(**given),
        lambda device: dict(listed=torch.ones(8, 8).bool(), block_size=(4, 4)),
        {
            "listed": MASK,
            "full": {"another shape": torch.ones(8, 7).bool(), "floats": torch.ones(8, 8), "a list": [1]},
            "block_size": BLOCK_SIZE,
            "width": WIDTH,
        },
    ),
    Spec(
        "lists_from_window",
        lambda **given: lists_from_window(**given),
        lambda device: dict(seqlen_q=16, seqlen_k=16, window_left=4, window_right=0, block_size=(4, 4)),
        {
            "seqlen_q": {label: value for label, value in NOT_A_SIZE.items() if label != "zero"},
            "seqlen_k": {label: value for label, value in NOT_A_SIZE.items() if label != "zero"},
            "window_left": {"below -1": -2, "a float": 1.5, "a string": "4"},
            "window_right": {"below -1": -7, "a float": 1.5},
            "block_size": BLOCK_SIZE,
        },
    ),
    Spec(
        "lists_from_block_mask",
        lambda **given: lists_from_block_mask(**given),
        lambda device: {},
        {"block_mask": {"None": None, "a tensor": torch.ones(3), "lists": sides()[0]}},
    ),
    Spec(
        "transpose_lists",
        lambda **given: transpose_lists(**given),
        lambda device: forward(device) | dict(num_kv_blocks=5),
        {
            "lists": LISTS | BROKEN,
            "num_kv_blocks": {"negative": -1, "a float": 5.0, "None": None},
            "width": WIDTH,
        },
        {"lists": NAMED},
    ),
    Spec(
        "draw_lists",
        lambda **given: draw_lists(**given),
        lambda device: forward(device) | dict(num_columns=5),
        {"lists": LISTS, "num_columns": NOT_A_SIZE, "batch": {"too large": 1}, "head": {"too large": 2}},
        {"lists": NAMED},
    ),
    Spec(
        "cu_total_blocks",
        lambda **given: cu_total_blocks(**given),
        lambda device: dict(cu_seqlens=torch.tensor([0, 4, 9]).int(), block_size=4),
        {
            "cu_seqlens": NOT_A_TENSOR | {"floats": torch.zeros(3), "two dimensions": torch.zeros(1, 3).int()},
            "block_size": NOT_A_SIZE,
        },
    ),
)
ORDERING = (
    Spec(
        "compute_dq_write_order",
        lambda **given: compute_dq_write_order(**given),
        order_arguments,
        {
            "order": ORDER,
            "bwd_mask_cnt": {"of another shape": Changed(lambda x: x[..., 1:]), "None": None},
            "bwd_mask_idx": {"of another shape": Changed(lambda x: x[0]), "None": None},
            "bwd_full_idx": {"None": None},
        },
        {"bwd_mask_cnt": ("mask_block_cnt",), "bwd_mask_idx": ("mask_block_idx",), "bwd_full_idx": ("full_block_idx",)},
        {"both orders": ("order", dict(spt=True))},
    ),
    Spec(
        "packed_write_order",
        lambda **given: packed_write_order(**given),
        lambda device: dict(lists=packed_lists(PACKED)[1], num_q_blocks=3),
        {
            "lists": LISTS
            | {label: change for label, change in BROKEN.items() if label != "indices of one dimension"}
            | {"padded": sides()[1], "no rows before": Changed(lambda x: x._replace(cu_total_n_blocks=None))}
            | {"stacked": packed_lists(replace(PACKED, form="stacked"))[1]},
            "num_q_blocks": NOT_A_SIZE,
            "spt": NOT_A_BOOL,
            "listed": {"negative": -1, "a float": 4.0, "a string": "4"},
            "cu_total_m_blocks": {"a list": [0, 3, 3, 5], "of fewer sequences": torch.zeros(3).int()}
            | {"floats": torch.zeros(4)},
        },
        {"lists": (*NAMED, "cu_total_n_blocks")},
    ),
    Spec(
        "deterministic_walk",
        lambda **given: deterministic_walk(**given),
        backward,
        {"order": ORDER, "lists": LISTS | BROKEN},
        {"lists": NAMED},
        {
            "both orders": ("order", dict(spt=True, order=torch.arange(5))),
            "keys past 63 bits": ("num_q_blocks", dict(num_q_blocks=1 << 60)),
        },
    ),
    Spec(
        "merged_walk",
        lambda **given: merged_walk(**given),
        backward,
        {
            "lists": LISTS | BROKEN,
            "locks": {"of another shape": (torch.zeros(1, 2, 5, 1).int(), torch.zeros(1, 2, 5, 1).int())}
            | {"mask only": (sides()[1].mask_block_idx, None)},
        },
        {"lists": NAMED, "locks": ("lock values",)},
    ),
    Spec(
        "plan_backward",
        lambda **given: plan_backward(**given),
        lambda device: backward(device) | dict(num_heads=2, num_heads_kv=1, num_q_blocks=4),
        {
            "lists": LISTS | BROKEN,
            "num_heads": {"another": 3, "zero": 0, "a float": 2.0},
            "num_heads_kv": {"no divisor": 3, "zero": 0, "None": None},
            "num_q_blocks": NOT_A_SIZE,
            "longest": {label: value for label, value in NOT_A_SIZE.items() if value is not None},
            "schedule": PERMUTATION,
            "listed": {"negative": -1, "a float": 3.0},
        },
        {"lists": NAMED},
    ),
    Spec(
        "plan_backward, stacked lists",
        lambda **given: plan_backward(**given),
        stacked,
        {
            "lists": LISTS
            | {label: change for label, change in BROKEN.items() if label != "indices of one dimension"}
            | {
                "no rows before": Changed(lambda x: x._replace(cu_total_n_blocks=None)),
                "offsets of fewer sequences": Changed(lambda x: x._replace(cu_block_idx_offsets=torch.zeros(2).int())),
                "float offsets": Changed(lambda x: x._replace(cu_block_idx_offsets=x.cu_block_idx_offsets.float())),
            },
            "cu_total_m_blocks": {"None": None, "a list": [0, 3, 3, 5], "of fewer sequences": torch.zeros(3).int()}
            | {"floats": torch.zeros(4)},
        },
        {"lists": (*NAMED, "cu_total_n_blocks", "cu_block_idx_offsets")},
    ),
)
COMPRESSION = Spec(
    "compression",
    lambda **given: compression(**given),
    lambda device: dict(causal=True, factor=4, offset=3),
    {
        "factor": NOT_A_SIZE | {"too large": 1 << 23},
        "offset": {"a float": 0.5, "None": None, "too large": 1 << 30, "too small": -(1 << 30), "True": True},
    },
    {"factor": ("compress_factor",), "offset": ("compress_offset",)},
    {
        "not causal": ("factor", dict(causal=False)),
        "an offset, not causal": ("offset", dict(causal=False, factor=1)),
    },
)


def checked(device: str) -> dict[str, Any]:
    locks = compute_dq_write_order(*sides()[0][:4], *sides()[1][:4])
    ordered = sides()[1]._replace(dq_write_order=locks[0], dq_write_order_full=locks[1], spt=False)
    return dict(forward=sides()[0], backward=ordered) | SIZES


def spoilt() -> dict[str, tuple[str, dict[str, Any]]]:
    """Right lists with one wrong entry, in every known way, twice."""
    given, found = checked("cpu"), {}
    for fault in FAULTS:
        pairs = (spoil(fault, given["forward"], given["backward"], seed) for seed in range(40))
        for number, pair in enumerate([pair for pair in pairs if pair is not None][:2], 1):
            found[f"{fault}, {number}"] = ("forward", dict(zip(("forward", "backward"), pair, strict=True)))
    return found


CHECK = Spec(
    "validate_lists",
    lambda forward, backward, **sizes: validate_lists(forward, backward, **sizes),
    checked,
    {
        "seqlen_q": {"too long": 10 * 128, "too short": 128},
        "seqlen_k": {"too long": 10 * 128, "too short": 128},
        "num_heads": {"another": 3},
    },
    {"seqlen_q": ("forward", "backward"), "seqlen_k": ("forward", "backward"), "num_heads": ("H",)}
    | {"forward": ("backward",)},
    spoilt(),
)
SPECS = (*MAKING, *ORDERING, COMPRESSION, CHECK)
