"""Exchanges between ranks: point-to-point messages in eager calls, functional collectives in graphs.

`Messages` and `Collectives` have the same functions. Those that send (`all_gather`, `to_heads`, `to_tokens`,
`reduce_scatter`) return buffers; `start` launches; those that receive (`gathered`, `by_head`, `write_sum`) wait, and
return what the buffers then hold. What is launched between `start` and the first wait runs beside the exchange.

Every rank makes its launches in the same order, of the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nsa_layer.call_spec import accumulation_dtype
from nsa_layer.context_parallel.layout import ShardLayout
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.chunked import sum_rounded
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
Addends = list[tuple[slice, Tensor]]  # rows of a sum, and what is to be added there
OPS = torch.ops._c10d_functional


class Messages:
    """Messages of rows, from and to where they stand in memory: all tensors of an exchange in one launch.

    NCCL's kernel holds multiprocessors while it waits for the other ranks' kernels: one launch for all tensors of a
    step waits once. Gradients of keys travel in the dtype of the call, and their rank sums them in fp32.
    """

    def __init__(self, cp: ContextParallel, *, kernels: bool = False) -> None:
        """kernels: sums may use the layer's own kernels."""
        self.cp, self.kernels = cp, kernels
        self._messages, self._works, self._held = [], [], ()

    def start(self) -> None:
        """Launch, after everything that was launched before on the current stream."""
        if self._messages:
            self._works = launch(self._messages)

    def all_gather(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """This rank's rows x [B, n, ...] to all ranks."""
        return self._to_whole([x] * self.cp.size, layout)

    def to_heads(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """This rank's rows x [B, n, R, h, ...], heads r to rank r."""
        own = self.cp.rank
        return self._to_whole([part if r == own else contiguous(part) for r, part in enumerate(x.unbind(2))], layout)

    def to_tokens(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """All rows x [B, N, h, ...] of this rank's heads to the ranks that hold the rows."""
        x, local = contiguous(x), sum(layout.rank_counts(self.cp.rank))
        buffer = x.new_empty((self.cp.size, len(x), local, *x.shape[2:]))
        for _, rank, rows, here in layout.chunks():
            if rank != self.cp.rank:
                self._add(dist.isend, x[:, rows], rank)
                continue
            copy(buffer[rank, :, here], x[:, rows])
            for peer in self._peers():
                self._add(dist.irecv, buffer[peer, :, here], peer)
        return buffer

    def reduce_scatter(
        self, addends: Addends, layout: ShardLayout, key_ranges: Sequence[Sequence[slice]]
    ) -> list[Addends]:
        """This rank's addends of a sum of all rows, [B, rows, ...], to the ranks that hold the rows.

        Args:
            key_ranges: for each rank the rows of its addends.

        Returns:
            For each of this rank's chunks the addends of all ranks, whose rows count from the chunk's first one.
        """
        addends, sums = [(rows, contiguous(x)) for rows, x in addends], []
        for _, rank, chunk, _ in layout.chunks():
            if rank != self.cp.rank:
                for rows, x in addends:
                    self._add(dist.isend, x[:, _shift(_common(chunk, rows), rows)], rank)
                continue
            received: Addends = []
            for peer, ranges in enumerate(key_ranges):
                for i, rows in enumerate(ranges):
                    common, like = _common(chunk, rows), addends[0][1]
                    if common.start == common.stop:
                        continue
                    if peer == rank:
                        x = addends[i][1][:, _shift(common, rows)]
                    else:
                        x = like.new_empty((len(like), common.stop - common.start, *like.shape[2:]))
                        self._add(dist.irecv, x, peer)
                    received.append((_shift(common, chunk), x))
            sums.append(received)
        return sums

    def gathered(self, buffer: Tensor, layout: ShardLayout) -> Tensor:
        """All rows [B, N, ...], in order, of what `all_gather` or `to_heads` sent."""
        self._wait()
        return buffer

    def by_head(self, buffer: Tensor, layout: ShardLayout) -> Tensor:
        """This rank's rows of all heads, [B, n, R, h, ...], of what `to_tokens` sent."""
        self._wait()
        return buffer.movedim(0, 2)

    def write_sum(self, sums: list[Addends], layout: ShardLayout, out: Tensor) -> None:
        """Write sums of this rank's rows, made in fp32 and rounded once, to out [B, n, ...]."""
        self._wait()
        for chunk, addends in zip(out.split(layout.rank_counts(self.cp.rank), dim=1), sums, strict=True):
            _add_up(chunk, addends, kernels=self.kernels)

    def hold(self, buffers: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Empty tensors that stand for buffers between two autograd functions: backward's have other shapes."""
        self._held = buffers
        return tuple(None if x is None else x.new_empty(0) for x in buffers)

    def release(self, stand_ins: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The buffers that `hold` took."""
        held, self._held = self._held, ()
        return held

    def _to_whole(self, parts: Sequence[Tensor], layout: ShardLayout) -> Tensor:
        """A part of this rank's rows to each rank."""
        own = parts[self.cp.rank]
        whole = own.new_empty((len(own), layout.total, *own.shape[2:]))
        for _, rank, rows, local in layout.chunks():
            if rank != self.cp.rank:
                self._add(dist.irecv, whole[:, rows], rank)
                continue
            copy(whole[:, rows], own[:, local])
            for peer in self._peers():
                self._add(dist.isend, whole[:, rows] if parts[peer] is own else parts[peer][:, local], peer)
        return whole

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.cp.size) if peer != self.cp.rank]

    def _add(self, how: Callable[..., Any], x: Tensor, rank: int) -> None:
        for row in x.unbind():
            if row.numel():
                self._messages.append(dist.P2POp(how, row, group=self.cp.group, group_peer=rank))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._messages, self._works = [], []


class Collectives:
    """The same exchanges as functional collectives, one for each tensor, which a compiler sees; rows are padded.

    Inductor keeps what is sent up to a wait for what the collective returned, not for a view of it.
    """

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp

    def start(self) -> None:
        """Nothing: each tensor is sent at once."""

    def all_gather(self, x: Tensor, layout: ShardLayout) -> Tensor:
        x = layout.pad(x).contiguous()[None]
        # The two threads of a gloo group assign the name of their last operation to one string, without a lock
        # (PyTorch 2.13): a name of more than 15 characters, such as the all-gather's, is freed twice.
        if x.device.type == "cpu":
            return self._all_to_all(x.expand(self.cp.size, *x.shape[1:]))
        return OPS.all_gather_into_tensor(x, self.cp.size, self.cp.group_name)

    def to_heads(self, x: Tensor, layout: ShardLayout) -> Tensor:
        return self._all_to_all(layout.pad(x).movedim(2, 0))

    def to_tokens(self, x: Tensor, layout: ShardLayout) -> Tensor:
        return self._all_to_all(layout.split(x))

    def reduce_scatter(self, addends: Addends, layout: ShardLayout, key_ranges: object = None) -> Tensor:
        dtype, total = accumulation_dtype(addends[0][1].dtype), None
        for rows, x in addends:
            x, outside = x.to(dtype), (rows.start, layout.total - rows.stop)
            if any(outside):  # padded: each write to a slice of a tensor doubles Inductor's expressions
                x = F.pad(x, (0, 0) * (x.dim() - 2) + outside)
            total = x if total is None else total + x
        return OPS.reduce_scatter_tensor(layout.split(total), "sum", self.cp.size, self.cp.group_name)

    def gathered(self, buffer: Tensor, layout: ShardLayout) -> Tensor:
        return layout.merge(OPS.wait_tensor(buffer))

    def by_head(self, buffer: Tensor, layout: ShardLayout) -> Tensor:
        return self._local(OPS.wait_tensor(buffer), layout).movedim(0, 2)

    def write_sum(self, buffer: Tensor, layout: ShardLayout, out: Tensor) -> None:
        out.copy_(self.sum(buffer, layout))

    def sum(self, buffer: Tensor, layout: ShardLayout) -> Tensor:
        """Sums of this rank's rows [B, n, ...] in the accumulation dtype."""
        return self._local(OPS.wait_tensor(buffer), layout)[0]

    def hold(self, buffers: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The buffers: forward's and backward's have the same shapes."""
        return buffers

    release = hold

    def _local(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """[.., B, most, ...] without padding."""
        return x[:, :, : sum(layout.rank_counts(self.cp.rank))]

    def _all_to_all(self, x: Tensor) -> Tensor:
        each = [1] * self.cp.size
        return OPS.all_to_all_single(x.contiguous(), each, each, self.cp.group_name)


def transport_of(x: Tensor, cp: ContextParallel) -> Collectives | Messages:
    """The transport of one exchange of tensors like x."""
    return Collectives(cp) if is_recorded(x) else Messages(cp)


def gather(x: Tensor, layout: ShardLayout, cp: ContextParallel) -> Tensor:
    """Differentiable all-gather [B, n, ...] -> [B, N, ...], in order; backward sums in the accumulation dtype."""
    return _Gather.apply(x, layout, Collectives(cp))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: ShardLayout, transport: Collectives) -> Tensor:
        ctx.static = layout, transport
        return transport.gathered(transport.all_gather(x, layout), layout)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        layout, transport = ctx.static
        buffer = transport.reduce_scatter([(slice(0, layout.total), d)], layout)
        return transport.sum(buffer, layout).to(d.dtype), None, None


# One place for messages to be launched, which benchmarks replace.
def launch(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Launch messages together."""
    return dist.batch_isend_irecv(messages)


def copy(into: Tensor, x: Tensor) -> None:
    """``into.copy_(x)``, 16 bytes at a time where rows allow it: PyTorch copies strided rows by element, three times
    slower."""
    if x.dtype == into.dtype and _is_wide(x) and _is_wide(into):
        into, x = into.view(torch.complex128), x.view(torch.complex128)
    into.copy_(x)


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()`` by `copy`."""
    if x.is_contiguous() or not x.is_cuda:
        return x.contiguous()
    packed = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy(packed, x)
    return packed


def _is_wide(x: Tensor) -> bool:
    step = 16 // x.element_size()
    sizes = x.stride()[:-1] + (x.storage_offset(), x.shape[-1])
    return x.is_cuda and x.stride(-1) == 1 and not any(size % step for size in sizes)


def _common(a: slice, b: slice) -> slice:
    """Rows of both, which may be none."""
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def _shift(rows: slice, origin: slice) -> slice:
    """Rows, counted from the first one of `origin`."""
    return slice(rows.start - origin.start, rows.stop - origin.start)


def _add_up(out: Tensor, addends: Addends, *, kernels: bool) -> None:
    """Write the sum of addends, rounded once, to out [B, n, H, D]."""
    ends = sorted({0, out.shape[1], *(end for rows, _ in addends for end in (rows.start, rows.stop))})
    for first, end in pairwise(ends):
        here = [x[:, first - at.start : end - at.start] for at, x in addends if at.start <= first and end <= at.stop]
        if not here:
            out[:, first:end].zero_()
        for into, *parts in zip(out[:, first:end], *here):
            sum_rounded(parts, out.dtype, out=into, kernels=kernels)
