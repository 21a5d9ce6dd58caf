"""The loop of mode "gather": K and V of some key/value heads are gathered while the heads before them attend.

Backward gathers them again, and sends dK and dV of the heads before to the ranks that hold their rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from nsa_layer.call_spec import (
    DIFFERENTIABLE,
    SELECTED_ALONE,
    CallSpec,
    CallTensors,
    Saved,
    accumulation_dtype,
    equal_gates,
)
from nsa_layer.context_parallel import shard_call
from nsa_layer.context_parallel.checks import WEIGHTS
from nsa_layer.context_parallel.layout import QueryShard, ShardLayout
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import Addends, Collectives, Messages
from nsa_layer.derivatives import first_derivatives
from nsa_layer.operators.arguments import OF_LAYER, static_arguments
from nsa_layer.operators.layer import NOTHING
from nsa_layer.operators.registration import OPS

Tensor = torch.Tensor
Fields = tuple[Tensor | None, ...]
# Tokens for each other rank from which on exchanges are 1 % of the attention: they then alternate, which saves memory.
OVERLAP_BELOW = 1 << 22
BLOCKS, WINDOW = ("k_cmp", "v_cmp"), ("k_win", "v_win")
SUMMED = WEIGHTS + BLOCKS  # gradients to which each shard adds
# An exchange under way: K and V of a step by name; sums of gradients by name, and their step.
Exchange = tuple[Collectives | Messages, dict[str, Tensor], dict[str, Any], int]


class GatherCall(NamedTuple):
    """The static side of a rank's call.

    Attributes:
        spec: of the whole call of `nsa`; or of `selected_attention`, whose packed sequences are one to shards.
        in_graph: exchanges are collectives and attention is operators.
        packed: sequences are, whether the host knows their lengths or not. Tensors are a batch of one then.
        tokens, blocks: layouts of tokens and of compressed keys.
        steps: (first, end) of each step's key/value heads.
        shards: of each rank.
        kept: branches' outputs that the kernels save.
        gathered: names of the tensors that are gathered a step at a time.
    """

    cp: ContextParallel
    backend: str
    spec: CallSpec
    in_graph: bool
    packed: bool
    tokens: ShardLayout
    steps: tuple[tuple[int, int], ...]
    shards: Sequence[Sequence[QueryShard]]
    blocks: ShardLayout | None = None
    kept: tuple[bool, ...] = ()
    gathered: tuple[str, ...] = ("k", "v")

    @property
    def own_shards(self) -> Sequence[QueryShard]:
        """This rank's."""
        return self.shards[self.cp.rank]

    @property
    def is_selected_alone(self) -> bool:
        """True for a call of `selected_attention`."""
        return self.spec.branches == SELECTED_ALONE

    @property
    def overlaps(self) -> bool:
        """True if the next step's exchange runs beside attention."""
        return self.tokens.total < OVERLAP_BELOW * (self.cp.size - 1)


