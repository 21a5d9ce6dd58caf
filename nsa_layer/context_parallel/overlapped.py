"""Keys and values of a few heads come beside the attention of the heads before.

Backward gathers them again, and what it adds to them goes to their ranks beside the heads after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from nsa_layer.call_spec import DIFFERENTIABLE, CallTensors, accumulation_dtype
from nsa_layer.context_parallel.collectives import Collectives
from nsa_layer.context_parallel.messages import Messages, Parts
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import Stretch
from nsa_layer.cute.memory_plan import split_heads
from nsa_layer.derivatives import ReverseMode, first_derivatives
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
Left = tuple[Tensor | None, ...]  # what a part's forward leaves to its backward
Places = dict[str, tuple[slice, ...]]
LONG = 1 << 16  # tokens from which on heads come a few at a time
# Tokens of all key/value heads of a step at most: a rank takes about as much memory as one GPU for a rank's tokens.
STEP = 3 << 20
# Tokens for each other rank from which on exchanges are 1 % of the attention, and take turns with it to save memory.
LONGEST = 1 << 22
OF_BLOCKS = ("k_cmp", "v_cmp")
OF_HEADS = ("gate_weight", "compress_k_weight", "compress_v_weight")


@dataclass(frozen=True)
class Call(ABC):
    """The static side of a rank's call. Its tensors have a batch dimension where sequences are packed too.

    Attributes:
        cp: the ranks.
        stretches: of this rank.
        seen: for each rank rows of keys of its stretches.
        tokens, blocks: rows of keys and values, and of compressed ones.
        heads: key/value heads of each step.
        backend: of `nsa`.
        packed: sequences are, whether their lengths are known or not.
        of_keys: names of the tensors that come a step at a time.
        recorded: in graphs that are made.
    """

    cp: ContextParallel
    stretches: tuple[Stretch, ...]
    seen: tuple[tuple[slice, ...], ...]
    tokens: Rows
    blocks: Rows | None
    heads: tuple[tuple[int, int], ...]
    backend: str
    packed: bool
    of_keys: tuple[str, ...]
    recorded: bool

    @staticmethod
    def common(
        cp: ContextParallel, backend: str, given: CallTensors, stretches: Sequence[Sequence[Stretch]], **more: Any
    ) -> dict[str, Any]:
        """Fields of every kind of call on a rank's tensors, packed or not; stretches of all ranks."""
        q, packed, Hkv = given.q, given.q.dim() == 3, given.k.shape[-2]
        tokens = Rows.of_tokens(cp, q.shape[-3])
        # Not a plan's groups: they follow from what is free, and ranks exchange the same heads.
        heads = steps_of(Hkv, sum(tokens.counts))
        seen = tuple(tuple(stretch.keys for stretch in of_rank) for of_rank in stretches)
        found = dict(cp=cp, stretches=tuple(stretches[cp.rank]), seen=seen, tokens=tokens, heads=heads)
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
        return sum(self.tokens.counts)

    @property
    def ahead(self) -> bool:
        """Exchanges of the next step run beside attention."""
        return self.total < LONGEST * (self.cp.size - 1)

    def send(self, given: CallTensors, step: int, parts: dict[str, Parts] | None = None) -> Sent:
        """Begin to gather keys and values of a step's heads, if there is such a step, and to sum parts of gradients."""
        exchange = Collectives(self.cp) if self.recorded else Messages(self.cp, kernels=self.backend == "cute")
        keys = {}
        if step < len(self.heads):
            of_step = {name: getattr(given, name)[:, :, slice(*self.heads[step])] for name in self.of_keys}
            keys = {name: exchange.send_to_all(x, self.tokens) for name, x in of_step.items()}
        sums = {name: exchange.send_sums(each, self.tokens, self.seen) for name, each in (parts or {}).items()}
        exchange.begin()
        return Sent(exchange, self.tokens, keys, sums)

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


