"""Refused calls of nsa_layer: the operator, its configuration, the module and the position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch

from fuzz.wrong_calls import NO_SCALES, NO_TENSORS, NOT_A_BOOL, NOT_A_TENSOR, Row, Table, Together, not_a_size
from nsa_layer import MemoryPolicy, NSACache, NSAConfig, NSAttention, nsa, nsa_with_kvcache, selected_attention, warm_up
from nsa_layer.call import FP8
from nsa_layer.checks import ARGUMENTS, BATCH, INT32, NO_EMPTY, Q
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import Case

B, T, HQ, HKV, D, DV = 2, 20, 4, 2, 8, 6
CONFIG = NSAConfig(block_size=4, q_tile=8, window_size=4)
NAN, INF = float("nan"), float("inf")


def batch(device: str) -> dict[str, Any]:
    shapes = dict(q=(B, T, HQ, D), k=(B, T, HKV, D), v=(B, T, HKV, DV))
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()} | dict(config=CONFIG)


def indexed(device: str) -> dict[str, Any]:
    of_index = {name: torch.randn(B, T, HKV, 4, device=device) for name in ("q_index", "k_index")}
    return batch(device) | of_index | dict(config=CONFIG.replace(q_tile=1, rule="index", branches=("selected",)))


def packed(device: str) -> dict[str, Any]:
    arguments = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in batch(device).items()}
    return arguments | dict(cu_seqlens=int32(0, 5, T))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def listed(device: str) -> dict[str, Any]:
    shapes = dict(q=(B, T, HQ, D), k=(B, 30, HKV, D), v=(B, 30, HKV, DV))
    lists = torch.zeros(B, T, HKV, 2, dtype=torch.int32, device=device)
    return {name: torch.randn(x, device=device) for name, x in shapes.items()} | dict(block_indices=lists, block_size=4)


def listed_packed(device: str) -> dict[str, Any]:
    arguments = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in listed(device).items()}
    return arguments | dict(cu_seqlens=int32(0, 5, T), cu_seqlens_k=int32(0, 9, 30))


def appended(device: str) -> dict[str, Any]:
    return {name: x for name, x in batch(device).items() if name != "config"}


def cached(device: str) -> dict[str, Any]:
    rows = {"k_cache": (32, D), "v_cache": (32, DV), "k_cmp_cache": (8, D), "v_cmp_cache": (8, DV)}
    caches = {name: torch.zeros(B, S, HKV, size, device=device) for name, (S, size) in rows.items()}
    filled = torch.zeros(B, dtype=torch.int32, device=device)
    return appended(device) | caches | dict(cache_seqlens=filled, config=CONFIG.replace(q_tile=1))


def paged(device: str) -> dict[str, Any]:
    return cached(device) | {name: int32(0, 1).view(B, 1) for name in ("page_table", "cmp_page_table")}


def two_pages(device: str) -> dict[str, Any]:
    """Validated; each sequence's tokens are on two pages."""
    pages = {name: torch.zeros(6, 16 if "cmp" not in name else 4, *x.shape[2:], device=device)
             for name, x in cached(device).items() if name.endswith("_cache")}  # fmt: skip
    tables = {name: int32(0, 1, 2, 3).view(B, 2) for name in ("page_table", "cmp_page_table")}
    return cached(device) | pages | tables | dict(validate=True)


def cache_arguments(device: str) -> dict[str, Any]:
    sizes = dict(batch=B, max_seqlen=32, num_kv_heads=HKV, head_dim=D, head_dim_v=DV, page_size=16, num_pages=9)
    return sizes | dict(config=CONFIG.replace(q_tile=1), own_window=False, dtype=torch.float32, device=device)


def empty_cache() -> NSACache:
    return NSACache(**cache_arguments("cpu"))


SIZES = dict(B=B, T=T, S=32, Hq=HQ, Hkv=HKV, D=D, Dv=DV, Tc=5, Sc=8, Hi=HKV, Di=4, branches=3)
SIZES |= dict(sequences=B, rows=B, rows_cmp=B, pages=1, cmp_pages=1)


def of_tensors(function: Callable, keys: str = BATCH["keys"], **sizes: int) -> Iterator[Row]:
    """Rows of each tensor that a function takes, by the layer's table of what it has to be.

    Of sizes, those that tensors before it and the configuration have.
    """
    layout, known = BATCH | dict(keys=keys), {"Tc", "branches", "sequences", "rows", "rows_cmp"}
    for name, parameter in signature(function).parameters.items():
        if name not in ARGUMENTS:
            continue
        kind = ARGUMENTS[name]
        letters = " ".join(layout.get(each, each) for each in kind.shape.split()).split()
        shape = [int(each) if each.isdigit() else (SIZES | sizes)[each] for each in letters]
        x = torch.zeros(shape, dtype=torch.int32 if kind.dtype == INT32 else torch.float32)
        needed = parameter.default is parameter.empty
        other = {INT32: torch.int64, Q: torch.float16}.get(kind.dtype, torch.int32)
        yield name, TypeError, "{} must be (a torch.Tensor|an int)", [1.0], "x", *[None] * needed
        yield name, TypeError, "{} must (be|have q's dtype)", x.to(other)
        yield name, ValueError, "must be on q's device", x.to("meta")
        less = (x.narrow(d, 0, shape[d] - 1) for d, each in enumerate(letters) if each in known or each.isdigit())
        yield name, ValueError, r"{} must have shape \(.*\), got", x[0], x[None], *less
        known |= {*letters} - {"Hi", "Di", "Sc"}  # which nothing in the right call has
        if kind.dense:
            yield name, ValueError, "{} must be contiguous in its last dimension, got", x.mT.contiguous().mT
        if name in NO_EMPTY:
            yield name, ValueError, "{} must have no empty dimension", x[:, :0]


