"""The kernels' backend as functions of tensors and numbers, as a graph has them: no contexts, outputs of known shapes.

What forward saves is joined over groups of heads. Of packed sequences it has rows for as many blocks, tiles and lists
as any lengths could have: shapes follow from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.memory_plan import MemoryPlan, head_groups
from nsa_layer.support import takes_unions

Tensor, Shape = torch.Tensor, tuple[int, ...]
INPUTS = 11  # tensors of a call that have gradients


def saved_shapes(
    tensors: Sequence[Tensor | None], *, spec: CallSpec, kept: Sequence[bool], exact: bool = False
) -> list[tuple[Shape, torch.dtype] | None]:
    """Shape and dtype of each field of `SavedForBackward`, all heads; None where there is nothing.

    Args:
        tensors: q, k, v, gate_weight, gates, w_k, w_v, k_cmp, v_cmp, k_win, v_win, cu_seqlens, block_indices.
        exact: for the lengths of ``spec``; otherwise with room for any.
    """
    q, k, v, gate_weight, gates, w_k, w_v, k_cmp, v_cmp, _, _, cu_seqlens, block_indices = tensors
    config, tokens, lead = spec.config, q.shape[-3], q.shape[:-3]
    Hq, Hkv, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if exact and spec.lengths is not None:
        longest, tiles = max(spec.lengths), sum(map(config.num_tiles, spec.lengths))
        blocks = sum(map(config.compressed_length, spec.lengths))
    else:
        longest, tiles = tokens, config.num_tiles(tokens)
        blocks = (tokens - config.span) // config.stride + 1
        blocks = max(0, blocks) if isinstance(blocks, int) else torch.sym_max(0, blocks)
        if cu_seqlens is not None:
            blocks = tokens // config.stride
            tiles = tiles if config.q_tile == 1 else tiles + cu_seqlens.shape[0] - 1
    n = config.list_width(longest) if exact else config.list_room(tokens)
    if takes_unions(config, listed=spec.listed):
        lists, counts = (*lead, tiles, Hkv, n), None
    else:
        lists, counts = (*lead, Hkv, tiles, n), (*lead, Hkv, tiles)
    low, exactly, whole = q.dtype, torch.float32, torch.int32
    gated = gate_weight is not None or gates is not None
    k_made, v_made = k_cmp is None, v_cmp is None
    rows = ((*lead, Hq, tokens), exactly)
    outputs = [((*lead, tokens, Hq, Dv), low) if keep else None for keep in kept]
    return [
        (lists, whole) if block_indices is None else None,
        (counts, whole) if block_indices is None and counts is not None else None,
        ((*lead, blocks, Hkv, D), low) if k_made else None,
        ((*lead, blocks, Hkv, Dv), low) if v_made else None,
        ((*lead, blocks, Hkv, D), exactly) if k_made and w_k is not None else None,
        ((*lead, blocks, Hkv, Dv), exactly) if v_made and w_v is not None else None,
        *outputs,
        *[rows] * 3,
        ((*lead, tokens, Hq, 3), exactly) if gated else None,
    ]


def attend(
    tensors: Sequence[Tensor | None], *, spec: CallSpec, heads: int, kept: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """o, and the fields of `SavedForBackward` for all heads, with the shapes of `saved_shapes`.

    Args:
        heads: key/value heads of a group.
    """
    from nsa_layer.cute import autograd

    inputs, plan = _inputs(tensors, spec, heads, kept)
    o, parts = autograd.forward_groups(inputs, spec, plan, backward=True)
    room, made = saved_shapes(tensors, spec=spec, kept=kept), []
    for field, shape in enumerate(room):
        fields = [part[field] for part in parts]
        if shape is None:
            made.append(None)
            continue
        made.append(_with_room(autograd.joined(fields, _heads(field, spec)), shape[0]))
    return o, made


def gradients(
    do: Tensor,
    tensors: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    *,
    spec: CallSpec,
    heads: int,
    kept: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the first `INPUTS` tensors, from what `attend` made."""
    from nsa_layer.cute import autograd

    inputs, plan = _inputs(tensors, spec, heads, kept)
    shapes, whole = saved_shapes(tensors, spec=spec, kept=kept, exact=True), []
    for x, shape in zip(made, shapes, strict=True):
        if shape is not None and x.shape != shape[0]:
            x = x[tuple(map(slice, shape[0]))].contiguous()
        whole.append(None if shape is None else x)
    parts = []
    for first, end in plan.groups:
        group = autograd.head_group(inputs, first, end)
        part = [_of_group(x, _heads(i, spec), (first, end), inputs.k.shape[-2]) for i, x in enumerate(whole)]
        part[0] = part[0] if group.block_indices is None else group.block_indices
        parts += part
    return list(autograd.gradients(do, inputs.packing, spec, plan, *inputs[:-1], *parts))


def _heads(field: int, spec: CallSpec) -> int:
    """The dimension of heads in a field of `SavedForBackward`."""
    return -3 if field == 0 and not takes_unions(spec.config, listed=spec.listed) else -2


def _of_group(x: Tensor | None, dim: int, heads: tuple[int, int], Hkv: int) -> Tensor | None:
    """A field's part of key/value heads (first, end)."""
    if x is None or heads == (0, Hkv):
        return x
    each = x.shape[dim] // Hkv
    return x.narrow(dim, heads[0] * each, (heads[1] - heads[0]) * each).contiguous()


def _inputs(tensors: Sequence[Tensor | None], spec: CallSpec, heads: int, kept: Sequence[bool]) -> tuple:
    """`Inputs` of all heads, and the plan."""
    from nsa_layer.cute.autograd import readable
    from nsa_layer.cute.forward import Inputs
    from nsa_layer.cute.packing import Packing

    *given, cu_seqlens, block_indices = tensors
    q, k, v, *weights = given
    weights[4:] = (None if x is None else readable(x) for x in weights[4:])
    lists = k if block_indices is None else block_indices
    rows = q.shape[-2] // lists.shape[-2]
    packing = Packing.of(spec, q.device, rows, cu_seqlens=cu_seqlens, total=q.shape[0])
    plan = MemoryPlan(head_groups(k.shape[-2], heads), tuple(kept))
    return Inputs(*map(readable, (q, k, v)), *weights, block_indices, None, packing), plan


def _with_room(x: Tensor, shape: Shape) -> Tensor:
    """x, contiguous, at the beginning of a tensor of this shape; lists end with -1."""
    if tuple(x.shape) == tuple(shape):
        return x.contiguous()
    whole = x.new_full(shape, 0 if x.is_floating_point() else -1)
    whole[tuple(map(slice, x.shape))] = x
    return whole
