"""Refused calls of block-sparse backward in two passes: of the dq pass, and of backward asked for one or both."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.cute.bwd_dq_sm90.interface import backward_dq
from flash_attn.cute.interface import _flash_attn_bwd
from fuzz.wrong_calls import NOT_A_BOOL, NOT_A_TENSOR, Row, Table, Together, changed
from fuzz.wrong_calls.attention import HQ, LENGTHS, PACKED_SIDES, SCALE, SIDES, B, D, less, moved, qkv, shapes

ROWS = 64  # of a warpgroup


def dq_call(device: str, packed: bool = False) -> dict[str, Any]:
    """Every argument of the pass that excludes no other: dq on top of what an accumulator holds."""
    given = qkv(device, packed)
    given.pop("max_seqlen_k", None)
    q = given["q"]
    rows = -(-(q.shape[-3] + len(LENGTHS) * ROWS) // ROWS) * ROWS
    lead = (HQ,) if packed else (B, HQ)
    sums = {name: torch.empty(*lead, rows, device=device) for name in ("dpsum", "lse_log2")}
    lists = PACKED_SIDES["compact"][0] if packed else SIDES[0]
    more = dict(dq=torch.empty_like(q), accum=torch.empty(*lead, rows * D, device=device))
    return given | sums | more | dict(dout=torch.empty_like(q), lists=moved(lists, device))


def with_sums(device: str) -> dict[str, Any]:
    """Row sums of its own."""
    given = dq_call(device)
    lse = torch.empty(B, HQ, given["q"].shape[1], device=device)
    return given | dict(out=torch.empty_like(given["q"]), lse=lse)


def no_tensor(name: str, kinds: str, *values: Any) -> tuple[Row, ...]:
    """Rows for what is no tensor, of half precision, on the CPU, or of a shape or strides that do not fit."""
    elsewhere = lambda x: torch.empty(x.shape, dtype=x.dtype)  # noqa: E731
    return (
        (name, *NOT_A_TENSOR),
        (name, ValueError, f"{{}} (is torch.({kinds})|has (shape|strides)) ", lambda x: x.half(), *values),
        (name, ValueError, "{} is on cpu, expected cuda:0, where q is", elsewhere),
    )


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device).select(-1, 0)


FLOAT, HALF = "float16|float32", "float16|bfloat16"
STRIDED, FEWER_TOKENS, FEWER_HEADS = (lambda x: strided(x)), (lambda x: less(x, 1)), (lambda x: less(x, 2))
NO_BLOCKS = "blocks of .* queries and .* keys: the dq pass takes multiples of 128"
BAD_BLOCKS = [changed(block_size=size) for size in ((64, 128), (128, 96), (100, 128))]
NO_ROWS = lambda x: less(x, 2, 200)  # noqa: E731
DQ = (
    ("q", *NOT_A_TENSOR),
    ("q", NotImplementedError, "q is torch.float32: the dq pass takes float16 and bfloat16", lambda x: x.float()),
    ("q", ValueError, r"q has shape .*, expected \[B, T, H, D\]", lambda x: x.select(0, 0)),
    ("k", *NOT_A_TENSOR),
    ("k", ValueError, "k is torch.float16 .*, expected torch.bfloat16", lambda x: x.half()),
    ("k", ValueError, r"v is torch.bfloat16 .*, expected torch.bfloat16 \(", FEWER_HEADS, lambda x: less(x, 0)),
    *no_tensor("v", HALF, FEWER_TOKENS),
    *no_tensor("dout", HALF, FEWER_TOKENS),
    *no_tensor("dpsum", FLOAT, NO_ROWS, FEWER_TOKENS, STRIDED),
    *no_tensor("lse_log2", FLOAT, FEWER_HEADS, STRIDED),
    ("lists", NotImplementedError, "no block lists: the dq pass walks lists", None),
    ("lists", TypeError, "lists is a tuple, expected BlockSparseTensorsTorch", (1, 2)),
    ("lists", NotImplementedError, NO_BLOCKS, *BAD_BLOCKS),
    *shapes("lists"),
    *SCALE,
    ("window_size", TypeError, "window_size is .*, expected two", 3, (1, 2, 3), (1.5, 0), ("1", "2"), None),
    ("mask_mod", TypeError, "mask_mod is 'causal', expected a function or None", "causal"),
    ("aux_tensors", TypeError, "aux_tensors is no list of tensors", 3, [3]),
    ("seqused_q seqused_k", ValueError, "{} is on cpu, expected cuda:0", torch.zeros(B).long(), torch.zeros(1).int()),
    ("seqused_k", TypeError, "seqused_k is a list, expected a tensor", [0] * B),
    *no_tensor("dq", HALF, FEWER_TOKENS, STRIDED, lambda x: x.narrow(1, 0, 1).expand(x.shape)),
    ("add", TypeError, "add is .*, expected a bool", 1, "yes"),
    *no_tensor("accum", FLOAT, lambda x: less(x, 2, 4 * ROWS * D), FEWER_TOKENS, lambda x: less(x, 2, D // 2), STRIDED),
    ("first", TypeError, "first is 1, expected a bool", 1),
    ("first", ValueError, "first is for accum alone", True, Together(accum=None, first=True)),
    ("start", ValueError, "start is .*, expected a multiple of 64", 0, 100, -64),
    ("start", TypeError, "start is .*, expected a multiple of 64", 64.0, "64", None),
    ("out lse", ValueError, "{} is on cpu, expected cuda:0, where q is", torch.empty(1)),
    ("dq", ValueError, "dq and accum are None, expected one of them or both", Together(dq=None, accum=None)),
    ("add", ValueError, "add is for dq, which is None", Together(dq=None, add=True)),
)
DQ_SUMS = (
    ("out lse", ValueError, "expected both out and lse, or neither", None),
    *no_tensor("out", HALF, FEWER_TOKENS),
    *no_tensor("lse", FLOAT, FEWER_TOKENS, FEWER_HEADS, STRIDED),
    ("start", ValueError, "start is 192, expected 64 or 128 with out", 192),
)
STARTS = "cu_seqlens_q cu_seqlens_k"
DQ_PACKED = (
    (STARTS, TypeError, "{} is a list, expected a tensor", [0, 300]),
    (STARTS, ValueError, "{} is torch.int64 .*, expected contiguous torch.int32", lambda x: x.long()),
    (STARTS, ValueError, "cu_seqlens_k is torch.int32 .*, expected contiguous torch.int32", lambda x: less(x, 0)),
    ("cu_seqlens_k", ValueError, r"k has shape \(520, 2, 64\), expected", None),
    ("max_seqlen_q", ValueError, "max_seqlen_q is .*, expected a number of queries or None", "300", 300.0, -1),
    ("dpsum", ValueError, r"dpsum is torch.float32 \(4, 440\)", lambda x: less(x, 1, 200)),
)


def asked_for(device: str) -> dict[str, Any]:
    given = qkv(device)
    o = torch.empty_like(given["q"])
    lse = torch.empty(B, HQ, given["q"].shape[1], device=device)
    lists = [moved(each, device) for each in SIDES]
    names = ("block_sparse_tensors_fwd", "block_sparse_tensors")
    return given | dict(out=o, dout=o, lse=lse, passes=2) | dict(zip(names, lists, strict=True))


def without(device: str) -> dict[str, Any]:
    given = asked_for(device)
    del given["passes"], given["block_sparse_tensors_fwd"]
    return given | dict(without_dq=True)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    return s


ALONE = "{} cannot be given together with passes=2"
BWD, FWD = "block_sparse_tensors", "block_sparse_tensors_fwd"
TWO = (
    ("passes", ValueError, "passes is .*, expected 1, 2 or None", 0, 3, 2.0, "2", True),
    (f"{BWD} {FWD}", NotImplementedError, "passes=2: two passes walk block lists of both directions", None),
    (BWD, NotImplementedError, "passes=2: no tile for backward lists of blocks", changed(block_size=(128, 96))),
    (FWD, NotImplementedError, f"passes=2: {NO_BLOCKS}", *BAD_BLOCKS),
    *shapes(FWD),
    ("score_mod", ValueError, ALONE, score),
    ("softcap", ValueError, ALONE, 3.0),
    ("aux_scalars", ValueError, ALONE, (1,)),
    ("learnable_sink", ValueError, ALONE, torch.zeros(HQ)),
    ("compress_factor", ValueError, ALONE, Together(causal=True, compress_factor=16)),
)
WITHOUT = (
    (BWD, NotImplementedError, "without_dq=True without block lists", None),
    (BWD, ValueError, r"expects sparse_block_size\[1\]=128", changed(block_size=(128, 96))),
    ("dq", ValueError, "dq cannot be given together with without_dq=True", torch.empty(1)),
    ("learnable_sink", ValueError, "learnable_sink cannot be given together with without_dq=True", torch.zeros(HQ)),
    ("without_dq", *NOT_A_BOOL, 0),
)
TABLES = (
    Table("backward_dq", backward_dq, dq_call, DQ, "cuda"),
    Table("backward_dq, sums", backward_dq, with_sums, DQ_SUMS, "cuda"),
    Table("backward_dq, packed", backward_dq, lambda device: dq_call(device, packed=True), DQ_PACKED, "cuda"),
    Table("backward of flash_attn_func, two passes", _flash_attn_bwd, asked_for, TWO, "cuda"),
    Table("backward of flash_attn_func, without dq", _flash_attn_bwd, without, WITHOUT, "cuda"),
)