NSA = (
    *of_tensors(nsa),
    ("k", ValueError, r"k must have shape \(2, 20, Hkv, 8\), got", lambda x: torch.cat([x, x], -1)),
    ("v", ValueError, r"v must have shape \(2, 20, 2, Dv\), got", lambda x: x.repeat(1, 1, 2, 1)),
    ("q", ValueError, "heads must be a multiple of k's, got 5 and 2", torch.zeros(B, T, 5, D)),
    ("config", TypeError, "config must be an NSAConfig, got", {"block_size": 4}, None, NSAConfig),
    ("gates", ValueError, "gate_weight and gates exclude each other",
     Together(gates=torch.zeros(B, T, HQ, 3), gate_weight=torch.zeros(HQ, 3, D))),
    ("softmax_scale", TypeError, "softmax_scale must be a number or None, got", "1", True),
    ("softmax_scale", ValueError, "softmax_scale must be positive and finite in float32, got", *NO_SCALES, 0),
    ("cu_seqlens", ValueError, r"q must have shape \(total, Hq, D\), got", int32(0, T)),
    ("max_seqlen", ValueError, "max_seqlen is for packed input, got 20 without cu_seqlens", T),
    ("max_seqlen", TypeError, "max_seqlen must be an int or None, got 20.0", 20.0),
    ("causal return_aux validate", *NOT_A_BOOL),
    ("k_win", ValueError, "k_win and v_win must be None where there is no window, got one with window_size=0",
     Together(k_win=torch.zeros(B, T, HKV, D), config=CONFIG.replace(window_size=0))),
    ("k_cmp", ValueError, "compress_k_weight and k_cmp exclude each other",
     Together(k_cmp=torch.zeros(B, 5, HKV, D), compress_k_weight=torch.zeros(HKV, D, D))),
    ("v_cmp", ValueError, "compress_v_weight and v_cmp exclude each other",
     Together(v_cmp=torch.zeros(B, 5, HKV, DV), compress_v_weight=torch.zeros(HKV, DV, DV))),
    ("block_indices", TypeError, "block_indices must be a torch.Tensor or None, got", *NO_TENSORS, 1.0),
    ("block_indices", TypeError, "block_indices must be int32 or int64, got", torch.zeros(B, 3, HKV, 2)),
    ("block_indices", ValueError, r"block_indices must have shape \(2, 3, 2 or 4, n\) with n >= 1, got",
     torch.zeros(B, 3, 3, 2).int(), torch.zeros(B, HKV, 3, 2).int(), torch.zeros(B, 3, HKV, 0).int(),
     torch.zeros(3, HKV, 2).int(), torch.zeros(B, 20, HKV, 2).int()),
    ("block_indices", ValueError, "block_indices must be on q's device cpu, got meta",
     torch.zeros(B, 3, HKV, 2, device="meta").int()),
    ("backend", ValueError, "backend must be None or one of 'cute', 'eager', 'reference', got", "triton", 3, ["eager"]),
    ("backend", ValueError, "backend='cute' needs tensors on a GPU, got cpu", "cute"),
    ("memory", TypeError, "memory must be a MemoryPolicy, got", None, {"budget": 1}, 1 << 30, MemoryPolicy),
)  # fmt: skip
PACKED = (
    ("cu_seqlens", TypeError, "cu_seqlens must be a torch.Tensor or None, got list", [0, T]),
    ("cu_seqlens", TypeError, "cu_seqlens must be int32, got torch.int64", lambda x: x.long()),
    ("cu_seqlens", ValueError, r"{} must be \[sequences \+ 1\], got shape \(1", lambda x: x[None], lambda x: x[:1]),
    ("cu_seqlens", ValueError, "cu_seqlens must start at 0, got 1", lambda x: x + 1, int32(1, T)),
    ("cu_seqlens", ValueError, r"cu_seqlens must not fall, got \[0, 12, ", int32(0, 12, 9, T), int32(0, 12, 11)),
    ("cu_seqlens", ValueError, "cu_seqlens must end at the 20 tokens of q, got 19", lambda x: x.clamp(max=T - 1)),
    ("cu_seqlens", ValueError, "cu_seqlens must be on q's device cpu or .*, got meta", lambda x: x.to("meta")),
    ("max_seqlen", ValueError, "max_seqlen must be at least the longest sequence, 15, got 14", 14),
    ("max_seqlen", TypeError, "max_seqlen must be an int or None, got", 20.0, "20", True),
    ("q", ValueError, r"q must have shape \(total, Hq, D\), got", lambda x: x[None]),
    ("k", ValueError, r"k must have shape \(20, Hkv, 8\), got", lambda x: x[:-1]),
    ("block_indices", ValueError, r"block_indices must have shape \(3, 2 or 4, n\)", torch.zeros(1, 3, 2, 2).int()),
)  # fmt: skip
NO_INDEX = dict(q_index=None, k_index=None)
BY_INDEX = (
    ("q_index k_index", ValueError, "needs q_index and k_index", None),
    ("k_index", ValueError, "k_index must have 2 heads, as k has, or 1, got 3", torch.zeros(B, T, 3, 4)),
    ("k_index", ValueError, r"k_index must have shape \(2, 20, Hi, 4\)", torch.zeros(B, T, HKV, 3)),
    ("causal", ValueError, "needs causal=True", False),
    ("block_indices", ValueError, "block_indices must be None", torch.zeros(B, T, HKV, 1).int()),
    ("index_scale", ValueError, "index_scale must be positive", 0.0),
    ("config", ValueError, "q_index is for rule='index'", CONFIG),
    ("config", ValueError, "return_index_loss is for rule='index'",
     Together(NO_INDEX, config=CONFIG, return_index_loss=True)),
    ("config", ValueError, "chooses blocks by the compressed branch",
     Together(NO_INDEX, config=CONFIG.replace(branches=("selected",)))),
    ("k_win", ValueError, "k_win is of the window branch", torch.zeros(B, T, HKV, D)),
    ("compress_k_weight", ValueError, "compress_k_weight is of the compressed branch", torch.zeros(HKV, D, D)),
    ("gates", ValueError, r"gates must have shape \(2, 20, 4, 1\)", torch.zeros(B, T, HQ, 3)),
)  # fmt: skip
LISTED = (
    *of_tensors(selected_attention, keys="B S", S=30),
    ("block_indices", TypeError, "block_indices must be a torch.Tensor, got", *NO_TENSORS, None),
    ("block_indices", ValueError, "block_indices must have a list for each query, 20, .*, got 7", lambda x: x[:, :7]),
    ("block_indices", ValueError, r"block_indices must have shape \(2, 20, 2 or 4, n\)", lambda x: x[:, :, :1]),
    *not_a_size("block_size"),
    ("softmax_scale", ValueError, "softmax_scale must be positive and finite in float32, got", *NO_SCALES, 0),
    ("causal deterministic return_lse validate", *NOT_A_BOOL),
    ("cu_seqlens", ValueError, r"q must have shape \(total, Hq, D\), got", int32(0, T)),
    ("cu_seqlens_k", ValueError, "cu_seqlens_k is for packed input", int32(0, T)),
    ("q_offset", ValueError, "q_offset must be at least 0, got -1", -1, torch.tensor([0, -1]).int()),
    ("k", ValueError, "k must have at least as many tokens as q where q_offset is None, got 2 fewer",
     Together(k=torch.zeros(B, 18, HKV, D), v=torch.zeros(B, 18, HKV, DV))),
    ("backend", ValueError, "backend='cute' needs tensors on a GPU, got cpu", "cute"),
)  # fmt: skip
LISTED_PACKED = (
    ("cu_seqlens_k", TypeError, "cu_seqlens_k must be int32, got torch.int64", lambda x: x.long()),
    ("cu_seqlens_k", ValueError, "cu_seqlens_k must end at the 30 tokens of k, got 29", int32(0, 9, 29)),
    ("cu_seqlens_k", ValueError, "cu_seqlens_k must have cu_seqlens's 2 sequences, got 3", int32(0, 9, 9, 30)),
    ("cu_seqlens_k", ValueError, r"k must have shape \(20, Hkv, 8\), got", None),
    ("cu_seqlens", ValueError, "cu_seqlens must end at the 20 tokens of q, got 19", int32(0, 5, 19)),
)
TILED, OF_INDEX, INDEX_KEYS = CONFIG.replace(q_tile=8), CONFIG.replace(q_tile=1, rule="index"), torch.zeros(B, 32, 1, 4)
CACHED = (
    *of_tensors(nsa_with_kvcache),
    ("config", TypeError, "config must be an NSAConfig, got", None, {"block_size": 4}),
    ("config", NotImplementedError, "nsa_with_kvcache with q_tile=8, .*: a choice belongs to a tile", TILED),
    ("config", NotImplementedError, "compress_offset=0: it shows keys", CONFIG.replace(q_tile=1, compress_offset=0)),
    ("q", ValueError, "q's heads must be a multiple of k_cache's, got 5", torch.zeros(B, T, 5, D)),
    ("k v", ValueError, "k and v must be given together", None),
    ("k_win", ValueError, "k_win needs k_win_cache to be written to", torch.zeros(B, T, HKV, D)),
    ("v_win_cache", ValueError, "v_win must be given with k, and only then", torch.zeros(B, 32, HKV, DV)),
    *((name, ValueError, "{} must be None where there is no window, got one with window_size=0",
       Together({name: torch.zeros(B, 32, HKV, size), "config": CONFIG.replace(q_tile=1, window_size=0), "k": None,
                 "v": None, "cache_seqlens": int32(20, 20)}))
      for name, size in (("k_win_cache", D), ("v_win_cache", DV))),
    ("config", ValueError, "rule='index' needs q_index and k_index_cache, got None for one of them", OF_INDEX),
    ("config", ValueError, "k_cmp_cache is of the compressed branch", OF_INDEX.replace(branches=("selected",))),
    ("k_index_cache", ValueError, "k_index_cache is for rule='index', got it with rule='nsa'", INDEX_KEYS),
    ("k_index_cache", ValueError, "k_index must be given with k, and only then, beside a k_index_cache",
     Together(config=OF_INDEX, k_index_cache=INDEX_KEYS, q_index=torch.zeros(B, T, HKV, 4))),
    ("k_index_cache", ValueError, "k_index_cache must have 2 heads, as k has, or 1, got 3",
     Together(config=OF_INDEX, k_index_cache=torch.zeros(B, 32, 3, 4), q_index=torch.zeros(B, T, HKV, 4),
              k_index=torch.zeros(B, T, 3, 4))),
    ("k_cache", TypeError, "k_cache must have q's dtype torch.float32 or be float8_e4m3fn, got torch.float8_e5m2",
     lambda x: x.to(torch.float8_e5m2)),
    ("v_cache k_cmp_cache", TypeError, "{} must have k_cache's dtype torch.float32, got torch.float8_e4m3fn",
     lambda x: x.to(FP8)),
    ("k_scale", ValueError, "k_scale is for k_cache in float8_e4m3fn, got it with torch.float32", torch.ones(HKV)),
    ("v_win_scale", ValueError, "v_win_scale is for v_win_cache in .*, got it with none", torch.ones(HKV)),
    ("k_cmp_cache", ValueError, "k_cmp needs k_cmp_cache", Together(k_cmp=torch.zeros(B, 5, HKV, D), k_cmp_cache=None)),
    ("k_cmp_cache v_cmp_cache", ValueError, "{} must have slots for 8 keys of 32 tokens, got", lambda x: x[:, 1:]),
    ("gates", ValueError, "gate_weight and gates exclude each other",
     Together(gates=torch.zeros(B, T, HQ, 3), gate_weight=torch.zeros(HQ, 3, D))),
    ("cache_seqlens", ValueError, "cache_seqlens must be at least 0, got -1", -1),
    ("page_table", ValueError, "cmp_page_table must be given with compressed caches on pages, and only then",
     Together(page_table=torch.zeros(B, 1).int(), k_cmp_cache=torch.zeros(B, 8, HKV, D))),
    ("max_seqlen_q", ValueError, "max_seqlen_q is for packed input, got 20", T),
    ("cu_seqlens_q", ValueError, r"q must have shape \(total, Hq, D\), got", int32(0, 5, T)),
    ("block_indices", ValueError, r"must have shape \(2, 20, 2 or 4, n\)", torch.zeros(B, 19, HKV, 2).int()),
    ("out", ValueError, "out is written to, must not be expanded, nor overlap itself",
     torch.zeros(1, T, HQ, DV).expand(B, T, HQ, DV), torch.zeros(960).as_strided((B, T, HQ, DV), (T * HQ, HQ, DV, 1))),
    *not_a_size("num_splits", least=0),
    ("softmax_scale", ValueError, "softmax_scale must be positive and finite in float32, got", *NO_SCALES, 0),
    ("validate return_lse", *NOT_A_BOOL),
    ("backend", ValueError, "backend='cute' needs tensors on a GPU, got cpu", "cute"),
)  # fmt: skip
IN_FP8 = {name: x.to(FP8) for name, x in cached("cpu").items() if name.endswith("_cache")} | dict(validate=True)
SHARED, OUTPUT = torch.zeros(B, 32, HKV, D), torch.zeros(B, T, HQ, DV)
OUT_OF_CACHE = (
    ("cache_seqlens", ValueError, "sequence 1 does not fit its caches, with 20 queries and 33 tokens",
     Together(cache_seqlens=int32(0, 13), validate=True)),
    ("cache_seqlens cache_batch_idx", ValueError, "sequence 0 does not fit its caches, with 20 queries",
     Together(cache_seqlens=int32(-1, 0), validate=True), Together(cache_batch_idx=int32(B, 1), validate=True),
     Together(k=None, v=None, cache_seqlens=int32(19, 20), validate=True)),
    ("cache_batch_idx", ValueError, "cache_batch_idx must let no two sequences write .* got 1 for sequences 0 and 1",
     Together(cache_batch_idx=int32(1, 1), validate=True)),
    *((name, ValueError, r"{} is written to, must not be expanded, .* got strides \(0, ",
       Together({name: torch.zeros(1, S, HKV, size).expand(B, S, HKV, size), "validate": True}))
      for name, S, size in (("k_cache", 32, D), ("v_cache", 32, DV), ("k_cmp_cache", 8, D), ("v_cmp_cache", 8, DV))),
    ("k_cache", ValueError, "{} is written to, must not be .* overlap itself",
     Together(k_cache=torch.zeros(B, 40, HKV, D).as_strided((B, 32, HKV, D), (8, 16, 8, 1)), validate=True)),
    ("k_cmp_cache", ValueError, "v_cmp_cache must have memory of its own, got a tensor that overlaps k_cmp_cache|"
     "k_cmp_cache must have memory of its own, got a tensor that overlaps v_cmp_cache",
     Together(zip(("k_cmp_cache", "v_cmp_cache"), torch.zeros(B, 8, HKV, D + 1).unfold(3, D, 1).unbind(3)),
              v_cache=torch.zeros(B, 32, HKV, D), v=torch.zeros(B, T, HKV, D), validate=True)),
    ("v_cache", ValueError, "(v_cache|k_cache) must have memory of its own, got .* overlaps",
     Together(k_cache=SHARED, v_cache=SHARED[..., :DV], validate=True)),
    ("k_cmp_cache", ValueError, "(k_cmp_cache|k_cache) must have memory of its own, got .* overlaps",
     Together(k_cache=SHARED, k_cmp_cache=SHARED[:, -8:], validate=True)),
    ("out", ValueError, "(out|v_cache) must have memory of its own, got .* overlaps",
     Together(out=OUTPUT, v_cache=OUTPUT.view(B, 40, HKV, DV)[:, :32], validate=True)),
    ("k_scale", ValueError, "(k|v_cmp)_scale must be positive and finite, got",
     Together(IN_FP8, k_scale=torch.tensor([1.0, 0.0])), Together(IN_FP8, v_cmp_scale=torch.tensor([1.0, math.inf]))),
    ("out", ValueError, "(out|k_cache) must have memory of its own, got .* overlaps",
     Together(IN_FP8, out=OUTPUT, k_cache=OUTPUT.view(FP8).flatten()[3:].as_strided((B, 32, HKV, D), (512, 16, 8, 1)))),
)  # fmt: skip
PAGES = (
    ("page_table cmp_page_table", ValueError, "{} must name no page of a sequence twice, got 3 twice for sequence 1",
     torch.tensor([[0, 1], [3, 3]]).int()),
    ("page_table cmp_page_table", ValueError, "{} must let no two sequences write to .*, got 0 for sequences 0 and 1",
     torch.tensor([[0, 1], [0, 2]]).int()),
    ("cmp_page_table", ValueError, "cmp_page_table must let no .*, or one where another has tokens, got 1 for",
     torch.tensor([[0, 1], [1, 2]]).int()),
    ("page_table cmp_page_table", ValueError, "sequence 0 does not fit its caches, with 20 queries",
     torch.tensor([[6, 1], [2, 3]]).int(), torch.tensor([[0, -1], [2, 3]]).int()),
)  # fmt: skip
PAGED = (
    ("cmp_page_table", ValueError, "cmp_page_table must be given with compressed caches on pages, and only then", None),
    ("cache_batch_idx", ValueError, "cache_batch_idx and page_table exclude each other", torch.zeros(B).int()),
    ("k_cmp_cache v_cmp_cache", ValueError, "{} must have slots for 1 keys of a page, got 0|v_cmp_cache must have",
     lambda x: x[:, :0]),
    ("v_cmp_cache", ValueError, r"v_cmp_cache must have shape \(2, 8, 2, .*got \(2, 7, ", lambda x: x[:, 1:]),
    ("v_cmp_cache", ValueError, r"v_cmp_cache must have shape \(2, 8, 2, .*got \(1, ", lambda x: x[:1]),
    ("k_cache", ValueError, "k_cache's pages must be a multiple or a divisor of block_size=4, got 30",
     Together(k_cache=torch.zeros(B, 30, HKV, D), v_cache=torch.zeros(B, 30, HKV, DV), k_cmp_cache=None,
              v_cmp_cache=None, cmp_page_table=None)),
)  # fmt: skip
CACHE = (
    *not_a_size("batch max_seqlen num_kv_heads head_dim"),
    *not_a_size("head_dim_v page_size num_pages", optional=True),
    ("config", TypeError, "config must be an NSAConfig, got", None, {"block_size": 4}),
    ("page_size", ValueError, "page_size must be a multiple or a divisor of block_size=4, got 10", 10),
    ("page_size", ValueError, "num_pages is for a paged cache, got 9 without page_size", None),
    ("own_window", *NOT_A_BOOL),
    ("own_window", ValueError, "own_window must be False where there is no window, got True",
     Together(own_window=True, config=CONFIG.replace(q_tile=1, window_size=0))),
    ("dtype", TypeError, "dtype must be float16, .* got", torch.int32, "bfloat16", None, torch.float8_e5m2),
    ("dtype", NotImplementedError, "own_sources with dtype=float8_e4m3fn", Together(own_sources=True, dtype=FP8)),
)  # fmt: skip
OF_CACHE = (
    ("q k v", *NOT_A_TENSOR, None),
    ("k v", ValueError, r"{} must have shape \(2, 20, 2, .\), got", lambda x: x[:, 1:]),
    ("validate return_lse", *NOT_A_BOOL),
    ("page_table cache_batch_idx cache_seqlens k_cache config window", TypeError, "attend has the options .*, got {}",
     None, 1),
    ("out", ValueError, "out is written to, must not be expanded", torch.zeros(1, T, HQ, DV).expand(B, T, HQ, DV)),
    ("q", ValueError, "q must have at most 32 tokens a sequence, the caches' capacity, got 40",
     Together(q=torch.zeros(B, 40, HQ, D), k=torch.zeros(B, 40, HKV, D), v=torch.zeros(B, 40, HKV, DV))),
    *((name, ValueError, "compress and {} exclude each other, got both; pass one or neither",
       Together({name: torch.zeros(HKV, D, D), "compress": lambda *kv: kv}))
      for name in ("k_cmp", "compress_k_weight")),
)  # fmt: skip
CROP = (
    ("lengths", ValueError, r"lengths must be at most \(0, 0\), and at least 0, got", [0, 1], [-1, 0], [0], [0.0, 0]),
    ("lengths", TypeError, "lengths must be a sequence of ints, got", 0.0, None),
    ("lengths", ValueError, "lengths must be at least 0, got -1", -1),
)
REORDER = (
    ("index", ValueError, "index must be 2 numbers from 0 to 1, got", [0], [0, 2], [-1, 0], [0.0, 1]),
    ("index", TypeError, "index must be a sequence of ints, got", 0, None),
)
POLICY = (
    ("budget", TypeError, "budget must be an int or None, got", 1e9, "1 GB", True),
    ("budget", ValueError, "budget must be at least 0 bytes, got -1", -1),
    ("recompute", ValueError, "recompute must be one of 'auto', .*, got", "some", None, ["all"], True),
)
COUNTS, COMPRESS = "block_size block_counts q_tile", "compress_size compress_stride"
OF_CONFIG = (
    *not_a_size(COUNTS),
    *not_a_size(COMPRESS, optional=True),
    (f"{COUNTS} {COMPRESS} compress_offset", ValueError, "{} must be at most 2147483647, got", 2**31, 10**30),
    ("block_size compress_size", ValueError, "{} must be at most 1048576 tokens, got", 2**31 - 1, 2**20 + 8),
    ("compress_stride", ValueError, "compress_stride must divide block_size, got", 5, 32),
    ("compress_size", ValueError, "compress_stride must divide compress_size, got", 4, 12),
    ("compress_size", ValueError, "compress_size other than block_size needs q_tile=1 and rule='nsa', got", 8, 32, 24),
    ("compress_size", ValueError, "compress_stride must divide block_size, got .*=3, block_size=16",
     Together(compress_size=6, compress_stride=3, q_tile=1)),
    ("compress_offset", TypeError, "compress_offset must be an int, got", 1.5, "1", True, NAN),
    ("compress_offset", ValueError, "compress_offset must be at least -2147483647, got", -(10**30)),
    ("q_tile", ValueError, "q_tile must be 1 or a power of two up to 256, got", 24, 3, 384, 512),
    ("block_size", ValueError, "q_tile must be a multiple or a divisor of block_size, got q_tile=32, .*=24", 24),
    ("deterministic", *NOT_A_BOOL, NAN),
    *not_a_size("window_size init_blocks local_blocks", least=0),
    ("init_blocks", ValueError, r"init_blocks \+ local_blocks must be at most 2147483647, got", 2**31 - 1),
    ("rule", ValueError, "rule must be one of 'nsa', 'index', 'seed', got", "logit", None, 1, NAN),
    ("rule", ValueError, "rule='seed' needs .* local_blocks, got 8, 15, 1 and 2", "seed"),
    ("rule", ValueError, "rule='index' needs q_tile=1, got 32", "index"),
    ("rule", ValueError, "rule='index' chooses blocks of the selected branch",
     Together(rule="index", q_tile=1, branches=("window",))),
    ("branches", ValueError, "branches must be some of", (), ("selected", "selected"), ("dense",)),
    ("branches", ValueError, "needs a window, got window_size=0", Together(branches=("window",), window_size=0)),
    ("branches", TypeError, "branches must be a tuple of str", "selected"),
    ("block_sizes", TypeError, "unexpected keyword argument 'block_sizes'", 64),
    ("force_blocks", TypeError, "unexpected keyword argument 'force_blocks'", True),
)  # fmt: skip
OLD = {"tile_query": "before", "importance": "softmax", "per_head": False}
FROM_DICT = (
    ("values", TypeError, "values must be a dict of NSAConfig fields by name, got", None, {1: 1}, [("q_tile", 1)], "a"),
    ("values", ValueError, "must be fields of NSAConfig, got a, block", {"block_sizes": 64, "a": 1, "q_tile": 64}),
    ("values", ValueError, "must be fields of NSAConfig, got importance, per_head, tile", lambda x: x | OLD),
    ("values", ValueError, "block_size must be at least 1", {"block_size": 0}),
    ("values", TypeError, "force_blocks must be a bool", {"force_blocks": 1}),
    ("values", ValueError, "block_stride is the old name of compress_stride, got it beside compress_stride",
     {"block_stride": 16, "compress_stride": 16}),
    ("values", ValueError, "force_blocks is the old name of init_blocks and local_blocks, got it beside init_blocks",
     {"force_blocks": True, "init_blocks": 1}),
)  # fmt: skip
SEED = (
    ("compress_stride", ValueError, "rule='seed' needs compress_stride=block_size and 0 for compress_offset, init", 32),
    ("compress_size", ValueError, "rule='seed' needs", 32),
    ("compress_offset", ValueError, "rule='seed' needs", None),
    ("init_blocks local_blocks", ValueError, "rule='seed' needs", 1),
    ("branches", ValueError, "rule='seed' needs all branches", ("selected",)),
)
INDEXED = dict(config=NSAConfig(rule="index", branches=("selected",)))
MODULE = (
    *not_a_size("dim num_heads num_kv_heads"),
    *not_a_size("head_dim head_dim_v", optional=True),
    ("dim num_heads num_kv_heads head_dim head_dim_v", ValueError, "{} must be at most 2147483647, got", 10**30),
    ("dim", ValueError, "num_heads must divide dim", 30),
    ("num_heads", ValueError, "num_kv_heads must divide num_heads, got 2 and 5", 5),
    ("num_kv_heads", ValueError, "num_kv_heads must divide num_heads, got 3 and 4", 3),
    ("config", TypeError, "config must be an NSAConfig, got", {}, None),
    ("compression", ValueError, "compression must be one of 'mean', 'linear', 'mlp', got", "max", None, True),
    ("gate", ValueError, "gate must be one of None, 'query', 'input', 'linear', got", "none", 1),
    ("kv_per_branch", *NOT_A_BOOL),
    ("kv_per_branch", ValueError, "kv_per_branch=True needs a branch beside", Together(INDEXED, kv_per_branch=True)),
    ("compression", ValueError, "compression='mlp' needs the compressed", Together(INDEXED, compression="mlp")),
    ("index_dim", ValueError, "index_dim is for rule='index', got 8 with rule='nsa'", 8),
    ("index_dim", ValueError, "index_dim must be at least 1, got 0", Together(INDEXED, index_dim=0)),
    ("rope", TypeError, "rope must be callable or None, got", 3, "rope"),
    ("backend", ValueError, "backend must be one of None, 'cute', 'eager', 'reference', got", "fast", 3, []),
)


