"""A call of all heads on the kernels as an operator has it: functions of tensors and numbers, outputs of known shapes.

What forward saves is joined over groups of heads. Of packed sequences it has rows for as many blocks, tiles and lists
as any lengths could have: shapes follow from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nsa_layer.call_spec import OWN_KEYS, CallSpec, CallTensors
from nsa_layer.cute.memory_plan import MemoryPlan, split_heads

if TYPE_CHECKING:
    from nsa_layer.cute.forward import SavedForBackward
    from nsa_layer.cute.packing import Packing

Tensor, Shape = torch.Tensor, tuple[int, ...]
READ = ("q", "k", "v", *OWN_KEYS)  # rows by token or block


def saved_shapes(
    tensors: CallTensors, *, spec: CallSpec, kept: Sequence[bool], exact: bool = False
) -> list[tuple[Shape, torch.dtype] | None]:
    """Shape and dtype of each field of `SavedForBackward`, all heads; None where there is nothing.

    Args:
        exact: for the lengths of ``spec``; otherwise with room for any.
    """
    (q, k, v), chosen = tensors[:3], tensors.block_indices is None
    tokens, lead = q.shape[-3], q.shape[:-3]
    Hq, Hkv, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    tiles, blocks, n = _counts(tensors, spec, exact=exact)
    if spec.by_union:
        lists, counts = (*lead, tiles, Hkv, n), None
    else:
        lists, counts = (*lead, Hkv, tiles, n), (*lead, Hkv, tiles)
    low, exactly, whole = q.dtype, torch.float32, torch.int32
    k_made, v_made = tensors.k_cmp is None, tensors.v_cmp is None
    k_projected, v_projected = tensors.compress_k_weight is not None, tensors.compress_v_weight is not None
    rows = ((*lead, Hq, tokens), exactly)
    outputs = [((*lead, tokens, Hq, Dv), low) if keep else None for keep in kept]
    return [
        (lists, whole) if chosen else None,
        (counts, whole) if chosen and counts is not None else None,
        ((*lead, blocks, Hkv, D), low) if k_made else None,
        ((*lead, blocks, Hkv, Dv), low) if v_made else None,
        ((*lead, blocks, Hkv, D), exactly) if k_made and k_projected else None,
        ((*lead, blocks, Hkv, Dv), exactly) if v_made and v_projected else None,
        *outputs,
        *[rows] * 3,
        ((*lead, tokens, Hq, 3), exactly) if tensors.gate != "none" else None,
    ]


def _counts(tensors: CallTensors, spec: CallSpec, *, exact: bool) -> tuple[int, int, int]:
    """Tiles, compressed blocks and chosen blocks of a tile, as for `saved_shapes`."""
    config, cu_seqlens, (tokens, keys) = spec.config, tensors.cu_seqlens, (x.shape[-3] for x in tensors[:2])
    if exact and spec.lengths is not None:
        tiles, blocks = sum(map(config.num_tiles, spec.lengths)), sum(map(config.compressed_length, spec.key_lengths))
        return tiles, blocks, config.list_width(max(spec.key_lengths))
    n, tiles = config.list_width(keys) if exact else config.list_room(keys), config.num_tiles(tokens)
    if cu_seqlens is not None:
        return tiles if config.q_tile == 1 else tiles + cu_seqlens.shape[0] - 1, keys // config.stride, n
    blocks = (keys - config.span) // config.stride + 1
    return tiles, max(0, blocks) if isinstance(blocks, int) else torch.sym_max(0, blocks), n


def attend(
    tensors: CallTensors,
    *,
    spec: CallSpec,
    heads: int,
    kept: Sequence[bool],
    needs_grad: bool,
    room: bool = True,
) -> tuple[Tensor, list[Tensor | None]]:
    """o, and the fields of `SavedForBackward` for all heads, with the shapes of `saved_shapes`.

    Args:
        heads: key/value heads of a group.
        needs_grad: there will be a backward.
        room: False for exact shapes, and any strides.
    """
    from nsa_layer.cute import head_groups

    tensors, packing, plan = _readable(tensors, spec, heads, kept)
    if len(plan.groups) == 1:
        o, (saved,) = head_groups.forward_groups(tensors, packing, spec, plan, backward=needs_grad)
        if tensors.block_indices is not None:
            saved = saved._replace(block_indices=None)
        if not room:
            return o, list(saved)
        if not _has_room(tensors, spec):
            return o, [None if x is None else x.contiguous() for x in saved]
        shapes = saved_shapes(tensors, spec=spec, kept=kept)
        return o, [None if x is None else with_room(x, of[0]) for x, of in zip(saved, shapes, strict=True)]
    shapes = saved_shapes(tensors, spec=spec, kept=kept, exact=not room)
    q, Hkv = tensors.q, tensors.k.shape[-2]
    joined = [
        None if of is None else q.new_full(of[0], 0 if of[1].is_floating_point else -1, dtype=of[1]) for of in shapes
    ]

    def join(saved: SavedForBackward, group: tuple[int, int]) -> None:
        for field, (x, into) in enumerate(zip(saved, joined, strict=True)):
            if into is not None:
                into = _of_group(into, _heads(field, spec), group, Hkv)
                into[tuple(map(slice, x.shape))].copy_(x)

    return head_groups.forward_groups(tensors, packing, spec, plan, backward=needs_grad, keep=join)[0], joined


def gradients(
    do: Tensor,
    tensors: CallTensors,
    saved: Sequence[Tensor | None],
    *,
    spec: CallSpec,
    heads: int,
    kept: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the differentiable tensors, from the fields that `attend` gave."""
    from nsa_layer.cute import head_groups
    from nsa_layer.cute.forward import SavedForBackward

    tensors, packing, plan = _readable(tensors, spec, heads, kept)
    if _has_room(tensors, spec):
        shapes = saved_shapes(tensors, spec=spec, kept=kept, exact=True)
        saved = [None if of is None else first_of(x, of[0]) for x, of in zip(saved, shapes, strict=True)]

    def saved_of(group: tuple[int, int]) -> SavedForBackward:
        part = SavedForBackward(*saved)
        if len(plan.groups) > 1:
            parts = (_of_group(x, _heads(i, spec), group, tensors.k.shape[-2]) for i, x in enumerate(saved))
            part = SavedForBackward(*(None if x is None else x.contiguous() for x in parts))
        lists = head_groups.head_group(tensors, *group).block_indices
        return part if lists is None else part._replace(block_indices=lists)

    return list(head_groups.gradients(do, tensors, packing, spec, plan, map(saved_of, plan.groups)))


