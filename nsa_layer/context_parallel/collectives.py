"""Differentiable exchanges between ranks, by the operators that the compiler knows.

An exchange is two functions: one sends, and returns what may be read after the other one only. What is launched between
them runs beside the exchange, and in backward what was between them does again.

A graph waits for what a collective returns, for no view of it: Inductor keeps what is sent up to such a wait alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nsa_layer.call_spec import accumulation_dtype
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
OPS = torch.ops._c10d_functional


class Exchange(NamedTuple):
    """The rows of a tensor that each rank has.

    Attributes:
        in_place: chunks are sent from and to where they stand in the whole, which is not the order of the ranks: NCCL
            can, and no row is copied once more.
    """

    rows: Rows
    cp: ContextParallel
    in_place: bool = False

    @classmethod
    def of(cls, x: Tensor, rows: Rows, cp: ContextParallel) -> Exchange:
        """For a tensor [B, ...]."""
        if is_recorded(x):
            return cls(rows, cp)
        of_chunks = rows.even and rows.most > 0 and not rows.in_order
        return cls(rows, cp, of_chunks and len(x) == 1 and _takes_lists(x))

    def send_to_whole(self, x: Tensor) -> Tensor:
        """Part r of x [R, B, most, ...], this rank's rows, to rank r; `whole` waits for what comes."""
        if not self.in_place:
            return self._by_rank(x)
        whole = x.new_empty((1, sum(self.rows.counts), *x.shape[3:]))
        self._by_chunk(whole, self._chunks(whole), self._parts(contiguous(x)))
        return whole.view(x.shape)

    def send_to_all(self, x: Tensor) -> Tensor:
        """This rank's rows [B, n, ...] to all ranks; `whole` waits for what comes."""
        if self.in_place:
            whole, size = x.new_empty((1, sum(self.rows.counts), *x.shape[2:])), self.cp.size
            parts = contiguous(x).split(self.rows.of_rank(self.cp.rank), dim=1)
            self._by_chunk(whole, self._chunks(whole), [[part] * size for part in parts])
            return whole.view(size, *x.shape)
        return OPS.all_gather_into_tensor(contiguous(self.rows.padded(x))[None], self.cp.size, self.cp.group_name)

    def whole(self, sent: Tensor) -> Tensor:
        """All rows [B, N, ...], in order."""
        sent = OPS.wait_tensor(sent)
        return sent.view(1, -1, *sent.shape[3:]) if self.in_place else self.rows.to_whole(sent)

    def send_to_ranks(self, x: Tensor) -> Tensor:
        """Rows of x [B, N, ...] to those who have them; `by_rank` waits for what comes."""
        if not self.in_place:
            return self._by_rank(self.rows.to_ranks(x))
        found = x.new_empty((self.cp.size, 1, self.rows.most, *x.shape[2:]))
        self._by_chunk(found, self._parts(found), self._chunks(contiguous(x)))
        return found

    def by_rank(self, sent: Tensor) -> Tensor:
        """This rank's rows, [R, B, n, ...], of every rank."""
        return OPS.wait_tensor(sent)[:, :, : sum(self.rows.of_rank(self.cp.rank))]

    def send_sums(self, x: Tensor) -> Tensor:
        """Send this rank's part of all rows, [B, N, ...], to those who have them; `sums` waits for the sums."""
        return self.send_sums_by_rank(self.rows.to_ranks(x))

    def send_sums_by_rank(self, x: Tensor) -> Tensor:
        """`send_sums` of x by rank, [R, B, most, ...]."""
        return OPS.reduce_scatter_tensor(x, "sum", self.cp.size, self.cp.group_name)

    def sums(self, sent: Tensor) -> Tensor:
        """This rank's rows [B, n, ...]."""
        return OPS.wait_tensor(sent)[0, :, : sum(self.rows.of_rank(self.cp.rank))]

    def _by_rank(self, x: Tensor) -> Tensor:
        each = [1] * self.cp.size
        return OPS.all_to_all_single(contiguous(x), each, each, self.cp.group_name)

    def _by_chunk(self, into: Tensor, outputs: list[list[Tensor]], inputs: list[list[Tensor]]) -> None:
        """The ranks' first chunks, then their second ones; outputs are parts of `into`."""
        for pair in zip(outputs, inputs, strict=True):
            work = dist.all_to_all(*pair, group=self.cp.group, async_op=True)
            torch._C._distributed_c10d._register_work(into, work)

    def _chunks(self, whole: Tensor) -> list[list[Tensor]]:
        """The i-th chunks of each rank, in [1, N, ...]."""
        parts = whole.split(self.rows.counts[0], dim=1)
        return [[parts[number] for number in numbers] for numbers in zip(*map(self.rows.chunks, range(self.cp.size)))]

    def _parts(self, x: Tensor) -> list[list[Tensor]]:
        """The i-th chunks of each rank, in [R, 1, n, ...]."""
        return [list(part.unbind()) for part in x.split(self.rows.counts[0], dim=2)]


