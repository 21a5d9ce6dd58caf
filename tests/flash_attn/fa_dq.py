"""Calls of SM90's dq pass for a case: row sums from an exact reference, and how accumulators lie."""

from __future__ import annotations

import math
from typing import Any

import torch
from fa_cases import Case, Inputs
from fa_lists import forward_lists
from fa_reference import attention, visible

LISTS = dict(T_q=700, T_k=700, lists="both")
HALVES = dict(block=(128, 64), **LISTS)
LENGTHS = ((100, 130), (0, 50), (600, 600), (1, 1), (64, 300))  # of packed queries and keys


def layout(case: Case, start: int = 64) -> Any:
    """How the accumulator lies that other calls of backward would share."""
    from flash_attn.cute.shared_backward import AccumLayout, Tile

    tile = Tile(90, 64, 128, 1, False, False, 32, None)
    heads = (case.Hq,) if case.packed else (case.B, case.Hq)
    tokens = sum(pair[0] for pair in case.packed) if case.packed else case.T_q
    return AccumLayout(heads, tokens, len(case.packed) if case.packed else None, start, case.D, tile)


def options(case: Case, x: Inputs) -> dict[str, Any]:
    from fa_mask_mods import MASK_MODS

    given: dict[str, Any] = {
        "causal": case.causal,
        "window_size": case.window,
        "mask_mod": MASK_MODS[case.mask_mod][0] if case.mask_mod else None,
        "aux_tensors": x.aux,
    }
    if x.cu_seqlens is not None:
        given |= {"cu_seqlens_q": x.cu_seqlens[0], "cu_seqlens_k": x.cu_seqlens[1]}
        given |= {"max_seqlen_q": max(pair[0] for pair in case.packed)}
    return given


def row_sums(case: Case, x: Inputs, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dpsum and lse_log2, exact; NaN where nothing may be read."""
    o = attention(case, x, torch.float64)[0]
    accum = layout(case, start)
    sums = [torch.full((*accum.heads, accum.rows), torch.nan, device="cuda") for _ in range(2)]
    begin_q = begin_k = 0
    for b, (T_q, T_k) in enumerate(case.lengths):
        if case.packed:
            of_q, of_k = slice(begin_q, begin_q + T_q), slice(begin_k, begin_k + T_k)
            q, k, do, out = x.q[of_q], x.k[of_k], x.do[of_q], o[of_q]
            at, lead = (begin_q + b * start) // start * start, (slice(None),)
        else:
            q, k, do, out, at, lead = x.q[b], x.k[b], x.do[b], o[b], 0, (b, slice(None))
        k = k.double().repeat_interleave(case.Hq // case.Hkv, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * case.D**-0.5
        lse = scores.masked_fill(~visible(case, b, x, q.device), -torch.inf).logsumexp(-1)
        lse = torch.where(lse.isneginf(), 0.0, lse * math.log2(math.e))
        for whole, part in zip(sums, ((do.double() * out).sum(-1).T, lse)):
            whole[(*lead, slice(at, at + T_q))] = part.float()
        begin_q, begin_k = begin_q + T_q, begin_k + T_k
    return tuple(sums)


def call(case: Case, x: Inputs, rows: tuple[torch.Tensor, torch.Tensor], lists: Any = None, **output: Any) -> None:
    """The dq pass over the case's lists, or others."""
    from flash_attn.cute.bwd_dq_sm90.interface import backward_dq

    lists = forward_lists(case) if lists is None else lists
    backward_dq(x.q, x.k, x.v, x.do, *rows, lists, **options(case, x), **output)


def rounded_sums(case: Case, x: Inputs) -> float:
    """What rounding dP and dpsum to fp32 can make of dq.

    Both sum products of do with v. A row that sees one key has to get 0 for their difference, and gets what rounding
    leaves, while plain PyTorch, which rounds such sums to bf16 alike, may get 0.
    """
    rows, values = (float(t.double().norm(dim=-1).max()) for t in (x.do, x.v))
    return torch.finfo(torch.float32).eps * rows * values * float(x.k.abs().max()) * case.D**-0.5
