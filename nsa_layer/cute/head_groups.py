"""A call on the kernels, a group of key/value heads after the other: forward, backward, and what is saved between.

Saved: q, k, v, the weights, each branch's o (unless the memory plan recomputes it) and lse, the gates, the compressed
keys and values, and the selected blocks. Block lists are built again in backward; nothing is selected again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nsa_layer.call_spec import DIFFERENTIABLE, OWN_KEYS, SELECTED_ALONE, CallSpec, CallTensors, Saved, Signature
from nsa_layer.cute.memory_plan import MemoryPlan, MemoryPolicy, Sizes, plan_memory
from nsa_layer.cute.varlen import Varlen
from nsa_layer.fork import require_patched
from nsa_layer.support import reads_unions
from nsa_layer.warm_up.api import compile_missing

require_patched()

from nsa_layer.cute.backward import backward, backward_selected  # noqa: E402
from nsa_layer.cute.forward import Pages, first_positions, forward, forward_selected  # noqa: E402
from nsa_layer.cute.side_stream import SideStream  # noqa: E402
from nsa_layer.kernels.launch import readable  # noqa: E402

Tensor = torch.Tensor
READ = ("q", "k", "v", *OWN_KEYS)  # rows by token or block


def placed(tensors: CallTensors, spec: CallSpec) -> tuple[CallTensors, Varlen | None]:
    """The tensors as kernels read them, and starts."""
    tensors, starts = tensors.map(readable, READ), {}
    if spec.bound is not None:
        starts = dict(cu_seqlens=tensors.cu_seqlens, total=tensors.q.shape[0])
        starts |= dict(cu_seqlens_k=tensors.cu_seqlens_k, total_k=tensors.k.shape[0])
    return tensors, Varlen.of(spec, tensors.q.device, tensors.q_heads_per_list, **starts)


def forward_groups(
    tensors: CallTensors,
    varlen: Varlen | None,
    spec: CallSpec,
    plan: MemoryPlan,
    *,
    backward: bool,
    o: Tensor | None = None,
    together: bool = True,
    **more: Any,
) -> tuple[Tensor, Saved]:
    """o, which is written where it is given, and what backward needs, of all heads; lists of the caller's are left out.

    Args:
        backward: there will be one.
        together: kernels that are missing are compiled side by side, before the first is launched.
        more: of `forward`.
    """
    q, k, v = tensors[:3]
    with _compiled(tensors, varlen, spec, plan, backward=backward) if together else nullcontext():
        if spec.branches == SELECTED_ALONE:
            o, lse = forward_selected(tensors, varlen, spec)
            return o, Saved(lse_slc=lse)
        o = q.new_empty((*q.shape[:-1], v.shape[-1])) if o is None else o
        whole: list[Tensor | None] = [None] * len(Saved._fields)
        for group in plan.groups:
            into = _narrow(o, -2, _query_heads(q, k, *group))
            part = forward(head_group(tensors, *group), varlen, into, spec=spec, kept=plan.kept, **more)
            if tensors.block_indices is not None:
                part = part._replace(block_indices=None)
            if len(plan.groups) == 1:
                return o, part
            for i, x in enumerate(part):
                if x is not None:
                    dim, heads = _heads_dim(i, spec), k.shape[-2]
                    each, shape = x.shape[dim] // (group[1] - group[0]), [*x.shape]
                    shape[dim] = each * heads
                    whole[i] = x.new_empty(shape) if whole[i] is None else whole[i]
                    whole[i].narrow(dim, each * group[0], x.shape[dim]).copy_(x)
    return o, Saved(*whole)


def infer(
    tensors: CallTensors,
    varlen: Varlen | None,
    spec: CallSpec,
    memory: MemoryPolicy,
    pages: Pages | None,
    side_stream: SideStream | None,
) -> tuple[Tensor, Saved]:
    """`forward_groups` without a backward: what calls on caches launch.

    Kernels that are missing are compiled one after the other; the caller may have them compiled together before.
    """
    sizes = Sizes.of(tensors, spec=spec, needs_grad=False)
    if pages is not None:
        sizes = sizes._replace(longest=pages.capacity)
    plan, more = plan_memory(sizes, memory, tensors.q.device), dict(pages=pages, side_stream=side_stream)
    return forward_groups(tensors, varlen, spec, plan, backward=False, together=False, **more)


def gradients(
    do: Tensor,
    tensors: CallTensors,
    varlen: Varlen | None,
    spec: CallSpec,
    plan: MemoryPlan,
    saved: Saved,
    *,
    o: Tensor | None = None,
    dq: Tensor | None = None,
    window: slice | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of the differentiable tensors, from what `forward_groups` gave.

    Args:
        o: of `forward_groups`, where the selected branch is alone.
        dq: is written where it is given.
        window: rows of k and v that k_win and v_win are, whose gradients are parts of dk and dv then, and are returned
            as None.
    """
    (q, k), spec, do = tensors[:2], spec.in_force(), readable(do)
    if spec.branches == SELECTED_ALONE:
        with _compiled(tensors, varlen, spec, plan, backward=True):
            found = backward_selected(tensors, varlen, spec, do, o, saved.lse_slc)
        return *found, *[None] * (len(DIFFERENTIABLE) - 3)
    of_tokens = (*tensors[:3], tensors.k_win, tensors.v_win)[: 5 if window is None else 3]
    whole = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in of_tokens[1:]]
    if window is not None:
        whole += [x[..., window, :, :] for x in whole]
    whole.insert(0, torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq)
    rest = []
    with _compiled(tensors, varlen, spec, plan, backward=True):
        for group in plan.groups:
            query = _query_heads(q, k, *group)
            grads = (_narrow(x, -2, query if i == 0 else group) for i, x in enumerate(whole))
            part, of_group = head_group(tensors, *group), saved
            if len(plan.groups) > 1:
                of_group = Saved(*(_of_group(x, _heads_dim(i, spec), group, k) for i, x in enumerate(saved)))
            if part.block_indices is not None:
                of_group = of_group._replace(block_indices=part.block_indices)
            given = part, varlen, of_group, _narrow(do, -2, query)
            rest.append(backward(*given, *grads, window_adds=window is not None, spec=spec))
    dq, dk, dv, *of_window = whole
    if window is not None:
        of_window = None, None
    return dq, dk, dv, *(_joined(list(parts), dim) for parts, dim in zip(zip(*rest), (0, -2, 0, 0, -2, -2))), *of_window


def _compiled(
    tensors: CallTensors, varlen: Varlen | None, spec: CallSpec, plan: MemoryPlan, *, backward: bool
) -> AbstractContextManager[None]:
    """Within, kernels that are missing are compiled side by side, before the first is launched."""

    def signature() -> Signature:
        alone = spec.branches == SELECTED_ALONE
        offset = first_positions(tensors, varlen, spec) if alone else tensors.q_offset
        return Signature.of(tensors._replace(q_offset=offset)._asdict(), spec, plan, backward=backward)

    return compile_missing(signature)


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


def _heads_dim(field: int, spec: CallSpec) -> int:
    """The dimension of heads in a field of `Saved`."""
    return -3 if field == 0 and not reads_unions(spec.config, listed=spec.listed) else -2


def _of_group(x: Tensor | None, dim: int, heads: tuple[int, int], k: Tensor) -> Tensor | None:
    """A field's part of key/value heads (first, end), contiguous."""
    if x is None:
        return None
    each = x.shape[dim] // k.shape[-2]
    return x.narrow(dim, heads[0] * each, (heads[1] - heads[0]) * each).contiguous()


def _joined(parts: list[Tensor | None], dim: int) -> Tensor | None:
    """The groups' tensors as one, along their heads."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, dim)
