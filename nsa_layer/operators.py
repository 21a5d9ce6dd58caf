"""`torch.ops.nsa_layer`: the operators that PyTorch sees, in eager mode, in graphs that it compiles, and in exports.

Arguments are flat, and an operator has a fixed number of outputs: what is missing is empty, never None. Shapes follow
from shapes: lists of packed sequences have room for what any lengths could need. Each operator has a backward that is
an operator too; that one cannot be differentiated.

- ``branches``, ``branches_backward``: the three branches in plain PyTorch, before the gates.
- ``attend``, ``attend_backward``: the layer on the kernels.
- ``selected``, ``selected_backward``: `selected_attention` in plain PyTorch; ``selected_on_kernels`` on the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import torch

from nsa_layer import autocast, derivatives, support
from nsa_layer.call_spec import Aux, CallSpec, ListSpec, accumulation_dtype, lse_shape
from nsa_layer.config import LARGEST, NSAConfig
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory, plans_by_tokens
from nsa_layer.cute.packing import takes_starts
from nsa_layer.gate import equal_gates, gate_kind
from nsa_layer.inputs import check_lengths, check_lists, check_positions
from nsa_layer.registration import OPS, is_recorded, register

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]

KEYS = "Tensor q, Tensor k, Tensor v"
BRANCHES = (
    f"{KEYS}, Tensor? compress_k_weight, Tensor? compress_v_weight, Tensor? k_cmp, Tensor? v_cmp, Tensor? k_win, "
    "Tensor? v_win, Tensor? cu_seqlens, Tensor? block_indices"
)
LAYER = BRANCHES.replace(KEYS, f"{KEYS}, Tensor? gate_weight, Tensor? gates")
CONFIG = (
    "int block_size, int compress_size, int compress_stride, int block_counts, int q_tile, int window_size, "
    "int compress_offset, bool force_blocks, bool deterministic, str rule, bool causal, float softmax_scale"
)
NAMES = tuple(each.split()[-1] for each in CONFIG.split(", "))
LISTS = f"{KEYS}, Tensor block_indices, Tensor? q_offset, Tensor? cu_seqlens, Tensor? cu_seqlens_k"
LIST_CONFIG = "int block_size, int q_tile, bool causal, float softmax_scale"


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
        cu_seqlens = torch.tensor([0, *accumulate(spec.lengths)], dtype=torch.int32)
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


def attend_on_kernels(
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
    memory: MemoryPolicy = MemoryPolicy(),
    needs_grad: bool = True,
    return_aux: bool = True,
) -> tuple[Tensor, Aux | None]:
    """The layer on the kernels; arguments as `nsa` has checked them.

    In graphs and modes groups of heads, and what is saved, follow from sizes and the GPU's memory, not from what is
    free of it.
    """
    if spec.lengths is not None and cu_seqlens.device.type != "cpu":  # no second look at what is on a GPU
        cu_seqlens = torch.tensor([0, *accumulate(spec.lengths)], dtype=torch.int32)
    weights = (gate_weight, gates, compress_k_weight, compress_v_weight)
    tensors = (q, k, v, *weights, k_cmp, v_cmp, k_win, v_win, cu_seqlens, block_indices)
    gate, own_window = gate_kind(gate_weight, gates), k_win is not None or v_win is not None
    asked = dict(gate=gate, needs_grad=needs_grad, own_window=own_window)
    if is_recorded():
        heads, kept = _plan_of_graph(q, k, v, block_indices, spec.config, memory, **asked)
    else:
        plan = plan_memory(Sizes.of(q, v, spec=spec, lists=block_indices, **asked), memory, q.device)
        heads, kept = plan.groups[0][1], plan.kept
    made = _call_attend(*tensors, *static_arguments(spec).values(), heads, kept, spec.bound, needs_grad)
    if not return_aux:
        return made[0], None
    choice, g, lses = made[1] if block_indices is None else block_indices, made[13], made[10:13]
    if block_indices is None:
        if not support.takes_unions(spec.config):
            choice = choice.transpose(-3, -2)
        if not torch.compiler.is_compiling():  # without the room that a graph has
            rows = sum(map(spec.config.num_tiles, spec.lengths)) if spec.lengths else choice.shape[-3]
            width = spec.config.list_width(max(spec.lengths) if spec.lengths else spec.bound or q.shape[-3])
            choice = choice.narrow(-3, 0, rows)[..., :width]
    if gate == "none":
        g = equal_gates(q)
    return made[0], Aux(choice, g, *lses)


def _plan_of_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor | None,
    config: NSAConfig,
    memory: MemoryPolicy,
    **asked: Any,
) -> tuple[int, tuple[bool, bool, bool]]:
    """Key/value heads of a group and the outputs that are saved, by sizes and the GPU's memory alone."""
    Hq = q.shape[-2]
    sizes = dict(Hq=Hq, Hkv=k.shape[-2], D=q.shape[-1], Dv=v.shape[-1], itemsize=q.dtype.itemsize, **asked)
    sizes |= dict(compress_stride=config.stride, q_tile=config.q_tile, block_size=config.block_size)
    sizes |= dict(deterministic=config.deterministic, listed=block_indices is not None)
    sizes |= dict(list_width=config.list_width(LARGEST))
    if block_indices is not None:
        sizes |= dict(list_width=block_indices.shape[-1], rows=Hq // block_indices.shape[-2])
    plans = plans_by_tokens(tuple(sizes.items()), memory.recompute, memory.budget, q.device.index)
    for most, heads, kept in plans:
        if prod(q.shape[:-2]) <= most:
            break
    return heads, kept


def attend_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    q_offset: Tensor | int | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *,
    spec: ListSpec,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`selected_attention` in plain PyTorch or on the kernels; arguments as checked."""
    if spec.lengths is not None:
        cu_seqlens, cu_seqlens_k = (
            torch.tensor([0, *accumulate(of)], dtype=torch.int32) for of in zip(*spec.lengths, strict=True)
        )
    if isinstance(q_offset, int):
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        q_offset = torch.full((sequences,), q_offset, dtype=torch.int32, device=q.device)
    static = (spec.block_size, spec.q_tile, spec.causal, spec.softmax_scale)
    op = OPS.selected.default if backend == "eager" else _call_selected
    return op(q, k, v, block_indices, q_offset, cu_seqlens, cu_seqlens_k, *static)[:2]


def static_arguments(spec: CallSpec) -> dict[str, Any]:
    """The arguments of the operators that are no tensors, in their order."""
    sizes = dict(compress_size=spec.config.span, compress_stride=spec.config.stride, compress_offset=spec.config.offset)
    more = dict(causal=spec.causal, softmax_scale=spec.softmax_scale)
    return {name: sizes.get(name, getattr(spec.config, name)) for name in NAMES[:-2]} | more


def _spec(static: dict[str, Any], lengths: tuple[int, ...] | None, *, listed: bool = False) -> CallSpec:
    return _call_spec(tuple(map(static.__getitem__, NAMES)), lengths, listed)


@lru_cache(maxsize=256)
def _call_spec(static: tuple[Any, ...], lengths: tuple[int, ...] | None, listed: bool) -> CallSpec:
    *of_config, causal, softmax_scale = static
    return CallSpec(NSAConfig(**dict(zip(NAMES, of_config))), causal, softmax_scale, lengths, listed=listed)


def _kernels_spec(
    static: dict[str, Any], cu_seqlens: Tensor | None, q: Tensor, k: Tensor, block_indices: Tensor | None, *own: Tensor
) -> CallSpec:
    """The spec of a call on the kernels; starts that these take without lengths are left on the GPU."""
    spec = _spec(static, None, listed=block_indices is not None)
    if takes_starts(cu_seqlens, q, k, spec.config, block_indices, *own):
        return _bounded(spec, q, static)
    return spec if cu_seqlens is None else replace(spec, lengths=check_lengths(cu_seqlens, q, "cu_seqlens", "q"))


def _bounded(spec: CallSpec, q: Tensor, static: dict[str, Any]) -> CallSpec:
    """The spec of packed sequences whose lengths the host does not know."""
    return replace(spec, bound=min(static["bound"] or q.shape[0], q.shape[0]))


def _branches(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o_cmp, o_slc, o_swa, the LSEs in the same order, the chosen blocks, all LSEs as backward takes them, and a copy
    of cu_seqlens."""
    from nsa_layer import eager

    *inputs, cu_seqlens, block_indices = tensors
    q = inputs[0]
    spec = _spec(static, None if cu_seqlens is None else check_lengths(cu_seqlens, q, "cu_seqlens", "q"))
    config = spec.config
    if block_indices is not None:
        _check_lists(block_indices, q, inputs[1], spec)
    with torch.no_grad(), autocast.off(q.device), derivatives.noted_lses() as lses:
        made = eager.attend_branches(*_complete(inputs, spec, 5), block_indices, None, spec=spec)
    choice = q.new_empty(0, dtype=torch.int32)
    if block_indices is None:
        choice = q.new_full(_choice_shape(q, inputs[1], cu_seqlens, config), -1, dtype=torch.int32)
        choice[tuple(map(slice, made.choice.shape))] = made.choice
    return *_apart(made.outputs), *_apart(made.lses), choice, torch.cat(lses), _copied(cu_seqlens)


def _branches_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, k, v, *_, cu_seqlens, block_indices = tensors
    acc = accumulation_dtype(q.dtype)
    o = (*q.shape[:-1], v.shape[-1]), acc if q.device.type == "cpu" else q.dtype
    choice = (0,) if block_indices is not None else _choice_shape(q, k, cu_seqlens, _spec(static, None).config)
    outputs = [q.new_empty(o[0], dtype=o[1]) for _ in range(3)]
    lses = [q.new_empty(lse_shape(q), dtype=acc) for _ in range(3)]
    flat = q.new_empty((3 * prod(q.shape[:-1]),), dtype=acc)
    return *outputs, *lses, q.new_empty(choice, dtype=torch.int32), flat, _copied_fake(q, cu_seqlens)


def _branches_backward(*tensors: Tensor | None, needs: Sequence[bool], **static: Any) -> tuple[Tensor, ...]:
    from nsa_layer import eager

    given, inputs, (block_indices, choice, lses, starts) = tensors[:3], tensors[3:12], tensors[12:]
    q, lengths = inputs[0], _lengths(starts)
    spec = _spec(static, lengths)
    if block_indices is None:
        rows = sum(map(spec.config.num_tiles, lengths)) if lengths else choice.shape[1]
        block_indices = choice.narrow(0 if lengths else 1, 0, rows)
        block_indices = block_indices[..., : spec.config.list_width(max(lengths or q.shape[1:2]))]
    each = lses.split(_sizes(q, lengths, 3))
    leaves = _leaves(inputs, needs)
    with _autograd(), autocast.off(q.device), derivatives.known_lses(each):
        made = eager.attend_branches(*_complete(leaves, spec, 5), block_indices, None, spec=spec)
    return _gradients(leaves, made.outputs, given)


def _selected(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o, the LSE, the same as backward takes it, and copies of the starts of queries and keys."""
    from nsa_layer import token_attention

    *inputs, cu_seqlens, cu_seqlens_k = tensors
    q, k, _, block_indices, q_offset = inputs
    spec = _list_spec(static, q, k, cu_seqlens, cu_seqlens_k)
    _check_lists_alone(block_indices, q, k, q_offset, spec)
    with torch.no_grad(), autocast.off(q.device), derivatives.noted_lses() as lses:
        o, lse = token_attention.attend_selected(*inputs, spec=spec)
    return *_apart([o, lse]), torch.cat(lses), _copied(cu_seqlens), _copied(cu_seqlens_k)


def _selected_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, _, v, *_, cu_seqlens, cu_seqlens_k = tensors
    acc = accumulation_dtype(q.dtype)
    flat = q.new_empty((prod(q.shape[:-1]),), dtype=acc)
    starts = _copied_fake(q, cu_seqlens), _copied_fake(q, cu_seqlens_k)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(q), dtype=acc), flat, *starts


def _selected_backward(*tensors: Tensor | None, needs: Sequence[bool], **static: Any) -> tuple[Tensor, ...]:
    from nsa_layer import token_attention

    do, *inputs, lses, cu_seqlens, cu_seqlens_k = tensors
    q = inputs[0]
    starts = (x if x.numel() else None for x in (cu_seqlens, cu_seqlens_k))
    spec = _list_spec(static, q, inputs[1], *starts)
    leaves = _leaves(inputs[:3], needs)
    each = lses.split(_sizes(q, None if spec.lengths is None else [T for T, _ in spec.lengths], 1))
    with _autograd(), autocast.off(q.device), derivatives.known_lses(each):
        o = token_attention.attend_selected(*leaves, *inputs[3:], spec=spec)[0]
    return _gradients(leaves, [o], [do])


def _attend(
    *tensors: Tensor | None, heads: int, kept: list[bool], needs_grad: bool, room: bool = True, **static: Any
) -> tuple[Tensor | None, ...]:
    """o, the fields of `SavedForBackward`, and a copy of cu_seqlens.

    Args:
        room: False for the shapes that the lengths ask for, instead of those that follow from shapes.
    """
    from nsa_layer.cute import graph

    q, cu_seqlens, block_indices = tensors[0], *tensors[11:]
    spec = _kernels_spec(static, cu_seqlens, *tensors[:2], block_indices, *tensors[7:9])
    if block_indices is not None and spec.bound is None:
        _check_lists(block_indices, q, tensors[1], spec)
    tensors = (*_complete(tensors[:11], spec, 7), *tensors[11:])
    with torch.cuda.device_of(q):
        o, made = graph.attend(tensors, spec=spec, heads=heads, kept=kept, needs_grad=needs_grad, room=room)
    return o, *made, _copied(cu_seqlens, q, left=spec.bound is not None)


def _attend_fake(*tensors: Tensor | None, heads: int, kept: list[bool], **static: Any) -> tuple[Tensor, ...]:
    from nsa_layer.cute.graph import saved_shapes

    q, v, cu_seqlens, block_indices = tensors[0], tensors[2], *tensors[11:]
    spec = _spec(static, None, listed=block_indices is not None)
    shapes = saved_shapes(tensors, spec=spec, kept=kept)
    made = (q.new_empty(0) if each is None else q.new_empty(each[0], dtype=each[1]) for each in shapes)
    left = takes_starts(cu_seqlens, *tensors[:2], spec.config, block_indices, *tensors[7:9])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), *made, _copied_fake(q, cu_seqlens, on_kernels=True, left=left)


def _attend_backward(
    do: Tensor, *tensors: Tensor | None, heads: int, kept: list[bool], needs: Sequence[bool], **static: Any
) -> tuple[Tensor, ...]:
    from nsa_layer.cute import graph

    inputs, block_indices, made, starts = tensors[:11], tensors[11], tensors[12:25], tensors[25]
    spec = _spec(static, _lengths(starts), listed=block_indices is not None)
    if _is_left(starts):
        spec = _bounded(spec, inputs[0], static)
    given = (*_complete(inputs, spec, 7), starts if starts.numel() else None, block_indices)
    with torch.cuda.device_of(do):
        made = [x if x is not None and x.dim() > 1 else None for x in made]
        found = graph.gradients(do, given, made, spec=spec, heads=heads, kept=kept)
    wanted = (d if need else None for d, need in zip(found, needs, strict=True))
    return tuple([None if d is None else _with_room(d, x) for d, x in zip(wanted, inputs, strict=True)])


def _selected_on_kernels(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    """o, the LSE, and copies of the starts of queries and keys."""
    from nsa_layer.cute import selected_alone

    *inputs, cu_seqlens, cu_seqlens_k = tensors
    q, k, _, block_indices, q_offset = inputs
    left = _leaves_starts(q, k, block_indices, cu_seqlens, cu_seqlens_k)
    spec = _list_spec(static, q, k, cu_seqlens, cu_seqlens_k, left=left)
    if not left:
        _check_lists_alone(block_indices, q, k, q_offset, spec)
    needs_grad = any(x.requires_grad for x in tensors[:3])  # in a graph of none
    with torch.no_grad(), autocast.off(q.device), torch.cuda.device_of(q):
        q, k, v, block_indices, places = selected_alone.placed(*tensors, spec=spec)
        with selected_alone.compiled_together(q, k, block_indices, places, spec, backward=needs_grad):
            made = selected_alone.forward(q, k, v, block_indices, places, spec)
    return *_apart(made), *(_copied(starts, q, left=left) for starts in (cu_seqlens, cu_seqlens_k))


def _leaves_starts(q: Tensor, k: Tensor, block_indices: Tensor, cu_seqlens: Tensor | None, *of_keys: Tensor) -> bool:
    """True if starts of queries and keys are left on the GPU."""
    on_gpu = all(starts is None or starts.device == q.device for starts in of_keys)
    return on_gpu and takes_starts(cu_seqlens, q, k, NSAConfig(q_tile=1), block_indices)


def _selected_on_kernels_fake(*tensors: Tensor | None, **static: Any) -> tuple[Tensor, ...]:
    q, k, v, block_indices, _, *starts = tensors
    lse = q.new_empty(lse_shape(q), dtype=torch.float32)
    how = dict(on_kernels=True, left=_leaves_starts(q, k, block_indices, *starts))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse, *(_copied_fake(q, x, **how) for x in starts)


def _selected_on_kernels_backward(
    do: Tensor, *tensors: Tensor | None, needs: Sequence[bool], **static: Any
) -> tuple[Tensor, ...]:
    from nsa_layer.cute import selected_alone

    *inputs, o, lse, cu_seqlens, cu_seqlens_k = tensors
    starts = [x if x.numel() else None for x in (cu_seqlens, cu_seqlens_k)]
    spec = _list_spec(static, inputs[0], inputs[1], *starts, left=_is_left(starts[0]))
    with torch.no_grad(), autocast.off(do.device), torch.cuda.device_of(do):
        q, k, v, block_indices, places = selected_alone.placed(*inputs, *starts, spec=spec)
        with selected_alone.compiled_together(q, k, block_indices, places, spec, backward=True):
            found = selected_alone.backward(places, spec, do, q, k, v, block_indices, o, lse, places.q_offset)
    return tuple(next(_apart([d])) if need else None for d, need in zip(found, needs, strict=True))


def _list_spec(static: dict[str, Any], q: Tensor, k: Tensor, *starts: Tensor | None, left: bool = False) -> ListSpec:
    if starts[0] is None:
        return ListSpec(**static)
    if left:
        return ListSpec(**static, bound=(q.shape[0], k.shape[0]))
    of_q = check_lengths(starts[0], q, "cu_seqlens", "q")
    of_k = of_q if starts[1] is None else check_lengths(starts[1], k, "cu_seqlens_k", "k")
    return ListSpec(**static, lengths=tuple(zip(of_q, of_k, strict=True)))


def _complete(inputs: Tensors, spec: CallSpec, at: int) -> Tensors:
    """The inputs without the room that k_cmp and v_cmp of packed sequences, the two from `at` on, have in a graph."""
    if spec.lengths is None:
        return inputs
    blocks = sum(map(spec.config.compressed_length, spec.lengths))
    for x in inputs[at : at + 2]:
        if x is not None and x.shape[0] < blocks:
            raise ValueError(f"k_cmp and v_cmp must have {blocks} rows for these cu_seqlens, got {x.shape[0]}")
    return (*inputs[:at], *(None if x is None else x[:blocks] for x in inputs[at : at + 2]), *inputs[at + 2 :])


def _with_room(d: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of its first rows, as it is promised."""
    if d.shape != x.shape:
        return torch.cat([d, d.new_zeros(len(x) - len(d), *x.shape[1:])])
    return d if d._base is None and d.is_contiguous() else d.clone(memory_format=torch.contiguous_format)


def _check_lists(block_indices: Tensor, q: Tensor, k: Tensor, spec: CallSpec | ListSpec) -> None:
    packed = spec.lengths is not None
    check_lists(block_indices, q, k.shape[-2], *spec.lists_and_blocks(q, k), packed=packed)


def _check_lists_alone(block_indices: Tensor, q: Tensor, k: Tensor, q_offset: Tensor | None, spec: ListSpec) -> None:
    _check_lists(block_indices, q, k, spec)
    check_positions(q_offset, spec.lengths or ((q.shape[1], k.shape[1]),), causal=spec.causal)


def _choice_shape(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, config: NSAConfig) -> tuple[int, ...]:
    """Room for the chosen blocks, whatever the lengths."""
    heads = q.shape[-2] if config.rule == "seed" else k.shape[-2]
    width, tiles = config.list_room(q.shape[-3]), config.num_tiles(q.shape[-3])
    if cu_seqlens is None:
        return q.shape[0], tiles, heads, width
    return tiles if config.q_tile == 1 else tiles + cu_seqlens.shape[0] - 1, heads, width


def _lengths(starts: Tensor) -> tuple[int, ...] | None:
    """Lengths of the sequences that start there; None where there are no starts, or they are left on a GPU."""
    if not starts.numel() or _is_left(starts):
        return None
    numbers = starts.tolist()
    return tuple(end - start for start, end in zip(numbers, numbers[1:])) or None


def _is_left(starts: Tensor | None) -> bool:
    """True if they are on a GPU, where no one but the kernels reads them."""
    return starts is not None and starts.numel() > 0 and starts.device.type == "cuda"


def _sizes(q: Tensor, lengths: Sequence[int] | None, branches: int) -> list[int]:
    """Elements of each log-sum-exp that a call notes."""
    if lengths is None:
        return [q.shape[:-1].numel()] * branches
    return [length * q.shape[-2] for length in lengths if length for _ in range(branches)]


def _copied(cu_seqlens: Tensor | None, q: Tensor | None = None, *, left: bool = False) -> Tensor:
    """A copy, since a caller may refill its own; empty where there is none. On the CPU but for two that are on a GPU:
    starts that are left there, and an empty one with q, since a graph with anything on the CPU is no CUDA graph."""
    if cu_seqlens is None:
        return torch.empty(0, dtype=torch.int32, device="cpu" if q is None else q.device)
    return cu_seqlens.clone() if left else cu_seqlens.to("cpu", copy=True)


def _copied_fake(like: Tensor, cu_seqlens: Tensor | None, *, on_kernels: bool = False, left: bool = False) -> Tensor:
    if cu_seqlens is None:
        return like.new_empty(0, dtype=torch.int32, device=like.device if on_kernels else "cpu")
    return cu_seqlens.new_empty(cu_seqlens.shape, device=cu_seqlens.device if left else "cpu")


def _apart(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """As they are promised: contiguous, and no views of anything."""
    return (x.contiguous() if x._base is None else x.clone(memory_format=torch.contiguous_format) for x in tensors)


@contextmanager
def _autograd() -> Iterator[None]:
    """Within, operators record gradients, also in a kernel of an operator, which PyTorch runs below autograd."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    # A caller's hooks are for what the caller's graph saves; torch.func takes none.
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()
    as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if allowed else nullcontext()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad(), as_it_is:
        yield


def _leaves(inputs: Tensors, needs: Sequence[bool]) -> list[Tensor | None]:
    return [None if x is None else x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]


def _gradients(leaves: Tensors, outputs: Sequence[Tensor], given: Tensors) -> tuple[Tensor | None, ...]:
    """The leaves' gradients, contiguous; None for those that need none."""
    asked = [x for x in leaves if x is not None and x.requires_grad]
    pairs = [(o, do) for o, do in zip(outputs, given, strict=True) if do is not None and o.requires_grad]
    outputs, given = zip(*pairs) if pairs else ((), ())
    found = iter(torch.autograd.grad(outputs, asked, given, allow_unused=True) if pairs else [None] * len(asked))
    gradients = []
    for x in leaves:
        d = next(found) if x is not None and x.requires_grad else None
        gradients.append(None if x is None or not x.requires_grad else _filled(d, x))
    return tuple(gradients)


def _filled(d: Tensor | None, x: Tensor) -> Tensor:
    if d is None:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return next(_apart([d]))


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
_call_attend = register(
    "attend",
    "cute",
    schema=f"{LAYER}, *, {CONFIG}, int heads, bool[] kept, SymInt? bound, bool needs_grad",
    compute=_attend,
    direct=partial(_attend, room=False),
    fake=_attend_fake,
    outputs=15,
    gradients=_attend_backward,
    saved=", ".join(["Tensor? block_indices", *(f"Tensor made_{i}" for i in range(13)), "Tensor starts"]),
    keep=lambda inputs, outputs: (*inputs[:11], inputs[12], *outputs[1:]),
    differentiable=11,
    differentiated=1,
)
register(
    "selected",
    "eager",
    schema=f"{LISTS}, *, {LIST_CONFIG}",
    compute=_selected,
    fake=_selected_fake,
    outputs=5,
    gradients=_selected_backward,
    saved="Tensor block_indices, Tensor? q_offset, Tensor lses, Tensor starts, Tensor starts_k",
    keep=lambda inputs, outputs: (*inputs[:5], *outputs[2:]),
    differentiable=3,
    differentiated=1,
)
_call_selected = register(
    "selected_on_kernels",
    "cute",
    schema=f"{LISTS}, *, {LIST_CONFIG}",
    compute=_selected_on_kernels,
    fake=_selected_on_kernels_fake,
    outputs=4,
    gradients=_selected_on_kernels_backward,
    saved="Tensor block_indices, Tensor? q_offset, Tensor o, Tensor lse, Tensor starts, Tensor starts_k",
    keep=lambda inputs, outputs: (*inputs[:5], *outputs),
    differentiable=3,
    differentiated=1,
)
