"""A stretch's call on some heads, whose derivatives are asked for by hand: on the kernels, or in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import CallSpec, CallTensors, Saved
from nsa_layer.cute.host_numbers import numbers_on
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.packing import Packing

Tensor = torch.Tensor


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

    def forward(self, o: Tensor, *, backward: bool) -> Saved:
        """Write the output, and return what there is of it for its backward: in PyTorch lists, LSEs and gates alone."""
        if self.backend == "cute":
            from nsa_layer.cute import head_groups

            return head_groups.forward_groups(*self._on_kernels(), backward=backward, o=o)[1]
        from nsa_layer import eager

        made, saved = eager.forward(self._in_pytorch(), spec=self.spec)
        o.copy_(made)
        return saved

    def gradients(self, do: Tensor, left: Saved, dq: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the differentiable tensors; that of q is written to dq."""
        if self.backend == "cute":
            from nsa_layer.cute import head_groups

            return head_groups.gradients(do, *self._on_kernels(), left, dq=dq, window=self.window)
        from nsa_layer import eager

        found = list(eager.backward(self._in_pytorch(), left, do, spec=self.spec))
        if self.spec.window and self.tensors.has_own_window:
            for at in (-2, -1):
                found[at] = self._among_zeros(found[at], take=True)
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

    def _in_pytorch(self) -> CallTensors:
        tensors = self.tensors
        if self.spec.window and tensors.has_own_window:
            tensors = tensors._replace(k_win=self._among_zeros(tensors.k_win), v_win=self._among_zeros(tensors.v_win))
        return self._placed(tensors)

    def _among_zeros(self, x: Tensor, *, take: bool = False) -> Tensor:
        """Keys of the window alone, where other backends look for them: among those of all tokens; or taken there."""
        window, keys = self.spec.window, self.spec.key_lengths or self.tensors.k.shape[1:2]
        counts, before = [count for count, _ in window], [at - first for at, (_, first) in zip(self.first, window)]
        parts, made = x.split(list(keys) if take else counts, dim=-3), []
        for part, S, at, count in zip(parts, keys, before, counts, strict=True):
            made.append(part.narrow(-3, at, count) if take else F.pad(part, (0, 0, 0, 0, at, S - at - count)))
        return torch.cat(made, dim=-3)
