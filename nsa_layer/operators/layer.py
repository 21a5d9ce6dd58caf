"""The operator ``attend``: the layer on the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from nsa_layer import support
from nsa_layer.call_spec import Aux, CallSpec
from nsa_layer.config import LARGEST, NSAConfig
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory, plans_by_tokens
from nsa_layer.cute.packing import takes_starts
from nsa_layer.gate import equal_gates, gate_kind
from nsa_layer.inputs import check_lengths, starts_of_lengths
from nsa_layer.operators.arguments import (
    CONFIG,
    LAYER,
    Tensor,
    check_lists_of,
    copied,
    copied_fake,
    is_left,
    lengths_of,
    spec_of,
    static_arguments,
    without_room,
)
from nsa_layer.operators.registration import is_recorded, register


def attend_on_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: CallSpec,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    compress_k_weight: Tensor | None,
    compress_v_weight: Tensor | None,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_indices: Tensor | None = None,
    memory: MemoryPolicy = MemoryPolicy(),
    needs_grad: bool = True,
    return_aux: bool = True,
) -> tuple[Tensor, Aux | None]:
    """The layer on the kernels; arguments as `nsa` has checked them.

    In graphs and modes groups of heads, and what is saved, follow from sizes and the GPU's memory, not from what is
    free of it.
    """
    if spec.lengths is not None and cu_seqlens.device.type != "cpu":  # no second look at what is on a GPU
        cu_seqlens = starts_of_lengths(spec.lengths)
    weights = (gate_weight, gates, compress_k_weight, compress_v_weight)
    tensors = (q, k, v, *weights, k_cmp, v_cmp, k_win, v_win, cu_seqlens, block_indices)
    gate, own_window = gate_kind(gate_weight, gates), k_win is not None or v_win is not None
    asked = dict(gate=gate, needs_grad=needs_grad, own_window=own_window)
    if is_recorded(q):
        heads, kept = _plan_of_graph(q, k, v, block_indices, spec.config, memory, **asked)
    else:
        plan = plan_memory(Sizes.of(q, v, spec=spec, lists=block_indices, **asked), memory, q.device)
        heads, kept = plan.groups[0][1], plan.kept
    made = _call_attend(*tensors, *static_arguments(spec).values(), heads, kept, spec.bound, needs_grad)
    if not return_aux:
        return made[0], None
    choice, g, lses = made[1] if block_indices is None else block_indices, made[13], made[10:13]
    if block_indices is None:
        if not support.takes_unions(spec.config):
            choice = choice.transpose(-3, -2)
        if not torch.compiler.is_compiling():  # without the room that a graph has
            rows = sum(map(spec.config.num_tiles, spec.lengths)) if spec.lengths else choice.shape[-3]
            width = spec.config.list_width(max(spec.lengths) if spec.lengths else spec.bound or q.shape[-3])
            choice = choice.narrow(-3, 0, rows)[..., :width]
    if gate == "none":
        g = equal_gates(q)
    return made[0], Aux(choice, g, *lses)


def _plan_of_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor | None,
    config: NSAConfig,
    memory: MemoryPolicy,
    **asked: Any,
) -> tuple[int, tuple[bool, bool, bool]]:
    """Key/value heads of a group and the outputs that are saved, by sizes and the GPU's memory alone."""
    Hq = q.shape[-2]
    sizes = dict(Hq=Hq, Hkv=k.shape[-2], D=q.shape[-1], Dv=v.shape[-1], itemsize=q.dtype.itemsize, **asked)
    sizes |= dict(compress_stride=config.stride, q_tile=config.q_tile, block_size=config.block_size)
    sizes |= dict(deterministic=config.deterministic, listed=block_indices is not None)
    sizes |= dict(list_width=config.list_width(LARGEST))
    if block_indices is not None:
        sizes |= dict(list_width=block_indices.shape[-1], rows=Hq // block_indices.shape[-2])
    plans = plans_by_tokens(tuple(sizes.items()), memory.recompute, memory.budget, q.device.index)
    for most, heads, kept in plans:
        if prod(q.shape[:-2]) <= most:
            break
    return heads, kept


def _kernels_spec(
    static: dict[str, Any], cu_seqlens: Tensor | None, q: Tensor, k: Tensor, block_indices: Tensor | None, *own: Tensor
) -> CallSpec:
    """The spec of a call on the kernels; starts that these take without lengths are left on the GPU."""
    spec = spec_of(static, None, listed=block_indices is not None)
    if takes_starts(cu_seqlens, q, k, spec.config, block_indices, *own):
        return _bounded(spec, q, static)
    return spec if cu_seqlens is None else replace(spec, lengths=check_lengths(cu_seqlens, q, "cu_seqlens", "q"))


def _bounded(spec: CallSpec, q: Tensor, static: dict[str, Any]) -> CallSpec:
    """The spec of packed sequences whose lengths the host does not know."""
    return replace(spec, bound=min(static["bound"] or q.shape[0], q.shape[0]))


def _attend(
    *tensors: Tensor | None, heads: int, kept: list[bool], needs_grad: bool, room: bool = True, **static: Any
) -> tuple[Tensor | None, ...]:
    """o, the fields of `SavedForBackward`, and a copy of cu_seqlens.

    Args:
        room: False for the shapes that the lengths ask for, instead of those that follow from shapes.
    """
    from nsa_layer.cute import graph

    q, cu_seqlens, block_indices = tensors[0], *tensors[11:]
    spec = _kernels_spec(static, cu_seqlens, *tensors[:2], block_indices, *tensors[7:9])
    if block_indices is not None and spec.bound is None:
        check_lists_of(block_indices, q, tensors[1], spec)
    tensors = (*without_room(tensors[:11], spec, 7), *tensors[11:])
    with torch.cuda.device_of(q):
        o, made = graph.attend(tensors, spec=spec, heads=heads, kept=kept, needs_grad=needs_grad, room=room)
    return o, *made, copied(cu_seqlens, q, left=spec.bound is not None)


def _attend_fake(*tensors: Tensor | None, heads: int, kept: list[bool], **static: Any) -> tuple[Tensor, ...]:
    from nsa_layer.cute.graph import saved_shapes

    q, v, cu_seqlens, block_indices = tensors[0], tensors[2], *tensors[11:]
    spec = spec_of(static, None, listed=block_indices is not None)
    shapes = saved_shapes(tensors, spec=spec, kept=kept)
    made = (q.new_empty(0) if each is None else q.new_empty(each[0], dtype=each[1]) for each in shapes)
    left = takes_starts(cu_seqlens, *tensors[:2], spec.config, block_indices, *tensors[7:9])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), *made, copied_fake(q, cu_seqlens, on_kernels=True, left=left)


