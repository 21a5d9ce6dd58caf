"""The backward of the three branches together: row sums from the gate, one dq for all, one dk and dv for two of them.

Each branch's attention call is handed its row sums and adds to accumulators; gradients are rounded once, at the end.
Where two calls' accumulators do not lie alike, each has its own, and the conversions add up. The selected branch may
take two passes; the second one adds what the others left in dq's accumulator, and writes dq.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from nsa_layer.cute.chunked import sum_rounded
from nsa_layer.fork import require_patched
from nsa_layer.profiler_ranges import component

require_patched()

from flash_attn.cute.interface import _flash_attn_bwd  # noqa: E402
from flash_attn.cute.shared_backward import (  # noqa: E402
    AccumLayout,
    BackwardLayout,
    SharedBackward,
    aligned,
    backward_layout,
    convert,
    zeroed,
)
from flash_attn.cute.two_pass_backward import backward_dq  # noqa: E402

Pair = tuple[torch.Tensor, torch.Tensor]

KNOWN = 1024  # layouts are kept for so many shapes
_known: dict[Hashable, Layouts] = {}


class Call(NamedTuple):
    """One branch's attention.

    Attributes:
        options: what `_flash_attn_bwd` takes but for softmax_scale.
        dq_options: of a call without dq, what `backward_dq` takes besides what both do.
    """

    k: torch.Tensor
    v: torch.Tensor
    options: dict
    dq_options: dict | None = None


class Pass(NamedTuple):
    """A call whose dq is still to be computed."""

    call: Call
    layout: AccumLayout
    do: torch.Tensor
    dpsum: torch.Tensor
    lse_log2: torch.Tensor


class Layouts(NamedTuple):
    """How the accumulators of the branches' calls lie, and their row sums: `tile_m` of `gated_sum_backward`."""

    calls: tuple[BackwardLayout, ...]
    tile_m: int


def backward_layouts(q: torch.Tensor, calls: tuple[Call, ...], *, key: Hashable) -> Layouts:
    """The layouts of these calls over the same queries, looked up where the same key and shapes came before.

    Args:
        calls: the compressed branch (left out where it has no keys), then the window and the selected one.
        key: what the options' values depend on, but for tensors' contents: the spec and the lists' block size.
    """
    key = (key, q.shape, q.dtype, q.device, *(call.k.shape for call in calls), calls[0].v.shape[-1])
    known = _known.get(key)
    if known is None:
        if len(_known) == KNOWN:
            _known.clear()
        layouts = aligned(*(backward_layout(q, call.k, call.v, **call.options) for call in calls))
        known = _known[key] = Layouts(layouts, layouts[0].dq.start)
    return known


