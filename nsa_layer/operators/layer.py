"""The operator ``attend``: the layer on the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from nsa_layer.call_spec import DIFFERENTIABLE, Aux, CallSpec, CallTensors
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, kept_in_graphs, plan_memory
from nsa_layer.cute.saved import SavedForBackward, saved_shapes
from nsa_layer.gate import equal_gates
from nsa_layer.inputs import check_lengths, starts_of_lengths
from nsa_layer.operators.arguments import (
    CONFIG,
    OF_LAYER,
    Tensor,
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
from nsa_layer.support import reads_unions


def attend_on_kernels(
    tensors: CallTensors,
    *,
    spec: CallSpec,
    memory: MemoryPolicy = MemoryPolicy(),
    needs_grad: bool = True,
    return_aux: bool = True,
) -> tuple[Tensor, Aux | None]:
    """The layer on the kernels; arguments as `nsa` has checked them.

    In graphs and modes the policy says what is saved, and groups of heads follow, when they run, from what is free.
    """
    q, block_indices = tensors.q, tensors.block_indices
    if spec.lengths is not None and tensors.cu_seqlens.device.type != "cpu":  # no second look at what is on a GPU
        tensors = tensors._replace(cu_seqlens=starts_of_lengths(spec.lengths))
    if spec.lengths is None and q.dim() == 3 and tensors.cu_seqlens.is_cuda:
        tensors = _with_rows(tensors, q.shape[0] // spec.config.stride)
    if is_recorded(q):
        heads, kept = None, kept_in_graphs(memory, needs_grad)
    else:
        plan = plan_memory(Sizes.of(tensors, spec=spec, needs_grad=needs_grad), memory, q.device)
        heads, kept = plan.groups[0][1], plan.kept
    plan = (heads, memory.budget, kept, spec.bound, needs_grad)
    made = _call_attend(*tensors[:-1], *static_arguments(spec).values(), *plan)
    if not return_aux:
        return made[0], None
    saved = SavedForBackward(*made[1:-1])
    choice, g = saved.block_indices if block_indices is None else block_indices, saved.g
    if block_indices is None:
        if not reads_unions(spec.config, listed=spec.listed):
            choice = choice.transpose(-3, -2)
        if not torch.compiler.is_compiling():  # without the room that a graph has
            rows = sum(map(spec.config.num_tiles, spec.lengths)) if spec.lengths else choice.shape[-3]
            width = spec.config.list_width(max(spec.lengths) if spec.lengths else spec.bound or q.shape[-3])
            choice = choice.narrow(-3, 0, rows)[..., :width]
    if tensors.gate == "none":
        g = equal_gates(q)
    lse_swa = saved.lse_swa if spec.config.window_size else torch.full_like(saved.lse_cmp, -torch.inf)
    return made[0], Aux(choice, g, saved.lse_cmp, saved.lse_slc, lse_swa)


def _with_rows(tensors: CallTensors, rows: int) -> CallTensors:
    """With as many rows of k_cmp or v_cmp as the kernels make of the other where the host knows no lengths."""
    if (tensors.k_cmp is None) == (tensors.v_cmp is None):
        return tensors
    return tensors.map(lambda x: pad(x, (0, 0, 0, 0, 0, max(0, rows - x.shape[0]))), ("k_cmp", "v_cmp"))


def _kernels_spec(static: dict[str, Any], tensors: CallTensors) -> CallSpec:
    """The spec of a call on the kernels; starts that these take without lengths are left on the GPU."""
    q, cu_seqlens = tensors.q, tensors.cu_seqlens
    spec = spec_of(static, None, listed=tensors.block_indices is not None)
    if stay_on_gpu(cu_seqlens):
        return _bounded(spec, q, static)
    return spec if cu_seqlens is None else replace(spec, lengths=check_lengths(cu_seqlens, q, "cu_seqlens", "q"))


def _bounded(spec: CallSpec, q: Tensor, static: dict[str, Any]) -> CallSpec:
    """The spec of packed sequences whose lengths the host does not know."""
    return replace(spec, bound=min(static["bound"] or q.shape[0], q.shape[0]))


def _attend(
    *given: Tensor | None,
    heads: int | None,
    budget: int | None,
    kept: list[bool],
    needs_grad: bool,
    room: bool = True,
    **static: Any,
) -> tuple[Tensor | None, ...]:
    """o, the fields of `SavedForBackward`, and a copy of cu_seqlens.

    Args:
        given: of `CallTensors`, but for q_offset.
        heads: key/value heads of a group; None: as many as the budget has room for, or what is free.
        room: False for the shapes that the lengths ask for, instead of those that follow from shapes.
    """
    from nsa_layer.cute import whole_call

    tensors = CallTensors(*given)
    q, block_indices, spec = tensors.q, tensors.block_indices, _kernels_spec(static, tensors)
    if block_indices is not None:
        check_lists_of(block_indices, q, tensors.k, spec, tensors.cu_seqlens)
    tensors = without_room(tensors, spec)
    with torch.cuda.device_of(q):
        plan = whole_call.plan_of(tensors, spec, heads, budget, kept, needs_grad=needs_grad)
        o, made = whole_call.attend(tensors, spec=spec, plan=plan, needs_grad=needs_grad, room=room)
    return o, *made, copied(tensors.cu_seqlens, q, left=spec.bound is not None)


def _attend_fake(*given: Tensor | None, kept: list[bool], **static: Any) -> tuple[Tensor, ...]:
    tensors = CallTensors(*given)
    q, v, cu_seqlens = tensors.q, tensors.v, tensors.cu_seqlens
    spec = spec_of(static, None, listed=tensors.block_indices is not None)
    shapes = saved_shapes(tensors, spec=spec, kept=kept)
    made = (q.new_empty(0) if each is None else q.new_empty(each[0], dtype=each[1]) for each in shapes)
    starts = copied_fake(q, cu_seqlens, on_kernels=True, left=stay_on_gpu(cu_seqlens))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), *made, starts


def _attend_backward(
    do: Tensor,
    *given: Tensor | None,
    heads: int | None,
    budget: int | None,
    kept: list[bool],
    needs: Sequence[bool],
    **static: Any,
) -> tuple[Tensor, ...]:
    from nsa_layer.cute import whole_call

    inputs, (block_indices, *made, starts) = given[: len(DIFFERENTIABLE)], given[len(DIFFERENTIABLE) :]
    tensors = CallTensors(*inputs, starts if starts.numel() else None, block_indices)
    spec = spec_of(static, lengths_of(starts), listed=block_indices is not None)
    if stay_on_gpu(starts):
        spec = _bounded(spec, tensors.q, static)
    with torch.cuda.device_of(do):
        made = [x if x is not None and x.dim() > 1 else None for x in made]
        tensors = without_room(tensors, spec)
        plan = whole_call.plan_of(tensors, spec, heads, budget, kept, needs_grad=True)
        found = whole_call.gradients(do, tensors, made, spec=spec, plan=plan)
    wanted = (d if need else None for d, need in zip(found, needs, strict=True))
    return tuple([None if d is None else _with_room(d, x) for d, x in zip(wanted, inputs, strict=True)])


def _with_room(d: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of its first rows, as it is promised."""
    if d.shape != x.shape:
        return torch.cat([d, d.new_zeros(len(x) - len(d), *x.shape[1:])])
    return d if d._base is None and d.is_contiguous() else d.clone(memory_format=torch.contiguous_format)


_call_attend = register(
    "attend",
    "cute",
    schema=f"{schema_of(OF_LAYER)}, *, {CONFIG}, int? heads, int? budget, bool[] kept, SymInt? bound, bool needs_grad",
    compute=_attend,
    direct=partial(_attend, room=False),
    fake=_attend_fake,
    outputs=2 + len(SavedForBackward._fields),
    gradients=_attend_backward,
    saved=", ".join(
        ["Tensor? block_indices", *(f"Tensor saved_{x}" for x in SavedForBackward._fields), "Tensor starts"]
    ),
    keep=lambda inputs, outputs: (
        *inputs[: len(DIFFERENTIABLE)],
        inputs[OF_LAYER.index("block_indices")],
        *outputs[1:],
    ),
    differentiable=len(DIFFERENTIABLE),
    differentiated=1,
)