def _takes_lists(x: Tensor) -> bool:
    return x.is_cuda


def copy(into: Tensor, x: Tensor) -> None:
    """``into.copy_(x)``, of one dtype 16 bytes at a time where rows allow it: an element at a time takes thrice as long
    where rows are not in order."""
    if x.dtype == into.dtype and _is_wide(x) and _is_wide(into):
        into, x = into.view(torch.complex128), x.view(torch.complex128)
    into.copy_(x)


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``, as `copy` copies."""
    if x.is_contiguous() or not x.is_cuda or is_recorded(x):
        return x.contiguous()
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy(found, x)
    return found


def _is_wide(x: Tensor) -> bool:
    step = 16 // x.element_size()
    rows = x.stride()[:-1] + (x.storage_offset(), x.shape[-1])
    return x.is_cuda and x.stride(-1) == 1 and not any(each % step for each in rows)


def send_to_heads(x: Tensor, exchange: Exchange) -> Tensor:
    """Send a rank's rows of all heads: x [B, n, R, h, ...], heads by the rank that gets them."""
    return _Sent.apply(x, exchange, True)


def receive_of_heads(sent: Tensor, exchange: Exchange) -> Tensor:
    """All rows of this rank's heads: [B, N, h, ...], in order."""
    return _Received.apply(sent, exchange, True)


def send_to_tokens(x: Tensor, exchange: Exchange) -> Tensor:
    """Send all rows of a rank's heads: x [B, N, h, ...]."""
    return _Sent.apply(x, exchange, False)


def receive_of_tokens(sent: Tensor, exchange: Exchange) -> Tensor:
    """This rank's rows of all heads: [B, n, R, h, ...]."""
    return _Received.apply(sent, exchange, False)


def divided(x: Tensor, ranks: int, steps: int) -> tuple[Tensor, ...]:
    """x [B, n, H, ...] by step, each [B, n, R, h, ...]."""
    return _Divided.apply(x, ranks, steps) if steps > 1 else (x.unflatten(2, (ranks, -1)),)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `divided`."""
    return _Joined.apply(*parts) if len(parts) > 1 else parts[0].flatten(2, 3)


def gather(x: Tensor, rows: Rows, cp: ContextParallel) -> Tensor:
    """All rows of every rank: [B, n, ...] -> [B, N, ...], in order; gradients are summed in the accumulation dtype."""
    return _Gathered.apply(x, Exchange(rows, cp))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
        ctx.static = exchange, to_heads
        return _send(x, exchange, to_heads)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        exchange, to_heads = ctx.static
        return _receive(d, exchange, not to_heads), None, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
        ctx.static = exchange, to_heads
        return _receive(sent, exchange, to_heads)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        exchange, to_heads = ctx.static
        return _send(d, exchange, not to_heads), None, None


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, steps: int) -> tuple[Tensor, ...]:
        return x.unflatten(2, (ranks, steps, -1)).unbind(3)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor | None, ...]:
        return _join(parts), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.ranks = parts[0].shape[2]
        return _join(parts)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        return d.unflatten(2, (ctx.ranks, -1)).unflatten(3, (len(ctx.needs_input_grad), -1)).unbind(3)


def _join(parts: Sequence[Tensor]) -> Tensor:
    (B, n, R, h, *rest), steps = parts[0].shape, len(parts)
    whole = parts[0].new_empty((B, n, R, steps, h, *rest))
    for into, part in zip(whole.unbind(3), parts, strict=True):
        copy(into, part)
    return whole.flatten(2, 4)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.static = exchange, x.dtype
        return exchange.whole(exchange.send_to_all(x))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        exchange, dtype = ctx.static
        return exchange.sums(exchange.send_sums(d.to(accumulation_dtype(dtype)))).to(dtype), None


def _send(x: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
    if to_heads:  # [B, n, R, h, ...] -> [R, B, most, h, ...]
        return exchange.send_to_whole(exchange.rows.padded(x).movedim(2, 0))
    return exchange.send_to_ranks(x)


def _receive(sent: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
    return exchange.whole(sent) if to_heads else exchange.by_rank(sent).movedim(0, 2)
