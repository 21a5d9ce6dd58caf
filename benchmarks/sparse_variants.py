"""The calls that the benchmark of block-sparse attention compares, and what fp32 says about their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tile_lists import BLOCK, HKV, HQ, Case, D, selected_in_sequences

BACKWARD = ("backward", "planned", "two passes", "deterministic", "deterministic, one pass")
WAYS = ("forward", *BACKWARD)
Call = Callable[[], tuple[torch.Tensor, ...]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(*lead: int) -> Inputs:
    """q, k, v, do: [*lead, H, D]."""
    q, k, v, do = (torch.randn(*lead, H, D, device="cuda", dtype=torch.bfloat16) for H in (HQ, HKV, HKV, HQ))
    return q, k, v, do


def variants(case: Case, lists: tuple[Any, Any], tensors: Inputs) -> dict[str, Call]:
    """`WAYS`, and "plan": making the plan that "planned" follows, which waits for nothing."""
    from flash_attn.cute.backward_plan import plan_backward
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, do = tensors
    forward, backward = lists
    M = case.T // BLOCK
    most = M * sum(0 if idx is None else idx.shape[-1] for idx in (forward.mask_block_idx, forward.full_block_idx))
    options = dict(num_heads=HQ, num_heads_kv=HKV, num_q_blocks=M)
    ordered = plan_backward(backward, deterministic=True, schedule="right to left", **options)
    planned = plan_backward(backward, **options)
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, block_sparse_tensors=forward, **case.mask)

    def back(with_lists: Any, passes: int, **more: bool) -> Call:
        of_both = dict(block_sparse_tensors=with_lists, block_sparse_tensors_fwd=forward, passes=passes)
        return lambda: _flash_attn_bwd(q, k, v, o, do, lse, **of_both, **case.mask, **more)

    return {
        "forward": lambda: _flash_attn_fwd(q, k, v, return_lse=True, block_sparse_tensors=forward, **case.mask),
        "backward": back(backward, 1),
        "planned": back(planned, 1),
        "two passes": back(planned, 2),
        "deterministic": back(planned, 2, deterministic=True),
        "deterministic, one pass": back(ordered, 1, deterministic=True),
        "plan": lambda: plan_backward(backward, listed=most, **options),
    }


def check(case: Case) -> dict[str, float | str]:
    """Of each way, the largest error against fp32 over the largest value, or what went wrong."""
    torch.manual_seed(0)
    lists, tensors = case.lists(), inputs(1, case.T)
    expected = fp32(*tensors, _visible(case))
    _poison_memory()
    found: dict[str, float | str] = {}
    try:
        calls = variants(case, lists, tensors)
    except Exception as error:  # every way of failing is a line of the table
        return dict.fromkeys(WAYS, _said(error))
    for way in WAYS:
        try:
            got = calls[way]()
            found[way] = _largest(got[:1] if way == "forward" else got, expected[way != "forward" :])
            if way.startswith("deterministic") and not all(map(torch.equal, got, calls[way]())):
                found[way] = "another result the second time"
        except Exception as error:
            found[way] = _said(error)
    return found


def check_packed() -> dict[str, float | str]:
    """`check` of packed sequences with compact lists, and of the same ones padded."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    torch.manual_seed(0)
    lengths = [300, 1, 900]
    total = sum(lengths)
    tensors = inputs(total)
    table = Case("selected", 1024, 4).table()
    tokens = table.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2).tril()
    visible = torch.zeros(HQ, total, total, dtype=torch.bool, device="cuda")
    at = 0
    for length in lengths:
        own = tokens[:, :length, :length].repeat_interleave(HQ // HKV, 0)
        visible[:, at : at + length, at : at + length] = own
        at += length
    expected = fp32(*(t[None] for t in tensors), visible)
    cu = torch.tensor([0, 300, 301, 1201], dtype=torch.int32, device="cuda")
    options = dict(causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=900, max_seqlen_k=900)
    q, k, v, do = tensors
    try:
        forward, backward = selected_in_sequences(lengths, 4, packed=True)
        _poison_memory()
        o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, block_sparse_tensors=forward, **options)
        gradients = _flash_attn_bwd(q, k, v, o, do, lse, block_sparse_tensors=backward, **options)
    except Exception as error:
        return dict.fromkeys(("forward", "backward"), _said(error))
    return {"forward": _largest([o[None]], expected), "backward": _largest([g[None] for g in gradients], expected[1:])}


def fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, visible: torch.Tensor) -> Inputs:
    """o, dq, dk, dv of one sequence; `visible`: bool [Hq, Tq, Tk]. A query that sees nothing gets zeros."""
    leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
    own_k, own_v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in leaves[1:])
    score = torch.einsum("bqhd,bkhd->bhqk", leaves[0], own_k) * D**-0.5
    weight = score.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    o = torch.einsum("bhqk,bkhd->bqhd", weight, own_v)
    return (o.detach(), *torch.autograd.grad(o, leaves, do.float()))


def _visible(case: Case) -> torch.Tensor:
    """bool [Hq, T, T], from the table that the lists are made of."""
    t = torch.arange(case.T, device="cuda")
    behind = t.view(-1, 1) - t
    if case.kind == "window":
        return ((behind >= 0) & (behind < case.listed * BLOCK)).expand(HQ, -1, -1)
    tokens = case.table().repeat_interleave(BLOCK, 1).repeat_interleave(case.block_k, 2)
    tokens = tokens if case.kind == "random" else tokens & (behind >= 0)
    return tokens.repeat_interleave(HQ // case.heads, 0)


def _poison_memory() -> None:
    """What kernels leave unwritten then shows as NaN."""
    held = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    del held


def _largest(got: Any, expected: Any) -> float | str:
    errors = [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected)]
    bad = [error for error in errors if not error < 0.02]
    return f"error {bad[0]:.2g}" if bad else max(errors)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"
