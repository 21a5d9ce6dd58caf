"""Differentiable exchanges between ranks, by the operators that the compiler knows.

An exchange is two functions: one sends, and returns what may be read after the other one only. What is launched between
them runs beside the exchange, and in backward what was between them does again.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_layer.call_spec import accumulation_dtype
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel

Tensor = torch.Tensor
OPS = torch.ops._c10d_functional


def send_to_heads(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """Send a rank's rows of all heads: x [B, n, R, h, ...], heads by the rank that gets them."""
    return _Sent.apply(x, rows, cp, True)


def receive_of_heads(sent: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """All rows of this rank's heads: [B, N, h, ...], in order."""
    return _Received.apply(sent, rows, cp, True)


def send_to_tokens(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """Send all rows of a rank's heads: x [B, N, h, ...]."""
    return _Sent.apply(x, rows, cp, False)


def receive_of_tokens(sent: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """This rank's rows of all heads: [B, n, R, h, ...]."""
    return _Received.apply(sent, rows, cp, False)


def gather(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """All rows of every rank: [B, n, ...] -> [B, N, ...], in order; gradients are summed in the accumulation dtype."""
    return _Gathered.apply(x, rows, cp)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, cp: ContextParallel, to_heads: bool) -> Tensor:
        ctx.static = rows, cp, to_heads
        return exchanged(_by_heads(x, rows) if to_heads else rows.to_ranks(x), cp)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        rows, cp, to_heads = ctx.static
        d = OPS.wait_tensor(d)
        return _of_heads(d, rows, cp) if to_heads else rows.to_whole(d), None, None, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, rows: Rows, cp: ContextParallel, to_heads: bool) -> Tensor:
        ctx.static = rows, cp, to_heads
        sent = OPS.wait_tensor(sent)
        return rows.to_whole(sent) if to_heads else _of_heads(sent, rows, cp)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        rows, cp, to_heads = ctx.static
        return exchanged(rows.to_ranks(d) if to_heads else _by_heads(d, rows), cp), None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
        ctx.static = rows, cp, x.dtype
        return rows.to_whole(OPS.wait_tensor(send_to_all(x, rows, cp)))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        rows, cp, dtype = ctx.static
        summed = OPS.wait_tensor(send_sums(d.to(accumulation_dtype(dtype)), rows, cp))
        return own(summed, rows, cp).to(dtype), None, None


def exchanged(x: Tensor, cp: ContextParallel) -> Tensor:
    """Part r of x [R, ...] to rank r, for each r; to be waited for."""
    return OPS.all_to_all_single(x.contiguous(), [1] * cp.size, [1] * cp.size, cp.group_name)


def send_to_all(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """This rank's rows [B, n, ...] to all: [R, B, most, ...], to be waited for."""
    x = rows.padded(x).contiguous()
    return OPS.all_gather_into_tensor(x, cp.size, cp.group_name).view(cp.size, *x.shape)


def send_sums(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """What this rank adds to all rows, [B, N, ...], to those who have them: the sums, [1, B, most, ...], to be waited
    for."""
    return send_sums_by_rank(rows.to_ranks(x), cp)


def send_sums_by_rank(x: Tensor, cp: ContextParallel) -> Tensor:
    """The same of x [R, B, most, ...]."""
    return OPS.reduce_scatter_tensor(x, "sum", cp.size, cp.group_name)


def own(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """[1, B, most, ...] -> this rank's rows [B, n, ...]."""
    return x[0, :, : sum(rows.of_rank(cp.rank))]


def _by_heads(x: Tensor, rows: Rows) -> Tensor:
    """[B, n, R, h, ...] -> [R, B, most, h, ...]"""
    return rows.padded(x).movedim(2, 0)


def _of_heads(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """The inverse of `_by_heads`."""
    return x[:, :, : sum(rows.of_rank(cp.rank))].movedim(0, 2)
