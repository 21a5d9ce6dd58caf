"""A call of all heads on the kernels as an operator has it: functions of tensors and numbers, outputs of known shapes.

What forward saves is joined over groups of heads. Of packed sequences it has rows for as many blocks, tiles and lists
as any lengths could have: shapes follow from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_layer.call_spec import OWN_KEYS, CallSpec, CallTensors
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, Sizes, plan_memory, split_heads
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.saved import SavedForBackward, first_of, has_room, saved_shapes, with_room
from nsa_layer.support import reads_unions

Tensor = torch.Tensor
READ = ("q", "k", "v", *OWN_KEYS)  # rows by token or block


def attend(
    tensors: CallTensors,
    *,
    spec: CallSpec,
    plan: MemoryPlan,
    needs_grad: bool,
    room: bool = True,
) -> tuple[Tensor, list[Tensor | None]]:
    """o, and the fields of `SavedForBackward` for all heads, with the shapes of `saved_shapes`.

    Args:
        needs_grad: there will be a backward.
        room: False for exact shapes, and any strides.
    """
    from nsa_layer.cute import head_groups

    tensors, packing = _readable(tensors, spec)
    if len(plan.groups) == 1:
        o, (saved,) = head_groups.forward_groups(tensors, packing, spec, plan, backward=needs_grad)
        if tensors.block_indices is not None:
            saved = saved._replace(block_indices=None)
        if not room:
            return o, list(saved)
        if not has_room(tensors, spec):
            return o, [None if x is None else x.contiguous() for x in saved]
        shapes = saved_shapes(tensors, spec=spec, kept=plan.kept)
        return o, [None if x is None else with_room(x, of[0]) for x, of in zip(saved, shapes, strict=True)]
    shapes = saved_shapes(tensors, spec=spec, kept=plan.kept, exact=not room)
    q, Hkv = tensors.q, tensors.k.shape[-2]
    joined = [
        None if of is None else q.new_full(of[0], 0 if of[1].is_floating_point else -1, dtype=of[1]) for of in shapes
    ]

    def join(saved: SavedForBackward, group: tuple[int, int]) -> None:
        for field, (x, into) in enumerate(zip(saved, joined, strict=True)):
            if into is not None:
                into = _of_group(into, _heads_dim(field, spec), group, Hkv)
                into[tuple(map(slice, x.shape))].copy_(x)

    return head_groups.forward_groups(tensors, packing, spec, plan, backward=needs_grad, keep=join)[0], joined


def gradients(
    do: Tensor,
    tensors: CallTensors,
    saved: Sequence[Tensor | None],
    *,
    spec: CallSpec,
    plan: MemoryPlan,
) -> list[Tensor | None]:
    """The gradients of the differentiable tensors, from the fields that `attend` gave."""
    from nsa_layer.cute import head_groups

    tensors, packing = _readable(tensors, spec)
    if has_room(tensors, spec):
        shapes = saved_shapes(tensors, spec=spec, kept=plan.kept, exact=True)
        saved = [None if of is None else first_of(x, of[0]) for x, of in zip(saved, shapes, strict=True)]

    def saved_of(group: tuple[int, int]) -> SavedForBackward:
        part = SavedForBackward(*saved)
        if len(plan.groups) > 1:
            parts = (_of_group(x, _heads_dim(i, spec), group, tensors.k.shape[-2]) for i, x in enumerate(saved))
            part = SavedForBackward(*(None if x is None else x.contiguous() for x in parts))
        lists = head_groups.head_group(tensors, *group).block_indices
        return part if lists is None else part._replace(block_indices=lists)

    return list(head_groups.gradients(do, tensors, packing, spec, plan, map(saved_of, plan.groups)))


def _heads_dim(field: int, spec: CallSpec) -> int:
    """The dimension of heads in a field of `SavedForBackward`."""
    return -3 if field == 0 and not reads_unions(spec.config, listed=spec.listed) else -2


def _of_group(x: Tensor | None, dim: int, heads: tuple[int, int], Hkv: int) -> Tensor | None:
    """A field's part of key/value heads (first, end)."""
    if x is None:
        return None
    each = x.shape[dim] // Hkv
    return x.narrow(dim, heads[0] * each, (heads[1] - heads[0]) * each)


def plan_of(
    tensors: CallTensors,
    spec: CallSpec,
    heads: int | None,
    budget: int | None,
    kept: Sequence[bool],
    *,
    needs_grad: bool,
) -> MemoryPlan:
    """Groups of as many key/value heads; None: as the budget has them, or what is free."""
    if heads is not None:
        return MemoryPlan(split_heads(tensors.k.shape[-2], heads), tuple(kept))
    sizes = Sizes.of(tensors, spec=spec, needs_grad=needs_grad)
    return plan_memory(sizes, MemoryPolicy(budget=budget), tensors.q.device, tuple(kept))


def _readable(tensors: CallTensors, spec: CallSpec) -> tuple[CallTensors, Packing | None]:
    """The tensors as kernels read them, and starts."""
    from nsa_layer.kernels.launch import readable

    q, rows = tensors.q, tensors.q_heads_per_list
    packing = Packing.of(spec, q.device, rows, cu_seqlens=tensors.cu_seqlens, total=q.shape[0])
    return tensors.map(readable, READ), packing