class GradAccumulators:
    """Gradients as the calls add to them, in the order of the layouts: the compressed branch if any, then the others.

    All accumulators that start from zero are one allocation; the first call to add to a dq leaves its own part there.
    """

    def __init__(self, layouts: Layouts, device: torch.device, *, softmax_scale: float) -> None:
        self._scale, self._waiting = softmax_scale, list(layouts.calls)
        of_blocks, of_tokens = layouts.calls[:-2], layouts.calls[-2:]
        # Calls over the same tokens share where their accumulators lie alike.
        shared = {x.dk.place: x for x in of_tokens if x.dk is not None}
        wanted = [x for x in (*of_blocks, *shared.values()) if x.dk is not None]
        flags = layouts.calls[0].flags
        parts = zeroed(*(p for x in wanted for p in (x.dk, x.dv)), *([flags] if flags else []), device=device)
        self._flags = parts.pop() if flags else None
        accums = [(*pair, x) for *pair, x in zip(parts[::2], parts[1::2], wanted)]
        self._of_blocks = accums[0] if of_blocks and of_blocks[0].dk is not None else None
        self._of_tokens = {x.dk.place: (dk, dv, x) for dk, dv, x in accums[-len(shared) :]} if shared else {}
        self._dq: dict[Hashable, tuple[torch.Tensor, AccumLayout]] = {}
        self._dq_pass: Pass | None = None
        self._stored: list[Pair] = []  # without GQA each call stores its dk and dv
        self._device = device

    def compressed(
        self, q: torch.Tensor, do: torch.Tensor, call: Call, dpsum: torch.Tensor, lse_log2: torch.Tensor
    ) -> Pair:
        """Launch the compressed branch's call; its dk and dv, rounded. ``dpsum`` and ``lse_log2`` as for `tokens`."""
        if self._of_blocks is None:
            return self._add(q, do, call, dpsum, lse_log2, None, None)
        dk, dv, layout = self._of_blocks
        self._of_blocks = None
        self._add(q, do, call, dpsum, lse_log2, dk, dv)
        return self._converted((dk, dv, layout), torch.empty_like(call.k), torch.empty_like(call.v), call, False)

    def tokens(
        self, q: torch.Tensor, do: torch.Tensor, call: Call, dpsum: torch.Tensor, lse_log2: torch.Tensor
    ) -> None:
        """Launch the next of the other calls, with its branch's row sums as `gated_sum_backward` gives them."""
        layout = self._waiting[0]
        if layout.dk is None:
            self._stored.append(self._add(q, do, call, dpsum, lse_log2, None, None))
        else:
            self._add(q, do, call, dpsum, lse_log2, *self._of_tokens[layout.dk.place][:2])

    def dq(self, q: torch.Tensor, out: torch.Tensor, call: Call, *, add: bool) -> torch.Tensor:
        """dq of all calls, written to ``out``; with ``add`` on top of what it holds. Its memory is let go of."""
        cu_seqlens = call.options.get("cu_seqlens_q")
        (accums, last), self._dq, self._dq_pass = (self._dq, self._dq_pass), {}, None
        read = None if last is None else accums.pop(last.layout.place, (None,))[0]
        with component("convert"):
            for accum, layout in accums.values():
                convert(accum, layout, out, scale=self._scale, cu_seqlens=cu_seqlens, add=add)
                add = True
        if last is not None:
            with component("slc"):
                self._last_pass(q, last, out, read, add)
        return out

    def dk_dv(self, dk: torch.Tensor, dv: torch.Tensor, call: Call, *, add: bool) -> Pair:
        """dk and dv of the calls of `tokens`, the same way."""
        for accums in self._of_tokens.values():
            self._converted(accums, dk, dv, call, add)
            add = True
        if self._stored:
            for out, *parts in zip((dk, dv), *self._stored):
                sum_rounded((out, *parts) if add else parts, out.dtype, out=out)
        return dk, dv

    def _add(
        self, q: torch.Tensor, do: torch.Tensor, call: Call, dpsum: torch.Tensor, lse_log2: torch.Tensor,
        dk: torch.Tensor | None, dv: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        layout, fixed = self._waiting.pop(0), dict(softmax_scale=self._scale)
        if call.dq_options is not None:
            self._dq_pass = Pass(call, layout.dq, do, dpsum, lse_log2)
            shared = SharedBackward(layout, dpsum, lse_log2, None, dk, dv)
            return _flash_attn_bwd(q, call.k, call.v, None, do, None, **fixed, shared=shared, **call.options)[1:]
        first = layout.dq.place not in self._dq
        if first:
            empty = torch.empty(layout.dq.shape, dtype=torch.float32, device=self._device)
            self._dq[layout.dq.place] = (empty, layout.dq)
        dq = self._dq[layout.dq.place][0]
        shared = SharedBackward(layout, dpsum, lse_log2, dq, dk, dv, first, self._flags if layout.flags else None)
        return _flash_attn_bwd(q, call.k, call.v, None, do, None, **fixed, shared=shared, **call.options)[1:]

    def _last_pass(self, q: torch.Tensor, last: Pass, out: torch.Tensor, accum: torch.Tensor | None, add: bool) -> None:
        """dq of a call without it, on top of the other calls' in ``accum``, and with ``add`` of what ``out`` holds."""
        call, layout, do, dpsum, lse_log2 = last
        static = dict(softmax_scale=self._scale, dq=out, accum=accum, add=add, start=layout.start)
        backward_dq(q, call.k, call.v, do, dpsum, lse_log2, **static, **call.dq_options)

    def _converted(
        self, accums: tuple[torch.Tensor, torch.Tensor, BackwardLayout], dk: torch.Tensor, dv: torch.Tensor,
        call: Call, add: bool,
    ) -> Pair:  # fmt: skip
        cu_seqlens = call.options.get("cu_seqlens_k")
        convert(accums[0], accums[2].dk, dk, scale=self._scale, cu_seqlens=cu_seqlens, add=add)
        convert(accums[1], accums[2].dv, dv, scale=1.0, cu_seqlens=cu_seqlens, add=add)
        return dk, dv
