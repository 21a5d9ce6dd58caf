"""Exchanges between ranks by collectives, which the compiler knows; and differentiable ones on these or on messages.

An exchange is two functions: one sends, and returns what may be read after the other one only. What is launched between
them runs beside the exchange, and in backward what was between them does again.

A graph waits for what a collective returns, for no view of it: Inductor keeps what is sent up to such a wait alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import accumulation_dtype
from nsa_layer.context_parallel.messages import Messages, Parts, copy
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
OPS = torch.ops._c10d_functional


class Collectives(NamedTuple):
    """`Messages` as a collective for each tensor: ranks' rows are padded to as many, in the order of the ranks."""

    cp: ContextParallel

    def begin(self) -> None:
        """Every tensor was sent when it was given."""

    def held(self, sent: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Tensors that stand for what was sent, between two functions of autograd: the same."""
        return sent

    released = held

    def send_to_all(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's rows [B, n, ...] to all ranks."""
        x = rows.padded(x).contiguous()[None]
        # A gloo group's two threads assign the name of what they did last to one string, which is freed twice where it
        # is longer than 15 characters (PyTorch 2.13): of these collectives the all-gather's is.
        if x.device.type == "cpu":
            return self._by_rank(x.expand(self.cp.size, *x.shape[1:]))
        return OPS.all_gather_into_tensor(x, self.cp.size, self.cp.group_name)

    def send_to_heads(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's rows x [B, n, R, h, ...], those of part r to rank r."""
        return self._by_rank(rows.padded(x).movedim(2, 0))

    def whole(self, sent: Tensor, rows: Rows) -> Tensor:
        """All rows [B, N, ...], in order, of what `send_to_all` or `send_to_heads` returned."""
        return rows.to_whole(OPS.wait_tensor(sent))

    def send_to_tokens(self, x: Tensor, rows: Rows) -> Tensor:
        """All rows x [B, N, h, ...] to those who have them."""
        return self._by_rank(rows.to_ranks(x))

    def by_rank(self, sent: Tensor, rows: Rows) -> Tensor:
        """This rank's rows, [B, n, R, h, ...], of what `send_to_tokens` returned."""
        return OPS.wait_tensor(sent)[:, :, : sum(rows.of_rank(self.cp.rank))].movedim(0, 2)

    def send_sums(self, parts: Parts, rows: Rows, seen: object) -> Tensor:
        """Parts of the sum of all rows to those who have them.

        Args:
            parts: rows of the whole, and what this rank adds to them, [B, rows, ...].
            seen: not asked for.
        """
        end, dtype, total = sum(rows.counts), accumulation_dtype(parts[0][1].dtype), None
        for which, x in parts:  # no writes to parts: see `overlapped.Written`
            x = F.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (which.start, end - which.stop))
            total = x if total is None else total + x
        return self.send_sum(total, rows)

    def send_sum(self, x: Tensor, rows: Rows) -> Tensor:
        """Part of a sum of all rows, [B, N, ...], to those who have them, in the accumulation dtype."""
        x = rows.to_ranks(x.to(accumulation_dtype(x.dtype)))
        return OPS.reduce_scatter_tensor(x, "sum", self.cp.size, self.cp.group_name)

    def write_sums(self, sent: Tensor, rows: Rows, out: Tensor) -> None:
        """Write sums of this rank's rows to out [B, n, ...]."""
        out.copy_(self.sums(sent, rows))

    def sums(self, sent: Tensor, rows: Rows) -> Tensor:
        """Sums of this rank's rows [B, n, ...], in the accumulation dtype."""
        return OPS.wait_tensor(sent)[0, :, : sum(rows.of_rank(self.cp.rank))]

    def _by_rank(self, x: Tensor) -> Tensor:
        each = [1] * self.cp.size
        return OPS.all_to_all_single(x.contiguous(), each, each, self.cp.group_name)


def exchange_for(x: Tensor, cp: ContextParallel) -> Collectives | Messages:
    """A launch of exchanges of tensors like x."""
    return Collectives(cp) if is_recorded(x) else Messages(cp)


def send(
    xs: Sequence[Tensor], rows: tuple[Rows, ...], exchange: Collectives | Messages, *, to_heads: bool
) -> tuple[Tensor, ...]:
    """Launch an exchange.

    Args:
        xs: with `to_heads` a rank's rows of all heads, [B, n, R, h, ...], heads by the rank that gets them; else all
            rows of a rank's heads, [B, N, h, ...].
        rows: of each.
    """
    return _Sent.apply(exchange, rows, to_heads, *xs)


def receive(
    sent: Sequence[Tensor], rows: tuple[Rows, ...], exchange: Collectives | Messages, *, to_heads: bool
) -> tuple[Tensor, ...]:
    """Wait for what was sent: with `to_heads` all rows of this rank's heads, [B, N, h, ...], in order; else this
    rank's rows of all heads, [B, n, R, h, ...]."""
    return _Received.apply(exchange, rows, to_heads, *sent)


def divided(x: Tensor, ranks: int, sizes: list[int]) -> tuple[Tensor, ...]:
    """x [B, n, H, ...] by step, each [B, n, R, h, ...], with so many heads."""
    return _Divided.apply(x, ranks, sizes) if len(sizes) > 1 else (x.unflatten(2, (ranks, -1)),)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `divided`."""
    return _Joined.apply(*parts) if len(parts) > 1 else parts[0].flatten(2, 3)


def gather(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """All rows of every rank: [B, n, ...] -> [B, N, ...], in order; gradients are summed in the accumulation dtype."""
    return _Gathered.apply(x, rows, Collectives(cp))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Collectives | Messages, rows: tuple[Rows, ...], to_heads: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.static = exchange, rows, to_heads
        return _differentiable(ctx, _send(exchange, rows, xs, to_heads=to_heads))

    @staticmethod
    def backward(ctx: Any, *ds: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange, rows, to_heads = ctx.static
        return None, None, None, *_receive(exchange, rows, _wanted(ctx, ds), to_heads=not to_heads)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Collectives | Messages, rows: tuple[Rows, ...], to_heads: bool, *sent: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.static = exchange, rows, to_heads
        return _differentiable(ctx, _receive(exchange, rows, sent, to_heads=to_heads))

    @staticmethod
    def backward(ctx: Any, *ds: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange, rows, to_heads = ctx.static
        return None, None, None, *_send(exchange, rows, _wanted(ctx, ds), to_heads=not to_heads)


def _differentiable(ctx: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """With gradients of those whose inputs have them."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for x, needed in zip(found, ctx.needs_input_grad[3:]) if not needed))
    return found


def _wanted(ctx: Any, ds: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of inputs that have some; a graph makes zeros of the others."""
    return tuple(d if needed else None for d, needed in zip(ds, ctx.needs_input_grad[3:], strict=True))


def _send(
    exchange: Collectives | Messages, rows: tuple[Rows, ...], xs: Sequence[Tensor | None], *, to_heads: bool
) -> tuple[Tensor | None, ...]:
    how = exchange.send_to_heads if to_heads else exchange.send_to_tokens
    found = tuple(None if x is None else how(x, each) for x, each in zip(xs, rows, strict=True))
    exchange.begin()
    return exchange.held(found)


def _receive(
    exchange: Collectives | Messages, rows: tuple[Rows, ...], sent: Sequence[Tensor | None], *, to_heads: bool
) -> tuple[Tensor | None, ...]:
    how = exchange.whole if to_heads else exchange.by_rank
    return tuple(None if x is None else how(x, each) for x, each in zip(exchange.released(sent), rows, strict=True))


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.unflatten(2, (ranks, -1)).split(sizes, 3)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor | None, ...]:
        return _join(parts), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[3] for part in parts]
        return _join(parts)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        return d.unflatten(2, (-1, sum(ctx.sizes))).split(ctx.sizes, 3)


def _join(parts: Sequence[Tensor]) -> Tensor:
    (B, n, R, _, *rest), sizes = parts[0].shape, [part.shape[3] for part in parts]
    whole = parts[0].new_empty((B, n, R, sum(sizes), *rest))
    for into, part in zip(whole.split(sizes, 3), parts, strict=True):
        copy(into, part)
    return whole.flatten(2, 3)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, exchange: Collectives) -> Tensor:
        ctx.static = rows, exchange
        return exchange.whole(exchange.send_to_all(x, rows), rows)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        rows, exchange = ctx.static
        return exchange.sums(exchange.send_sum(d, rows), rows).to(d.dtype), None, None
