"""Exchanges between ranks: point-to-point messages of rows, all tensors of an exchange in one launch.

Graphs have them in operators, which send the same messages when they run: `exchange` here, and those of `gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from nsa_layer.context_parallel.layout import Ranges, ShardLayout
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.chunked import sum_rounded
from nsa_layer.operators.registration import OPS, differentiate, register

Tensor = torch.Tensor
Addends = list[tuple[slice, Tensor]]  # rows of a sum, and what is to be added there


class Exchange:
    """Tensors that travel together.

    NCCL's kernel holds multiprocessors while it waits for the other ranks' kernels: one launch for all tensors waits
    once. The functions that add a tensor return what is complete after `wait`; what is launched between `start` and
    `wait` runs beside the exchange. Every rank adds the same tensors in the same order.
    """

    def __init__(self, cp: ContextParallel, *, kernels: bool = False) -> None:
        """kernels: sums may use the layer's own kernels."""
        self.cp, self.kernels = cp, kernels
        self.held: Sequence[Tensor | None] = ()  # buffers between two halves of an exchange
        self._messages, self._works, self._sums = [], [], []

    def start(self) -> None:
        """Launch, after everything that was launched before on the current stream."""
        if self._messages:
            self._works = launch(self._messages)

    def wait(self) -> None:
        """Let the current stream wait for the messages, and add up sums."""
        for work in self._works:
            work.wait()
        for out, addends in self._sums:
            _add_up(out, addends, kernels=self.kernels)
        self._messages, self._works, self._sums = [], [], []

    def gather(self, x: Tensor | Sequence[Tensor], layout: ShardLayout, ranges: Ranges | None = None) -> list[Tensor]:
        """[B, rows, ...] for each of this rank's ranges, of all ranks' rows.

        Args:
            x: this rank's rows [B, n, ...]; a sequence has those for each rank.
            ranges: of each rank; None: all rows.
        """
        rank, in_place = self.cp.rank, ranges is None and isinstance(x, Tensor)  # what is sent is in the buffer too
        xs, ranges = [x] * self.cp.size if isinstance(x, Tensor) else x, ranges or layout.all_rows
        buffers = [xs[0].new_empty((len(xs[0]), rows.stop - rows.start, *xs[0].shape[2:])) for rows in ranges[rank]]
        for reader, i, rows, holder, local in layout.pieces(ranges, rank):
            if reader == holder:
                copy(buffers[i][:, rows], xs[rank][:, local])
            elif holder == rank:
                self._add(dist.isend, buffers[0][:, rows] if in_place else contiguous(xs[reader][:, local]), reader)
            else:
                self._add(dist.irecv, buffers[i][:, rows], holder)
        return buffers

    def reduce_scatter(
        self, addends: Sequence[Tensor], layout: ShardLayout, out: Tensor, ranges: Ranges | None = None
    ) -> None:
        """Write sums over the ranks to this rank's rows `out` [B, n, ...]: made in fp32, and rounded once.

        Args:
            addends: [B, rows, ...] for each of this rank's ranges.
            ranges: as for `gather`.
        """
        self._sums.append((out, self._scatter(addends, layout, ranges)))

    def to_heads(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """This rank's rows x [B, n, R, h, ...], heads r to rank r -> all rows of this rank's heads, [B, N, h, ...]."""
        return self.gather(x.unbind(2), layout)[0]

    def to_tokens(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """All rows x [B, N, h, ...] of this rank's heads -> this rank's rows of all heads, [B, n, R, h, ...]."""
        rank = self.cp.rank
        buffer = x.new_empty((self.cp.size, len(x), layout.local(rank), *x.shape[2:]))
        for local, own in self._scatter([x], layout, into=buffer):
            copy(buffer[rank, :, local], own)
        return buffer.movedim(0, 2)

    def _scatter(
        self, xs: Sequence[Tensor], layout: ShardLayout, ranges: Ranges | None = None, into: Tensor | None = None
    ) -> Addends:
        """This rank's rows of all ranks' tensors, arguments as for `reduce_scatter`.

        Args:
            into: [R, B, n, ...] takes the other ranks' rows, which are not returned then.
        """
        xs, rank, received = [contiguous(x) for x in xs], self.cp.rank, []
        for reader, i, rows, holder, local in layout.pieces(ranges or layout.all_rows, rank):
            if holder != rank:
                self._add(dist.isend, xs[i][:, rows], holder)
            elif reader == rank:
                received.append((local, xs[i][:, rows]))
            elif into is None:
                received.append((local, xs[0].new_empty((len(xs[0]), local.stop - local.start, *xs[0].shape[2:]))))
                self._add(dist.irecv, received[-1][1], reader)
            else:
                self._add(dist.irecv, into[reader, :, local], reader)
        return received

    def _add(self, how: Callable[..., Any], x: Tensor, rank: int) -> None:
        for row in x.unbind():
            if row.numel():
                self._messages.append(dist.P2POp(how, row, group=self.cp.group, group_peer=rank))


def exchange(
    way: str, xs: Sequence[Tensor], layouts: Sequence[ShardLayout], cp: ContextParallel, ranges: Ranges | None = None
) -> tuple[Tensor, ...]:
    """An `Exchange` from start to end by the operator, differentiable: of tensors, or of one tensor's ranges.

    Args:
        way: "to_heads" or "to_tokens"; "gather" of one tensor, or "reduce_scatter" of its addends.
    """
    return _Exchange.apply(way, layouts, cp, ranges, *xs)


def gather(x: Tensor, layout: ShardLayout, cp: ContextParallel, ranges: Ranges | None = None) -> tuple[Tensor, ...]:
    """Differentiable `Exchange.gather`."""
    return exchange("gather", [x], [layout], cp, ranges or layout.all_rows)


INVERSE = dict(to_heads="to_tokens", to_tokens="to_heads", gather="reduce_scatter", reduce_scatter="gather")


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: str, layouts: Sequence[ShardLayout], cp: ContextParallel, ranges: Ranges | None, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.static = way, layouts, cp, ranges
        return tuple(_by_operator(way, xs, layouts, cp, ranges))

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:
        (way, layouts, cp, ranges), needs = ctx.static, ctx.needs_input_grad[4:]
        if ranges is None:
            ds, layouts = zip(*((d, of) for d, of, need in zip(ds, layouts, needs) if need))
        grads = iter(_by_operator(INVERSE[way], ds, layouts, cp, ranges))
        return *(None,) * 4, *(next(grads) if need else None for need in needs)


def _by_operator(
    way: str, xs: Sequence[Tensor], layouts: Sequence[ShardLayout], cp: ContextParallel, ranges: Ranges | None
) -> list[Tensor]:
    counts = [count for layout in layouts for count in layout.counts]
    ends = [end for of_rank in ranges or () for rows in of_rank for end in (rows.start, rows.stop)]
    return OPS.exchange.default(list(xs), way, counts, ends, *static_of(cp))


CP = "str group_name, str? load_balance, int rank, int size"  # the rank too: graphs are kept by their constants


def static_of(cp: ContextParallel) -> tuple[str, str | None, int, int]:
    """Arguments of operators for `CP`."""
    return cp.group_name, cp.load_balance, cp.rank, cp.size


def ranks_of(group_name: str, load_balance: str | None, rank: int, size: int) -> ContextParallel:
    """The inverse of `static_of`."""
    return ContextParallel(dist.distributed_c10d._resolve_process_group(group_name), load_balance=load_balance)


def _arguments(counts: Sequence[int], ends: Sequence[int], cp: ContextParallel) -> tuple[list[ShardLayout], Ranges]:
    """Layouts and ranges of the operator's numbers."""
    layouts = [ShardLayout(tuple(of), cp.size, cp.load_balance) for of in _split(counts, cp.num_chunks)]
    rows = [slice(*pair) for pair in _split(ends, 2)]
    return layouts, _split(rows, len(rows) // cp.size or 1)


def _split(x: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def _exchange(xs: list[Tensor], way: str, counts: list[int], ends: list[int], *cp: Any) -> list[Tensor]:
    cp = ranks_of(*cp)
    (layouts, ranges), together = _arguments(counts, ends, cp), Exchange(cp)
    if way == "gather":
        outputs = together.gather(xs[0], layouts[0], ranges)
    elif way == "reduce_scatter":
        outputs = [xs[0].new_empty((len(xs[0]), layouts[0].local(cp.rank), *xs[0].shape[2:]))]
        together.reduce_scatter(xs, layouts[0], outputs[0], ranges)
    else:
        outputs = [getattr(together, way)(x, layout) for x, layout in zip(xs, layouts, strict=True)]
    together.start()
    together.wait()
    return [x.contiguous() for x in outputs]


def _exchange_fake(xs: list[Tensor], way: str, counts: list[int], ends: list[int], *cp: Any) -> list[Tensor]:
    cp, x = ranks_of(*cp), xs[0]
    layouts, ranges = _arguments(counts, ends, cp)
    if way == "gather":
        return [x.new_empty((len(x), rows.stop - rows.start, *x.shape[2:])) for rows in ranges[cp.rank]]
    if way == "reduce_scatter":
        return [x.new_empty((len(x), layouts[0].local(cp.rank), *x.shape[2:]))]
    if way == "to_heads":
        return [x.new_empty((len(x), layout.total, *x.shape[3:])) for x, layout in zip(xs, layouts)]
    shapes = [(len(x), layout.local(cp.rank), cp.size, *x.shape[2:]) for x, layout in zip(xs, layouts)]
    return [x.new_empty(shape) for x, shape in zip(xs, shapes)]


_schema = f"exchange(Tensor[] xs, str way, SymInt[] counts, SymInt[] ends, {CP}) -> Tensor[]"
differentiate(register(_schema, _exchange, _exchange_fake), _exchange)


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


def _add_up(out: Tensor, addends: Addends, *, kernels: bool) -> None:
    """Write the sum of addends, rounded once, to out [B, n, ...]."""
    some = (..., *[None] * (4 - out.dim()))
    out, addends = out[some], [(rows, x[some]) for rows, x in addends]
    ends = sorted({0, out.shape[1], *(end for rows, _ in addends for end in (rows.start, rows.stop))})
    for first, end in pairwise(ends):
        here = [x[:, first - at.start : end - at.start] for at, x in addends if at.start <= first and end <= at.stop]
        if not here:
            out[:, first:end].zero_()
            continue
        for into, *parts in zip(out[:, first:end], *here):
            sum_rounded(parts, out.dtype, out=into, kernels=kernels)
