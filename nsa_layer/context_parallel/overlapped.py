"""Keys and values of a few heads come beside the attention of the heads before.

Backward gathers them again, and what it adds to them goes to their ranks, in the accumulation dtype, beside the heads
after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nsa_layer.call_spec import DIFFERENTIABLE, CallTensors, accumulation_dtype
from nsa_layer.context_parallel.collectives import Exchange
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import Stretch
from nsa_layer.cute.memory_plan import split_heads
from nsa_layer.derivatives import ReverseMode, first_derivatives
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
Left = tuple[Tensor | None, ...]  # what a part's forward leaves to its backward
Places = dict[str, tuple[slice, ...]]
LONG = 1 << 19  # tokens from which on heads come one by one
OF_BLOCKS = ("k_cmp", "v_cmp")
OF_HEADS = ("gate_weight", "compress_k_weight", "compress_v_weight")


@dataclass(frozen=True)
class Call(ABC):
    """The static side of a rank's call. Its tensors have a batch dimension where sequences are packed too.

    Attributes:
        stretches: of this rank.
        tokens, blocks: exchanges of keys and values, and of compressed ones.
        heads: key/value heads of each step.
        backend: of `nsa`.
        packed: sequences are, whether their lengths are known or not.
        of_keys: names of the tensors that come a step at a time.
        recorded: in graphs that are made.
    """

    stretches: tuple[Stretch, ...]
    tokens: Exchange
    blocks: Exchange | None
    heads: tuple[tuple[int, int], ...]
    backend: str
    packed: bool
    of_keys: tuple[str, ...]
    recorded: bool

    @staticmethod
    def common(
        cp: ContextParallel, backend: str, given: CallTensors, stretches: Sequence[Stretch], **more: Any
    ) -> dict[str, Any]:
        """Fields of every kind of call on a rank's tensors, packed or not."""
        q, packed, Hkv = given.q, given.q.dim() == 3, given.k.shape[-2]
        tokens = Rows.of_tokens(cp, q.shape[-3])
        # Not a plan's groups: they follow from what is free, and ranks exchange the same heads.
        heads = steps_of(Hkv, max(1, min(LONG // sum(tokens.counts), -(-Hkv // 2))))
        found = dict(stretches=tuple(stretches), tokens=Exchange.of(q[None] if packed else q, tokens, cp), heads=heads)
        return found | dict(backend=backend, packed=packed, recorded=is_recorded(q)) | more

    @abstractmethod
    def places(self, given: CallTensors, step: int, number: int) -> Places:
        """Places of a stretch and a step in this rank's tensors, and in compressed ones of all ranks."""

    @abstractmethod
    def forward(self, part: CallTensors, number: int, o: Tensor, *, backward: bool) -> Left:
        """Write a stretch's output on a step's heads, and return what there is of it for its backward."""

    @abstractmethod
    def gradients(
        self, part: CallTensors, number: int, do: Tensor, left: Left, dq: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of a part's differentiable tensors; that of q is written to dq."""

    @abstractmethod
    def joined(self, left: Sequence[Left], q: Tensor) -> tuple[Tensor, ...]:
        """Outputs beside o, of what the steps of a stretch left."""

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(self.tokens.rows.counts)

    def gathered(self, given: CallTensors) -> Iterator[dict[str, Tensor]]:
        """Keys and values of all ranks, of the heads of each step, sent for a step ahead."""
        sent = self._sent(given, 0)
        for step in range(len(self.heads)):
            following = self._sent(given, step + 1) if step + 1 < len(self.heads) else {}
            yield {name: self.tokens.whole(x) for name, x in sent.items()}
            sent = following

    def _sent(self, given: CallTensors, step: int) -> dict[str, Tensor]:
        first, end = self.heads[step]
        return {name: self.tokens.send_to_all(getattr(given, name)[:, :, first:end]) for name in self.of_keys}

    def rows(self, given: CallTensors, step: int) -> tuple[slice, slice, slice]:
        """A step's key/value heads, query heads, and heads that have lists."""
        (first, end), Hq = self.heads[step], given.q.shape[2]
        G, heads = Hq // given.k.shape[2], slice(first, end)
        of_q = slice(first * G, end * G)
        own_lists = given.block_indices is not None and given.block_indices.shape[2] == Hq
        return heads, of_q, of_q if own_lists else heads

    def part(self, given: CallTensors, keys: dict[str, Tensor], places: Places, stretch: Stretch) -> CallTensors:
        """A stretch's tensors on a step's heads; given with compressed keys and values of all ranks."""
        found = {name: x[at] for name, at in places.items() if (x := getattr(given, name)) is not None}
        found |= {name: x[:, stretch.keys] for name, x in keys.items()}
        if self.packed:
            found = {name: x if name in OF_HEADS else x[0] for name, x in found.items()}
        return CallTensors(**found, cu_seqlens=given.cu_seqlens)


def attend(call: Call, given: CallTensors, *, return_more: bool) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """o of a rank's queries, packed or not, and what else there is of each stretch."""
    if call.packed:
        given = given.as_batch()
    if call.backend == "cute" and not call.recorded:
        from nsa_layer.kernels.launch import readable

        given = given.map(readable)
    o, *rest = _Attend.apply(call, return_more, *given)
    each = len(rest) // len(call.stretches)
    return o[0] if call.packed else o, [tuple(rest[i : i + each]) for i in range(0, len(rest), each)] if each else []


def steps_of(Hkv: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Key/value heads of each step, at most so many; one at both ends, beside whose exchange nothing runs."""
    inner = split_heads(max(0, Hkv - 2), heads)
    ends = [(first, first + 1) for first in sorted({0, Hkv - 1})]
    return (ends[0], *((first + 1, end + 1) for first, end in inner), *ends[1:])


class _Attend(ReverseMode):
    @staticmethod
    def forward(ctx: Any, call: Call, return_more: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """tensors: of `CallTensors`."""
        whole = given = CallTensors(*tensors)
        if given.k_cmp is not None:
            sent = {name: call.blocks.send_to_all(getattr(given, name)) for name in OF_BLOCKS}
            whole = given._replace(**{name: call.blocks.whole(x) for name, x in sent.items()})
        o = given.q.new_empty((*given.q.shape[:-1], given.v.shape[-1]))
        backward, saved = any(ctx.needs_input_grad), []
        for step, keys in enumerate(call.gathered(given)):
            for i, stretch in enumerate(call.stretches):
                places = call.places(given, step, i)
                part, into = call.part(whole, keys, places, stretch), o[places["q"]]
                saved.append(call.forward(part, i, into[0] if call.packed else into, backward=backward))
            del keys, part
        ctx.call = call
        ctx.save_for_backward(*whole, *(x for left in saved for x in left))
        ctx.set_materialize_grads(False)
        if not return_more:
            return (o,)
        more = []
        for i, stretch in enumerate(call.stretches):
            q = given.q[:, stretch.queries]
            more += call.joined(saved[i :: len(call.stretches)], q[0] if call.packed else q)
        ctx.mark_non_differentiable(*more)
        return o, *more

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        found = first_derivatives(ctx.call.backend, partial(_gradients, ctx.call), do, *ctx.saved_tensors)
        return None, None, *found


def _gradients(call: Call, do: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `CallTensors`, from what forward saved; those of weights are this rank's part."""
    count = len(CallTensors._fields)
    given, left = CallTensors(*tensors[:count]), tensors[count:]
    each, exactly = len(left) // (len(call.heads) * len(call.stretches)), accumulation_dtype(given.q.dtype)
    named = {name: x for name, x in given._asdict().items() if x is not None}
    made = {name: torch.empty_like(x) for name, x in named.items() if name in DIFFERENTIABLE}
    summed = [name for name in (*OF_HEADS, *OF_BLOCKS) if name in named]
    made |= {name: torch.zeros_like(named[name], dtype=exactly) for name in summed}
    sent: dict[str, Tensor] = {}

    def arrive(step: int) -> None:
        for name, x in sent.items():
            made[name][:, :, slice(*call.heads[step])] = call.tokens.sums(x)

    for step, keys in enumerate(call.gathered(given)):
        sums = {name: Sums(x, call.tokens.rows) for name, x in keys.items()}
        for i, stretch in reversed([*enumerate(call.stretches)]):
            at, places = (step * len(call.stretches) + i) * each, call.places(given, step, i)
            do_i, dq_i = (x[places["q"]][0] if call.packed else x[places["q"]] for x in (do, made["q"]))
            part = call.part(given, keys, places, stretch)
            found = call.gradients(part, i, do_i, left[at : at + each], dq_i)
            for name, x, d in zip(DIFFERENTIABLE[1:], part[1:], found[1:]):
                if x is None:
                    continue
                if name in keys:
                    sums[name].add(d[None] if call.packed else d, stretch.keys)
                elif name in summed:
                    made[name][places[name]] += d
                else:
                    made[name][places[name]] = d
            del found, d
        del keys, part
        if step:
            arrive(step - 1)
        sent = {name: call.tokens.send_sums_by_rank(x.total) for name, x in sums.items()}
        del sums
    arrive(len(call.heads) - 1)
    to_blocks = {name: call.blocks.send_sums(made[name]) for name in OF_BLOCKS if name in named}
    made |= {name: call.blocks.sums(x) for name, x in to_blocks.items()}
    return tuple(made[name].to(named[name].dtype) if name in made else None for name in CallTensors._fields)


class Sums:
    """The sum of stretches' gradients of keys, in the accumulation dtype, laid out by rank.

    Attributes:
        total: [R, B, most, h, D]; anything before the first `add`.
    """

    def __init__(self, x: Tensor, rows: Rows) -> None:
        """x: [B, S, h, D]."""
        self.rows, (B, _, *rest) = rows, x.shape
        shape = (rows.size, B, rows.most, *rest)
        self.total, self.filled = x.new_empty(shape, dtype=accumulation_dtype(x.dtype)), False

    def add(self, d: Tensor, which: slice) -> None:
        """Add to the keys of a slice of all; d: [B, keys, h, D]."""
        for at, (rank, begin) in self.rows.places():
            first, end = (min(max(place, at.start), at.stop) for place in (which.start, which.stop))
            chunk = self.total[rank, :, begin : begin + at.stop - at.start]
            here = chunk[:, first - at.start : end - at.start]
            part = d[:, first - which.start : end - which.start] if first < end else d[:, :0]
            if self.filled:
                here += part
                continue
            here.copy_(part)
            chunk[:, : first - at.start].zero_()
            chunk[:, end - at.start :].zero_()
        self.filled = True
