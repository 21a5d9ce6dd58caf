"""The calls that the benchmark of block-sparse attention compares, and what fp32 says about their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tile_lists import BLOCK, HKV, HQ, Case, D, selected_in_sequences

BACKWARD = (
    "backward", "planned", "two passes", "deterministic", "deterministic, planned", "deterministic, one pass",
)  # fmt: skip
WAYS = ("forward", *BACKWARD)
ONE_PASS = ("one pass", "one pass, locks")  # of masks.py: without a plan, and in the order of semaphore values
WIDE = 65  # room in a row of lists, from which kernels' CTAs have a tile each
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
    """The calls `ways`, of `WAYS` and `ONE_PASS`, and "plan": making the plan that others follow, which never waits.

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
        "one pass": lambda: back(backward, 1),
        "one pass, locks": lambda: back(_with_locks(forward, backward), 1, deterministic=True),
        "plan": lambda: lambda: plan_backward(backward, listed=M * capacity(forward), **options),
    }
    return {way: makers[way]() for way in (*ways, "plan")}


def _with_locks(forward: Any, backward: Any) -> Any:
    from flash_attn.cute.block_lists import compute_dq_write_order

    order, order_full = compute_dq_write_order(*forward[:4], *backward[:4], spt=True)
    return backward._replace(dq_write_order=order, dq_write_order_full=order_full, spt=True)


@dataclass(frozen=True)
class Setup:
    """Compile-time properties of a case's kernels, beyond its masks and heads.

    Attributes:
        wide: rows of forward lists have room for more than `WIDE` blocks.
        groups: without a plan, a CTA of backward loops over a list for all query heads of a key/value head.
    """

    case: Case
    wide: bool = False
    groups: bool = False

    @classmethod
    def of(cls, case: Case) -> Setup:
        """As the case's own lists have it."""
        from flash_attn.cute.bwd_sm90.two_pass import loops_over_group
        from flash_attn.cute.fwd_sm90.persistence import capacity

        forward, backward = case.lists()
        q, v = (torch.empty(1, case.T, H, case.head_dim, device="meta") for H in (HQ, HKV))
        return cls(case, capacity(forward) >= WIDE, loops_over_group(forward, backward, q, v))


def check(setup: Setup, way: str) -> float | str:
    """The largest error of a way against fp32 over the largest value, or what went wrong."""
    torch.manual_seed(0)
    case = setup.case
    try:
        lists, tensors = case.lists(), inputs(1, case.T, head_dim=case.head_dim)
        expected = fp32(*tensors, _visible(case))
        _poison_memory()
        with _kernels_of(setup):
            call = variants(case, lists, tensors, [way])[way]
            got = call()
            if way.startswith("deterministic") and not all(map(torch.equal, got, call())):
                return "another result the second time"
        return _largest(got[:1] if way == "forward" else got, expected[way != "forward" :])
    except Exception as error:  # every way of failing is a line of the table
        return _said(error)


def dense_calls(T: int) -> dict[str, Call]:
    """The dense causal kernels."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, do = inputs(1, T)
    o, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    return {
        "forward": lambda: _flash_attn_fwd(q, k, v, causal=True, return_lse=True),
        "backward": lambda: _flash_attn_bwd(q, k, v, o, do, lse, causal=True),
    }


def compile_dense() -> None:
    for call in dense_calls(1024).values():
        call()


@contextmanager
def _kernels_of(setup: Setup) -> Iterator[None]:
    """Make calls on a case's few blocks compile the kernels of its own lists."""
    from flash_attn.cute.bwd_sm90 import two_pass
    from flash_attn.cute.fwd_sm90 import persistence

    with ExitStack() as undo:
        undo.enter_context(patch.object(two_pass, "LOOPS_OVER_GROUP", setup.groups))
        if setup.wide:
            undo.enter_context(patch.object(persistence, "MOST_ENTRIES", 0))
        yield


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
        both = dict(block_sparse_tensors=backward, block_sparse_tensors_fwd=forward)
        gradients = _flash_attn_bwd(q, k, v, o, do, lse, **both, **options)
    except Exception as error:
        return dict.fromkeys(("forward", "backward"), _said(error))
    return {"forward": _largest([o[None]], expected), "backward": _largest([g[None] for g in gradients], expected[1:])}


def fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, visible: torch.Tensor) -> Inputs:
    """o, dq, dk, dv of one sequence; `visible`: bool [Hq, Tq, Tk]. A query that sees nothing gets zeros."""
    leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
    own_k, own_v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in leaves[1:])
    score = torch.einsum("bqhd,bkhd->bhqk", leaves[0], own_k) * q.shape[-1] ** -0.5
    weight = score.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    o = torch.einsum("bhqk,bkhd->bqhd", weight, own_v)
    return (o.detach(), *torch.autograd.grad(o, leaves, do.float()))


def _visible(case: Case) -> torch.Tensor:
    """bool [Hq, T, T], from the table that the lists are made of."""
    t = torch.arange(case.T, device="cuda")
    behind = t.view(-1, 1) - t
    if "window_size_left" in case.mask:
        return ((behind >= 0) & (behind < case.listed * BLOCK)).expand(HQ, -1, -1)
    tokens = case.table().repeat_interleave(BLOCK, 1).repeat_interleave(case.block_k, 2)
    tokens = tokens & (behind >= 0) if case.mask["causal"] else tokens
    return tokens.repeat_interleave(HQ // case.heads, 0)


def _poison_memory() -> None:
    """Fill free memory with NaN, so that output which a kernel leaves unwritten is NaN."""
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
