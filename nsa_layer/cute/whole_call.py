"""A call of all heads on the kernels: groups of heads one after the other, and what they save as one.

What forward saves is joined over groups of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_layer.call_spec import OWN_KEYS, CallSpec, CallTensors, Saved
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, Sizes, plan_memory, split_heads
from nsa_layer.cute.packing import Packing
from nsa_layer.saved import saved_shapes
from nsa_layer.support import reads_unions

Tensor = torch.Tensor
READ = ("q", "k", "v", *OWN_KEYS)  # rows by token or block


def attend(tensors: CallTensors, *, spec: CallSpec, plan: MemoryPlan, needs_grad: bool) -> tuple[Tensor, Saved]:
    """o, and what backward needs for all heads; lists of the caller's are left out.

    Args:
        needs_grad: there will be a backward.
    """
    from nsa_layer.cute import head_groups

    tensors, packing = _readable(tensors, spec)
    if len(plan.groups) == 1:
        o, (saved,) = head_groups.forward_groups(tensors, packing, spec, plan, backward=needs_grad)
        return o, saved if tensors.block_indices is None else saved._replace(block_indices=None)
    q, Hkv = tensors.q, tensors.k.shape[-2]
    joined = Saved(
        *(
            None if of is None else q.new_full(of[0], 0 if of[1].is_floating_point else -1, dtype=of[1])
            for of in saved_shapes(tensors, spec=spec, kept=plan.kept, exact=True)
        )
    )

    def join(saved: Saved, group: tuple[int, int]) -> None:
        for field, (x, into) in enumerate(zip(saved, joined, strict=True)):
            if into is not None:
                into = _of_group(into, _heads_dim(field, spec), group, Hkv)
                into[tuple(map(slice, x.shape))].copy_(x)

    return head_groups.forward_groups(tensors, packing, spec, plan, backward=needs_grad, keep=join)[0], joined


def gradients(
    do: Tensor, tensors: CallTensors, saved: Saved, *, spec: CallSpec, plan: MemoryPlan
) -> tuple[Tensor | None, ...]:
    """The gradients of the differentiable tensors, from what `attend` gave."""
    from nsa_layer.cute import head_groups

    tensors, packing = _readable(tensors, spec)

    def saved_of(group: tuple[int, int]) -> Saved:
        part = saved
        if len(plan.groups) > 1:
            parts = (_of_group(x, _heads_dim(i, spec), group, tensors.k.shape[-2]) for i, x in enumerate(saved))
            part = Saved(*(None if x is None else x.contiguous() for x in parts))
        lists = head_groups.head_group(tensors, *group).block_indices
        return part if lists is None else part._replace(block_indices=lists)

    return head_groups.gradients(do, tensors, packing, spec, plan, map(saved_of, plan.groups))


def _heads_dim(field: int, spec: CallSpec) -> int:
    """The dimension of heads in a field of `Saved`."""
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
