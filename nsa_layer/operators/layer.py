"""The operator ``attend``: the layer, or `selected_attention`, on the kernels or in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from nsa_layer.call_spec import DIFFERENTIABLE, SELECTED_ALONE, Aux, CallSpec, CallTensors, Saved
from nsa_layer.checks import check_lengths, check_positions, starts_of_lengths
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, kept_in_graphs, plan_memory, plan_of
from nsa_layer.operators.arguments import (
    CONFIG,
    NAMES,
    OF_LAYER,
    Tensor,
    apart,
    check_lists_of,
    copied,
    copied_fake,
    lengths_of,
    schema_of,
    spec_of,
    static_arguments,
    stay_on_gpu,
    without_room,
)
from nsa_layer.operators.registration import is_recorded, register
from nsa_layer.saved import first_of, saved_shapes, with_room
from nsa_layer.support import reads_unions

NOTHING = (False, False, False)


def attend(
    tensors: CallTensors,
    *,
    spec: CallSpec,
    backend: str = "cute",
    memory: MemoryPolicy = MemoryPolicy(),
    needs_grad: bool = True,
    return_aux: bool = True,
) -> tuple[Tensor, Aux | Tensor | None]:
    """o and `Aux`, or of `selected_attention` the log-sum-exp; arguments as they have been checked.

    In graphs and modes the policy says what is saved, and groups of heads follow, when they run, from what is free.
    """
    (q, k), config, alone = tensors[:2], spec.config, spec.branches == SELECTED_ALONE
    if spec.lengths is not None:  # no second look at what may be on a GPU
        of_keys = None if tensors.cu_seqlens_k is None else starts_of_lengths(spec.key_lengths)
        tensors = tensors._replace(cu_seqlens=starts_of_lengths(spec.lengths), cu_seqlens_k=of_keys)
    elif stay_on_gpu(tensors.cu_seqlens):
        tensors = _with_rows(tensors, q.shape[0] // config.stride)
    planned = backend == "cute" and not alone
    heads, kept = k.shape[-2] if alone else None, kept_in_graphs(memory, needs_grad) if planned else NOTHING
    if planned and not is_recorded(q):
        plan = plan_memory(Sizes.of(tensors, spec=spec, needs_grad=needs_grad), memory, q.device)
        heads, kept = plan.groups[0][1], plan.kept
    plan = (backend, heads, memory.budget, kept, spec.bound, needs_grad)
    o, *made = _call_attend(*tensors, *static_arguments(spec).values(), *plan)
    saved = Saved(*made[:-2])
    if alone or not return_aux:
        return o, saved.lse_slc if alone else None
    lists = saved.block_indices
    if tensors.block_indices is None:
        if backend == "cute" and not reads_unions(config, listed=spec.listed):
            lists = lists.transpose(-3, -2)
        if not torch.compiler.is_compiling():  # without the room that a graph has
            rows = sum(map(config.num_tiles, spec.lengths)) if spec.lengths else lists.shape[-3]
            width = config.list_width(max(spec.lengths) if spec.lengths else spec.bound or q.shape[-3])
            lists = lists.narrow(-3, 0, rows)[..., :width]
    absent = {} if tensors.gate != "none" else dict(g=None)
    absent |= {} if config.window_size else dict(lse_swa=None)
    return o, saved._replace(block_indices=lists, **absent).aux(tensors)


def _with_rows(tensors: CallTensors, rows: int) -> CallTensors:
    """With as many rows of k_cmp or v_cmp as the kernels make of the other where the host knows no lengths."""
    if (tensors.k_cmp is None) == (tensors.v_cmp is None):
        return tensors
    return tensors.map(lambda x: pad(x, (0, 0, 0, 0, 0, max(0, rows - x.shape[0]))), ("k_cmp", "v_cmp"))


def _spec(static: dict[str, Any], tensors: CallTensors, backend: str, bound: int | None) -> CallSpec:
    """The static side of a call that runs; starts that the kernels read are left on the GPU."""
    q, cu_seqlens, cu_seqlens_k = tensors.q, tensors.cu_seqlens, tensors.cu_seqlens_k
    if cu_seqlens is None:
        return spec_of(static, tensors)
    if _leaves_starts(tensors, backend):
        return replace(spec_of(static, tensors), bound=min(bound or q.shape[0], q.shape[0]))
    of_q, of_k = check_lengths(cu_seqlens, q, "cu_seqlens", "q"), None
    if cu_seqlens_k is not None:
        of_k = check_lengths(cu_seqlens_k, tensors.k, "cu_seqlens_k", "k")
    return spec_of(static, tensors, (of_q, of_k))


def _leaves_starts(tensors: CallTensors, backend: str) -> bool:
    starts = tensors.cu_seqlens, tensors.cu_seqlens_k
    return backend == "cute" and stay_on_gpu(starts[0]) and (starts[1] is None or stay_on_gpu(starts[1]))


def _attend(
    *tensors: Tensor | None,
    backend: str,
    heads: int | None,
    budget: int | None,
    kept: list[bool],
    bound: int | None,
    needs_grad: bool,
    room: bool = True,
    **static: Any,
) -> tuple[Tensor | None, ...]:
    """o, the fields of `Saved`, and copies of starts of queries and of keys.

    Args:
        tensors: of `CallTensors`.
        heads: key/value heads of a group; None: as many as the budget has room for, or what is free.
        room: False for the shapes that the lengths ask for, and any strides, instead of those of an operator.
    """
    tensors = CallTensors(*tensors)
    q, spec = tensors.q, _spec(static, tensors, backend, bound)
    if tensors.block_indices is not None:
        check_lists_of(tensors.block_indices, q, tensors.k, spec, tensors.cu_seqlens)
    if spec.branches == SELECTED_ALONE and spec.bound is None:
        pairs = zip(spec.lengths or q.shape[1:2], spec.key_lengths or tensors.k.shape[1:2])
        check_positions(tensors.q_offset, tuple(pairs), causal=spec.causal)
    with torch.cuda.device_of(q):
        tensors = without_room(tensors, spec)
        if backend != "cute":
            from nsa_layer.eager import forward

            o, made = forward.forward(tensors, spec=spec)
        else:
            from nsa_layer.cute import head_groups

            plan = plan_of(tensors, spec, heads, budget, kept, needs_grad)
            o, made = head_groups.forward_groups(*head_groups.placed(tensors, spec), spec, plan, backward=needs_grad)
        if room:
            shapes = saved_shapes(tensors, spec=spec, kept=kept, backend=backend)
            pairs = zip(made, shapes, strict=True)
            o, *made = (x if x is None else next(apart([x])) for x in (o, *(with_room(*pair) for pair in pairs)))
    starts = tensors.cu_seqlens, tensors.cu_seqlens_k
    return o, *made, *(copied(x, q, left=spec.bound is not None) for x in starts)


def _attend_fake(*tensors: Tensor | None, backend: str, kept: list[bool], **static: Any) -> tuple[Tensor, ...]:
    tensors = CallTensors(*tensors)
    q, left = tensors.q, _leaves_starts(tensors, backend)
    shapes = saved_shapes(tensors, spec=spec_of(static, tensors), kept=kept, backend=backend)
    made = (q.new_empty(0) if each is None else q.new_empty(each[0], dtype=each[1]) for each in shapes)
    starts = (copied_fake(x, q, left=left) for x in (tensors.cu_seqlens, tensors.cu_seqlens_k))
    return q.new_empty((*q.shape[:-1], tensors.v.shape[-1])), *made, *starts


def _attend_backward(
    do: Tensor,
    *saved: Tensor | None,
    backend: str,
    heads: int | None,
    budget: int | None,
    kept: list[bool],
    bound: int | None,
    needs: Sequence[bool],
    **static: Any,
) -> tuple[Tensor | None, ...]:
    inputs, (block_indices, q_offset, o, *made, starts, starts_k) = saved[:COUNT], saved[COUNT:]
    of_q, of_k = (x if x.numel() else None for x in (starts, starts_k))
    tensors = CallTensors(*inputs, of_q, block_indices, q_offset, of_k)
    spec = spec_of(static, tensors, (lengths_of(starts), lengths_of(starts_k)))
    if stay_on_gpu(starts):
        spec = replace(spec, bound=min(bound or tensors.q.shape[0], tensors.q.shape[0]))
    with torch.cuda.device_of(do):
        tensors = without_room(tensors, spec)
        shapes = saved_shapes(tensors, spec=spec, kept=kept, backend=backend, exact=True)
        made = Saved(*(None if of is None else first_of(x, of[0]) for x, of in zip(made, shapes, strict=True)))
        if backend != "cute":
            from nsa_layer.eager import backward

            found = backward.backward(tensors, made, do, spec=spec)
        else:
            from nsa_layer.cute import head_groups

            plan = plan_of(tensors, spec, heads, budget, kept, True)
            found = head_groups.gradients(do, *head_groups.placed(tensors, spec), spec, plan, made, o=o)
    wanted = (d if need else None for d, need in zip(found, needs, strict=True))
    return tuple([None if d is None else _promised(d, x) for d, x in zip(wanted, inputs, strict=True)])


def _promised(d: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of its first rows, contiguous."""
    if d.shape != x.shape:
        return torch.cat([d, d.new_zeros(len(x) - len(d), *x.shape[1:])])
    return next(apart([d]))


def _keep(args: Sequence[Any], outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    tensors, (*static, backend) = CallTensors(*args[: len(OF_LAYER)]), args[len(OF_LAYER) :][: len(NAMES) + 1]
    alone = static[-1] == " ".join(SELECTED_ALONE)
    o = outputs[0] if alone and backend == "cute" else None
    return *tensors[:COUNT], tensors.block_indices, tensors.q_offset, o, *outputs[1:]


COUNT = len(DIFFERENTIABLE)
_call_attend = register(
    "attend",
    schema=f"{schema_of(OF_LAYER)}, *, {CONFIG}, str backend, int? heads, int? budget, bool[] kept, SymInt? bound, "
    "bool needs_grad",
    compute=_attend,
    direct=partial(_attend, room=False),
    fake=_attend_fake,
    outputs=3 + len(Saved._fields),
    gradients=_attend_backward,
    saved=", ".join(
        [
            "Tensor? block_indices, Tensor? q_offset, Tensor? o",
            *(f"Tensor? saved_{x}" for x in Saved._fields),
            "Tensor starts, Tensor starts_k",
        ]
    ),
    keep=_keep,
    differentiable=COUNT,
    differentiated=1,
)
