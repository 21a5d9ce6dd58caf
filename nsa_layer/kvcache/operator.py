"""``torch.ops.nsa_layer.with_kvcache``: the step on caches as an operator that changes its caches in place."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from nsa_layer import autocast
from nsa_layer.cached_call import with_query_lengths
from nsa_layer.call import CACHES, TENSORS, Call, KVCache, Lses, accumulation_dtype, lse_shape
from nsa_layer.operators import CONFIG, static_arguments
from nsa_layer.operators.layer import STATIC_NAMES, static_spec
from nsa_layer.operators.registration import OPS, differentiate, needs_dispatcher, register

Tensor = torch.Tensor
AT_OFFSET, REQUIRED = TENSORS.index("q_offset"), ("q", "k_cache", "v_cache", "cache_seqlens")  # tensors before q_offset
NO_GRADIENT = (
    "attention to cached tokens (nsa_with_kvcache, NSACache, models with a cache) has no gradient, since caches do not "
    "keep what their keys and values come from: train on whole sequences without a cache, or call it under no_grad"
)


def attend_cached(call: Call, *, out: Tensor | None, validate: bool) -> tuple[Tensor, Lses]:
    """The step: o, written to ``out`` where there is one, and the branches' log-sum-exps; by the operator, or on the
    kernels as a function where the dispatcher would do nothing, which saves host time."""
    cache, spec = call.cache, call.spec
    with torch.no_grad():
        if not isinstance(cache.cache_seqlens, Tensor):
            seqlens = torch.full((call.B,), cache.cache_seqlens, dtype=torch.int32, device=call.q.device)
            call = call._replace(cache=(cache := cache._replace(cache_seqlens=seqlens)))
        if spec.backend == "cute" and not needs_dispatcher():
            o, lses = _on_backend(call, validate=validate)
            increment_version([x for name in CACHES if (x := getattr(cache, name)) is not None])
        else:
            static = static_arguments(spec) | dict(bound=spec.bound, num_splits=cache.num_splits, validate=validate)
            o, *lses = OPS.with_kvcache(*call.tensors[:AT_OFFSET], *cache[:-1], **static)
        o = o if out is None else out.copy_(o)
    return refuse_gradients(call, out, o, tuple(lses))


def refuse_gradients(call: Call, out: Tensor | None, o: Tensor, lses: Lses) -> tuple[Tensor, Lses]:
    """o and the log-sum-exps; copies whose backward raises, where a tensor of the call needs a gradient."""
    tensors = (*call.tensors, *call.cache, out) if torch.is_grad_enabled() else ()
    needing = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    if needing:  # gradients would pass one number on their way to all of them, so that graphs keep what raises
        passed = sum(x[:0].sum() for x in needing)
        o, *lses = _WithoutGradient.apply(passed, o, *lses)
    return o, tuple(lses)


def _on_backend(call: Call, *, validate: bool) -> tuple[Tensor, Lses]:
    with autocast.off(call.q.device):
        if call.spec.backend == "cute":
            from nsa_layer.cute import kvcache

            return kvcache.attend_cached(call, validate=validate)
        from nsa_layer.kvcache import eager

        return eager.attend_cached(call, validate=validate)[:2]


def _step(
    *tensors: Tensor | None, validate: bool, bound: int | None = None, num_splits: int = 0, **static: Any
) -> tuple[Tensor, ...]:
    call = Call(*tensors[:AT_OFFSET], cache=KVCache(*tensors[AT_OFFSET:], num_splits))
    spec = static_spec(map(static.__getitem__, STATIC_NAMES), listed=call.block_indices is not None)
    call = with_query_lengths(call._replace(spec=spec), bound, backend=spec.backend, validate=validate)
    o, lses = _on_backend(call, validate=validate)
    return o, *(lse.contiguous() for lse in lses)


def _fake(*tensors: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    q, v_cache = tensors[0], tensors[AT_OFFSET + 1]
    lses = [q.new_empty(lse_shape(q), dtype=accumulation_dtype(q.dtype)) for _ in range(3)]
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1])), *lses


def _step_schema() -> str:
    aliases, tensors = dict(zip(CACHES, "abcdefg")), []
    for name in (*TENSORS[:AT_OFFSET], *KVCache._fields[:-1]):
        kind = f"Tensor({aliases[name]}!)" if name in aliases else "Tensor"
        tensors.append(f"{kind}{'?' * (name not in REQUIRED)} {name}")
    options = f"{CONFIG}, bool validate, SymInt? bound=None, int num_splits=0"
    return f"with_kvcache({', '.join(tensors)}, *, {options}) -> (Tensor, Tensor, Tensor, Tensor)"


differentiate(register(_step_schema(), _step, _fake), _step)


class _WithoutGradient(torch.autograd.Function):
    """Copies, whose backward is an operator that raises: a graph keeps it, and raises when it runs."""

    @staticmethod
    def forward(passed: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, do: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return OPS.raise_no_gradient(do).new_empty(()), *(None,) * 4


def _raise(do: Tensor) -> Tensor:
    raise RuntimeError(NO_GRADIENT)


register("raise_no_gradient(Tensor do) -> Tensor", _raise, torch.empty_like)
