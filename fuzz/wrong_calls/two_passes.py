"""Refused calls of block-sparse backward in two passes: asked for both, or for the first one."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.cute.interface import _flash_attn_bwd
from flash_attn.cute.lists.backward_plan import plan_backward
from fuzz.attention_lists import both_directions
from fuzz.case import Blocks
from fuzz.wrong_calls import NOT_A_BOOL, Table, Together, changed
from fuzz.wrong_calls.attention import HKV, HQ, SIDES, B, M, N, backward_call, moved, qkv, shapes

NO_BLOCKS = "blocks of .* queries and .* keys: the dq pass takes multiples of 128"
BAD_BLOCKS = [changed(block_size=size) for size in ((64, 128), (128, 96), (100, 128))]


def asked_for(device: str) -> dict[str, Any]:
    arguments = qkv(device)
    o = torch.empty_like(arguments["q"])
    lse = torch.empty(B, HQ, arguments["q"].shape[1], device=device)
    lists = [moved(each, device) for each in SIDES]
    names = ("block_sparse_tensors_fwd", "block_sparse_tensors")
    return arguments | dict(out=o, dout=o, lse=lse, passes=2) | dict(zip(names, lists, strict=True))


ONE_LIST = both_directions(Blocks(B=B, H=1, M=M, N=N, pattern="full"))[1]
OF_GROUPS = plan_backward(ONE_LIST, num_heads=HQ, num_heads_kv=HKV, num_q_blocks=M, per_group=True)


def without(device: str) -> dict[str, Any]:
    arguments = asked_for(device)
    del arguments["passes"], arguments["block_sparse_tensors_fwd"]
    return arguments | dict(without_dq=True)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    return s


ALONE = "{} cannot be given together with passes=2"
BWD, FWD = "block_sparse_tensors", "block_sparse_tensors_fwd"
TWO = (
    ("passes", ValueError, "passes is .*, expected 1, 2 or None", 0, 3, 2.0, "2", True),
    (f"{BWD} {FWD}", NotImplementedError, "passes=2: two passes loop over block lists of both directions", None),
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
    (BWD, ValueError, "lists for each of 4 query heads",
     lambda lists: moved(SIDES[1]._replace(plan=OF_GROUPS.plan, plan_per_group=True), "cuda")),
    (BWD, NotImplementedError, "one pass loops over query heads one by one",
     lambda lists: Together(block_sparse_tensors=moved(OF_GROUPS, "cuda"), without_dq=False)),
)  # fmt: skip
TABLES = (
    Table("backward of flash_attn_func, two passes", _flash_attn_bwd, asked_for, TWO, "cuda"),
    Table("backward of flash_attn_func, without dq", _flash_attn_bwd, without, WITHOUT, "cuda"),
    Table("backward of flash_attn_func, without dq on sm_100", _flash_attn_bwd, backward_call,
          (("without_dq", NotImplementedError, "on sm_100", True),), "cuda", arch=100),
)  # fmt: skip
