"""fp32 accumulators that the branches' backward calls share: one dq for all, one dk and dv for calls of the same keys.

Each call gets its row sums from the gate's backward and adds to the accumulators; gradients are rounded once, at the
end. Accumulators that are laid out differently are kept apart, and their conversions add up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from flash_attn.cute import shared_backward
from flash_attn.cute.shared_backward import AccumLayout, BackwardLayout, SharedBackward
from nsa_layer.checks import MOST_KEPT
from nsa_layer.cute.chunked import sum_rounded

Tensor = torch.Tensor

_known: dict[Hashable, tuple[BackwardLayout, ...]] = {}


def backward_layouts(q: Tensor, calls: Sequence[dict], *, key: Hashable) -> tuple[BackwardLayout, ...]:
    """The layouts of these calls over the same queries, cached by `key` and shapes.

    Args:
        calls: of the compressed branch (left out where it has no keys), then the window and the selected one, as far
            as they are there: k, v and the options of `_flash_attn_bwd` without softmax_scale.
        key: everything that the options depend on but for the contents of tensors.
    """
    if not calls:
        return ()
    key = (key, q.shape, q.dtype, q.device, *(call["k"].shape for call in calls), calls[0]["v"].shape[-1])
    known = _known.get(key)
    if known is None:
        if len(_known) == MOST_KEPT:
            _known.clear()
        known = _known[key] = shared_backward.aligned(*(shared_backward.backward_layout(q, **call) for call in calls))
    return known


class KeyGradient:
    """A gradient [..., H, D] that parts are added to one after the other; the first is written: it is filled then."""

    def __init__(self, out: Tensor, *, filled: bool = False) -> None:
        self.out, self.filled = out, filled


class GradAccumulators:
    """The accumulators of a backward; all that start from zero are one allocation.

    Without GQA calls have no accumulators of dk and dv: each stores its own.
    """

    def __init__(
        self, layouts: Sequence[BackwardLayout], device: torch.device, *, softmax_scale: float, keys: Sequence[str]
    ) -> None:
        """keys: a name for each call's; calls over the same keys share dk and dv where these are laid out alike."""
        self._scale, self._device = softmax_scale, device
        self._waiting = list(zip(keys, layouts, strict=True))
        owners = {(name, layout.dk.layout_key): layout for name, layout in self._waiting if layout.dk is not None}
        flags = layouts[0].flags if layouts else None
        wanted = [part for layout in owners.values() for part in (layout.dk, layout.dv)]
        zeros = iter(shared_backward.zeroed(*wanted, *([flags] if flags else []), device=device))
        self._dk_dv = {key: (next(zeros), next(zeros), layout) for key, layout in owners.items()}
        self._flags = next(zeros, None)
        self._dq: dict[Hashable, tuple[Tensor, AccumLayout]] = {}

    def share(self, dpsum: Tensor, lse_log2: Tensor, *, with_dq: bool = True) -> SharedBackward:
        """The accumulators of the next call in the order of the layouts, and its branch's row sums.

        The first call to add to a dq leaves its own part there. with_dq: False for a call that leaves dq out.
        """
        name, layout = self._waiting.pop(0)
        dk, dv = (None, None) if layout.dk is None else self._dk_dv[name, layout.dk.layout_key][:2]
        if not with_dq:
            return SharedBackward(layout, dpsum, lse_log2, None, dk, dv)
        first = layout.dq.layout_key not in self._dq
        if first:
            empty = torch.empty(layout.dq.shape, dtype=torch.float32, device=self._device)
            self._dq[layout.dq.layout_key] = (empty, layout.dq)
        dq, flags = self._dq[layout.dq.layout_key][0], self._flags if layout.flags else None
        return SharedBackward(layout, dpsum, lse_log2, dq, dk, dv, first, flags)

    def take_dq(self, layout: BackwardLayout) -> Tensor | None:
        """The dq accumulator of this layout, if any call added to one, and no longer part of `write_dq`."""
        return self._dq.pop(layout.dq.layout_key, (None,))[0]

    def write_dq(self, out: Tensor, cu_seqlens: Tensor | None, *, add: bool) -> bool:
        """Write dq of all calls to `out`, with `add` on top of what it holds; True if it now holds anything."""
        accums, self._dq = self._dq, {}
        for accum, layout in accums.values():
            shared_backward.convert(accum, layout, out, scale=self._scale, cu_seqlens=cu_seqlens, add=add)
            add = True
        return add

    def add_dk_dv(
        self,
        name: str,
        dk: KeyGradient,
        dv: KeyGradient,
        stored: Sequence[tuple[Tensor | None, Tensor | None]],
        cu_seqlens: Tensor | None,
    ) -> None:
        """Add the parts of all calls over keys of this name: from the accumulators, or as the calls stored them."""
        for key in [key for key in self._dk_dv if key[0] == name]:
            accum_dk, accum_dv, layout = self._dk_dv.pop(key)
            for accum, of, scale, grad in ((accum_dk, layout.dk, self._scale, dk), (accum_dv, layout.dv, 1.0, dv)):
                shared_backward.convert(accum, of, grad.out, scale=scale, cu_seqlens=cu_seqlens, add=grad.filled)
                grad.filled = True
        for grad, parts in zip((dk, dv), zip(*stored)):
            if present := [x for x in parts if x is not None]:
                sum_rounded([grad.out] * grad.filled + present, grad.out, kernels=True)
                grad.filled = True
