"""The kernels as an ``attend`` of a backend, whose queries may be a stretch of a longer context."""

from __future__ import annotations

import torch

from flash_attn.cute.runtime.own_device import on_own_device
from nsa_layer import support
from nsa_layer.call_spec import Aux, CallSpec, OwnKeys, require_choice_by_token
from nsa_layer.cute.autograd import _joined_aux, forward_groups, gradients, readable
from nsa_layer.cute.forward import Inputs
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.packing import Packing
from nsa_layer.derivatives import first_derivatives

Tensor = torch.Tensor


@on_own_device
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
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_indices: Tensor | None = None,
    q_offset: Tensor | None = None,
) -> tuple[Tensor, Aux]:
    """Arguments as of `eager.attend`; one group of heads, everything saved."""
    if q_offset is not None and block_indices is None:
        require_choice_by_token(spec.config)
    own = OwnKeys(k_cmp, v_cmp, k_win, v_win).map(readable)
    weights = (gate_weight, gates, compress_k_weight, compress_v_weight)
    rows = q.shape[-2] // (k if block_indices is None else block_indices).shape[-2]
    packing = Packing.of(spec, q.device, rows)
    o, *aux = _Attend.apply(packing, spec, *map(readable, (q, k, v)), *weights, *own, block_indices, q_offset)
    return o, Aux(*aux)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packing, spec, *tensors):
        """tensors: fields of `Inputs` before the last."""
        inputs, plan = Inputs(*tensors, packing), MemoryPlan(((0, tensors[1].shape[-2]),), (True,) * 3)
        o, parts = forward_groups(inputs, spec, plan, backward=any(ctx.needs_input_grad))
        ctx.save_for_backward(*tensors, *parts[0])
        ctx.static = packing, spec, plan
        aux = _joined_aux(parts, inputs.q, unions=support.takes_unions(spec.config, listed=spec.listed))
        ctx.mark_non_differentiable(*aux)
        return o, *aux

    @staticmethod
    def backward(ctx, do, *_):
        return None, None, *first_derivatives("cute", gradients, do, *ctx.static, *ctx.saved_tensors), None, None
