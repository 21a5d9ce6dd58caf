"""Wrong calls of block-sparse backward in two passes: of the dq pass, and of backward that is asked for one or both."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.cute.flash_bwd_dq_sm90 import backward_dq
from flash_attn.cute.interface import _flash_attn_bwd
from fuzz.wrong_calls import NOT_A_BOOL, NOT_A_SCALE, NOT_A_TENSOR, Changed, Spec
from fuzz.wrong_calls.attention import (
    HQ,
    LENGTHS,
    SHAPES,
    WORDS,
    B,
    D,
    changed,
    less,
    moved,
    packed_sides,
    qkv,
    sides,
)

ROWS = 64  # of a warpgroup


def dq_call(device: str, packed: bool = False) -> dict[str, Any]:
    """All that the pass may take but what excludes something else: dq on top of what an accumulator holds."""
    given = qkv(device, packed)
    given.pop("max_seqlen_k", None)
    q = given["q"]
    rows = -(-(q.shape[-3] + len(LENGTHS) * ROWS) // ROWS) * ROWS
    lead = (HQ,) if packed else (B, HQ)
    sums = {name: torch.empty(*lead, rows, device=device) for name in ("dpsum", "lse_log2")}
    lists = packed_sides("compact")[0] if packed else sides()[0]
    more = dict(dq=torch.empty_like(q), accum=torch.empty(*lead, rows * D, device=device))
    return given | sums | more | dict(dout=torch.empty_like(q), lists=moved(lists, device))


def with_sums(device: str) -> dict[str, Any]:
    """Row sums of its own."""
    given = dq_call(device)
    lse = torch.empty(B, HQ, given["q"].shape[1], device=device)
    return given | dict(out=torch.empty_like(given["q"]), lse=lse)


def dq_pass(q: Any, k: Any, v: Any, dout: Any, dpsum: Any, lse_log2: Any, lists: Any, **more: Any) -> None:
    backward_dq(q, k, v, dout, dpsum, lse_log2, lists, **more)


HALF = Changed(lambda x: x.half())
FEWER_TOKENS, FEWER_HEADS = Changed(lambda x: less(x, 1)), Changed(lambda x: less(x, 2))
STRIDED = Changed(lambda x: torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device).select(-1, 0))
ON_THE_CPU = Changed(lambda x: torch.empty(x.shape, dtype=x.dtype))
NO_INTS = {"a list": [0, 300], "int64": Changed(lambda x: x.long()), "one less": Changed(lambda x: less(x, 0))}
LISTS = {name: value for name, value in SHAPES.items() if name not in ("lists of other blocks", "blocks of 100 keys")}
DQ = Spec(
    "backward_dq",
    dq_pass,
    dq_call,
    {
        "q": NOT_A_TENSOR
        | {"in fp32": Changed(lambda x: x.float()), "three dimensions": Changed(lambda x: x.select(0, 0))},
        "k": NOT_A_TENSOR | {"half": HALF, "fewer heads than v": FEWER_HEADS, "a batch": Changed(lambda x: less(x, 0))},
        "v": NOT_A_TENSOR | {"half": HALF, "fewer tokens": FEWER_TOKENS, "on the CPU": ON_THE_CPU},
        "dout": NOT_A_TENSOR | {"half": HALF, "fewer tokens": FEWER_TOKENS, "on the CPU": ON_THE_CPU},
        "dpsum": NOT_A_TENSOR
        | {"half": HALF, "fewer rows": Changed(lambda x: less(x, 2, 200)), "a head less": FEWER_TOKENS}
        | {"strided": STRIDED, "on the CPU": ON_THE_CPU},
        "lse_log2": NOT_A_TENSOR
        | {"half": HALF, "a row less": FEWER_HEADS, "strided": STRIDED, "on the CPU": ON_THE_CPU},
        "lists": {"None": None, "a tuple": (1, 2)}
        | {"blocks of 64 queries": changed(block_size=(64, 128)), "blocks of 96 keys": changed(block_size=(128, 96))}
        | LISTS,
        "softmax_scale": NOT_A_SCALE | {"a tensor": torch.ones(1)},
        "window_size": {"an int": 3, "three": (1, 2, 3), "floats": (1.5, 0), "strings": ("1", "2"), "None": None},
        "mask_mod": {"a string": "causal"},
        "aux_tensors": {"a number": 3, "numbers": [3]},
        "seqused_q": {"int64": torch.zeros(B, dtype=torch.int64), "one less": torch.zeros(B - 1, dtype=torch.int32)},
        "seqused_k": {"int64": torch.zeros(B, dtype=torch.int64), "a list": [0] * B},
        "dq": NOT_A_TENSOR
        | {"half": HALF, "fewer tokens": FEWER_TOKENS, "strided": STRIDED, "on the CPU": ON_THE_CPU}
        | {"broadcast": Changed(lambda x: x.narrow(1, 0, 1).expand(x.shape))},
        "add": {"an int": 1, "a string": "yes"},
        "accum": NOT_A_TENSOR
        | {"half": HALF, "fewer rows": Changed(lambda x: less(x, 2, 4 * ROWS * D)), "a head less": FEWER_TOKENS}
        | {"half a row": Changed(lambda x: less(x, 2, D // 2)), "strided": STRIDED, "on the CPU": ON_THE_CPU},
        "first": {"an int": 1, "with dq": True},
        "start": {"zero": 0, "no multiple": 100, "negative": -64, "a float": 64.0, "a string": "64", "None": None},
        "out": {"alone": Changed(lambda _: torch.empty(1))},
        "lse": {"alone": Changed(lambda _: torch.empty(1))},
    },
    {"lists": (*WORDS, "block_sparse_tensors", "block sparse tensors", "blocks"), "k": ("v", "q"), "q": ("dout",)},
    {
        "neither": ("dq", dict(dq=None, accum=None)),
        "add without dq": ("add", dict(dq=None, add=True)),
        "first without accum": ("first", dict(accum=None, first=True)),
    },
    "cuda",
)
DQ_SUMS = Spec(
    "backward_dq, sums",
    dq_pass,
    with_sums,
    {
        "out": NOT_A_TENSOR | {"None": None, "half": HALF, "fewer tokens": FEWER_TOKENS, "on the CPU": ON_THE_CPU},
        "lse": NOT_A_TENSOR
        | {"None": None, "half": HALF, "a head less": FEWER_TOKENS, "a row less": FEWER_HEADS, "strided": STRIDED}
        | {"on the CPU": ON_THE_CPU},
        "start": {"192": 192},
    },
    device="cuda",
)
DQ_PACKED = Spec(
    "backward_dq, packed",
    dq_pass,
    lambda device: dq_call(device, packed=True),
    {
        "cu_seqlens_q": NO_INTS,
        "cu_seqlens_k": NO_INTS | {"None": None},
        "max_seqlen_q": {"a string": "300", "a float": 300.0, "negative": -1},
        "dpsum": {"rows of no pack": Changed(lambda x: less(x, 1, 200))},
    },
    {"cu_seqlens_q": ("cu_seqlens_k",), "cu_seqlens_k": ("k",)},
    device="cuda",
)


def asked_for(device: str) -> dict[str, Any]:
    given = qkv(device)
    o = torch.empty_like(given["q"])
    lse = torch.empty(B, HQ, given["q"].shape[1], device=device)
    lists = [moved(each, device) for each in sides()]
    names = ("block_sparse_tensors_fwd", "block_sparse_tensors")
    return given | dict(out=o, dout=o, lse=lse, passes=2) | dict(zip(names, lists, strict=True))


def backward(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **more: Any) -> Any:
    return _flash_attn_bwd(q, k, v, out, dout, lse, **more)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    return s


TWO = Spec(
    "backward of flash_attn_func, two passes",
    backward,
    asked_for,
    {
        "passes": {"zero": 0, "three": 3, "a float": 2.0, "a string": "2", "True": True},
        "block_sparse_tensors": {"None": None, "blocks of 96 keys": changed(block_size=(128, 96))},
        "block_sparse_tensors_fwd": {
            "None": None,
            "blocks of 64 queries": changed(block_size=(64, 128)),
            "blocks of 96 keys": changed(block_size=(128, 96)),
        }
        | LISTS,
        "score_mod": {"given": score},
        "softcap": {"given": 3.0},
        "aux_scalars": {"given": (1,)},
        "learnable_sink": {"given": torch.zeros(HQ)},
    },
    {
        "block_sparse_tensors": ("lists", "block_sparse_tensors"),
        "block_sparse_tensors_fwd": ("lists", *WORDS, "blocks", "block_sparse_tensors", "block sparse tensors"),
    },
    {"compress_factor": ("compress_factor", dict(causal=True, compress_factor=16))},
    "cuda",
)


def without(device: str) -> dict[str, Any]:
    given = asked_for(device)
    del given["passes"], given["block_sparse_tensors_fwd"]
    return given | dict(without_dq=True)


WITHOUT = Spec(
    "backward of flash_attn_func, without dq",
    backward,
    without,
    {
        "block_sparse_tensors": {"None": None, "blocks of 96 keys": changed(block_size=(128, 96))},
        "dq": {"given": Changed(lambda _: torch.empty(1))},
        "learnable_sink": {"given": torch.zeros(HQ)},
        "without_dq": NOT_A_BOOL | {"zero": 0},
    },
    {"block_sparse_tensors": ("without_dq", *WORDS)},
    device="cuda",
)
SPECS = (DQ, DQ_SUMS, DQ_PACKED, TWO, WITHOUT)
