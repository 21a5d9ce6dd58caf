"""The kernels as an ``attend`` of a backend, whose queries may be a stretch of a longer context."""

from __future__ import annotations

import torch

from flash_attn.cute.runtime.own_device import on_own_device
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, require_choice_by_token
from nsa_layer.cute.head_groups import forward_groups, gradients, joined_aux
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.packing import Packing
from nsa_layer.cute.saved import SavedForBackward
from nsa_layer.cute.whole_call import READ
from nsa_layer.derivatives import first_derivatives
from nsa_layer.kernels.launch import readable
from nsa_layer.support import reads_unions

Tensor = torch.Tensor


@on_own_device
def attend(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Aux]:
    """Arguments as of `eager.attend`; one group of heads, everything saved."""
    if tensors.q_offset is not None and tensors.block_indices is None:
        require_choice_by_token(spec.config)
    read = {name: readable(x) for name in READ if (x := getattr(tensors, name)) is not None}
    packing = Packing.of(spec, tensors.q.device, tensors.q_heads_per_list)
    o, *aux = _Attend.apply(packing, spec, *tensors._replace(**read, cu_seqlens=None))
    return o, Aux(*aux)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packing, spec, *given):
        """given: of `CallTensors`."""
        tensors = CallTensors(*given)
        ctx.static = packing, spec, MemoryPlan(((0, tensors.k.shape[-2]),), (True,) * 3)
        o, parts = forward_groups(tensors, *ctx.static, backward=any(ctx.needs_input_grad))
        ctx.save_for_backward(*tensors, *parts[0])
        aux = joined_aux(parts, tensors.q, unions=reads_unions(spec.config, listed=spec.listed))
        ctx.mark_non_differentiable(*aux)
        return o, *aux

    @staticmethod
    def backward(ctx, do, *_):
        count = len(CallTensors._fields)

        def found(do, *saved):
            left = [SavedForBackward(*saved[count:])]
            return gradients(do, CallTensors(*saved[:count]), *ctx.static, left)

        return None, None, *first_derivatives("cute", found, do, *ctx.saved_tensors), None, None, None
