"""Exchanges between ranks as messages of rows, from and to where they stand: those of a step in one launch.

NCCL's kernel takes multiprocessors, and waits there until the other ranks' kernels have theirs: one for all tensors of
a step waits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute.chunked import sum_rounded

Tensor = torch.Tensor
Parts = list[tuple[slice, Tensor]]  # rows of a whole, and what is to be added there


class Messages:
    """One launch. Every rank makes its launches in the same order, and names tensors in the same order in each.

    `begin` comes between what is sent and what is asked for, which waits.
    """

    def __init__(self, cp: ContextParallel, *, kernels: bool = False) -> None:
        """kernels: sums may be the layer's kernels'."""
        self.cp, self.kernels = cp, kernels
        self._messages, self._works, self._held = [], [], ()

    def begin(self) -> None:
        """Send what was given, after what was launched before; what is launched next runs beside it."""
        if self._messages:
            self._works = launch(self._messages)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._messages, self._works = [], []

    def held(self, sent: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Tensors that stand for what was sent, between two functions of autograd: empty ones, since in backward what
        is sent is of another shape."""
        self._held = sent
        return tuple(None if x is None else x.new_empty(0) for x in sent)

    def released(self, sent: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The tensors that `held` was given."""
        held, self._held = self._held, ()
        return held

    def send_to_all(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's rows [B, n, ...] to all ranks."""
        return self._send_to_whole([x] * self.cp.size, rows)

    def send_to_heads(self, x: Tensor, rows: Rows) -> Tensor:
        """This rank's rows x [B, n, R, h, ...], those of part r to rank r."""
        return self._send_to_whole(
            [contiguous(part) if r != self.cp.rank else part for r, part in enumerate(x.unbind(2))], rows
        )

    def whole(self, sent: Tensor, rows: Rows) -> Tensor:
        """All rows [B, N, ...], in order, of what `send_to_all` or `send_to_heads` returned."""
        self.wait()
        return sent

    def _send_to_whole(self, parts: Sequence[Tensor], rows: Rows) -> Tensor:
        """Rows of a part to each rank."""
        own = parts[self.cp.rank]
        whole = own.new_empty((len(own), sum(rows.counts), *own.shape[2:]))
        for at, (rank, begin) in rows.places():
            here, end = whole[:, at], begin + at.stop - at.start
            if rank != self.cp.rank:
                self._add(dist.irecv, here, rank)
                continue
            copy(here, own[:, begin:end])
            for peer, part in enumerate(parts):
                if peer != rank:
                    self._add(dist.isend, here if part is own else part[:, begin:end], peer)
        return whole

    def send_to_tokens(self, x: Tensor, rows: Rows) -> Tensor:
        """All rows x [B, N, h, ...] to those who have them."""
        x, own = contiguous(x), sum(rows.of_rank(self.cp.rank))
        found = x.new_empty((self.cp.size, len(x), own, *x.shape[2:]))
        for at, (rank, begin) in rows.places():
            if rank != self.cp.rank:
                self._add(dist.isend, x[:, at], rank)
                continue
            here = found[:, :, begin : begin + at.stop - at.start]
            copy(here[rank], x[:, at])
            for peer in range(self.cp.size):
                if peer != rank:
                    self._add(dist.irecv, here[peer], peer)
        return found

    def by_rank(self, sent: Tensor, rows: Rows) -> Tensor:
        """This rank's rows, [B, n, R, h, ...], of what `send_to_tokens` returned."""
        self.wait()
        return sent.movedim(0, 2)

    def send_sums(self, parts: Parts, rows: Rows, seen: Sequence[Sequence[slice]]) -> list[Parts]:
        """Parts of the sum of all rows to those who have them, for each of this rank's chunks all that is added there.

        Args:
            parts: rows of the whole, and what this rank adds to them, [B, rows, ...].
            seen: for each rank the rows of its parts.
        """
        parts, found = [(which, contiguous(x)) for which, x in parts], []
        for at, (rank, _) in rows.places():
            if rank != self.cp.rank:
                for which, x in parts:
                    self._add(dist.isend, x[:, _within(_common(at, which), which)], rank)
                continue
            pieces = []
            for peer, of_peer in enumerate(seen):
                for i, which in enumerate(of_peer):
                    here = _common(at, which)
                    if here.start == here.stop:
                        continue
                    if peer == rank:
                        piece = parts[i][1][:, _within(here, which)]
                    else:
                        like = parts[0][1]
                        piece = like.new_empty((len(like), here.stop - here.start, *like.shape[2:]))
                        self._add(dist.irecv, piece, peer)
                    pieces.append((_within(here, at), piece))
            found.append(pieces)
        return found

    def write_sums(self, sent: list[Parts], rows: Rows, out: Tensor) -> None:
        """Write sums of this rank's rows, made in the accumulation dtype, to out [B, n, ...]."""
        self.wait()
        for part, pieces in zip(out.split(rows.of_rank(self.cp.rank), dim=1), sent, strict=True):
            _add_up(part, pieces, kernels=self.kernels)

    def _add(self, how: object, x: Tensor, rank: int) -> None:
        for part in x.unbind():
            if part.numel():
                self._messages.append(dist.P2POp(how, part, group=self.cp.group, group_peer=rank))


def launch(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Begin all of them."""
    return dist.batch_isend_irecv(messages)


def _common(at: slice, which: slice) -> slice:
    """Rows that both have."""
    start = max(at.start, which.start)
    return slice(start, max(start, min(at.stop, which.stop)))


def _within(here: slice, which: slice) -> slice:
    """Places of rows among some that begin no later."""
    return slice(here.start - which.start, here.stop - which.start)


def _add_up(out: Tensor, parts: Parts, *, kernels: bool) -> None:
    """Write the sum of parts of rows, rounded once, to out [B, n, H, D]."""
    cuts = sorted({0, out.shape[1], *(end for at, _ in parts for end in (at.start, at.stop))})
    for first, end in pairwise(cuts):
        present = [x[:, first - at.start : end - at.start] for at, x in parts if at.start <= first and end <= at.stop]
        if not present:
            out[:, first:end].zero_()
        for into, *pieces in zip(out[:, first:end], *present):
            sum_rounded(pieces, out.dtype, out=into, kernels=kernels)


def copy(into: Tensor, x: Tensor) -> None:
    """``into.copy_(x)``, of one dtype 16 bytes at a time where rows allow it: an element at a time takes thrice as long
    where rows are not in order."""
    if x.dtype == into.dtype and _is_wide(x) and _is_wide(into):
        into, x = into.view(torch.complex128), x.view(torch.complex128)
    into.copy_(x)


def contiguous(x: Tensor) -> Tensor:
    """``x.contiguous()``, as `copy` copies."""
    if x.is_contiguous() or not x.is_cuda:
        return x.contiguous()
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    copy(found, x)
    return found


def _is_wide(x: Tensor) -> bool:
    step = 16 // x.element_size()
    rows = x.stride()[:-1] + (x.storage_offset(), x.shape[-1])
    return x.is_cuda and x.stride(-1) == 1 and not any(each % step for each in rows)
