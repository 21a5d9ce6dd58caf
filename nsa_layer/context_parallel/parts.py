"""A stretch's call on some heads, whose derivatives are asked for by hand: on the kernels, or in plain PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nsa_layer import support
from nsa_layer.call_spec import DIFFERENTIABLE, Aux, CallSpec, CallTensors
from nsa_layer.cute.host_numbers import numbers_on
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.saved import SavedForBackward
from nsa_layer.operators.recorded import gradients_of, leaves_of, recording

Tensor = torch.Tensor
NOTHING = SavedForBackward(*[None] * len(SavedForBackward._fields))


class Part(NamedTuple):
    """The call.

    Attributes:
        tensors: without positions.
        spec: the static side, with lengths of the stretch; ``window`` is of the window's own keys, or else
            of the rows of ``k`` and ``v`` that it reads.
        first: positions of the first query of each packed sequence, or of a batch.
        backend: of `nsa`.
        kept: outputs that the kernels save.
    """

    tensors: CallTensors
    spec: CallSpec
    first: tuple[int, ...]
    backend: str
    kept: tuple[bool, bool, bool]

    def forward(self, o: Tensor, *, backward: bool) -> SavedForBackward:
        """Write the output, and return what there is of it for its backward: in PyTorch lists, LSEs and gates alone."""
        if self.backend == "cute":
            from nsa_layer.cute import head_groups

            return head_groups.forward_groups(*self._on_kernels(), backward=backward, o=o)[1][0]
        made, aux = self._attend(self.tensors)
        o.copy_(made)
        lses = dict(lse_cmp=aux.lse_cmp, lse_slc=aux.lse_slc, lse_swa=aux.lse_swa)
        return NOTHING._replace(block_indices=aux.block_indices, g=aux.gates, **lses)

    def gradients(self, do: Tensor, left: SavedForBackward, dq: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the differentiable tensors; that of q is written to dq."""
        if self.backend == "cute":
            from nsa_layer.cute import head_groups

            return head_groups.gradients(do, *self._on_kernels(), [left], dq=dq, window=self.window)
        leaves = leaves_of(self.tensors.differentiable, [True] * len(DIFFERENTIABLE))
        with recording():
            o, _ = self._attend(CallTensors(*leaves, block_indices=left.block_indices))
        found = gradients_of(leaves, [o], [do])
        dq.copy_(found[0])
        return dq, *found[1:]

    @property
    def window(self) -> slice | None:
        """Rows of keys that windows see, where they have no keys of their own."""
        if not self.spec.window or not self.spec.config.window_size or self.tensors.has_own_window:
            return None
        counts, first = zip(*self.spec.window)
        begin = self.first[0] - first[0]
        return slice(begin, begin + sum(counts))

    def _placed(self, tensors: CallTensors) -> CallTensors:
        """With positions of the first queries."""
        first = self.first if self.spec.lengths else self.first * len(tensors.q)
        return tensors._replace(q_offset=numbers_on((first,), tensors.q.device)[0])

    def _on_kernels(self) -> tuple[CallTensors, Packing | None, CallSpec, MemoryPlan]:
        (q, k, v), tensors = self.tensors[:3], self.tensors
        packing = Packing.of(self.spec, q.device, tensors.q_heads_per_list)
        if self.window is not None:
            tensors = tensors._replace(k_win=k[..., self.window, :, :], v_win=v[..., self.window, :, :])
        return self._placed(tensors), packing, self.spec, MemoryPlan(((0, k.shape[-2]),), self.kept)

    def _attend(self, tensors: CallTensors) -> tuple[Tensor, Aux]:
        if self.spec.window and tensors.has_own_window:
            tensors = tensors._replace(k_win=self._among_zeros(tensors.k_win), v_win=self._among_zeros(tensors.v_win))
        attend = import_module(support.BACKENDS[self.backend]).attend
        return attend(self._placed(tensors), spec=self.spec)

    def _among_zeros(self, x: Tensor) -> Tensor:
        """Keys of the window alone, where other backends look for them: among those of all tokens."""
        parts, window = x.split([count for count, _ in self.spec.window], dim=-3), self.spec.window
        keys = self.spec.key_lengths or self.tensors.k.shape[1:2]
        before = [at - first for at, (_, first) in zip(self.first, window, strict=True)]
        sides = ((at, S - at - part.shape[-3]) for S, at, part in zip(keys, before, parts, strict=True))
        return torch.cat([F.pad(part, (0, 0, 0, 0, *each)) for part, each in zip(parts, sides)], dim=-3)
