"""The operator ``branches``: the three branches in plain PyTorch, before the gates."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from nsa_layer import autocast, derivatives
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, accumulation_dtype, lse_shape
from nsa_layer.inputs import check_lengths, starts_of_lengths
from nsa_layer.operators.arguments import (
    CONFIG,
    OF_BRANCHES,
    Tensor,
    apart,
    check_lists_of,
    choice_shape,
    copied,
    copied_fake,
    lengths_of,
    schema_of,
    spec_of,
    static_arguments,
    without_room,
)
from nsa_layer.operators.recorded import gradients_of, leaves_of, lse_sizes, recording
from nsa_layer.operators.registration import OPS, register


def attend(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Aux]:
    """The layer in plain PyTorch; arguments as `nsa` has checked them.

    In a graph the lists of chosen blocks have room for any length: columns, and of packed sequences rows, of padding.
    """
    from nsa_layer import eager

    given = tensors
    if spec.lengths is not None:  # no second look at what may be on a GPU
        given = tensors._replace(cu_seqlens=starts_of_lengths(spec.lengths))
    ordered = (getattr(given, name) for name in OF_BRANCHES)
    made = OPS.branches.default(*ordered, *static_arguments(spec).values())
    choice = tensors.block_indices
    if choice is None:
        choice = made[6]
        if spec.lengths is not None:
            choice = choice[: sum(map(spec.config.num_tiles, spec.lengths))]
        if not torch.compiler.is_compiling():
            choice = choice[..., : spec.config.list_width(max(spec.lengths or tensors.q.shape[1:2]))]
    return eager.gated(tensors, eager.Branches(list(made[: spec.config.num_branches]), list(made[3:6]), choice))


def _branches(*given: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o_cmp, o_slc, o_swa (without a window empty), the LSEs in the same order, the chosen blocks, all LSEs as backward
    takes them, and a copy of cu_seqlens."""
    from nsa_layer import eager

    tensors = CallTensors(**dict(zip(OF_BRANCHES, given, strict=True)))
    q, k, cu_seqlens, block_indices = tensors.q, tensors.k, tensors.cu_seqlens, tensors.block_indices
    spec = spec_of(static, None if cu_seqlens is None else check_lengths(cu_seqlens, q, "cu_seqlens", "q"))
    if block_indices is not None:
        check_lists_of(block_indices, q, k, spec)
    with torch.no_grad(), autocast.off(q.device), derivatives.noted_lses() as lses:
        made = eager.attend_branches(without_room(tensors, spec), spec=spec)
    choice = q.new_empty(0, dtype=torch.int32)
    if block_indices is None:
        choice = q.new_full(choice_shape(q, k, cu_seqlens, spec.config), -1, dtype=torch.int32)
        choice[tuple(map(slice, made.choice.shape))] = made.choice
    outputs = made.outputs + [q.new_empty(0, dtype=made.outputs[0].dtype)] * (3 - spec.config.num_branches)
    return *apart(outputs), *apart(made.lses), choice, torch.cat(lses), copied(cu_seqlens)


def _branches_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, k, v, *_, cu_seqlens, block_indices = tensors
    acc = accumulation_dtype(q.dtype)
    o = (*q.shape[:-1], v.shape[-1]), acc if q.device.type == "cpu" else q.dtype
    config = spec_of(static, None).config
    choice = (0,) if block_indices is not None else choice_shape(q, k, cu_seqlens, config)
    outputs = [q.new_empty(o[0] if i < config.num_branches else 0, dtype=o[1]) for i in range(3)]
    lses = [q.new_empty(lse_shape(q), dtype=acc) for _ in range(3)]
    flat = q.new_empty((config.num_branches * prod(q.shape[:-1]),), dtype=acc)
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
    each = lses.split(lse_sizes(q, lengths, spec.config.num_branches))
    leaves = leaves_of(inputs, needs)
    tensors = CallTensors(**dict(zip(OF_BRANCHES, leaves)), block_indices=block_indices)
    with recording(), autocast.off(q.device), derivatives.known_lses(each):
        made = eager.attend_branches(without_room(tensors, spec), spec=spec)
    return gradients_of(leaves, made.outputs, given[: spec.config.num_branches])


register(
    "branches",
    "eager",
    schema=f"{schema_of(OF_BRANCHES)}, *, {CONFIG}",
    compute=_branches,
    fake=_branches_fake,
    outputs=9,
    gradients=_branches_backward,
    saved="Tensor? block_indices, Tensor choice, Tensor lses, Tensor starts",
    keep=lambda inputs, outputs: (*inputs[:9], inputs[10], *outputs[6:]),
    differentiable=9,
    differentiated=3,
)
