"""Registration of operators and their backward with PyTorch, as `torch.ops.nsa_layer`.

The first arguments of an operator are tensors, and what is missing among its outputs is empty. A backward is an
operator too; that one cannot be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch

from nsa_layer import autocast, derivatives

Tensor, DispatchKeySet = torch.Tensor, torch._C.DispatchKeySet
Tensors = Sequence[Tensor | None]

PLAIN = (Tensor, torch.nn.Parameter)
DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
LIBRARY = torch.library.Library("nsa_layer", "DEF")
OPS = torch.ops.nsa_layer


def is_recorded(*tensors: Tensor | None) -> bool:
    """True in graphs that are made, in modes (those of fake tensors, selective checkpoints), of tensors of classes of
    their own (fake ones)."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(x is not None and type(x) not in PLAIN for x in tensors)


def needs_dispatcher(tensors: Tensors = ()) -> bool:
    """True if something acts on a call in PyTorch's dispatcher: it is recorded, transformed or profiled."""
    return is_recorded(*tensors) or derivatives.is_transformed() or torch._C._autograd._profiler_enabled()


def register(
    name: str,
    *,
    schema: str,
    compute: Callable[..., tuple[Tensor | None, ...]],
    fake: Callable[..., tuple[Tensor, ...]],
    outputs: int,
    gradients: Callable[..., tuple[Tensor | None, ...]],
    saved: str,
    keep: Callable[[Sequence[Any], Tensors], Tensors],
    differentiable: int,
    differentiated: int,
    direct: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Register an operator and its backward; returns what calls it, by the dispatcher where that does anything.

    Without the dispatcher, which takes time, there is None for what is missing.

    Args:
        schema: arguments; tensors come before the star.
        outputs: number of them; the first `differentiated` have gradients.
        saved: arguments of backward beside gradients and the first `differentiable` inputs, whose gradients it gives.
        keep: tensors of backward's arguments beside gradients, from all arguments and outputs.
        direct: computes calls without the dispatcher, whose outputs may have other shapes.
    """
    tensors, config = schema.split(", *, ")
    inputs = ", ".join(tensors.split(", ")[:differentiable])
    given = ", ".join(f"Tensor? do_{i}" for i in range(differentiated))
    direct = _flat(schema, direct or compute)
    op, compute = define(name, schema, outputs, compute, fake)
    of_backward = f"{given}, {inputs}, {saved}, *, {config}, bool[] needs"
    fake = _gradients_fake(differentiated, differentiable)
    op_backward, whole = define(f"{name}_backward", of_backward, differentiable, gradients, fake)
    gradients = _flat(of_backward, gradients)
    count, may_be_none = len(tensors.split(", ")), ["?" in each for each in f"{inputs}, {saved}".split(", ")]

    class Differentiable(derivatives.ReverseMode):
        """The operator, or a function that computes the same, and its backward."""

        @staticmethod
        def forward(compute: Callable, *args: Any) -> tuple[Tensor | None, ...]:
            given = set(map(id, args))  # what is saved may be an argument, such as gates, which autograd refuses
            return tuple([x.detach() if id(x) in given and x is not None else x for x in compute(*args)])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
            compute, *args = inputs
            ctx.dispatched, ctx.static = compute is not direct, args[count:]
            ctx.save_for_backward(*keep(args, output))
            ctx.mark_non_differentiable(*(x for x in output[differentiated:] if x is not None))
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
            given, needs = given[:differentiated], ctx.needs_input_grad[1 : 1 + differentiable]
            if all(do is None for do in given):
                return (None,) * len(ctx.needs_input_grad)
            run, saved = gradients, ctx.saved_tensors
            if ctx.dispatched or needs_dispatcher(given):
                run, saved = op_backward, map(_filled, saved, may_be_none, repeat(saved[0]))
            found = derivatives.first_derivatives(run, *given, *saved, *ctx.static, needs)
            found = (d if need else None for d, need in zip(found, needs, strict=True))
            return None, *found, *(None,) * (len(ctx.needs_input_grad) - 1 - differentiable)

    def autograd(keys: DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        derivatives.refuse_tangents(*args)
        below = partial(_below_autograd, op, compute, keys)
        return derivatives.apply_here(Differentiable, below, *args) if _needs_grad(args[:count]) else below(*args)

    def without_dispatcher(*args: Any) -> tuple[Tensor | None, ...]:
        if needs_dispatcher(args[:count]):
            return op(*args)
        if _needs_grad(args[:count]):
            return derivatives.apply_here(Differentiable, direct, *args)
        with torch.no_grad():
            return direct(*args)

    def autograd_of_backward(keys: DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        derivatives.refuse_tangents(*args)
        below = partial(_below_autograd, op_backward, whole, keys)
        return derivatives.apply_here(derivatives.FirstDerivatives, below, *args) if _needs_grad(args) else below(*args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    LIBRARY.impl(f"{name}_backward", autograd_of_backward, "Autograd", with_keyset=True)
    return without_dispatcher


def _needs_grad(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def define(
    name: str, schema: str, outputs: int, compute: Callable, fake: Callable
) -> tuple[torch._ops.OpOverload, Callable[..., tuple[Tensor, ...]]]:
    """The operator, and what computes it from its arguments.

    Those behind the star can be given by place too, which takes the dispatcher half the time.
    """
    found = _flat(schema, compute)

    def whole(*args: Any) -> tuple[Tensor, ...]:
        like = next(x for x in args if x is not None)
        with torch.no_grad(), autocast.off(like.device):
            return tuple([like.new_empty(0) if x is None else x for x in found(*args)])

    returns = ", ".join(["Tensor"] * outputs)
    schema_by_place = f"{name}({schema.replace('*, ', '')}) -> ({returns})"
    LIBRARY.define(schema_by_place, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, whole, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa_layer::{name}", _flat(schema, fake), lib=LIBRARY)
    torch.library.register_vmap(f"nsa_layer::{name}", _refuse_vmap, lib=LIBRARY)
    return getattr(OPS, name).default, whole


def refuse_derivatives(op: torch._ops.OpOverload, compute: Callable[..., tuple[Tensor, ...]]) -> None:
    """Let an operator without derivatives of its own raise where it is asked for them."""

    def autograd(keys: DispatchKeySet, *args: Any, **static: Any) -> tuple[Tensor, ...]:
        tensors = [x for each in args for x in (each if isinstance(each, (list, tuple)) else [each])]
        derivatives.refuse_tangents(*tensors)
        if _needs_grad(tensors):
            raise RuntimeError(f"{op.name()} has no derivatives of its own: call nsa")
        return _below_autograd(op, compute, keys, *args, **static)

    LIBRARY.impl(op._opname, autograd, "Autograd", with_keyset=True)


def _flat(schema: str, function: Callable[..., tuple]) -> Callable[..., tuple]:
    """The function of a schema's arguments by place, which takes those behind the star by name."""
    tensors, config = (part.split(", ") for part in schema.split(", *, "))
    count, names = len(tensors), [each.split()[-1] for each in config]
    return lambda *args: function(*args[:count], **dict(zip(names, args[count:], strict=True)))


def _filled(x: Tensor | None, may_be_none: bool, like: Tensor) -> Tensor | None:
    """x, or an empty tensor in the place of one that has to be there."""
    return like.new_empty(0) if x is None and not may_be_none else x


def _refuse_vmap(*_: Any, **__: Any) -> None:
    raise NotImplementedError(derivatives.VMAP)


def _below_autograd(
    op: torch._ops.OpOverload,
    compute: Callable[..., tuple[Tensor, ...]],
    keys: DispatchKeySet,
    *args: Any,
    **static: Any,
) -> tuple[Tensor, ...]:
    keys = keys & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        if keys.highestPriorityTypeId() in DEVICES:  # nothing looks at calls on their way: the dispatcher takes time
            return compute(*args, **static)
        return op.redispatch(keys, *args, **static)


def _gradients_fake(first: int, count: int) -> Callable[..., tuple[Tensor, ...]]:
    def fake(*tensors: Tensor | None, needs: Sequence[bool], **static: Any) -> tuple[Tensor, ...]:
        inputs = tensors[first : first + count]
        return tuple(
            x.new_empty(x.shape) if x is not None and need else inputs[0].new_empty(0)
            for x, need in zip(inputs, needs, strict=True)
        )

    return fake
