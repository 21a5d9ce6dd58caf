"""The operator ``branches``: the three branches in plain PyTorch, before the gates."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from nsa_layer import autocast, derivatives
from nsa_layer.call_spec import Aux, CallSpec, accumulation_dtype, lse_shape
from nsa_layer.inputs import check_lengths, starts_of_lengths
from nsa_layer.operators.arguments import (
    BRANCHES,
    CONFIG,
    Tensor,
    apart,
    check_lists_of,
    choice_shape,
    copied,
    copied_fake,
    lengths_of,
    spec_of,
    static_arguments,
    without_room,
)
from nsa_layer.operators.recorded import gradients_of, leaves_of, lse_sizes, recording
from nsa_layer.operators.registration import OPS, register


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: CallSpec,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    compress_k_weight: Tensor | None,
    compress_v_weight: Tensor | None,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    cu_seqlens: Tensor | None,
    block_indices: Tensor | None,
) -> tuple[Tensor, Aux]:
    """The layer in plain PyTorch; arguments as `nsa` has checked them.

    In a graph the lists of chosen blocks have room for any length: columns, and of packed sequences rows, of padding.
    """
    from nsa_layer import eager

    if spec.lengths is not None:  # no second look at what may be on a GPU
        cu_seqlens = starts_of_lengths(spec.lengths)
    tensors = (q, k, v, compress_k_weight, compress_v_weight, k_cmp, v_cmp, k_win, v_win, cu_seqlens, block_indices)
    made = OPS.branches.default(*tensors, *static_arguments(spec).values())
    choice = block_indices
    if choice is None:
        choice = made[6]
        if spec.lengths is not None:
            choice = choice[: sum(map(spec.config.num_tiles, spec.lengths))]
        if not torch.compiler.is_compiling():
            choice = choice[..., : spec.config.list_width(max(spec.lengths or q.shape[1:2]))]
    return eager.gated(q, gate_weight, gates, eager.Branches(list(made[:3]), list(made[3:6]), choice))


def _branches(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o_cmp, o_slc, o_swa, the LSEs in the same order, the chosen blocks, all LSEs as backward takes them, and a copy
    of cu_seqlens."""
    from nsa_layer import eager

    *inputs, cu_seqlens, block_indices = tensors
    q = inputs[0]
    spec = spec_of(static, None if cu_seqlens is None else check_lengths(cu_seqlens, q, "cu_seqlens", "q"))
    config = spec.config
    if block_indices is not None:
        check_lists_of(block_indices, q, inputs[1], spec)
    with torch.no_grad(), autocast.off(q.device), derivatives.noted_lses() as lses:
        made = eager.attend_branches(*without_room(inputs, spec, 5), block_indices, None, spec=spec)
    choice = q.new_empty(0, dtype=torch.int32)
    if block_indices is None:
        choice = q.new_full(choice_shape(q, inputs[1], cu_seqlens, config), -1, dtype=torch.int32)
        choice[tuple(map(slice, made.choice.shape))] = made.choice
    return *apart(made.outputs), *apart(made.lses), choice, torch.cat(lses), copied(cu_seqlens)


def _branches_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, k, v, *_, cu_seqlens, block_indices = tensors
    acc = accumulation_dtype(q.dtype)
    o = (*q.shape[:-1], v.shape[-1]), acc if q.device.type == "cpu" else q.dtype
    choice = (0,) if block_indices is not None else choice_shape(q, k, cu_seqlens, spec_of(static, None).config)
    outputs = [q.new_empty(o[0], dtype=o[1]) for _ in range(3)]
    lses = [q.new_empty(lse_shape(q), dtype=acc) for _ in range(3)]
    flat = q.new_empty((3 * prod(q.shape[:-1]),), dtype=acc)
    return *outputs, *lses, q.new_empty(choice, dtype=torch.int32), flat, copied_fake(q, cu_seqlens)


def _branches_backward(*tensors: Tensor | None, needs: Sequence[bool], **static: Any) -> tuple[Tensor, ...]:
    from nsa_layer import eager

    given, inputs, (block_indices, choice, lses, starts) = tensors[:3], tensors[3:12], tensors[12:]
    q, lengths = inputs[0], lengths_of(starts)
    spec = spec_of(static, lengths)
    if block_indices is None:
        rows = sum(map(spec.config.num_tiles, lengths)) if lengths else choice.shape[1]
        block_indices = choice.narrow(0 if lengths else 1, 0, rows)
        block_indices = block_indices[..., : spec.config.list_width(max(lengths or q.shape[1:2]))]
    each = lses.split(lse_sizes(q, lengths, 3))
    leaves = leaves_of(inputs, needs)
    with recording(), autocast.off(q.device), derivatives.known_lses(each):
        made = eager.attend_branches(*without_room(leaves, spec, 5), block_indices, None, spec=spec)
    return gradients_of(leaves, made.outputs, given)


register(
    "branches",
    "eager",
    schema=f"{BRANCHES}, *, {CONFIG}",
    compute=_branches,
    fake=_branches_fake,
    outputs=9,
    gradients=_branches_backward,
    saved="Tensor? block_indices, Tensor choice, Tensor lses, Tensor starts",
    keep=lambda inputs, outputs: (*inputs[:9], inputs[10], *outputs[6:]),
    differentiable=9,
    differentiated=3,
)
