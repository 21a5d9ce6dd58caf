"""`gather` in graphs: exchanges are collectives that a compiler sees, and the attention beside them an operator.

``gathered`` is what a graph that is made has at first, which PyTorch's own tracing takes apart: into exchanges, and for
each stretch and step ``stretch`` and, in backward, ``stretch_backward``. These have no derivatives of their own.

PyTorch's cache keeps graphs by what they have at first. Steps and windows are made later, of numbers of this package:
they are an argument, and so is `EDITION`, which goes up where a change makes other graphs of the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nsa_layer.call_spec import DIFFERENTIABLE, Aux, CallSpec, CallTensors, Saved
from nsa_layer.checks import check_lengths
from nsa_layer.context_parallel import overlapped, stretches
from nsa_layer.context_parallel.overlapped import Left
from nsa_layer.context_parallel.parts import Part
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.stretches import stretch_at
from nsa_layer.context_parallel.whole import whole_lengths
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.operators.arguments import CONFIG, NAMES, OF_LAYER, apart, schema_of, spec_of, static_arguments
from nsa_layer.operators.registration import LIBRARY, OPS, define, is_recorded, refuse_derivatives
from nsa_layer.saved import first_of, saved_shapes, with_room

Tensor = torch.Tensor
MORE = "int first, int total, int[] window, str backend, bool[] kept"
RANKS = "str group, str place, str? load_balance, str numbers"
HOW = f"str backend, {RANKS}, str recompute, int? budget, bool needs_grad, bool return_aux"
LAYER, TENSORS = schema_of(OF_LAYER), len(OF_LAYER)
MADE = len(Saved._fields)
OF_TOKENS = ("k", "v", "k_win", "v_win")
EDITION = 2


def attend(
    cp: ContextParallel,
    backend: str,
    given: CallTensors,
    *,
    spec: CallSpec,
    memory: MemoryPolicy,
    needs_grad: bool,
    return_aux: bool,
) -> tuple[Tensor, Aux | None]:
    """`gather.attend` as an operator."""
    how = (backend, *names_of(cp), memory.recompute, memory.budget, needs_grad, return_aux)
    o, *aux = OPS.gathered.default(*given[:TENSORS], *static_arguments(spec).values(), *how)
    return o, Aux(*aux) if return_aux else None


def of_one_shape(x: Tensor | None) -> Tensor | None:
    """x, whose sizes are numbers: those of a rank's rows are made of them, so that a graph is of one shape."""
    return None if x is None else x.view([int(size) for size in x.shape])


def names_of(cp: ContextParallel) -> tuple[str, str, str | None, str]:
    """Ranks as arguments of an operator: with their place, or one finds the graph of another in PyTorch's cache; and
    the numbers that graphs follow from, in words."""
    return cp.group_name, cp.place, cp.load_balance, _numbers()


def _numbers() -> str:
    return " ".join(map(str, (EDITION, overlapped.LONG, overlapped.STEP, overlapped.LONGEST, stretches.TILE)))


# What compiles a graph calls it, and does not look inside, where it may take numbers for some that change.
_numbers._dynamo_marked_constant = True


def ranks_of(group: str, place: str, load_balance: str | None, numbers: str) -> ContextParallel:
    """The ranks of these arguments."""
    cp = ContextParallel(torch._C._distributed_c10d._resolve_process_group(group), "gather", load_balance)
    assert cp.place == place
    return cp


def _gathered(*args: Any) -> list[Tensor]:
    from nsa_layer.context_parallel import gather

    given = CallTensors(*map(of_one_shape, args[:TENSORS]))
    *static, softmax_scale, branches = args[TENSORS : TENSORS + len(NAMES)]
    static = dict(zip(NAMES, (*static, float(softmax_scale), branches), strict=True))
    backend, *ranks, recompute, budget, needs_grad, return_aux = args[TENSORS + len(NAMES) :]
    spec = spec_of(static, given)
    cp = ranks_of(*ranks)
    if given.cu_seqlens is not None:
        given = given._replace(cu_seqlens=given.cu_seqlens.cpu())
        if not is_recorded(given.q):  # backend="eager"
            spec = replace(spec, lengths=whole_lengths(given.cu_seqlens, given.q, cp))
    how = dict(memory=MemoryPolicy(budget=budget, recompute=recompute), needs_grad=needs_grad, return_aux=return_aux)
    o, aux = gather.attend_here(cp, backend, given, spec=spec, **how)
    return [o] if aux is None else [o, *vars(aux).values()]


def forward(part: Part, total: int, *, backward: bool) -> tuple[Tensor, Saved]:
    """The output, and what there is of it for its backward; of a part of so many tokens in all."""
    o, *left = OPS.stretch.default(*part.tensors[:TENSORS], *_static(part, total), backward)
    return o, Saved(*(x if x.dim() > 1 else None for x in left))