def attend_in_steps(call: GatherCall, tensors: CallTensors, *, return_more: bool) -> tuple[Tensor, list[Fields]]:
    """o of a rank's queries, and with `return_more` for each shard the fields of `Aux`, or its LSE where it is alone.

    Args:
        tensors: this rank's: compressed keys of the blocks that start here; of ``k_win`` and ``v_win``, unless they are
            gathered, what each shard's window sees, one shard after the other.
    """
    if call.packed:
        tensors = tensors.as_batch()
    if call.backend == "cute" and not call.in_graph:
        from nsa_layer.kernels.launch import readable

        tensors = tensors.map(readable)
    o, *more = _Gather.apply(call, return_more, *tensors)
    count = len(more) // len(call.own_shards)
    by_shard = [tuple(more[i : i + count]) for i in range(0, len(more), count)] if count else []
    return o[0] if call.packed else o, by_shard


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GatherCall, return_more: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """tensors: of `CallTensors`."""
        local, backward, saved = CallTensors(*tensors), any(ctx.needs_input_grad), []
        whole = _gather_blocks(call, local)
        o = local.q.new_empty((*local.q.shape[:-1], local.v.shape[-1]))
        o_steps = _by_step(call, o, "q", local)
        exchanges = deque([_start(call, local, 0)])
        for step, o_step in enumerate(o_steps):
            if call.overlaps:
                exchanges.append(_start(call, local, step + 1))
            keys = _finish(call, exchanges.popleft(), {})
            for i, shard in enumerate(call.own_shards):
                inputs = _shard_inputs(call, whole, keys, step, i)
                saved.append(_forward(call, inputs, shard, _row(call, o_step[:, shard.queries]), backward=backward))
            del keys, inputs
            if not call.overlaps:
                exchanges.append(_start(call, local, step + 1))
        o = torch.cat(o_steps, 2) if call.in_graph else o
        ctx.call = call
        ctx.save_for_backward(*whole, *[x for fields in saved for x in fields])
        ctx.set_materialize_grads(False)
        if not return_more:
            return (o,)
        more = []
        for i, shard in enumerate(call.own_shards):
            more += _more(call, saved[i :: len(call.own_shards)], _row(call, local.q[:, shard.queries]))
        ctx.mark_non_differentiable(*more)
        return o, *more

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.compiler.is_compiling():
            return None, None, *_gradients(ctx.call, do, *ctx.saved_tensors)
        return None, None, *first_derivatives(partial(_gradients, ctx.call), do, *ctx.saved_tensors)


