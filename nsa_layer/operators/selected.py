"""The operators ``selected`` and ``selected_on_kernels``: `selected_attention` in plain PyTorch and on the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from nsa_layer import autocast, derivatives
from nsa_layer.call_spec import ListSpec, accumulation_dtype, lse_shape
from nsa_layer.inputs import check_lengths, check_positions, starts_of_lengths
from nsa_layer.operators.arguments import (
    LIST_CONFIG,
    LISTS,
    Tensor,
    apart,
    check_lists_of,
    copied,
    copied_fake,
    stay_on_gpu,
)
from nsa_layer.operators.recorded import gradients_of, leaves_of, lse_sizes, recording
from nsa_layer.operators.registration import OPS, register


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    q_offset: Tensor | int | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *,
    spec: ListSpec,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`selected_attention` in plain PyTorch or on the kernels; arguments as checked."""
    if spec.lengths is not None:
        cu_seqlens, cu_seqlens_k = map(starts_of_lengths, zip(*spec.lengths, strict=True))
    if isinstance(q_offset, int):
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        q_offset = torch.full((sequences,), q_offset, dtype=torch.int32, device=q.device)
    static = (spec.block_size, spec.q_tile, spec.causal, spec.softmax_scale)
    op = OPS.selected.default if backend == "eager" else _call_selected
    return op(q, k, v, block_indices, q_offset, cu_seqlens, cu_seqlens_k, *static)[:2]


