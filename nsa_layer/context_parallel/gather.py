"""Mode "gather": each rank attends with its own queries to the keys and values of all ranks.

Graphs have all of a call in the operators ``gather`` and ``gather_backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from nsa_layer import autocast
from nsa_layer.call import LSES, SAVED_FIELDS, TENSORS, Aux, Call, Saved
from nsa_layer.checks import starts_of_lengths
from nsa_layer.context_parallel.gather_loop import SUMS, WINDOW_KEYS, GatherLoop
from nsa_layer.context_parallel.layout import resized
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import CP, static_of
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, kept_in_graphs, plan_memory
from nsa_layer.cute.padding import cut, padded
from nsa_layer.derivatives import first_derivatives
from nsa_layer.operators.layer import CONFIG, output_gradient, reads_output, static_arguments
from nsa_layer.operators.registration import OPS, as_output, differentiate, dispatcher_sees, none_for_empty, register

Tensor = torch.Tensor


def attend_shard(
    cp: ContextParallel, call: Call, memory: MemoryPolicy, *, return_aux: bool
) -> tuple[Tensor, Aux | None, Tensor | None]:
    """`operators.attend` of a rank's tensors, with the spec of the whole call, without what is not asked for."""
    if call.spec.backend == "reference":
        raise NotImplementedError("cp: mode='gather' with backend='reference'")
    call = call.with_scores(return_aux)
    q, lists, spec, config, packed = call.q, call.block_indices, call.spec, call.config, call.packed
    kept, chunk, total = (False,) * 3, q.shape[-3] // len(cp.chunks), q.shape[-3] * cp.size
    if lists is None:
        config.require_choice_by_token("cp with mode='gather'")
    elif config.q_tile > 1 and (packed or chunk % config.q_tile):
        raise NotImplementedError(
            f"cp: mode='gather' with lists for tiles of {config.q_tile} queries needs chunks of whole tiles, not packed"
        )
    if call.has_own_window:
        window = zip(WINDOW_KEYS, call.of_window)  # both, of which one may be k or v
        call = call._replace(**{name: x.view_as(x) if getattr(call, name) is None else x for name, x in window})
    starts = None
    if packed:  # read when the call runs: a copy, since the caller may refill its own
        starts = starts_of_lengths(spec.lengths) if spec.lengths else call.cu_seqlens.to("cpu", copy=True)
    call = call._replace(cu_seqlens=starts)
    if spec.backend == "cute" and not call.one_branch:
        kept = kept_of_shard(call, total, memory, queries=q.shape[-3])
    Dv = call.v.shape[-1]
    call = padded(call, needs_grad=call.needs_grad) if spec.backend == "cute" else call
    static = (*static_arguments(spec).values(), kept, call.needs_grad, *static_of(cp))
    o, *saved = _Attend.apply(static, *call.tensors)
    o = cut(o, Dv)
    sums = torch.stack(saved[SUMS::SAVED_FIELDS]).sum(0) if spec.index_loss else None
    if not return_aux:
        return o, None, sums
    joined = partial(_joined, saved, len(cp.chunks))
    lses = {name: joined(name, -1) for name in LSES.values()}
    lists, scores = (joined(name, -3) for name in ("block_indices", "index_scores"))
    if scores is not None:
        scores = scores.masked_fill(lists < 0, -torch.inf)
    return o, Saved(block_indices=lists, index_scores=scores, g=joined("g", -3), **lses).aux(call), sums


