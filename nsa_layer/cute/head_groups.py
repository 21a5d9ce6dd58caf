"""A call on the kernels, a group of key/value heads after the other: forward, backward, and what is saved between.

Saved: q, k, v, the weights, each branch's o (unless the memory plan recomputes it) and lse, the gates, the compressed
keys and values, and the selected blocks. Block lists are built again in backward; nothing is selected again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from nsa_layer import determinism
from nsa_layer.call_spec import OWN_KEYS, Aux, CallSpec, CallTensors, Saved
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, Sizes, plan_memory
from nsa_layer.cute.packing import Packing
from nsa_layer.fork import require_patched
from nsa_layer.gate import equal_gates
from nsa_layer.support import reads_unions
from nsa_layer.warm_up.api import compile_missing
from nsa_layer.warm_up.shapes import CallShape

require_patched()

from nsa_layer.cute.backward import backward  # noqa: E402
from nsa_layer.cute.forward import Pages, forward  # noqa: E402
from nsa_layer.cute.side_stream import SideStream  # noqa: E402
from nsa_layer.kernels.launch import readable  # noqa: E402

Tensor = torch.Tensor


def forward_groups(
    tensors: CallTensors,
    packing: Packing | None,
    spec: CallSpec,
    plan: MemoryPlan,
    *,
    backward: bool,
    o: Tensor | None = None,
    keep: Callable[[Saved, tuple[int, int]], None] | None = None,
) -> tuple[Tensor, list[Saved]]:
    """o, which is written where it is given, and what each group of heads leaves to its backward, if there will be one.

    Args:
        keep: takes what a group leaves, and its key/value heads, before the next group; the list is then empty.
    """
    with _compiled_together(tensors, spec, plan, backward=backward):
        return _forward_groups(tensors, packing, spec, plan, o, keep)


def _forward_groups(
    tensors: CallTensors,
    packing: Packing | None,
    spec: CallSpec,
    plan: MemoryPlan,
    o: Tensor | None = None,
    keep: Callable[[Saved, tuple[int, int]], None] | None = None,
    **more: Any,
) -> tuple[Tensor, list[Saved]]:
    (q, k, v), parts = tensors[:3], []
    keep = keep or (lambda part, _: parts.append(part))
    o = q.new_empty((*q.shape[:-1], v.shape[-1])) if o is None else o
    for group in plan.groups:
        into = _narrow(o, -2, _query_heads(q, k, *group))
        keep(forward(head_group(tensors, *group), packing, into, spec=spec, kept=plan.kept, **more), group)
    return o, parts


def infer(
    tensors: CallTensors,
    packing: Packing | None,
    spec: CallSpec,
    memory: MemoryPolicy,
    pages: Pages | None,
    side_stream: SideStream | None,
) -> tuple[Tensor, Aux]:
    """o and the auxiliary results of tensors that are `readable`, without a backward: what calls on caches launch.

    Kernels that are missing are compiled one after the other; the caller may have them compiled together before.
    """
    sizes = Sizes.of(tensors, spec=spec, needs_grad=False)
    if pages is not None:
        sizes = sizes._replace(longest=pages.room)
    plan = plan_memory(sizes, memory, tensors.q.device)
    o, parts = _forward_groups(tensors, packing, spec, plan, pages=pages, side_stream=side_stream)
    aux = Aux(*joined_aux(parts, tensors.q, unions=reads_unions(spec.config, listed=spec.listed)))
    if aux.lse_swa is None:
        aux.lse_swa = torch.full_like(aux.lse_cmp, -torch.inf)
    return o, aux


def gradients(
    do: Tensor,
    tensors: CallTensors,
    packing: Packing | None,
    spec: CallSpec,
    plan: MemoryPlan,
    saved: Iterable[Saved],
    *,
    dq: Tensor | None = None,
    window: slice | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the differentiable tensors.

    Args:
        saved: by each group's forward; asked for one by one, before that group's backward.
        dq: is written where it is given.
        window: rows of k and v that k_win and v_win are, whose gradients are parts of dk and dv then, and are returned
            as None.
    """
    q, k = tensors[:2]
    spec = determinism.in_force(spec)
    do = readable(do)
    of_tokens = (*tensors[:3], tensors.k_win, tensors.v_win)[: 5 if window is None else 3]
    whole = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in of_tokens[1:]]
    if window is not None:
        whole += [x[..., window, :, :] for x in whole]
    whole.insert(0, torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq)
    rest = []
    with _compiled_together(tensors, spec, plan, backward=True):
        for (first, end), of_group in zip(plan.groups, saved, strict=True):
            query, key = _query_heads(q, k, first, end), (first, end)
            grads = (_narrow(x, -2, query if i == 0 else key) for i, x in enumerate(whole))
            given = head_group(tensors, first, end), packing, of_group, _narrow(do, -2, query)
            rest.append(backward(*given, *grads, window_adds=window is not None, spec=spec))
    dq, dk, dv, *of_window = whole
    if window is not None:
        of_window = None, None
    return dq, dk, dv, *(joined(list(parts), dim) for parts, dim in zip(zip(*rest), (0, -2, 0, 0, -2, -2))), *of_window