class Sent(NamedTuple):
    """On its way: keys and values of a step's heads, and sums of the gradients of those of another one."""

    exchange: Collectives | Messages
    rows: Rows
    keys: dict[str, Tensor]
    sums: dict[str, Any]

    def whole(self) -> dict[str, Tensor]:
        """Keys and values of all ranks."""
        return {name: self.exchange.whole(x, self.rows) for name, x in self.keys.items()}

    def write(self, name: str, out: Tensor) -> None:
        """Write a sum of this rank's rows, [B, n, h, D]."""
        self.exchange.write_sums(self.sums[name], self.rows, out)


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


def steps_of(heads: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """The first and the end of each step's heads, of calls of so many tokens: one at both ends, beside whose exchange
    nothing runs, and few steps between, since kernels of more heads are faster; all at once in short calls."""
    if tokens < LONG:
        return ((0, heads),)
    inner = split_heads(max(0, heads - 2), max(1, min(STEP // tokens, -(-heads // 2))))
    ends = [(first, first + 1) for first in sorted({0, heads - 1})]
    return (ends[0], *((first + 1, end + 1) for first, end in inner), *ends[1:])


class _Attend(ReverseMode):
    @staticmethod
    def forward(ctx: Any, call: Call, return_more: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """tensors: of `CallTensors`."""
        whole = given = CallTensors(*tensors)
        if given.k_cmp is not None:
            blocks = Collectives(call.cp)
            of_blocks = {name: blocks.send_to_all(getattr(given, name), call.blocks) for name in OF_BLOCKS}
            whole = given._replace(**{name: blocks.whole(x, call.blocks) for name, x in of_blocks.items()})
        o = given.q.new_empty((*given.q.shape[:-1], given.v.shape[-1]))
        o = Written(o, dim=2, zeros=False, recorded=call.recorded)
        backward, saved = any(ctx.needs_input_grad), []
        flying = [call.send(given, 0)]
        for step in range(len(call.heads)):
            if call.ahead:
                flying.append(call.send(given, step + 1))
            keys, here = flying.pop(0).whole(), o.of(call.rows(given, step)[1])
            for i, stretch in enumerate(call.stretches):
                part, into = call.part(whole, keys, call.places(given, step, i), stretch), here[:, stretch.queries]
                saved.append(call.forward(part, i, into[0] if call.packed else into, backward=backward))
            del keys, part
            if not call.ahead:
                flying.append(call.send(given, step + 1))
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
        found = first_derivatives(partial(_gradients, ctx.call), do, *ctx.saved_tensors)
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
    flying, parts, late = [call.send(given, 0)], {}, 2 if call.ahead else 1

    def arrive(step: int) -> dict[str, Tensor]:
        """Write the sums that came with a step's keys and values, and return these."""
        sent = flying.pop(0)
        for name in sent.sums:
            sent.write(name, made[name].of(slice(*call.heads[step - late])))
        return sent.whole()

    for step in range(len(call.heads)):
        if call.ahead:
            flying.append(call.send(given, step + 1, parts))
        keys = arrive(step)
        parts = {name: [] for name in keys}
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
                    parts[name].insert(0, (stretch.keys, d[None] if call.packed else d))  # stretches come last to first
                elif name in summed:
                    here[name][places[name][:-1]] += d
                else:
                    here[name][places[name][:-1]] = d
            del found, d
        del keys, part
        if not call.ahead:
            flying.append(call.send(given, step + 1, parts))
    if call.ahead:
        flying.append(call.send(given, len(call.heads), parts))
    for step in range(len(call.heads), len(call.heads) + late):
        arrive(step)
    found = {name: x.whole() for name, x in made.items()}
    blocks, of_blocks = Collectives(call.cp), [name for name in OF_BLOCKS if name in named]
    sums = [blocks.send_sum(found[name], call.blocks) for name in of_blocks]
    found |= {name: blocks.sums(x, call.blocks) for name, x in zip(of_blocks, sums)}
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
