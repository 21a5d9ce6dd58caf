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

from nsa_layer.call_spec import DIFFERENTIABLE, CallSpec, CallTensors, ListSpec, accumulation_dtype
from nsa_layer.context_parallel import shard_call
from nsa_layer.context_parallel.layout import QueryShard, ShardLayout, head_steps
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import Addends, Collectives, Messages
from nsa_layer.cute.saved import SavedForBackward
from nsa_layer.derivatives import ReverseMode, first_derivatives
from nsa_layer.gate import equal_gates
from nsa_layer.operators.arguments import OF_LAYER, static_arguments
from nsa_layer.operators.registration import OPS, is_recorded

Tensor = torch.Tensor
Fields = tuple[Tensor | None, ...]
# Tokens for each other rank from which on exchanges are 1 % of the attention: they then alternate, which saves memory.
OVERLAP_BELOW = 1 << 22
WEIGHTS = ("gate_weight", "compress_k_weight", "compress_v_weight")
BLOCKS, WINDOW = ("k_cmp", "v_cmp"), ("k_win", "v_win")
# An exchange under way: K and V of a step by name; sums of gradients by name, and their step.
Exchange = tuple[Collectives | Messages, dict[str, Tensor], dict[str, Any], int]


class GatherCall(NamedTuple):
    """The static side of a rank's call. Its tensors are a batch, of one where sequences are packed.

    Attributes:
        cp, backend: of the call.
        spec: of the whole call of `nsa`, or of `selected_attention`, whose packed sequences are one to shards.
        kept: branches' outputs that the kernels save.
        in_graph: exchanges are collectives and attention is operators.
        packed: sequences are, whether the host knows their lengths or not.
        gathered: names of the tensors that are gathered a step at a time.
        tokens, blocks: layouts of tokens and of compressed keys.
        shards: of this rank.
        key_ranges: the keys of each rank's shards.
        steps: (first, end) of each step's key/value heads.
    """

    cp: ContextParallel
    backend: str
    spec: CallSpec | ListSpec
    kept: tuple[bool, ...]
    in_graph: bool
    packed: bool
    gathered: tuple[str, ...]
    tokens: ShardLayout
    blocks: ShardLayout | None
    shards: tuple[QueryShard, ...]
    key_ranges: tuple[tuple[slice, ...], ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def overlaps(self) -> bool:
        """True if the next step's exchange runs beside attention."""
        return self.tokens.total < OVERLAP_BELOW * (self.cp.size - 1)


def attend_in_steps(
    cp: ContextParallel,
    backend: str,
    tensors: CallTensors,
    spec: CallSpec | ListSpec,
    shards: Sequence[Sequence[QueryShard]],
    *,
    return_more: bool,
    kept: tuple[bool, ...] = (),
    gathered: tuple[str, ...] = ("k", "v"),
    blocks: ShardLayout | None = None,
) -> tuple[Tensor, list[Fields]]:
    """Attend with a rank's queries; `GatherCall` has the arguments.

    Args:
        tensors: this rank's. Of compressed keys it has the blocks that start here; of ``k_win`` and ``v_win``, unless
            they are gathered, what each shard's window sees, one shard after the other.
        shards: of each rank.

    Returns:
        o, and with `return_more` for each shard the fields of `Aux`, or of `selected_attention` the LSE.
    """
    q, packed, in_graph = tensors.q, tensors.q.dim() == 3, is_recorded(tensors.q)
    tokens = ShardLayout.of_tokens(cp, q.shape[-3])
    # Not a memory plan's groups, which follow from what is free: ranks exchange the same heads.
    steps = head_steps(tensors.k.shape[-2], tokens.total)
    key_ranges = tuple(tuple(shard.keys for shard in of_rank) for of_rank in shards)
    shards = tuple(shards[cp.rank])
    call = GatherCall(cp, backend, spec, kept, in_graph, packed, gathered, tokens, blocks, shards, key_ranges, steps)
    if packed:
        tensors = tensors.as_batch()
    if backend == "cute" and not in_graph:
        from nsa_layer.kernels.launch import readable

        tensors = tensors.map(readable)
    o, *more = _Gather.apply(call, return_more, *tensors)
    count = len(more) // len(shards)
    by_shard = [tuple(more[i : i + count]) for i in range(0, len(more), count)] if count else []
    return o[0] if packed else o, by_shard


class _Gather(ReverseMode):
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
            for i, shard in enumerate(call.shards):
                part, o_part = _part(call, whole, keys, step, i), o_step[:, shard.queries]
                saved.append(_forward(call, part, shard, o_part[0] if call.packed else o_part, backward=backward))
            del keys, part
            if not call.overlaps:
                exchanges.append(_start(call, local, step + 1))
        o = torch.cat(o_steps, 2) if call.in_graph else o
        ctx.call = call
        ctx.save_for_backward(*whole, *(x for fields in saved for x in fields))
        ctx.set_materialize_grads(False)
        if not return_more:
            return (o,)
        more = []
        for i, shard in enumerate(call.shards):
            q = local.q[:, shard.queries]
            more += _more(call, saved[i :: len(call.shards)], q[0] if call.packed else q)
        ctx.mark_non_differentiable(*more)
        return o, *more

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *first_derivatives(ctx.call.backend, partial(_gradients, ctx.call), do, *ctx.saved_tensors)


def _gradients(call: GatherCall, do: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of `CallTensors`, from what forward saved; those of weights are this rank's part."""
    count, shards = len(CallTensors._fields), len(call.shards)
    whole, saved = CallTensors(*tensors[:count]), tensors[count:]
    fields, exactly = len(saved) // (len(call.steps) * shards), accumulation_dtype(whole.q.dtype)
    grads, by_step, d_keys = {}, {}, {}
    for name in DIFFERENTIABLE:
        if (x := getattr(whole, name)) is not None:
            summed = name in WEIGHTS + BLOCKS
            grads[name] = torch.zeros_like(x, dtype=exactly) if summed else torch.empty_like(x)
            by_step[name] = _by_step(call, grads[name], name, whole, zeros=summed)
    exchanges = deque([_start(call, whole, 0)])
    for step in range(len(call.steps)):
        if call.overlaps:
            exchanges.append(_start(call, whole, step + 1, d_keys, step - 1))
        d_keys = {name: [None] * shards for name in call.gathered}
        keys = _finish(call, exchanges.popleft(), by_step)
        for i in reversed(range(shards)):
            part, rows, at = _part(call, whole, keys, step, i), _rows(call, i), (step * shards + i) * fields
            do_part, dq_part = (x[:, rows["q"]] for x in (do[:, :, _heads(call, whole, step)["q"]], by_step["q"][step]))
            if call.packed:
                do_part, dq_part = do_part[0], dq_part[0]
            results = _backward(call, part, call.shards[i], do_part, saved[at : at + fields], dq_part)
            for name, d in zip(DIFFERENTIABLE[1:], results[1:]):
                if getattr(part, name) is None:
                    continue
                d = d if name in WEIGHTS or not call.packed else d[None]
                if name in keys:
                    d_keys[name][i] = call.shards[i].keys, d
                else:
                    _write(by_step[name][step], d, name, rows)
            del results, d
        del keys, part
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
    call: GatherCall,
    local: CallTensors,
    step: int,
    d_keys: dict[str, Addends] | None = None,
    d_step: int = 0,
) -> Exchange:
    """Start to gather K and V of a step, if there is such a step, and to sum gradients of those of step `d_step`."""
    transport = Collectives(call.cp) if call.in_graph else Messages(call.cp, kernels=call.backend == "cute")
    keys = {}
    if step < len(call.steps):
        heads = slice(*call.steps[step])
        keys = {name: transport.all_gather(getattr(local, name)[:, :, heads], call.tokens) for name in call.gathered}
    d_keys = d_keys or {}
    sums = {name: transport.reduce_scatter(each, call.tokens, call.key_ranges) for name, each in d_keys.items()}
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
    if local.k_cmp is None:
        return local
    transport = Collectives(call.cp)
    buffers = {name: transport.all_gather(getattr(local, name), call.blocks) for name in BLOCKS}
    return local._replace(**{name: transport.gathered(x, call.blocks) for name, x in buffers.items()})


def _scatter_blocks(call: GatherCall, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the ranks of gradients of compressed keys and values, of the blocks that start on this rank."""
    transport = Collectives(call.cp)
    buffers = {name: transport.reduce_scatter([(slice(0, d.shape[1]), d)], call.blocks) for name, d in grads.items()}
    return {name: transport.sum(buffer, call.blocks) for name, buffer in buffers.items()}


def _heads(call: GatherCall, tensors: CallTensors, step: int) -> dict[str, slice]:
    """A step's heads in each tensor."""
    (first, end), Hq = call.steps[step], tensors.q.shape[2]
    G, lists = Hq // tensors.k.shape[2], tensors.block_indices
    heads = dict.fromkeys(CallTensors._fields, slice(first, end))
    of_query = ("q", "gates", "gate_weight") + (
        ("block_indices",) if lists is not None and lists.shape[2] == Hq else ()
    )
    return heads | dict.fromkeys(of_query, slice(first * G, end * G))


def _rows(call: GatherCall, i: int) -> dict[str, slice]:
    """A shard's rows in each tensor that is not gathered: among this rank's tokens or lists, and all ranks' blocks."""
    shard, spec, alone = call.shards[i], call.spec, isinstance(call.spec, ListSpec)
    queries, tile = shard.queries, spec.q_tile if alone else spec.config.q_tile
    rows = dict(q=queries, gates=queries, block_indices=slice(queries.start // tile, -(-queries.stop // tile)))
    if not alone:
        rows |= dict.fromkeys(BLOCKS, shard.blocks(spec))
        windows = (each.window(spec)[0] for each in call.shards)
        ends = list(accumulate((window.stop - window.start for window in windows), initial=0))
        rows |= dict.fromkeys(WINDOW, slice(ends[i], ends[i + 1]))
    return rows


def _part(call: GatherCall, whole: CallTensors, keys: dict[str, Tensor], step: int, i: int) -> CallTensors:
    """The tensors of a shard and a step. `whole` has all ranks' compressed keys, `keys` what is gathered."""
    heads, rows, shard = _heads(call, whole, step), _rows(call, i), call.shards[i]
    part = {name: x[:, shard.keys] for name, x in keys.items()}
    part |= {
        name: x[:, at, heads[name]]
        for name, at in rows.items()
        if name not in keys and (x := getattr(whole, name)) is not None
    }
    if call.packed:
        part = {name: x[0] for name, x in part.items()}
    weights = {name: x[heads[name]] for name in WEIGHTS if (x := getattr(whole, name)) is not None}
    return CallTensors(**part, **weights, cu_seqlens=whole.cu_seqlens)


def _by_step(call: GatherCall, x: Tensor, name: str, tensors: CallTensors, *, zeros: bool = False) -> Sequence[Tensor]:
    """Each step's heads of a tensor like the one of this name, to be written.

    Views; in a graph tensors of their own, to be joined: Inductor's expressions double with each write to a slice.
    """
    heads = [_heads(call, tensors, step)[name] for step in range(len(call.steps))]
    views = x.split([each.stop - each.start for each in heads], 0 if name in WEIGHTS else 2)
    if not call.in_graph:
        return views
    return [torch.zeros_like(view) if zeros else torch.empty_like(view) for view in views]


def _write(out: Tensor, d: Tensor, name: str, rows: dict[str, slice]) -> None:
    """Write a shard's gradient to its rows of a step's, or add it where shards have rows in common."""
    if name not in WEIGHTS:
        out = out[:, rows[name]]
    if name in WEIGHTS + BLOCKS:
        out += d
    else:
        out.copy_(d)


def _forward(call: GatherCall, part: CallTensors, shard: QueryShard, o: Tensor, *, backward: bool) -> Fields:
    """Write a shard's output on a step's heads, and return what backward needs."""
    how = dict(backend=call.backend, kept=call.kept, backward=backward)
    if isinstance(call.spec, ListSpec):
        operator, tensors = shard_call.list_operator(part, shard, call.backend)
        output, *fields = operator(*tensors, *_static(call, shard))
        o.copy_(output)
        return None if call.backend == "eager" else output, *fields
    if not call.in_graph:
        return shard_call.forward(part, shard, call.spec, o, **how)
    output, *fields = OPS.shard.default(*part[: len(OF_LAYER)], *_static(call, shard), backward)
    o.copy_(output)
    return tuple(x if x.dim() > 1 else None for x in fields)


def _backward(
    call: GatherCall, part: CallTensors, shard: QueryShard, do: Tensor, saved: Fields, dq: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of a part's differentiable tensors; q's is written to dq."""
    if isinstance(call.spec, ListSpec):
        operator, tensors = shard_call.list_operator(part, shard, call.backend, "_backward")
        saved = saved[2:] if call.backend == "eager" else saved
        grads = operator(do, *tensors[:5], *saved, *_static(call, shard), [True] * 3)
    elif not call.in_graph:
        how = dict(backend=call.backend, kept=call.kept)
        return shard_call.gradients(do, part, SavedForBackward(*saved), shard, call.spec, dq, **how)
    else:
        grads = OPS.shard_backward.default(do, *part[: len(OF_LAYER)], *saved, *_static(call, shard))
    dq.copy_(grads[0])
    return grads


def _static(call: GatherCall, shard: QueryShard) -> tuple[Any, ...]:
    """Arguments of the operators that are no tensors."""
    if isinstance(call.spec, ListSpec):
        return call.spec.block_size, call.spec.q_tile, call.spec.causal, call.spec.softmax_scale
    first = shard.offsets[0]
    return *static_arguments(call.spec).values(), first, call.tokens.total, call.backend, call.kept


def _more(call: GatherCall, saved: Sequence[Fields], q: Tensor) -> tuple[Tensor, ...]:
    """Outputs beside o, of what a shard's steps saved: fields of `Aux`, or the LSE."""
    if isinstance(call.spec, ListSpec):
        return (torch.cat([lse for _, lse, *_ in saved], -2),)
    steps = [SavedForBackward(*fields) for fields in saved]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(fields, name) for fields in steps]
        return None if parts[0] is None else torch.cat(parts, -2)

    lists, gates, lse_cmp, lse_slc, lse_swa = map(joined, ("block_indices", "g", "lse_cmp", "lse_slc", "lse_swa"))
    lists = q.new_empty(0, dtype=torch.int32) if lists is None else lists  # a graph does not return the caller's
    lse_swa = torch.full_like(lse_cmp, -torch.inf) if lse_swa is None else lse_swa
    return lists, equal_gates(q) if gates is None else gates, lse_cmp, lse_slc, lse_swa