def _compiled_together(
    tensors: CallTensors, spec: CallSpec, plan: MemoryPlan, *, backward: bool
) -> AbstractContextManager[None]:
    """Within, kernels that are missing are compiled side by side, before the first is launched."""
    return compile_missing(partial(_shape, tensors, spec, plan, backward=backward))


def _shape(tensors: CallTensors, spec: CallSpec, plan: MemoryPlan, *, backward: bool) -> CallShape:
    """The call without its tensors."""
    q, k, v = tensors[:3]
    B, T = (1, q.shape[0]) if q.dim() == 3 else q.shape[:2]
    sizes = dict(B=B, T=T, Hq=q.shape[-2], Hkv=k.shape[-2], D=q.shape[-1], Dv=v.shape[-1], dtype=q.dtype)
    static = dict(config=spec.config, causal=spec.causal, lengths=spec.lengths, plan=plan)
    if spec.bound is not None:  # kernels for others of these bounds are the same
        static["lengths"] = (spec.bound, T - spec.bound)
    static["lists"] = None if tensors.block_indices is None else tuple(tensors.block_indices.shape[-2:])
    if tensors.q_offset is not None:
        static |= dict(keys=k.shape[-3], lengths_k=spec.lengths_k)
    own = tuple(name for name in OWN_KEYS if getattr(tensors, name) is not None)
    static |= dict(gate=tensors.gate, projected=tensors.compress_k_weight is not None, own=own)
    return CallShape(**sizes, **static, backward=backward)


def head_group(tensors: CallTensors, first: int, end: int) -> CallTensors:
    """The part of the tensors that key/value heads `first` to `end` and their query heads have."""
    if (first, end) == (0, tensors.k.shape[-2]):
        return tensors
    query, key = _query_heads(tensors.q, tensors.k, first, end), (first, end)
    parts = dict(q=_narrow(tensors.q, -2, query), gates=_narrow(tensors.gates, -2, query))
    parts |= {name: _narrow(getattr(tensors, name), -2, key) for name in ("k", "v", *OWN_KEYS)}
    if tensors.block_indices is not None:
        of_query_heads = tensors.block_indices.shape[-2] == tensors.q.shape[-2]
        parts["block_indices"] = _narrow(tensors.block_indices, -2, query if of_query_heads else key)
    parts |= {name: _narrow(getattr(tensors, name), 0, key) for name in ("compress_k_weight", "compress_v_weight")}
    return tensors._replace(**parts, gate_weight=_narrow(tensors.gate_weight, 0, query))


def _query_heads(q: Tensor, k: Tensor, first: int, end: int) -> tuple[int, int]:
    """(first, end) of the query heads of key/value heads `first` to `end`."""
    G = q.shape[-2] // k.shape[-2]
    return first * G, end * G


def _narrow(x: Tensor | None, dim: int, heads: tuple[int, int]) -> Tensor | None:
    """Heads (first, end) of a tensor; None of None."""
    if x is None or heads == (0, x.shape[dim]):
        return x
    return x.narrow(dim, heads[0], heads[1] - heads[0])


def joined_aux(parts: list[Saved], q: Tensor, *, unions: bool) -> tuple[Tensor, ...]:
    """`Aux`'s fields for all heads."""
    packed = q.dim() == 3
    heads_dim = 0 if packed else 1
    block_indices = [part.block_indices for part in parts]
    block_indices = joined(block_indices, -2) if unions else joined(block_indices, heads_dim).transpose(-3, -2)
    lses = [joined(list(lses), heads_dim) for lses in zip(*((p.lse_cmp, p.lse_slc, p.lse_swa) for p in parts))]
    g = joined([part.g for part in parts], -2)
    if g is None:
        g = equal_gates(q)
    return block_indices, g, *lses


def joined(parts: list[Tensor | None], dim: int) -> Tensor | None:
    """The groups' tensors as one, along their heads."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, dim)
