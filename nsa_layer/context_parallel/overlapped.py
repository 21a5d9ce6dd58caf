"""`gather` on the kernels: keys and values of a few heads come beside the attention of the heads before.

Backward gathers them again, and what it adds to them goes to their ranks, in fp32, beside the heads after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from nsa_layer import support
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, accumulation_dtype
from nsa_layer.compress import project
from nsa_layer.config import NSAConfig
from nsa_layer.context_parallel.collectives import Exchange
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import Stretch, Window
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, Sizes, head_groups, plan_memory
from nsa_layer.cute.packing import Packing, numbers_on
from nsa_layer.derivatives import ReverseMode, first_derivatives

Tensor = torch.Tensor
LONG = 1 << 19  # tokens from which on heads come one by one
OF_KEYS, OF_WINDOW = ("k", "v"), ("k_win", "v_win")


class Part(NamedTuple):
    """A stretch's call on some heads."""

    tensors: CallTensors
    packing: Packing | None
    spec: CallSpec
    plan: MemoryPlan


class Call(NamedTuple):
    """The static side of a rank's call.

    Its tensors have a batch dimension where sequences are packed too, and no compression weights. Those of the window
    have what each stretch's window sees, one stretch after the other.

    Attributes:
        spec: of the whole call.
        tokens, blocks: exchanges of keys and values, and of compressed ones.
        stretches, windows: of this rank.
        heads: key/value heads of each step.
        kept: outputs that are saved.
    """

    spec: CallSpec
    tokens: Exchange
    blocks: Exchange
    stretches: tuple[Stretch, ...]
    windows: tuple[Window, ...]
    heads: tuple[tuple[int, int], ...]
    kept: tuple[bool, bool, bool]

    @property
    def packed(self) -> bool:
        return self.spec.lengths is not None

    def gathered(self, given: CallTensors) -> Iterator[dict[str, Tensor]]:
        """Keys and values of all ranks, of the heads of each step, sent for a step ahead."""
        sent = self._sent(given, 0)
        for step in range(len(self.heads)):
            following = self._sent(given, step + 1) if step + 1 < len(self.heads) else {}
            yield {name: self.tokens.whole(x) for name, x in sent.items()}
            sent = following

    def _sent(self, given: CallTensors, step: int) -> dict[str, Tensor]:
        first, end = self.heads[step]
        return {name: self.tokens.send_to_all(getattr(given, name)[:, :, first:end]) for name in OF_KEYS}

    def window_rows(self) -> Iterator[slice]:
        """Rows of each stretch in the window's tensors."""
        ends = accumulate((window.keys.stop - window.keys.start for window in self.windows), initial=0)
        return (slice(*pair) for pair in pairwise(ends))

    def parts(self, given: CallTensors, keys: dict[str, Tensor], step: int) -> Iterator[tuple[Stretch, Part]]:
        """The calls of a step, one for each stretch.

        Args:
            given: with compressed keys and values of all ranks.
        """
        heads = slice(*self.heads[step])
        G = given.q.shape[2] // given.k.shape[2]
        of_q = slice(heads.start * G, heads.stop * G)
        of_lists, tile = heads, self.spec.config.q_tile
        if given.block_indices is not None and given.block_indices.shape[2] == given.q.shape[2]:
            of_lists = of_q
        for stretch, window, seen in zip(self.stretches, self.windows, self.window_rows(), strict=True):
            spec, blocks, queries = stretch.spec(self.spec), stretch.blocks(self.spec), stretch.queries
            lists = slice(queries.start // tile, -(-queries.stop // tile))
            found = dict(
                q=given.q[:, queries, of_q],
                gates=None if given.gates is None else given.gates[:, queries, of_q],
                k_cmp=given.k_cmp[:, blocks, heads],
                v_cmp=given.v_cmp[:, blocks, heads],
                block_indices=None if given.block_indices is None else given.block_indices[:, lists, of_lists],
                **{name: x[:, stretch.keys] for name, x in keys.items()},
            )
            if given.k_win is not None:
                spec = replace(spec, window=window.lengths)
                found |= {name: getattr(given, name)[:, seen, heads] for name in OF_WINDOW}
            if self.packed:
                found = {name: None if x is None else x[0] for name, x in found.items()}
            offset = stretch.offsets(1 if self.packed else len(given.q), given.q.device)
            weight = None if given.gate_weight is None else given.gate_weight[of_q]
            tensors = CallTensors(**found, gate_weight=weight, q_offset=offset)
            packing = Packing.of(spec, given.q.device, tensors.q_heads_per_list)
            yield stretch, Part(tensors, packing, spec, MemoryPlan(((0, heads.stop - heads.start),), self.kept))


def attend(
    cp: ContextParallel,
    given: CallTensors,
    stretches: Sequence[Stretch],
    windows: Sequence[Window],
    blocks: Rows,
    *,
    spec: CallSpec,
    memory: MemoryPolicy,
    needs_grad: bool,
    return_aux: bool,
) -> tuple[Tensor, list[Aux] | None]:
    """o of a rank's queries, and what else there is of each stretch.

    Args:
        given: of this rank, packed or not as in `nsa`.
        blocks: rows of compressed keys.
    """
    from nsa_layer.cute.autograd import readable

    packed = spec.lengths is not None
    q, v, tokens = given.q, given.v, Rows.of_tokens(cp, given.q.shape[-3])
    S, Hkv = sum(tokens.counts), v.shape[-2]
    whole_v = torch.empty((*v.shape[:-3], S, *v.shape[-2:]), dtype=v.dtype, device="meta")
    plan = plan_memory(Sizes.of(given._replace(v=whole_v), spec=spec, needs_grad=needs_grad), memory, q.device)
    # Not the plan's groups: they follow from what is free, and ranks exchange the same heads.
    heads = steps_of(Hkv, max(1, min(LONG // S, -(-Hkv // 2))))
    exchanges = Exchange.of(q[None] if packed else q, tokens, cp), Exchange(blocks, cp)
    call = Call(spec, *exchanges, tuple(stretches), tuple(windows), heads, plan.kept)
    if packed:
        given = CallTensors(*(x if x is None else x[None] for x in given))._replace(gate_weight=given.gate_weight)
    o, *rest = _Attend.apply(call, return_aux, *(x if x is None else readable(x) for x in given))
    o = o[0] if packed else o
    return o, [Aux(*rest[i : i + 5]) for i in range(0, len(rest), 5)] if return_aux else None


def steps_of(Hkv: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Key/value heads of each step, at most so many; one at both ends, beside whose exchange nothing runs."""
    inner = head_groups(max(0, Hkv - 2), heads)
    ends = [(first, first + 1) for first in sorted({0, Hkv - 1})]
    return (ends[0], *((first + 1, end + 1) for first, end in inner), *ends[1:])


class _Attend(ReverseMode):
    @staticmethod
    def forward(ctx: Any, call: Call, return_aux: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """tensors: of `CallTensors`."""
        from nsa_layer.cute import autograd

        given = CallTensors(*tensors)
        k_cmp, v_cmp = map(call.blocks.whole, [call.blocks.send_to_all(x) for x in (given.k_cmp, given.v_cmp)])
        whole = given._replace(k_cmp=k_cmp, v_cmp=v_cmp)
        o = given.q.new_empty((*given.q.shape[:-1], given.v.shape[-1]))
        G, backward, saved = given.q.shape[2] // given.k.shape[2], any(ctx.needs_input_grad), []
        for step, keys in enumerate(call.gathered(given)):
            of_q = slice(*(G * head for head in call.heads[step]))
            for stretch, part in call.parts(whole, keys, step):
                into = o[:, stretch.queries, of_q]
                into = into[0] if call.packed else into
                saved += autograd.forward_groups(*part, backward=backward, o=into)[1]
            del keys, part
        ctx.call = call
        ctx.save_for_backward(*whole, *(x for left in saved for x in left))
        ctx.set_materialize_grads(False)
        if not return_aux:
            return (o,)
        auxes = []
        for i, stretch in enumerate(call.stretches):
            q, left = given.q[:, stretch.queries], saved[i :: len(call.stretches)]
            unions = support.takes_unions(call.spec.config, listed=call.spec.listed)
            auxes += autograd._joined_aux(left, q[0] if call.packed else q, unions=unions)
        ctx.mark_non_differentiable(*auxes)
        return o, *auxes

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        found = first_derivatives("cute", partial(_gradients, ctx.call), do, *ctx.saved_tensors)
        return None, None, *found, *[None] * (len(CallTensors._fields) - len(found))


def _gradients(call: Call, do: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the differentiable tensors, from what forward saved."""
    from nsa_layer.cute import autograd

    count = len(CallTensors._fields)
    given, left = CallTensors(*tensors[:count]), tensors[count:]
    each, G = len(autograd.SavedForBackward._fields), given.q.shape[2] // given.k.shape[2]
    exactly = accumulation_dtype(given.q.dtype)
    dq, d_gates = torch.empty_like(given.q), None if given.gates is None else torch.empty_like(given.gates)
    d_weight = None if given.gate_weight is None else torch.zeros_like(given.gate_weight, dtype=exactly)
    of_keys = {name: torch.empty_like(getattr(given, name)) for name in OF_KEYS}
    of_window = [None if x is None else torch.empty_like(x) for x in (given.k_win, given.v_win)]
    seen = list(call.window_rows())
    of_blocks = {name: torch.zeros_like(getattr(given, name), dtype=exactly) for name in ("k_cmp", "v_cmp")}
    sent: dict[str, Tensor] = {}

    def arrive(step: int) -> None:
        for name, x in sent.items():
            of_keys[name][:, :, slice(*call.heads[step])] = call.tokens.sums(x)

    for step, keys in enumerate(call.gathered(given)):
        heads = slice(*call.heads[step])
        of_q = slice(heads.start * G, heads.stop * G)
        sums = {name: Sums(x, call.tokens.rows) for name, x in keys.items()}
        for i, (stretch, part) in reversed([*enumerate(call.parts(given, keys, step))]):
            at = (step * len(call.stretches) + i) * each
            rows, blocks = (slice(None), stretch.queries, of_q), (slice(None), stretch.blocks(call.spec), heads)
            do_i, dq_i = (x[rows][0] if call.packed else x[rows] for x in (do, dq))
            saved = autograd.SavedForBackward(*left[at : at + each])
            found = autograd.gradients(do_i, *part, [saved], dq=dq_i)
            _, dk, dv, d_weight_i, d_gates_i, _, _, dk_cmp, dv_cmp, dk_win, dv_win = found
            if d_weight is not None:
                d_weight[of_q] += d_weight_i
            if d_gates is not None:
                d_gates[rows] = d_gates_i
            of_blocks["k_cmp"][blocks] += dk_cmp
            of_blocks["v_cmp"][blocks] += dv_cmp
            for name, d in dict(k=dk, v=dv).items():
                sums[name].add(d[None] if call.packed else d, stretch.keys)
            for into, d in zip(of_window, (dk_win, dv_win), strict=True):
                if into is not None:
                    into[:, seen[i], heads] = d
            del found, saved, dk, dv, dk_cmp, dv_cmp, dk_win, dv_win, d
        del keys, part
        if step:
            arrive(step - 1)
        sent = {name: call.tokens.send_sums_by_rank(x.total) for name, x in sums.items()}
        del sums
    arrive(len(call.heads) - 1)
    to_blocks = [call.blocks.send_sums(x) for x in of_blocks.values()]
    dk_cmp, dv_cmp = (call.blocks.sums(x).to(given.k_cmp.dtype) for x in to_blocks)
    if d_weight is not None:
        d_weight = d_weight.to(given.gate_weight.dtype)
    return dq, of_keys["k"], of_keys["v"], d_weight, d_gates, None, None, dk_cmp, dv_cmp, *of_window


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


class _Pooled(ReverseMode):
    """Means of complete blocks, by the kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, options: dict[str, Any], total: int | None) -> Tensor:
        from nsa_layer.kernels.mean_pool.pool import pool

        ctx.options, ctx.like = options, (x.shape, x.dtype)
        more = dict(total_blocks=total) if total is not None else {}
        return pool(x, None, k_dtypes=(dtype,), v_dtype=dtype, **options, **more)[0][0]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        from nsa_layer.kernels.mean_pool.pool import unpool

        dx = d.new_empty(ctx.like[0], dtype=ctx.like[1])
        unpool(d.contiguous(), None, dx, None, **ctx.options)
        return dx, None, None, None


def compressed(x: Tensor, lengths: tuple[int, ...] | None, *, weight: Tensor | None, config: NSAConfig) -> Tensor:
    """Compressed tokens in the dtype of x: [B, T, Hkv, D], or packed [total, Hkv, D] of these lengths."""
    from nsa_layer.cute.autograd import readable

    options, total = dict(block_size=config.span, stride=config.stride), None
    if lengths is not None:
        blocks = [config.compressed_length(length) for length in lengths]
        starts = [tuple(accumulate(each, initial=0)) for each in (lengths, blocks)]
        options |= dict(zip(("cu_seqlens", "cu_blocks"), numbers_on(tuple(starts), x.device)))
        total = sum(blocks)
    means = _Pooled.apply(readable(x), x.dtype if weight is None else torch.float32, options, total)
    return project(means, weight).to(x.dtype)
