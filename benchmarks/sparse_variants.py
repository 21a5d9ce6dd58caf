"""The calls that the benchmark of block-sparse attention compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tile_lists import BLOCK, HKV, HQ, Case, D

BACKWARD = (
    "backward", "planned", "two passes", "deterministic", "deterministic, planned", "deterministic, one pass",
)  # fmt: skip
WAYS = ("forward", *BACKWARD)
Call = Callable[[], tuple[torch.Tensor, ...]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(*lead: int, head_dim: int = D) -> Inputs:
    """q, k, v, do: [*lead, H, head_dim]."""
    q, k, v, do = (torch.randn(*lead, H, head_dim, device="cuda", dtype=torch.bfloat16) for H in (HQ, HKV, HKV, HQ))
    return q, k, v, do


def ordered_plan(backward: Any, T: int) -> Any:
    """Backward lists with a deterministic plan."""
    from flash_attn.cute.lists.backward_plan import plan_backward

    options = dict(num_heads=HQ, num_heads_kv=HKV, num_q_blocks=T // BLOCK)
    return plan_backward(backward, deterministic=True, schedule="longest first", **options)


def variants(case: Case, lists: tuple[Any, Any], tensors: Inputs, ways: Iterable[str] = WAYS) -> dict[str, Call]:
    """The calls `ways`, of `WAYS`, and "plan": making the plan that others follow, which never waits.

    "backward" and "deterministic" are calls as a user makes them, who gives lists of both directions, without a plan;
    "planned" and "deterministic, planned" the same with one. The others say how many passes they take.
    """
    from flash_attn.cute.fwd_sm90.persistence import capacity
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    from flash_attn.cute.lists.backward_plan import plan_backward

    q, k, v, do = tensors
    forward, backward = lists
    M = case.T // BLOCK
    options = dict(num_heads=HQ, num_heads_kv=HKV, num_q_blocks=M)
    planned = plan_backward(backward, **options)
    o, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, block_sparse_tensors=forward, **case.mask)

    def back(with_lists: Any, passes: int | None, **more: bool) -> Call:
        of_both = dict(block_sparse_tensors=with_lists, block_sparse_tensors_fwd=forward, passes=passes)
        return lambda: _flash_attn_bwd(q, k, v, o, do, lse, **of_both, **case.mask, **more)

    makers: dict[str, Callable[[], Call]] = {
        "forward": lambda: lambda: _flash_attn_fwd(q, k, v, return_lse=True, block_sparse_tensors=forward, **case.mask),
        "backward": lambda: back(backward, None),
        "planned": lambda: back(planned, None),
        "two passes": lambda: back(planned, 2),
        "deterministic": lambda: back(backward, None, deterministic=True),
        "deterministic, planned": lambda: back(planned, None, deterministic=True),
        "deterministic, one pass": lambda: back(ordered_plan(backward, case.T), 1, deterministic=True),
        "plan": lambda: lambda: plan_backward(backward, listed=M * capacity(forward), **options),
    }
    return {way: makers[way]() for way in (*ways, "plan")}


def dense_calls(T: int) -> dict[str, Call]:
    """The dense causal kernels."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, do = inputs(1, T)
    o, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    return {
        "forward": lambda: _flash_attn_fwd(q, k, v, causal=True, return_lse=True),
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, causal=True),
    }