def kept_of_shard(
    call: Call, total: int, memory: MemoryPolicy, *, queries: int, ranks: int = 1
) -> tuple[bool, bool, bool]:
    """Outputs that the kernels save, by the memory of a call with this number of queries and `total` keys, of one of
    `ranks` parts of the heads; in graphs by the policy alone."""
    if dispatcher_sees(call.q):
        return kept_in_graphs(memory, call.needs_grad)
    rows = dict(q=queries, k=total, v=total, block_indices=queries)
    tensors = {name: x for name in rows if (x := getattr(call, name)) is not None}
    whole = {name: resized(x, rows[name], x.shape[-2] // ranks) for name, x in tensors.items()}
    sizes = Sizes.of(call._replace(**whole), needs_grad=call.needs_grad)
    return plan_memory(sizes, memory, call.q.device).kept


def _joined(saved: Sequence[Tensor | None], count: int, name: str, dim: int) -> Tensor | None:
    """A field of `Saved` of all steps' heads and the rows, which are dimension `dim`, of all `count` shards."""
    parts = saved[Saved._fields.index(name) :: SAVED_FIELDS]
    return None if parts[0] is None else torch.cat([torch.cat(parts[i::count], -2) for i in range(count)], dim)


class _Attend(torch.autograd.Function):
    """The operators; where the dispatcher would do nothing, as functions."""

    @staticmethod
    def forward(ctx: Any, static: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """o, and `Saved` of each step and shard, of which the sums of an index' loss have a gradient."""
        ctx.static, ctx.dispatched = static, dispatcher_sees(tensors[0])
        run = OPS.gather.default if ctx.dispatched else partial(_run, direct=True)
        o, *saved = map(none_for_empty, run(list(tensors), *static))
        ctx.save_for_backward(*tensors, o if reads_output(static) else None, *saved)
        ctx.set_materialize_grads(False)
        outputs = [None if x is None else x.detach() for x in saved]
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if x is not None and i % SAVED_FIELDS != SUMS))
        return o, *outputs

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        d_sums = more[SUMS]  # that of every step and shard: their sums are added up
        if do is None and d_sums is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors  # a checkpoint lets them be read once
        do = output_gradient(do, *tensors[:3:2])
        run = OPS.gather_backward.default if ctx.dispatched or dispatcher_sees(do) else _run_backward
        count, static = len(TENSORS), ctx.static

        def gradients(do: Tensor, d_sums: Tensor | None, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
            return tuple(map(none_for_empty, run(do, d_sums, list(saved[:count]), list(saved[count:]), *static)))

        compute = gradients if torch.compiler.is_compiling() else partial(first_derivatives, gradients)
        grads = compute(do, d_sums, *tensors)
        return None, *grads, *[None] * (count - len(grads))


def _run(tensors: list[Tensor | None], *static: Any, direct: bool = False) -> list[Tensor | None]:
    with torch.no_grad(), autocast.off(tensors[0].device), torch.cuda.device_of(tensors[0]):
        o, *saved = GatherLoop(tensors, static).forward()
        return [o, *(x if direct else o.new_empty(0) if x is None else as_output(x) for x in saved)]


def _run_fake(tensors: list[Tensor | None], *static: Any) -> list[Tensor]:
    q, _, v, *_ = tensors
    shapes = GatherLoop(tensors, static, read=False).capacity()
    saved = (q.new_empty(0) if of is None else q.new_empty(of[0], dtype=of[1]) for of in shapes)
    return [q.new_empty((*q.shape[:-1], v.shape[-1])), *saved]


def _run_backward(
    do: Tensor, d_sums: Tensor | None, tensors: list[Tensor | None], saved: list[Tensor | None], *static: Any
) -> list[Tensor]:
    with torch.no_grad(), autocast.off(do.device), torch.cuda.device_of(do):
        grads = GatherLoop(tensors, static).gradients(do, d_sums, *saved)
    return [do.new_empty(0) if d is None else d for d in grads]


def _run_backward_fake(do: Tensor, d_sums: Tensor | None, tensors: list[Tensor | None], *_: Any) -> list[Tensor]:
    call = Call(*tensors)
    if d_sums is None:
        call = call._replace(q_index=None, k_index=None)
    return [do.new_empty(0) if x is None else x.new_empty(x.shape) for x in call.differentiable]


GATHER_OPTIONS = f"{CONFIG}, bool[] kept, bool backward, {CP}"
differentiate(register(f"gather(Tensor?[] tensors, {GATHER_OPTIONS}) -> Tensor[]", _run, _run_fake), _run)
schema = f"gather_backward(Tensor do, Tensor? d_sums, Tensor?[] tensors, Tensor?[] saved, {GATHER_OPTIONS}) -> Tensor[]"
differentiate(register(schema, _run_backward, _run_backward_fake), _run_backward)
