"""Registration of operators with PyTorch, as `torch.ops.nsa_layer`.

The first arguments of an operator are tensors, and what is missing among its outputs is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nsa_layer import autocast, derivatives

Tensor, DispatchKeySet = torch.Tensor, torch._C.DispatchKeySet
Tensors = Sequence[Tensor | None]

PLAIN = (Tensor, torch.nn.Parameter)
DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
LIBRARY = torch.library.Library("nsa_layer", "DEF")
OPS = torch.ops.nsa_layer


def dispatcher_sees(*tensors: Tensor | None) -> bool:
    """True while a graph is traced, in modes (fake tensors, selective checkpoints), for tensor subclasses (fake
    tensors)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(x is not None and type(x) not in PLAIN for x in tensors)


def needs_dispatcher(tensors: Tensors = ()) -> bool:
    """True if something acts on a call in PyTorch's dispatcher: in a graph or a mode, a transform or a profiler."""
    return dispatcher_sees(*tensors) or derivatives.is_transformed() or torch._C._autograd._profiler_enabled()


def register(schema: str, compute: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Register the operator of this schema; `differentiate` sets or refuses its derivatives."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa_layer::{name}", fake, lib=LIBRARY)
    return getattr(OPS, name).default


def define(
    name: str, schema: str, outputs: int, compute: Callable, fake: Callable
) -> tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, ...]]]:
    """The operator, and the function that computes it, with empty tensors for None.

    Outputs are contiguous, and no views of anything; empty ones may be arguments of another operator.
    """

    def whole(*args: Any) -> tuple[Tensor, ...]:
        like = next(x for x in args if x is not None)
        with torch.no_grad(), autocast.off(like.device):
            outputs = compute(*map(none_for_empty, args))
            return tuple([like.new_empty(0) if x is None else as_output(x) for x in outputs])

    op = register(f"{name}({schema}) -> ({', '.join(['Tensor'] * outputs)})", whole, fake)
    torch.library.register_vmap(f"nsa_layer::{name}", derivatives.ReverseMode.vmap, lib=LIBRARY)
    return op, whole


def none_for_empty(x: Any) -> Any:
    """None for an empty tensor, by which operators return None; anything else unchanged."""
    return None if isinstance(x, Tensor) and x.shape == (0,) else x


def as_output(x: Tensor) -> Tensor:
    """x as operators must return it: contiguous, and no view."""
    return x.contiguous() if x._base is None else x.clone(memory_format=torch.contiguous_format)


def differentiate(
    op: torch._ops.OpOverload,
    compute: Callable[..., tuple[Tensor, ...]],
    function: type[torch.autograd.Function] | None = None,
) -> None:
    """Give an operator the derivatives of a function, whose first argument computes the operator; None: derivatives
    raise."""

    def autograd(keys: DispatchKeySet, *args: Any, **static: Any) -> tuple[Tensor, ...]:
        tensors = [x for each in args for x in (each if isinstance(each, (list, tuple)) else [each])]
        derivatives.refuse_transforms(*tensors)
        below = partial(_below_autograd, op, compute, keys)
        if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)):
            return below(*args, **static)
        if function is None:
            raise RuntimeError(f"{op.name()} has no derivatives of its own: call nsa")
        return derivatives.apply_here(function, below, *args)

    LIBRARY.impl(op._opname, autograd, "Autograd", with_keyset=True)


def _below_autograd(
    op: torch._ops.OpOverload,
    compute: Callable[..., tuple[Tensor, ...]],
    keys: DispatchKeySet,
    *args: Any,
    **static: Any,
) -> tuple[Tensor, ...]:
    keys = keys & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        if keys.highestPriorityTypeId() in DEVICES:  # nothing observes the call: skipping the dispatcher saves time
            return compute(*args, **static)
        return op.redispatch(keys, *args, **static)