def _gradients(call: GatherCall, do: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of `CallTensors`, from what forward saved; those of weights are this rank's part."""
    count, shards = len(CallTensors._fields), call.own_shards
    whole, saved = CallTensors(*tensors[:count]), tensors[count:]
    fields, exactly = len(saved) // (len(call.steps) * len(shards)), accumulation_dtype(whole.q.dtype)
    grads, by_step, d_keys = {}, {}, {}
    for name in DIFFERENTIABLE:
        if (x := getattr(whole, name)) is not None:
            grads[name] = torch.zeros_like(x, dtype=exactly) if name in SUMMED else torch.empty_like(x)
            by_step[name] = _by_step(call, grads[name], name, whole)
    exchanges = deque([_start(call, whole, 0)])
    for step in range(len(call.steps)):
        if call.overlaps:
            exchanges.append(_start(call, whole, step + 1, d_keys, step - 1))
        d_keys = {name: [None] * len(shards) for name in call.gathered}
        keys = _finish(call, exchanges.popleft(), by_step)
        for i, shard in reversed([*enumerate(shards)]):
            at, first = _index(call, whole, step, i), (step * len(shards) + i) * fields
            inputs = _shard_inputs(call, whole, keys, step, i)
            do_shard, dq_shard = _row(call, do[at["q"]]), _row(call, by_step["q"][step][at["q"][:-1]])
            results = _backward(call, inputs, shard, do_shard, saved[first : first + fields], dq_shard)
            for name, d in zip(DIFFERENTIABLE[1:], results[1:]):
                if getattr(inputs, name) is None:
                    continue
                d = d[None] if call.packed and name not in WEIGHTS else d
                if name in keys:
                    d_keys[name][i] = shard.keys, d
                elif name in SUMMED:
                    by_step[name][step][at[name][:-1]] += d
                else:
                    by_step[name][step][at[name][:-1]] = d
            del results, d
        del keys, inputs
        if not call.overlaps:
            exchanges.append(_start(call, whole, step + 1, d_keys, step))
    if call.overlaps:
        exchanges.append(_start(call, whole, len(call.steps), d_keys, len(call.steps) - 1))
    del d_keys
    while exchanges:
        _finish(call, exchanges.popleft(), by_step)
    if call.in_graph:
        grads = {name: torch.cat(parts, 0 if name in WEIGHTS else 2) for name, parts in by_step.items()}
    grads |= _scatter_blocks(call, {name: grads[name] for name in BLOCKS if name in grads})
    return tuple(grads[name].to(getattr(whole, name).dtype) if name in grads else None for name in CallTensors._fields)


def _start(
    call: GatherCall, local: CallTensors, step: int, d_keys: dict[str, Addends] | None = None, d_step: int = 0
) -> Exchange:
    """Start to gather K and V of a step, if there is such a step, and to sum gradients of those of step `d_step`."""
    transport = Collectives(call.cp) if call.in_graph else Messages(call.cp, kernels=call.backend == "cute")
    keys = {}
    if step < len(call.steps):
        heads, _ = _heads(call, local, step)
        keys = {name: transport.all_gather(getattr(local, name)[:, :, heads], call.tokens) for name in call.gathered}
    ranges = [[shard.keys for shard in of_rank] for of_rank in call.shards]
    sums = {name: transport.reduce_scatter(d, call.tokens, ranges) for name, d in (d_keys or {}).items()}
    transport.start()
    return transport, keys, sums, d_step


def _finish(call: GatherCall, exchange: Exchange, by_step: dict[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Write the sums of gradients that come with K and V of a step, and return these, of all ranks."""
    transport, keys, sums, d_step = exchange
    for name, buffer in sums.items():
        transport.write_sum(buffer, call.tokens, by_step[name][d_step])
    return {name: transport.gathered(buffer, call.tokens) for name, buffer in keys.items()}


def _gather_blocks(call: GatherCall, local: CallTensors) -> CallTensors:
    """With compressed keys and values of all ranks."""
    transport, names = Collectives(call.cp), () if local.k_cmp is None else BLOCKS
    buffers = {name: transport.all_gather(getattr(local, name), call.blocks) for name in names}
    return local._replace(**{name: transport.gathered(x, call.blocks) for name, x in buffers.items()})


def _scatter_blocks(call: GatherCall, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the ranks of gradients of compressed keys and values, of the blocks that start on this rank."""
    transport = Collectives(call.cp)
    buffers = {name: transport.reduce_scatter([(slice(0, d.shape[1]), d)], call.blocks) for name, d in grads.items()}
    return {name: transport.sum(buffer, call.blocks) for name, buffer in buffers.items()}


def _heads(call: GatherCall, tensors: CallTensors, step: int) -> tuple[slice, slice]:
    """A step's key/value heads and query heads."""
    (first, end), G = call.steps[step], tensors.q.shape[2] // tensors.k.shape[2]
    return slice(first, end), slice(first * G, end * G)


def _index(call: GatherCall, tensors: CallTensors, step: int, i: int) -> dict[str, tuple[slice, ...]]:
    """What a shard and a step read of each tensor that is not gathered: of this rank's, and of all compressed keys."""
    (heads, of_query), every, lists = _heads(call, tensors, step), slice(None), tensors.block_indices
    shard = call.own_shards[i]
    index = dict.fromkeys(("q", "gates"), (every, shard.queries, of_query))
    if lists is not None:
        tile = call.spec.q_tile
        rows = slice(shard.queries.start // tile, -(-shard.queries.stop // tile))
        index["block_indices"] = every, rows, of_query if lists.shape[2] == tensors.q.shape[2] else heads
    if call.is_selected_alone:
        return index
    if tensors.k_cmp is not None:
        index |= dict.fromkeys(BLOCKS, (every, shard.blocks(call.spec), heads))
    if tensors.has_own_window and "k_win" not in call.gathered:
        windows = (each.window(call.spec)[0] for each in call.own_shards)
        ends = list(accumulate((rows.stop - rows.start for rows in windows), initial=0))
        index |= dict.fromkeys(WINDOW, (every, slice(*ends[i : i + 2]), heads))
    return index | dict(zip(WEIGHTS, ((of_query,), (heads,), (heads,))))


def _shard_inputs(call: GatherCall, whole: CallTensors, keys: dict[str, Tensor], step: int, i: int) -> CallTensors:
    """A shard's tensors of a step. `whole` has all ranks' compressed keys, `keys` those that are gathered."""
    index, shard = _index(call, whole, step, i), call.own_shards[i]
    inputs = {name: x[at] for name, at in index.items() if (x := getattr(whole, name)) is not None}
    inputs |= {name: x[:, shard.keys] for name, x in keys.items()}
    inputs = {name: x if name in WEIGHTS else _row(call, x) for name, x in inputs.items()}
    return CallTensors(**inputs, cu_seqlens=whole.cu_seqlens)


def _row(call: GatherCall, x: Tensor) -> Tensor:
    """Packed sequences without the dimension of a batch of one."""
    return x[0] if call.packed else x


def _by_step(call: GatherCall, x: Tensor, name: str, tensors: CallTensors) -> Sequence[Tensor]:
    """Each step's heads of a tensor like the one of this name, to be written.

    Views; in a graph tensors of their own, to be joined: Inductor's expressions double with each write to a slice.
    """
    of_query = name in ("q", "gates", "gate_weight")
    heads = [_heads(call, tensors, step)[of_query] for step in range(len(call.steps))]
    views = x.split([each.stop - each.start for each in heads], 0 if name in WEIGHTS else 2)
    like = torch.zeros_like if name in SUMMED else torch.empty_like
    return [like(view) for view in views] if call.in_graph else views


def _forward(call: GatherCall, inputs: CallTensors, shard: QueryShard, o: Tensor, *, backward: bool) -> Fields:
    """Write a shard's output on a step's heads, and return what backward needs."""
    if call.is_selected_alone:
        tensors = shard_call.with_starts(inputs, shard)
        output, *fields = OPS.attend.default(*tensors, *_static(call, shard), backward)
        fields = (output if call.backend == "cute" else None, *fields)
    elif call.in_graph:
        output, *fields = OPS.shard.default(*inputs[: len(OF_LAYER)], *_static(call, shard), backward)
        fields = tuple(x if x.dim() > 1 else None for x in fields)
    else:
        return shard_call.forward(inputs, shard, call.spec, call.backend, call.kept, o, backward=backward)
    o.copy_(output)
    return fields


def _backward(
    call: GatherCall, inputs: CallTensors, shard: QueryShard, do: Tensor, saved: Fields, dq: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of a shard's differentiable tensors; q's is written to dq."""
    if call.is_selected_alone:
        tensors, count = shard_call.with_starts(inputs, shard), len(DIFFERENTIABLE)
        arguments = (*tensors[:count], tensors.block_indices, tensors.q_offset, *saved, *_static(call, shard), True)
        grads = OPS.attend_backward.default(do, *arguments, [x is not None for x in tensors[:count]])
    elif call.in_graph:
        grads = OPS.shard_backward.default(do, *inputs[: len(OF_LAYER)], *saved, *_static(call, shard))
    else:
        saved = Saved(*saved)
        return shard_call.backward(inputs, shard, call.spec, call.backend, call.kept, do, saved, dq)
    dq.copy_(grads[0])
    return grads


def _static(call: GatherCall, shard: QueryShard) -> tuple[Any, ...]:
    """Arguments of the operators that are no tensors."""
    if call.is_selected_alone:
        return *static_arguments(call.spec).values(), call.backend, 1, None, NOTHING, None
    first = shard.offsets[0]
    return *static_arguments(call.spec).values(), first, call.tokens.total, call.backend, call.kept


def _more(call: GatherCall, saved: Sequence[Fields], q: Tensor) -> tuple[Tensor, ...]:
    """Outputs beside o, of what a shard's steps saved: fields of `Aux`, or the LSE."""
    if call.is_selected_alone:
        return (torch.cat([fields[1 + Saved._fields.index("lse_slc")] for fields in saved], -2),)
    steps = [Saved(*fields) for fields in saved]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(fields, name) for fields in steps]
        return None if parts[0] is None else torch.cat(parts, -2)

    lists, gates, lse_cmp, lse_slc, lse_swa = map(joined, ("block_indices", "g", "lse_cmp", "lse_slc", "lse_swa"))
    lists = q.new_empty(0, dtype=torch.int32) if lists is None else lists  # a graph does not return the caller's
    lse_swa = torch.full_like(lse_cmp, -torch.inf) if lse_swa is None else lse_swa
    return lists, equal_gates(q) if gates is None else gates, lse_cmp, lse_slc, lse_swa