def layer_arguments(device: str) -> dict[str, Any]:
    own = NSAttention(32, num_heads=4, num_kv_heads=2, config=CONFIG, rope=RotaryEmbedding(8), device=device)
    return dict(x=torch.randn(B, T, 32, device=device), layer=own)


def in_a_pack(cu_seqlens: object, x: torch.Tensor | None = None) -> Together:
    return Together(x=torch.zeros(T, 32) if x is None else x, cu_seqlens=cu_seqlens)


def other_layer(**changes: Any) -> Together:
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=CONFIG, **changes)
    return Together(layer=layer, positions=torch.arange(T))


def with_cache(options: dict[str, Any] | None = None, **changes: Any) -> Together:
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=CONFIG.replace(q_tile=1), **options or {})
    return Together(dict(layer=layer, cache=empty_cache()) | changes)


FORWARD = (
    ("x", *NOT_A_TENSOR, None),
    ("x", ValueError, r"x must have shape \(B, T, 32\), got", torch.zeros(T, 32), torch.zeros(B, T, 31)),
    ("x", TypeError, "x must have the layer's dtype torch.float32, got", lambda x: x.double(), lambda x: x.int()),
    ("x", ValueError, "x must be on the layer's device cpu, got meta", lambda x: x.to("meta")),
    ("x", ValueError, r"x must have shape \(total, 32\)", in_a_pack(int32(0, T), torch.zeros(B, T, 32))),
    ("positions", TypeError, "positions must be a torch.Tensor or None, got list", list(range(T))),
    ("positions", TypeError, "positions must be integers, got", torch.zeros(T), torch.ones(T, dtype=torch.bool)),
    ("positions", ValueError, r"{} must have shape \(2, 20\) or \(20,\)", torch.arange(T - 1), torch.ones(3, T).int()),
    ("positions", ValueError, "positions are for rope", other_layer(rope=None)),
    ("cu_seqlens", TypeError, "cu_seqlens must be a torch.Tensor or None, got list", in_a_pack([0, T])),
    ("cu_seqlens", TypeError, "cu_seqlens must be int32, got torch.int64", in_a_pack(torch.tensor([0, T]))),
    ("cu_seqlens", ValueError, r"cu_seqlens must be \[sequences \+ 1\]", in_a_pack(int32(0))),
    ("cache", TypeError, "cache must be an NSACache or None, got", True, {}, NSACache),
    ("cache", ValueError, "cache must have the layer's config NSAConfig", empty_cache()),
    ("cache", ValueError, "cache needs causal=True", with_cache(causal=False), with_cache(return_aux=True)),
)
OF_NSA = (  # refused by nsa or NSACache.attend, which come after the projections
    ("cache", ValueError, r"page_table must have shape \(1, pages\), got \(2,", with_cache(x=torch.zeros(1, T, 32))),
    ("cache", ValueError, "sources must be given with compress to a cache", with_cache(dict(kv_per_branch=True))),
    ("cache", ValueError, r"v must have shape .*, 6\), got .*, 8\)", with_cache()),
    ("cache", ValueError, r"k_cache must have shape .*, 16\), got .*, 8\)", with_cache(dict(head_dim=16))),
    ("cache", TypeError, "k_cache must have q's dtype torch.float64 or be .*, got torch.float32",
     with_cache(dict(head_dim_v=6, dtype=torch.float64), x=torch.zeros(B, T, 32).double())),
    ("x", ValueError, "no empty dimension", torch.zeros(1, 0, 32)),
    ("cu_seqlens", ValueError, "cu_seqlens must end", in_a_pack(int32(0, 4))),
    ("max_seqlen", ValueError, "max_seqlen is for packed input", 5),
    ("causal", *NOT_A_BOOL),
)  # fmt: skip
ROPE = (
    ("head_dim", ValueError, "head_dim must be even and at least 2, got", 7, 0, -2),
    ("slowest_of", ValueError, "slowest_of must be even and at least head_dim=8, got", 6, 9),
    ("base", ValueError, "base must be above 1 and finite, got", 1.0, NAN, INF, -1.0, 10**400),
)
ROTATED = (
    ("q", ValueError, "q must have head dimension 8, got 6", torch.zeros(1, 4, 2, 6)),
    ("k", ValueError, "k must have head dimension 8, got 10", torch.zeros(1, 4, 1, 10)),
)
SHAPES = (
    (
        "shapes",
        ValueError,
        r"a shape must be \(B, T, Hq, Hkv, D\) or .*, got",
        [(1, 128, 4, 64)],
        [(1, 128, 4, 2, 64, 64, 1)],
    ),
)
GOOD_CONFIG = dict(block_size=16, compress_stride=8, block_counts=4, q_tile=32, window_size=8)
TABLES = (
    Table("nsa_with_kvcache", nsa_with_kvcache, cached, CACHED),
    Table("nsa_with_kvcache, validate", nsa_with_kvcache, cached, OUT_OF_CACHE, first=False),
    Table("nsa_with_kvcache, paged", nsa_with_kvcache, paged, PAGED),
    Table("nsa_with_kvcache, pages", nsa_with_kvcache, two_pages, PAGES, first=False),
    Table("NSACache", NSACache, cache_arguments, CACHE),
    Table("NSACache.attend", lambda **arguments: empty_cache().attend(**arguments), appended, OF_CACHE, first=False),
    Table("NSACache.crop", lambda **one: empty_cache().crop(**one), lambda device: dict(lengths=0), CROP, first=False),
    Table("NSACache.reorder", lambda **one: empty_cache().reorder(**one), lambda device: dict(index=[1, 0]), REORDER,
          first=False),
    Table("nsa", nsa, batch, NSA),
    Table("nsa, packed", nsa, packed, PACKED),
    Table("nsa, index", nsa, indexed, BY_INDEX),
    Table("selected_attention", selected_attention, listed, LISTED),
    Table("selected_attention, packed", selected_attention, listed_packed, LISTED_PACKED),
    Table("MemoryPolicy", MemoryPolicy, lambda device: dict(budget=1 << 30, recompute="all"), POLICY),
    Table("NSAConfig", NSAConfig, lambda device: GOOD_CONFIG, OF_CONFIG),
    Table("NSAConfig.replace", NSAConfig(**GOOD_CONFIG).replace, lambda device: {}, OF_CONFIG),
    Table("NSAConfig.from_dict", NSAConfig.from_dict, lambda device: dict(values={"block_size": 16}), FROM_DICT),
    Table("NSAConfig.seed", NSAConfig.seed, lambda device: {}, SEED),
    Table("NSAttention", NSAttention, lambda device: dict(dim=32, num_heads=4, num_kv_heads=2, config=CONFIG), MODULE),
    Table("NSAttention.forward", lambda x, layer, **more: layer(x, **more), layer_arguments, FORWARD),
    Table("NSAttention.forward, late", lambda x, layer, **more: layer(x, **more), layer_arguments, OF_NSA, first=False),
    Table("RotaryEmbedding", RotaryEmbedding, lambda device: dict(head_dim=8, base=10000.0), ROPE),
    Table("RotaryEmbedding.forward", RotaryEmbedding(8), lambda device: dict(
        q=torch.zeros(1, 4, 2, 8), k=torch.zeros(1, 4, 1, 8), positions=torch.arange(4)), ROTATED),
    Table("warm_up", warm_up, lambda device: dict(config=CONFIG, shapes=[(1, 128, 4, 2, 64)]), SHAPES),
    Table("testing.Case", Case, lambda device: {}, (("gate", ValueError, "gate must be", "sum", None),)),
)  # fmt: skip
