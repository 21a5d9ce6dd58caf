"""The operator ``attend``: the layer, or `selected_attention`, on the kernels or in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.nn.functional import pad

from nsa_layer import derivatives, reference, support
from nsa_layer.call import DIFFERENTIABLE, SAVED_FIELDS, TENSORS, Aux, Call, CallSpec, Saved
from nsa_layer.checks import check_compressed, check_lists, check_positions, host_reads, starts_of_lengths, with_lengths
from nsa_layer.config import CONFIG_FIELDS, NSAConfig
from nsa_layer.cute.memory_plan import NOTHING, MemoryPolicy, Sizes, kept_in_graphs, plan_memory, plan_of
from nsa_layer.cute.padding import cut, padded
from nsa_layer.operators import tape
from nsa_layer.operators.registration import define, differentiate, dispatcher_sees, needs_dispatcher, none_for_empty
from nsa_layer.saved_shapes import saved_shapes

Tensor = torch.Tensor
SCHEMA_TYPES = {"int": "int", "int | None": "int?", "bool": "bool", "str": "str", "tuple[str, ...]": "str"}
OF_SPEC = "bool causal, float softmax_scale, str backend, float? index_scale, bool index_loss, bool index_scores"
CONFIG = f"{', '.join(f'{SCHEMA_TYPES[f.type]} {f.name}' for f in fields(NSAConfig))}, {OF_SPEC}"
SPEC_FIELDS = tuple(each.split()[-1] for each in OF_SPEC.split(", "))
STATIC_NAMES = (*CONFIG_FIELDS, *SPEC_FIELDS)
INPUTS, COUNT = len(TENSORS), len(DIFFERENTIABLE)
BUDGET = -4  # the number of `_forward`'s argument, from the end


def attend(
    call: Call, *, memory: MemoryPolicy = MemoryPolicy(), return_aux: bool = True
) -> tuple[Tensor, Aux | None, Tensor | None]:
    """o, `Aux`, and the sums of an index' loss, the first of which has a gradient; arguments as they have been checked.

    In graphs and modes the policy says what is saved, and groups of heads follow, when they run, from what is free.
    Where the dispatcher would do nothing, the operator is called as a function, to save time. The reference is no
    operator.
    """
    call = call.with_scores(return_aux)
    (q, k, v), spec, needs_grad = call[:3], call.spec, call.needs_grad
    if spec.backend == "reference":
        return reference.attend(call)
    if spec.lengths is not None:  # starts on a GPU are not read twice
        of_keys = None if call.cu_seqlens_k is None else starts_of_lengths(spec.key_lengths)
        call = call._replace(cu_seqlens=starts_of_lengths(spec.lengths), cu_seqlens_k=of_keys)
    elif (call.k_cmp is None) != (call.v_cmp is None) and not host_reads(spec.backend, q, call.cu_seqlens):
        # The kernels write as many rows of the other as cu_seqlens say, which the host cannot compare with this one's.
        rows = spec.config.compressed_capacity(k.shape[0])
        call = call.map(lambda x: pad(x, (0, 0, 0, 0, 0, max(0, rows - x.shape[0]))), ("k_cmp", "v_cmp"))
    heads, kept = k.shape[-2], NOTHING
    if spec.backend == "cute":
        if dispatcher_sees(q):
            heads, kept = None, kept_in_graphs(memory, needs_grad and not call.one_branch)
        else:
            plan = plan_memory(Sizes.of(call, needs_grad=needs_grad), memory, q.device)
            heads, kept = plan.groups[0][1], plan.kept
    static = (*static_arguments(spec).values(), heads, memory.budget, kept, spec.bound, needs_grad)
    call = padded(call, needs_grad=needs_grad) if spec.backend == "cute" else call
    tensors = call.tensors
    if needs_dispatcher(tensors):
        o, *saved = OP(*tensors, *static)
    else:
        args = (*unwrap_dead_wrappers(tensors), *static)
        run = tape.for_layout(_forward, args, budget=BUDGET)
        if needs_grad:
            o, *saved = APPLY(run, *args)
        else:
            with torch.no_grad():
                o, *saved = run(*args)
    saved, o = Saved(*map(none_for_empty, saved[:SAVED_FIELDS])), cut(o, v.shape[-1])
    return o, saved.aux(call) if return_aux else None, saved.index_sums


class Attend(derivatives.ReverseMode):
    """The operator as autograd sees it; its first argument computes it, by the dispatcher or without."""

    @staticmethod
    def forward(run: Callable[..., tuple], *args: Any) -> tuple[Tensor | None, ...]:
        arguments = set(map(id, args))  # a saved tensor may be an argument, such as gates, which autograd refuses
        return tuple([x.detach() if id(x) in arguments and x is not None else x for x in run(*args)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        args = inputs[1:]
        call, ctx.static, ctx.dispatched = Call(*args[:INPUTS]), args[INPUTS:], True
        o = output[0] if reads_output(ctx.static) else None
        ctx.save_for_backward(*call.differentiable, call.block_indices, call.q_offset, o, *output[1:])
        sums = output[SAVED_FIELDS] if static_spec(ctx.static).index_loss else None
        ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None and x is not sums))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *more: Tensor | None) -> tuple[Tensor | None, ...]:
        needs, d_sums = ctx.needs_input_grad[1 : 1 + COUNT], more[SAVED_FIELDS - 1]
        if d_sums is None:  # an index has gradients of its loss alone
            needs = (*needs[:-2], False, False)
        if do is None and d_sums is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors  # a checkpoint lets them be read once
        do = output_gradient(do, *tensors[:3:2])
        run = BACKWARD_OP if ctx.dispatched or needs_dispatcher((do,)) else _backward
        grads = derivatives.first_derivatives(run, do, d_sums, *tensors, *ctx.static, needs)
        grads = (d if need else None for d, need in zip(grads, needs, strict=True))
        return None, *grads, *(None,) * (len(ctx.needs_input_grad) - 1 - COUNT)


class _Direct(Attend):
    """The same as a function, for calls and gradients with which the dispatcher would do nothing."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor | None, ...]) -> None:
        Attend.setup_context(ctx, inputs, output)
        ctx.dispatched = False