def gradients(do: Tensor, part: Part, total: int, left: Left) -> tuple[Tensor | None, ...]:
    """Gradients of the differentiable tensors."""
    return OPS.stretch_backward.default(do, *part.tensors[:TENSORS], *left, *_static(part, total))


def _static(part: Part, total: int) -> tuple[Any, ...]:
    window = [number for pair in part.spec.window or () for number in pair]
    return *static_arguments(part.spec).values(), part.first[0], total, window, part.backend, part.kept


def _part(
    tensors: CallTensors, *, first: int, total: int, window: list[int], backend: str, kept: list[bool], **static: Any
) -> tuple[Part, slice | None]:
    """The part, and the keys that it is of where sequences are packed."""
    if backend == "cute":
        from nsa_layer.kernels.launch import readable

        tensors = tensors.map(readable)
    q, cu_seqlens, listed = tensors.q, tensors.cu_seqlens, tensors.block_indices is not None
    spec, how = spec_of(static, tensors), (backend, tuple(kept))
    if cu_seqlens is None:
        return Part(tensors, replace(spec, window=(tuple(window),) if window else None), (first,), *how), None
    lengths = check_lengths(cu_seqlens, q.new_empty(total, 0), "cu_seqlens", "the ranks")
    stretch = stretch_at(first, slice(0, len(q)), cu_seqlens[1:].tolist(), cut=spec.causal and not listed)
    part = {name: x[stretch.keys] for name in OF_TOKENS if (x := getattr(tensors, name)) is not None}
    if not tensors.has_own_window:
        spec = replace(spec, window=stretch.window_of_keys(spec).lengths)
    spec, first = stretch.spec(replace(spec, lengths=lengths)), tuple(at for *_, at in stretch.lengths)
    return Part(tensors._replace(**part, cu_seqlens=None), spec, first, *how), stretch.keys


def _stretch(*given: Tensor | None, backward: bool, **static: Any) -> tuple[Tensor | None, ...]:
    """o, and the fields of what a part leaves, with room for any lengths."""
    tensors = CallTensors(*given)
    part, _ = _part(tensors, **static)
    o = tensors.q.new_empty((*tensors.q.shape[:-1], tensors.v.shape[-1]))
    with torch.cuda.device_of(o):
        left = part.forward(o, backward=backward)
    shapes = saved_shapes(tensors, spec=part.spec, kept=part.kept, backend=part.backend)
    return o, *(None if of is None else next(apart([with_room(x, of)])) for x, of in zip(left, shapes, strict=True))


def _stretch_fake(*given: Tensor | None, backend: str, kept: list[bool], **static: Any) -> tuple[Tensor, ...]:
    tensors = CallTensors(*given)
    q = tensors.q
    made = saved_shapes(tensors, spec=spec_of(static, tensors), kept=kept, backend=backend)
    left = (q.new_empty(0) if of is None else q.new_empty(of[0], dtype=of[1]) for of in made)
    return q.new_empty((*q.shape[:-1], tensors.v.shape[-1])), *left


def _stretch_backward(do: Tensor, *given: Tensor | None, **static: Any) -> tuple[Tensor | None, ...]:
    tensors, left = CallTensors(*given[:TENSORS]), given[TENSORS:]
    part, keys = _part(tensors, **static)
    shapes = saved_shapes(part.tensors, spec=part.spec, kept=part.kept, backend=part.backend, exact=True)
    left = Saved(*(None if of is None else first_of(x, of[0]) for x, of in zip(left, shapes, strict=True)))
    if tensors.block_indices is not None:
        left = left._replace(block_indices=tensors.block_indices)
    with torch.cuda.device_of(do):
        dq = torch.empty_like(tensors.q, memory_format=torch.contiguous_format)
        found = dict(zip(DIFFERENTIABLE, part.gradients(do, left, dq)))
    for name in OF_TOKENS:
        if keys is not None and found[name] is not None:
            whole = torch.zeros_like(getattr(tensors, name), memory_format=torch.contiguous_format)
            whole[keys], found[name] = found[name], whole
    return tuple(None if d is None or x is None else next(apart([d])) for d, x in zip(found.values(), tensors))


def _stretch_backward_fake(do: Tensor, *given: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    return tuple(do.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[: len(DIFFERENTIABLE)])


LIBRARY.define(f"gathered({LAYER}, {CONFIG}, {HOW}) -> Tensor[]")
LIBRARY.impl("gathered", _gathered, "CompositeImplicitAutograd")
FORWARD = f"{LAYER}, *, {CONFIG}, {MORE}, bool backward"
BACKWARD = f"Tensor do, {LAYER}, {', '.join(f'Tensor? left_{i}' for i in range(MADE))}, *, {CONFIG}, {MORE}"
refuse_derivatives(*define("stretch", FORWARD, 1 + MADE, _stretch, _stretch_fake))
refuse_derivatives(
    *define("stretch_backward", BACKWARD, len(DIFFERENTIABLE), _stretch_backward, _stretch_backward_fake)
)
