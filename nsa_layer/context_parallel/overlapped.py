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
import torch.nn.functional as F

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
        o = Written(o, dim=2, zeros=False, recorded=call.recorded)
        backward, saved = any(ctx.needs_input_grad), []
        for step, keys in enumerate(call.gathered(given)):
            here = o.of(call.rows(given, step)[1])
            for i, stretch in enumerate(call.stretches):
                part, into = call.part(whole, keys, call.places(given, step, i), stretch), here[:, stretch.queries]
                saved.append(call.forward(part, i, into[0] if call.packed else into, backward=backward))
            del keys, part
        o = o.whole()
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
    summed = [name for name in (*OF_HEADS, *OF_BLOCKS) if name in named]
    made = {name: torch.empty_like(x) for name, x in named.items() if name in DIFFERENTIABLE}
    made |= {name: torch.zeros_like(named[name], dtype=exactly) for name in summed}
    made = {
        name: Written(x, dim=0 if name in OF_HEADS else 2, zeros=name in summed, recorded=call.recorded)
        for name, x in made.items()
    }
    sent: dict[str, Tensor] = {}

    def arrive(step: int) -> None:
        for name, x in sent.items():
            made[name].of(slice(*call.heads[step])).copy_(call.tokens.sums(x))

    for step, keys in enumerate(call.gathered(given)):
        sums = {name: Sums(x, call.tokens.rows, recorded=call.recorded) for name, x in keys.items()}
        heads = call.places(given, step, 0)
        here = {name: x.of(heads[name][-1]) for name, x in made.items() if name not in keys}
        for i, stretch in reversed([*enumerate(call.stretches)]):
            at, places = (step * len(call.stretches) + i) * each, call.places(given, step, i)
            do_i, dq_i = do[places["q"]], here["q"][:, stretch.queries]
            if call.packed:
                do_i, dq_i = do_i[0], dq_i[0]
            part = call.part(given, keys, places, stretch)
            found = call.gradients(part, i, do_i, left[at : at + each], dq_i)
            for name, x, d in zip(DIFFERENTIABLE[1:], part[1:], found[1:]):
                if x is None:
                    continue
                if name in keys:
                    sums[name].add(d[None] if call.packed else d, stretch.keys)
                elif name in summed:
                    here[name][places[name][:-1]] += d
                else:
                    here[name][places[name][:-1]] = d
            del found, d
        del keys, part
        if step:
            arrive(step - 1)
        sent = {name: call.tokens.send_sums_by_rank(x.total) for name, x in sums.items()}
        del sums
    arrive(len(call.heads) - 1)
    found = {name: x.whole() for name, x in made.items()}
    to_blocks = {name: call.blocks.send_sums(found[name]) for name in OF_BLOCKS if name in named}
    found |= {name: call.blocks.sums(x) for name, x in to_blocks.items()}
    return tuple(found[name].to(named[name].dtype) if name in found else None for name in CallTensors._fields)


class Written:
    """A tensor that is written some heads after the others.

    In graphs of parts that are joined: Inductor takes each write to a part of a tensor for a choice between two, of
    which it makes ever longer expressions.
    """

    def __init__(self, x: Tensor, *, dim: int, zeros: bool, recorded: bool) -> None:
        """x: memory of all, with heads at `dim`; zeros or anything."""
        self.x, self.dim, self.parts = x, dim, [] if recorded else None
        self.like = torch.zeros_like if zeros else torch.empty_like

    def of(self, heads: slice) -> Tensor:
        """The part of some heads, to be written; of those that follow the last ones."""
        part = self.x.narrow(self.dim, heads.start, heads.stop - heads.start)
        if self.parts is not None:
            part = self.like(part)
            self.parts.append(part)
        return part

    def whole(self) -> Tensor:
        return self.x if self.parts is None else torch.cat(self.parts, self.dim)


class Sums:
    """The sum of stretches' gradients of keys, in the accumulation dtype, laid out by rank."""

    def __init__(self, x: Tensor, rows: Rows, *, recorded: bool) -> None:
        """x: [B, S, h, D]."""
        self.rows, (B, _, *rest) = rows, x.shape
        self.recorded, self.filled, self.dtype = recorded, False, accumulation_dtype(x.dtype)
        shape = (B, sum(rows.counts), *rest) if recorded else (rows.size, B, rows.most, *rest)
        self.sum = x.new_zeros(shape, dtype=self.dtype) if recorded else x.new_empty(shape, dtype=self.dtype)

    @property
    def total(self) -> Tensor:
        """[R, B, most, h, D]; anything before the first `add`."""
        return self.rows.to_ranks(self.sum) if self.recorded else self.sum

    def add(self, d: Tensor, which: slice) -> None:
        """Add to the keys of a slice of all; d: [B, keys, h, D]."""
        if self.recorded:  # no writes to parts: see `Written`
            self.sum = self.sum + F.pad(d, (0, 0, 0, 0, which.start, self.sum.shape[1] - which.stop))
            return
        for at, (rank, begin) in self.rows.places():
            first, end = (min(max(place, at.start), at.stop) for place in (which.start, which.stop))
            chunk = self.sum[rank, :, begin : begin + at.stop - at.start]
            here = chunk[:, first - at.start : end - at.start]
            part = d[:, first - which.start : end - which.start] if first < end else d[:, :0]
            if self.filled:
                here += part
                continue
            here.copy_(part)
            chunk[:, : first - at.start].zero_()
            chunk[:, end - at.start :].zero_()
        self.filled = True