def output_gradient(do: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """do; zeros where the index' loss alone has a gradient."""
    return q.new_zeros(*q.shape[:-1], v.shape[-1]) if do is None else do


def static_arguments(spec: CallSpec) -> dict[str, Any]:
    """The arguments of the operators that are no tensors, in their order."""
    static = {name: getattr(spec.config, name) for name in CONFIG_FIELDS}
    static |= {name: getattr(spec, name) for name in SPEC_FIELDS}
    return static | dict(branches=" ".join(spec.config.branches))


def reads_output(static: Sequence[Any]) -> bool:
    """True if backward reads o: with one branch on the kernels. static: values of `static_arguments`, and others."""
    spec = static_spec(static)
    return spec.backend == "cute" and spec.config.branches == ("selected",)


def static_spec(static: Iterable[Any], *, listed: bool = False) -> CallSpec:
    """The spec of the values of `static_arguments`, which others may follow."""
    return _call_spec(tuple(static)[: len(STATIC_NAMES)], listed)


@lru_cache(maxsize=256)
def _call_spec(static: tuple[Any, ...], listed: bool) -> CallSpec:
    of_config, of_spec = dict(zip(CONFIG_FIELDS, static)), dict(zip(SPEC_FIELDS, static[len(CONFIG_FIELDS) :]))
    of_config["branches"] = tuple(of_config["branches"].split())
    return CallSpec(NSAConfig(**of_config), listed=listed, **of_spec)


def _call(tensors: Sequence[Tensor | None], static: Sequence[Any], bound: int | None) -> Call:
    """The call that an operator computes; starts that the kernels read stay on the GPU."""
    call = Call(*tensors)
    call = call._replace(spec=static_spec(static, listed=call.block_indices is not None))
    return with_lengths(call, bound, read=host_reads(call.spec.backend, call.q, call.cu_seqlens, call.cu_seqlens_k))


def _forward(*args: Any) -> tuple[Tensor | None, ...]:
    """o, the fields of `Saved`, and copies of starts of queries and of keys.

    Args:
        args: of the operator: tensors, options; key/value heads of a group (None: as many as fit the
            budget, or what is free); the budget; outputs to save; bound; needs_grad.
    """
    *static, heads, budget, kept, bound, needs_grad = args[INPUTS:]
    call = _call(args[:INPUTS], static, bound)
    q, spec = call.q, call.spec
    check_lists(call)
    check_compressed(call)
    if call.one_branch and call.lengths_known:
        pairs = zip(spec.lengths or q.shape[1:2], spec.key_lengths or call.k.shape[1:2])
        check_positions(call.q_offset, tuple(pairs), causal=spec.causal)
    with torch.cuda.device_of(q):
        plan = plan_of(call, heads, budget, kept, needs_grad)
        o, saved = support.backend_module(spec.backend).forward(call, plan=plan, backward=needs_grad)
    return o, *saved, *_copied_starts(call, call.lengths_known)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    call, (*static, _, _, kept, _, _) = Call(*args[:INPUTS]), args[INPUTS:]
    call = call._replace(spec=static_spec(static, listed=call.block_indices is not None))
    q, known = call.q, host_reads(call.spec.backend, call.q, call.cu_seqlens, call.cu_seqlens_k)
    shapes = saved_shapes(call, kept=kept)
    saved = (q.new_empty(0) if each is None else q.new_empty(each[0], dtype=each[1]) for each in shapes)
    starts = (q.new_empty(0) if x is None else x for x in _copied_starts(call, known, fake=True))
    return q.new_empty((*q.shape[:-1], call.v.shape[-1])), *saved, *starts


@partial(tape.replayed, budget=BUDGET - 1)
def _backward(do: Tensor, d_sums: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the differentiable tensors, None where none is needed.

    Args:
        d_sums: the gradient of ``Saved.index_sums``, of which only the first number counts.
        args: the differentiable tensors, block_indices, q_offset, o, fields of `Saved`, starts of queries and of keys;
            what is no tensor as for `_forward`; and which gradients are needed.
    """
    inputs, (block_indices, q_offset, o, *args) = args[:COUNT], args[COUNT:]
    saved, args = Saved(*args[:SAVED_FIELDS]), args[SAVED_FIELDS:]
    starts, starts_k, *static, heads, budget, kept, bound, _, needs = args
    with torch.cuda.device_of(do):
        call = _call((*inputs, starts, block_indices, q_offset, starts_k), static, bound)
        plan, of_loss = plan_of(call, heads, budget, kept, True), d_sums if call.spec.index_loss else None
        grads = support.backend_module(call.spec.backend).backward(call, saved, do, plan=plan, o=o, d_sums=of_loss)
    return tuple([d if need else None for d, need in zip(grads, needs, strict=True)])


def _copied_starts(call: Call, known: bool, *, fake: bool = False) -> Iterator[Tensor | None]:
    """Copies of starts of queries and of keys, since a caller may refill its own, on the CPU if the host reads them."""
    for x in (call.cu_seqlens, call.cu_seqlens_k):
        device = "cpu" if known or x is None else x.device
        yield x if x is None else x.new_empty(x.shape, device=device) if fake else x.to(device, copy=True)


def _backward_fake(do: Tensor, d_sums: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    pairs = zip(args[:COUNT], args[-1], strict=True)
    return tuple(x.new_empty(x.shape) if x is not None and need else do.new_empty(0) for x, need in pairs)


def schema_of(names: Sequence[str]) -> str:
    """The part of a schema that is tensors of a call."""
    return ", ".join(f"Tensor{'?' * (name in Call._field_defaults)} {name}" for name in names)


ATTEND_OPTIONS = f"{CONFIG}, int? heads, int? budget, bool[] kept, SymInt? bound, bool needs_grad"
SAVED = ("block_indices", "q_offset", "o", *(f"saved_{name}" for name in Saved._fields))
OF_BACKWARD = (schema_of(DIFFERENTIABLE), *(f"Tensor? {name}" for name in SAVED), "Tensor? starts, Tensor? starts_k")
_schema, _replayed_forward = f"{schema_of(TENSORS)}, {ATTEND_OPTIONS}", tape.replayed(_forward, budget=BUDGET)
OP, _compute = define("attend", _schema, 3 + SAVED_FIELDS, _replayed_forward, _forward_fake)
_schema = f"Tensor do, Tensor? d_sums, {', '.join(OF_BACKWARD)}, {ATTEND_OPTIONS}, bool[] needs"
BACKWARD_OP, _compute_backward = define("attend_backward", _schema, COUNT, _backward, _backward_fake)
differentiate(OP, _compute, Attend)
differentiate(BACKWARD_OP, _compute_backward, derivatives.FirstDerivatives)
APPLY = super(torch.autograd.Function, _Direct).apply  # the class's own looks at forward's signature every time