def _attend_backward(
    do: Tensor, *tensors: Tensor | None, heads: int, kept: list[bool], needs: Sequence[bool], **static: Any
) -> tuple[Tensor, ...]:
    from nsa_layer.cute import graph

    inputs, block_indices, made, starts = tensors[:11], tensors[11], tensors[12:25], tensors[25]
    spec = spec_of(static, lengths_of(starts), listed=block_indices is not None)
    if is_left(starts):
        spec = _bounded(spec, inputs[0], static)
    given = (*without_room(inputs, spec, 7), starts if starts.numel() else None, block_indices)
    with torch.cuda.device_of(do):
        made = [x if x is not None and x.dim() > 1 else None for x in made]
        found = graph.gradients(do, given, made, spec=spec, heads=heads, kept=kept)
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
    schema=f"{LAYER}, *, {CONFIG}, int heads, bool[] kept, SymInt? bound, bool needs_grad",
    compute=_attend,
    direct=partial(_attend, room=False),
    fake=_attend_fake,
    outputs=15,
    gradients=_attend_backward,
    saved=", ".join(["Tensor? block_indices", *(f"Tensor made_{i}" for i in range(13)), "Tensor starts"]),
    keep=lambda inputs, outputs: (*inputs[:11], inputs[12], *outputs[1:]),
    differentiable=11,
    differentiated=1,
)