def _selected(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o, the LSE, the same as backward takes it, and copies of the starts of queries and keys."""
    from nsa_layer import token_attention

    *inputs, cu_seqlens, cu_seqlens_k = tensors
    q, k, _, block_indices, q_offset = inputs
    spec = _list_spec(static, q, k, cu_seqlens, cu_seqlens_k)
    check_lists_of(block_indices, q, k, spec)
    _check_positions(q, k, q_offset, spec)
    with torch.no_grad(), autocast.off(q.device), derivatives.noted_lses() as lses:
        o, lse = token_attention.attend_selected(*inputs, spec=spec)
    return *apart([o, lse]), torch.cat(lses), copied(cu_seqlens), copied(cu_seqlens_k)


def _selected_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, _, v, *_, cu_seqlens, cu_seqlens_k = tensors
    acc = accumulation_dtype(q.dtype)
    flat = q.new_empty((prod(q.shape[:-1]),), dtype=acc)
    starts = copied_fake(q, cu_seqlens), copied_fake(q, cu_seqlens_k)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(q), dtype=acc), flat, *starts


def _selected_backward(*tensors: Tensor | None, needs: Sequence[bool], **static: Any) -> tuple[Tensor, ...]:
    from nsa_layer import token_attention

    do, *inputs, lses, cu_seqlens, cu_seqlens_k = tensors
    q = inputs[0]
    starts = (x if x.numel() else None for x in (cu_seqlens, cu_seqlens_k))
    spec = _list_spec(static, q, inputs[1], *starts)
    leaves = leaves_of(inputs[:3], needs)
    each = lses.split(lse_sizes(q, None if spec.lengths is None else [T for T, _ in spec.lengths], 1))
    with recording(), autocast.off(q.device), derivatives.known_lses(each):
        o = token_attention.attend_selected(*leaves, *inputs[3:], spec=spec)[0]
    return gradients_of(leaves, [o], [do])


def _selected_on_kernels(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o, the LSE, and copies of the starts of queries and keys."""
    from nsa_layer.cute import selected_alone

    *inputs, cu_seqlens, cu_seqlens_k = tensors
    q, k, _, block_indices, q_offset = inputs
    left = _leaves_starts(q, cu_seqlens, cu_seqlens_k)
    spec = _list_spec(static, q, k, cu_seqlens, cu_seqlens_k, left=left)
    check_lists_of(block_indices, q, k, spec, cu_seqlens)
    if not left:
        _check_positions(q, k, q_offset, spec)
    needs_grad = any(x.requires_grad for x in tensors[:3])  # in a graph of none
    with torch.no_grad(), autocast.off(q.device), torch.cuda.device_of(q):
        q, k, v, block_indices, extents = selected_alone.placed(*tensors, spec=spec)
        with selected_alone.compiled_together(q, k, block_indices, extents, spec, backward=needs_grad):
            made = selected_alone.forward(q, k, v, block_indices, extents, spec)
    return *apart(made), *(copied(starts, q, left=left) for starts in (cu_seqlens, cu_seqlens_k))


def _leaves_starts(q: Tensor, *starts: Tensor | None) -> bool:
    """True if starts of queries and keys are left on the GPU."""
    return stay_on_gpu(starts[0]) and all(x is None or x.device == q.device for x in starts)


def _selected_on_kernels_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, _, v, _, _, *starts = tensors
    lse = q.new_empty(lse_shape(q), dtype=torch.float32)
    how = dict(on_kernels=True, left=_leaves_starts(q, *starts))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse, *(copied_fake(q, x, **how) for x in starts)


def _selected_on_kernels_backward(
    do: Tensor, *tensors: Tensor | None, needs: Sequence[bool], **static: Any
) -> tuple[Tensor, ...]:
    from nsa_layer.cute import selected_alone

    *inputs, o, lse, cu_seqlens, cu_seqlens_k = tensors
    starts = [x if x.numel() else None for x in (cu_seqlens, cu_seqlens_k)]
    spec = _list_spec(static, inputs[0], inputs[1], *starts, left=stay_on_gpu(starts[0]))
    with torch.no_grad(), autocast.off(do.device), torch.cuda.device_of(do):
        q, k, v, block_indices, extents = selected_alone.placed(*inputs, *starts, spec=spec)
        with selected_alone.compiled_together(q, k, block_indices, extents, spec, backward=True):
            found = selected_alone.backward(extents, spec, do, q, k, v, block_indices, o, lse, extents.q_offset)
    return tuple(next(apart([d])) if need else None for d, need in zip(found, needs, strict=True))


def _list_spec(static: dict[str, Any], q: Tensor, k: Tensor, *starts: Tensor | None, left: bool = False) -> ListSpec:
    if starts[0] is None:
        return ListSpec(**static)
    if left:
        return ListSpec(**static, bound=(q.shape[0], k.shape[0]))
    of_q = check_lengths(starts[0], q, "cu_seqlens", "q")
    of_k = of_q if starts[1] is None else check_lengths(starts[1], k, "cu_seqlens_k", "k")
    return ListSpec(**static, lengths=tuple(zip(of_q, of_k, strict=True)))


def _check_positions(q: Tensor, k: Tensor, q_offset: Tensor | None, spec: ListSpec) -> None:
    check_positions(q_offset, spec.lengths or ((q.shape[1], k.shape[1]),), causal=spec.causal)


register(
    "selected",
    "eager",
    schema=f"{LISTS}, *, {LIST_CONFIG}",
    compute=_selected,
    fake=_selected_fake,
    outputs=5,
    gradients=_selected_backward,
    saved="Tensor block_indices, Tensor? q_offset, Tensor lses, Tensor starts, Tensor starts_k",
    keep=lambda inputs, outputs: (*inputs[:5], *outputs[2:]),
    differentiable=3,
    differentiated=1,
)


_call_selected = register(
    "selected_on_kernels",
    "cute",
    schema=f"{LISTS}, *, {LIST_CONFIG}",
    compute=_selected_on_kernels,
    fake=_selected_on_kernels_fake,
    outputs=4,
    gradients=_selected_on_kernels_backward,
    saved="Tensor block_indices, Tensor? q_offset, Tensor o, Tensor lse, Tensor starts, Tensor starts_k",
    keep=lambda inputs, outputs: (*inputs[:5], *outputs),
    differentiable=3,
    differentiated=1,
)
