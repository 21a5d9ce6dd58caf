"""The pages of a backend as an ``attend`` with gradients, whose queries may be a stretch of a longer context."""

from __future__ import annotations

import torch

from nsa_layer.call_spec import Aux, CallSpec, CallTensors, Saved, require_choice_by_token
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.derivatives import first_derivatives
from nsa_layer.eager import pages as plain
from nsa_layer.support import reads_unions

Tensor = torch.Tensor


def attend(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Aux]:
    """The kernels; arguments as of `eager.attend`; one group of heads, everything saved."""
    if tensors.q_offset is not None and tensors.block_indices is None:
        require_choice_by_token(spec.config)
    return _attend(tensors, spec, "cute")


def eager(tensors: CallTensors, *, spec: CallSpec) -> tuple[Tensor, Aux]:
    """Plain PyTorch."""
    return _attend(tensors, spec, "eager")


def _attend(tensors: CallTensors, spec: CallSpec, backend: str) -> tuple[Tensor, Aux]:
    o, *saved = _Attend.apply(backend, spec, *tensors._replace(cu_seqlens=None))
    saved = Saved(*saved)
    if backend == "cute" and tensors.block_indices is None and not reads_unions(spec.config, listed=spec.listed):
        saved = saved._replace(block_indices=saved.block_indices.transpose(-3, -2))
    return o, saved.aux(tensors)


def _plan(tensors: CallTensors) -> MemoryPlan:
    return MemoryPlan(((0, tensors.k.shape[-2]),), (True,) * 3)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, spec, *given):
        """given: of `CallTensors`."""
        tensors, ctx.static = CallTensors(*given), (backend, spec)
        if backend == "eager":
            o, saved = plain.forward(tensors, spec=spec)
        else:
            from nsa_layer.cute import pages

            with torch.cuda.device_of(tensors.q):
                how = dict(spec=spec, plan=_plan(tensors), backward=any(ctx.needs_input_grad))
                o, saved = pages.forward(tensors, **how)
        ctx.save_for_backward(*tensors, *saved)
        ctx.mark_non_differentiable(*(x for x in saved if x is not None))
        return o, *saved

    @staticmethod
    def backward(ctx, do, *_):
        backend, spec = ctx.static
        count = len(CallTensors._fields)

        def found(do, *given):
            tensors, saved = CallTensors(*given[:count]), Saved(*given[count:])
            if backend == "eager":
                return plain.backward(tensors, saved, do, spec=spec)
            from nsa_layer.cute import pages

            with torch.cuda.device_of(do):
                return pages.backward(tensors, saved, do, spec=spec, plan=_plan(tensors))

        return None, None, *first_derivatives(found, do, *ctx.saved_tensors), None, None, None, None