def _heads(field: int, spec: CallSpec) -> int:
    """The dimension of heads in a field of `SavedForBackward`."""
    return -3 if field == 0 and not spec.by_union else -2


def _has_room(tensors: CallTensors, spec: CallSpec) -> bool:
    """True if `attend` may make anything larger than the call's lengths ask for."""
    if tensors.cu_seqlens is None:
        T = tensors.q.shape[-3]
        return spec.config.list_width(T) != spec.config.list_room(T)
    return _counts(tensors, spec, exact=True) != _counts(tensors, spec, exact=False)


def first_of(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else x[tuple(map(slice, shape))].contiguous()


def _of_group(x: Tensor | None, dim: int, heads: tuple[int, int], Hkv: int) -> Tensor | None:
    """A field's part of key/value heads (first, end)."""
    if x is None:
        return None
    each = x.shape[dim] // Hkv
    return x.narrow(dim, heads[0] * each, (heads[1] - heads[0]) * each)


def _readable(
    tensors: CallTensors, spec: CallSpec, heads: int, kept: Sequence[bool]
) -> tuple[CallTensors, Packing | None, MemoryPlan]:
    """The tensors as kernels read them, starts, and the plan."""
    from nsa_layer.cute.packing import Packing
    from nsa_layer.kernels.launch import readable

    read = {name: readable(x) for name in READ if (x := getattr(tensors, name)) is not None}
    q, rows = tensors.q, tensors.q_heads_per_list
    packing = Packing.of(spec, q.device, rows, cu_seqlens=tensors.cu_seqlens, total=q.shape[0])
    return tensors._replace(**read), packing, MemoryPlan(split_heads(tensors.k.shape[-2], heads), tuple(kept))


def with_room(x: Tensor, shape: Shape) -> Tensor:
    """x, contiguous, at the beginning of a tensor of this shape; lists end with -1."""
    if tuple(x.shape) == tuple(shape):
        return x.contiguous()
    whole = x.new_full(shape, 0 if x.is_floating_point() else -1)
    whole[tuple(map(slice, x.shape))] = x
    return whole
