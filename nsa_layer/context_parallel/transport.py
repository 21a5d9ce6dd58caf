"""Exchanges between ranks: point-to-point messages of rows, all tensors of an exchange in one launch.

In graphs they are inside operators, which send the same messages: `exchange` here, `gather` and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from nsa_layer.context_parallel.layout import ShardLayout
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.chunked import sum_rounded
from nsa_layer.operators.registration import OPS, differentiate, register

Tensor = torch.Tensor
Addends = list[tuple[slice, Tensor]]  # rows of a sum, and the tensor to add there
INVERSE = dict(to_heads="to_tokens", to_tokens="to_heads", gather="reduce_scatter", reduce_scatter="gather")
CP = "str group_name, str? load_balance, int rank, int size"  # the rank too: graphs are kept by their constants


class Exchange:
    """Tensors that one launch of messages exchanges.

    NCCL's kernel holds multiprocessors while it waits for the other ranks' kernels: one launch for all tensors waits
    once. Functions that add a tensor return a result that is complete after `wait`; kernels launched between `start`
    and `wait` run beside the exchange. Every rank adds the same tensors in the same order.
    """

    def __init__(self, *, kernels: bool = False) -> None:
        """kernels: sums may use the layer's own kernels."""
        self.kernels, self._messages, self._works, self._sums = kernels, [], [], []

    def start(self) -> None:
        """Launch, after everything that was launched before on the current stream."""
        if self._messages:
            self._works = launch_messages(self._messages)

    def wait(self) -> None:
        """Let the current stream wait for the messages, and add up sums."""
        for work in self._works:
            work.wait()
        for out, addends in self._sums:
            _add_up(out, addends, kernels=self.kernels)
        self._messages, self._works, self._sums = [], [], []

    def __del__(self) -> None:
        """After an error nothing has waited: kernels launched from now on do, before they use the memory."""
        if self._works and self._messages[0].tensor.is_cuda:
            for work in self._works:
                work.wait()

    def gather(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """This rank's rows x [B, n, ...] -> the rows of all ranks that it reads, [B, rows, ...]."""
        return self._gather([x] * layout.cp.size, layout, in_place=layout.ranges is None)

    def reduce_scatter(self, xs: Tensor | Sequence[Tensor], layout: ShardLayout, out: Tensor | None = None) -> Tensor:
        """Rows as of `gather`, or of each range -> this rank's rows `out` [B, n, ...]: sums over the ranks and
        ranges, made in fp32, and rounded once."""
        if isinstance(xs, Tensor):
            xs = xs.split(layout.sizes, 1)
        out = xs[0].new_empty((len(xs[0]), layout.local, *xs[0].shape[2:])) if out is None else out
        self._sums.append((out, self._scatter(xs, layout)))
        return out

    def to_heads(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """This rank's rows x [B, n, R, h, ...], heads r to rank r -> all rows of this rank's heads, [B, N, h, ...]."""
        return self._gather(x.unbind(2), layout)

    def to_tokens(self, x: Tensor, layout: ShardLayout) -> Tensor:
        """All rows x [B, N, h, ...] of this rank's heads -> this rank's rows of all heads, [B, n, R, h, ...]."""
        size, rank = layout.cp.size, layout.cp.rank
        buffer = x.new_empty((size, len(x), layout.local, *x.shape[2:]))
        for local, part in self._scatter([x], layout, into=buffer):
            copy(buffer[rank, :, local], part)
        return buffer.movedim(0, 2)

    def _gather(self, xs: Sequence[Tensor], layout: ShardLayout, *, in_place: bool = False) -> Tensor:
        """The rows that this rank reads.

        Args:
            xs: this rank's rows, as each rank reads them; in_place: all, which are sent from the result.
        """
        rank = layout.cp.rank
        whole = xs[0].new_empty((len(xs[0]), sum(layout.sizes), *xs[0].shape[2:]))
        ranges = whole.split(layout.sizes, 1)
        for reader, i, rows, holder, local in layout.pieces():
            if reader == holder:
                copy(ranges[i][:, rows], xs[rank][:, local])
            elif holder == rank:
                self._add(dist.isend, whole[:, rows] if in_place else contiguous(xs[reader][:, local]), reader, layout)
            else:
                self._add(dist.irecv, ranges[i][:, rows], holder, layout)
        return whole

    def _scatter(self, xs: Sequence[Tensor], layout: ShardLayout, into: Tensor | None = None) -> Addends:
        """This rank's rows, from every rank that reads them, of the ranges xs that this one reads.

        Args:
            into: [R, B, n, ...]: other ranks' rows are written there, and not returned.
        """
        xs, rank, received = [contiguous(x) for x in xs], layout.cp.rank, []
        for reader, i, rows, holder, local in layout.pieces():
            if holder != rank:
                self._add(dist.isend, xs[i][:, rows], holder, layout)
            elif reader == rank:
                received.append((local, xs[i][:, rows]))
            elif into is None:
                received.append((local, xs[0].new_empty((len(xs[0]), local.stop - local.start, *xs[0].shape[2:]))))
                self._add(dist.irecv, received[-1][1], reader, layout)
            else:
                self._add(dist.irecv, into[reader, :, local], reader, layout)
        return received

    def _add(self, how: Callable[..., Any], x: Tensor, rank: int, layout: ShardLayout) -> None:
        for row in x.unbind():
            if row.numel():
                self._messages.append(dist.P2POp(how, unowned(row), group=layout.cp.group, group_peer=rank))


class Linear(torch.autograd.Function):
    """A linear function of tensors, whose backward is another one: each maps tensors, or None, to tensors, or None."""

    @staticmethod
    def forward(
        ctx: Any, apply: Callable[..., Sequence[Tensor]], transposed: Callable[..., Any], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transposed, outputs = transposed, tuple(apply(*xs))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, needed in zip(outputs, ctx.needs_input_grad[2:]) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *ds: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(d is None for d in ds):
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *ctx.transposed(*ds)


def exchange(way: str, xs: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> tuple[Tensor, ...]:
    """The method `way` of `Exchange` from start to end by the operator, differentiable; layouts with ranges are of one
    tensor alone."""
    return Linear.apply(partial(_by_operator, way, layouts), partial(_by_operator, INVERSE[way], layouts), *xs)


def sum_over_ranks(x: Tensor, cp: ContextParallel) -> Tensor:
    """The sum of the ranks' x [n], the same bits on each; a rank's gradient of it is that of its own x."""
    layout = ShardLayout((1,) * cp.size + (0,) * (cp.num_chunks - cp.size), cp)  # a row on each rank

    def total(x: Tensor) -> list[Tensor]:
        return [_by_operator("gather", [layout], x[None, None])[0].sum((0, 1))]

    return Linear.apply(total, lambda d: [d], x)[0]


def start_exchange(way: str, xs: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> Callable[[], tuple[Tensor, ...]]:
    """Start an `exchange` without an operator, and return the function that waits; backward has two halves too."""
    together, held = Exchange(), []

    def start(way: str, *xs: Tensor | None) -> list[Tensor | None]:
        add = getattr(together, way)
        held[:] = [None if x is None else add(x, layout) for x, layout in zip(xs, layouts, strict=True)]
        together.start()
        return [None if x is None else x.new_empty(0) for x in xs]

    def wait(*_: Tensor | None) -> list[Tensor | None]:
        together.wait()
        received, held[:] = list(held), []
        return received

    sent = Linear.apply(partial(start, way), wait, *xs)
    return lambda: Linear.apply(wait, partial(start, INVERSE[way]), *sent)


def _by_operator(way: str, layouts: Sequence[ShardLayout], *xs: Tensor | None) -> list[Tensor | None]:
    present = [layout for x, layout in zip(xs, layouts, strict=True) if x is not None]
    counts = [count for layout in present for count in layout.counts]
    ends = [end for of_rank in layouts[0].ranges or () for rows in of_rank for end in (rows.start, rows.stop)]
    tensors = [x for x in xs if x is not None]
    outputs = iter(OPS.exchange.default(tensors, way, counts, ends, *static_of(layouts[0].cp)))
    return [None if x is None else next(outputs) for x in xs]


def static_of(cp: ContextParallel) -> tuple[str, str | None, int, int]:
    """Arguments of operators for `CP`."""
    return cp.group_name, cp.load_balance, cp.rank, cp.size


def ranks_of(group_name: str, load_balance: str | None, rank: int, size: int) -> ContextParallel:
    """The inverse of `static_of`."""
    return ContextParallel(dist.distributed_c10d._resolve_process_group(group_name), load_balance=load_balance)


def _layouts(counts: Sequence[int], ends: Sequence[int], cp: ContextParallel) -> list[ShardLayout]:
    """Layouts of the operator's numbers."""
    rows = [slice(*pair) for pair in _split(ends, 2)]
    ranges = _split(rows, len(rows) // cp.size) if rows else None
    return [ShardLayout(tuple(of), cp, ranges) for of in _split(counts, cp.num_chunks)]


def _split(x: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def _exchange(xs: list[Tensor], way: str, counts: list[int], ends: list[int], *cp: Any) -> list[Tensor]:
    together = Exchange()
    outputs = [getattr(together, way)(*pair) for pair in zip(xs, _layouts(counts, ends, ranks_of(*cp)), strict=True)]
    together.start()
    together.wait()
    return [x.contiguous() for x in outputs]


def _exchange_fake(xs: list[Tensor], way: str, counts: list[int], ends: list[int], *cp: Any) -> list[Tensor]:
    def shape(x: Tensor, layout: ShardLayout) -> tuple[int, ...]:
        rows = dict(gather=(sum(layout.sizes),), reduce_scatter=(layout.local,), to_heads=(layout.total,))
        rows["to_tokens"] = layout.local, layout.cp.size
        return len(x), *rows[way], *x.shape[3 if way == "to_heads" else 2 :]

    return [x.new_empty(shape(x, layout)) for x, layout in zip(xs, _layouts(counts, ends, ranks_of(*cp)))]


_exchange_schema = f"exchange(Tensor[] xs, str way, SymInt[] counts, SymInt[] ends, {CP}) -> Tensor[]"
differentiate(register(_exchange_schema, _exchange, _exchange_fake), _exchange)


# The one function that launches messages, which benchmarks replace.
def launch_messages(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Launch messages together."""
    return dist.batch_isend_irecv(messages)


def unowned(x: Tensor) -> Tensor:
    """x, on a GPU by a storage that is not of PyTorch's allocator; a message keeps it until it is waited for.

    PyTorch records NCCL's stream on its allocator's own blocks. Those are reused only when the GPU has passed the
    message, not in the order of launches, so that calls in a row would hold a block each.
    """
    return torch.from_dlpack(x.detach()) if x.is_cuda else x


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
            sum_rounded(parts, into, kernels=kernels)
