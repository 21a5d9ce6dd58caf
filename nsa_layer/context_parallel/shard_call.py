"""Attention of one `QueryShard` on some heads, forward and backward: a call whose queries have an offset.

In graphs it is the operators ``shard`` and ``shard_backward``, without derivatives of their own. They read the lengths
of packed sequences when they run, and their outputs have the largest shapes that any lengths could have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import DIFFERENTIABLE, CallSpec, CallTensors, Saved
from nsa_layer.checks import check_lengths
from nsa_layer.context_parallel.layout import TILE, QueryShard
from nsa_layer.cute.host_numbers import numbers_on
from nsa_layer.cute.memory_plan import MemoryPlan
from nsa_layer.cute.varlen import Varlen
from nsa_layer.operators.arguments import CONFIG, OF_LAYER, apart, schema_of, spec_of
from nsa_layer.operators.registration import define, refuse_derivatives
from nsa_layer.saved import first_of, saved_shapes, with_room

Tensor = torch.Tensor
Kept = Sequence[bool]
FIELDS = len(Saved._fields)


def forward(
    tensors: CallTensors, shard: QueryShard, spec: CallSpec, backend: str, kept: Kept, o: Tensor, *, backward: bool
) -> Saved:
    """Write the output to o, and return what backward needs: in PyTorch lists, gates and LSEs alone.

    Args:
        tensors: the shard's. ``k_win`` and ``v_win`` have the rows that `QueryShard.window` names.
        spec: of the whole call.
        kept: branches' outputs that the kernels save.
        backward: there will be one.
    """
    if backend == "cute":
        from nsa_layer.cute import head_groups

        return head_groups.forward_groups(*_on_kernels(tensors, shard, spec, kept), backward=backward, o=o)[1]
    from nsa_layer.eager.forward import forward as forward_in_pytorch

    output, saved = forward_in_pytorch(_in_pytorch(tensors, shard, spec), spec=shard.spec(spec))
    o.copy_(output)
    return saved


def backward(
    tensors: CallTensors,
    shard: QueryShard,
    spec: CallSpec,
    backend: str,
    kept: Kept,
    do: Tensor,
    saved: Saved,
    dq: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of the differentiable tensors; q's is written to dq. Arguments as for `forward`."""
    if backend == "cute":
        from nsa_layer.cute import head_groups

        rows = None if tensors.has_own_window else _window(tensors, shard, spec)[0]
        return head_groups.gradients(do, *_on_kernels(tensors, shard, spec, kept), saved, dq=dq, window=rows)
    from nsa_layer.eager.backward import backward as backward_in_pytorch

    grads = list(backward_in_pytorch(_in_pytorch(tensors, shard, spec), saved, do, spec=shard.spec(spec)))
    if tensors.has_own_window:
        grads[-2:] = (_without_zeros(d, shard, spec) for d in grads[-2:])
    dq.copy_(grads[0])
    return dq, *grads[1:]


def _window(tensors: CallTensors, shard: QueryShard, spec: CallSpec) -> tuple[Any, Any]:
    """`QueryShard.window`, of k and v from a whole tile on; (None, None) without a window."""
    if not spec.config.window_size:
        return None, None
    return shard.window(spec, tile=1 if tensors.has_own_window else TILE)


def _on_kernels(
    tensors: CallTensors, shard: QueryShard, spec: CallSpec, kept: Kept
) -> tuple[CallTensors, Varlen | None, CallSpec, MemoryPlan]:
    """The call as the kernels take it. Windows without keys of their own read rows of k and v."""
    (q, k, v), (rows, window) = tensors[:3], _window(tensors, shard, spec)
    spec = replace(shard.spec(spec), window=window)
    varlen = Varlen.of(spec, q.device, tensors.q_heads_per_list)
    if rows is not None and not tensors.has_own_window:
        tensors = tensors._replace(k_win=k[..., rows, :, :], v_win=v[..., rows, :, :])
    return _with_offset(tensors, shard, spec), varlen, spec, MemoryPlan(((0, k.shape[-2]),), tuple(kept))


def _in_pytorch(tensors: CallTensors, shard: QueryShard, spec: CallSpec) -> CallTensors:
    """The call's tensors for plain PyTorch, whose ``k_win`` has rows for all keys: 0 outside of the window."""
    if tensors.has_own_window:
        window = shard.window(spec)[1]
        sides = [(at, S - at - n) for at, S, n in _window_rows(shard, spec)]

        def among_zeros(x: Tensor) -> Tensor:
            parts = x.split([n for n, _ in window], dim=-3)
            return torch.cat([F.pad(part, (0, 0, 0, 0, *each)) for part, each in zip(parts, sides)], dim=-3)

        tensors = tensors.map(among_zeros, ("k_win", "v_win"))
    return _with_offset(tensors, shard, spec)


def _without_zeros(d: Tensor | None, shard: QueryShard, spec: CallSpec) -> Tensor | None:
    """A gradient of ``k_win`` with rows for all keys -> that of the window's rows."""
    if d is None:
        return None
    rows = _window_rows(shard, spec)
    parts = d.split([S for _, S, _ in rows], dim=-3)
    return torch.cat([part.narrow(-3, at, n) for part, (at, _, n) in zip(parts, rows)], dim=-3)


def _window_rows(shard: QueryShard, spec: CallSpec) -> list[tuple[int, int, int]]:
    """Of each sequence the first key of the window, all keys, and keys of the window."""
    window = shard.window(spec)[1]
    return [(offset - first, S, n) for (_, S, offset), (n, first) in zip(shard.lengths, window)]


def _with_offset(tensors: CallTensors, shard: QueryShard, spec: CallSpec) -> CallTensors:
    offsets = shard.offsets if spec.lengths else shard.offsets * len(tensors.q)
    return tensors._replace(q_offset=numbers_on((offsets,), tensors.q.device)[0])


def _shard(
    *tensors: Tensor | None, first: int, total: int, backend: str, kept: Kept, backward: bool, **static: Any
) -> tuple[Tensor | None, ...]:
    whole = CallTensors(*tensors)
    here, shard, spec, _ = _shard_of(whole, first, total, backend, static)
    o = whole.q.new_empty((*whole.q.shape[:-1], whole.v.shape[-1]))
    with torch.cuda.device_of(o):
        saved = forward(here, shard, spec, backend, kept, o, backward=backward)
    shapes = saved_shapes(whole, spec=spec, kept=kept, backend=backend)
    return o, *(None if of is None else next(apart([with_room(x, of)])) for x, of in zip(saved, shapes, strict=True))


def _shard_fake(*tensors: Tensor | None, backend: str, kept: Kept, **static: Any) -> tuple[Tensor, ...]:
    call = CallTensors(*tensors)
    shapes = saved_shapes(call, spec=spec_of(static, call), kept=kept, backend=backend)
    saved = (call.q.new_empty(0) if of is None else call.q.new_empty(of[0], dtype=of[1]) for of in shapes)
    return call.q.new_empty((*call.q.shape[:-1], call.v.shape[-1])), *saved


def _shard_backward(
    do: Tensor, *tensors: Tensor | None, first: int, total: int, backend: str, kept: Kept, **static: Any
) -> tuple[Tensor | None, ...]:
    whole, saved = CallTensors(*tensors[: len(OF_LAYER)]), tensors[len(OF_LAYER) :]
    here, shard, spec, rows = _shard_of(whole, first, total, backend, static)
    shapes = saved_shapes(here, spec=shard.spec(spec), kept=kept, backend=backend, exact=True)
    saved = Saved(*(None if of is None else first_of(x, of[0]) for x, of in zip(saved, shapes, strict=True)))
    if whole.block_indices is not None:
        saved = saved._replace(block_indices=whole.block_indices)
    with torch.cuda.device_of(do):
        dq = torch.empty_like(whole.q, memory_format=torch.contiguous_format)
        grads = dict(zip(DIFFERENTIABLE, backward(here, shard, spec, backend, kept, do, saved, dq)))
    for name, at in rows.items():
        d = torch.zeros_like(getattr(whole, name), memory_format=torch.contiguous_format)
        d[at], grads[name] = grads[name], d
    return tuple(None if d is None or x is None else next(apart([d])) for d, x in zip(grads.values(), whole))


def _shard_backward_fake(do: Tensor, *tensors: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    return tuple(do.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors[: len(DIFFERENTIABLE)])


def _shard_of(
    tensors: CallTensors, first: int, total: int, backend: str, static: dict[str, Any]
) -> tuple[CallTensors, QueryShard, CallSpec, dict[str, slice]]:
    """The shard's tensors, the shard, the whole call's spec, and the rows of packed keys that the shard reads."""
    if backend == "cute":
        from nsa_layer.kernels.launch import readable

        tensors = tensors.map(readable)
    q, starts, listed = tensors.q, tensors.cu_seqlens, tensors.block_indices is not None
    spec, ends = spec_of(static, tensors), (total,)
    if starts is not None:
        lengths = check_lengths(starts, q.new_empty(total, 0), "cu_seqlens", "the ranks")
        spec, ends = replace(spec, lengths=lengths), starts[1:].tolist()
    shard = QueryShard.at(first, slice(0, q.shape[-3]), ends, cut=spec.causal and not listed)
    if starts is None:
        return tensors, shard, spec, {}
    window, begin = shard.window(spec)[0], shard.keys.start
    window = slice(begin + window.start, begin + window.stop)
    rows = dict(k=shard.keys, v=shard.keys) | (dict(k_win=window, v_win=window) if tensors.has_own_window else {})
    cut = {name: getattr(tensors, name)[at] for name, at in rows.items()}
    return tensors._replace(**cut, cu_seqlens=None), shard, spec, rows


def with_starts(tensors: CallTensors, shard: QueryShard) -> CallTensors:
    """The tensors of a shard of `selected_attention`, as its operator takes them.

    The host does not know lengths of packed sequences: starts of the shard's queries are made on their device.
    """
    q, begin, starts = tensors.q, shard.offsets[0], tensors.cu_seqlens
    if starts is None:
        return tensors._replace(q_offset=torch.full((len(q),), begin, dtype=torch.int32, device=q.device))
    offsets = (begin - starts[:-1]).clamp(min=0).to(q.device)
    of_queries = starts.clamp(begin, begin + len(q)) - begin
    return tensors._replace(q_offset=offsets, cu_seqlens=of_queries, cu_seqlens_k=starts)


SHARD = "int first, int total, str backend, bool[] kept"
TENSORS, SAVED = schema_of(OF_LAYER), ", ".join(f"Tensor? saved_{i}" for i in range(FIELDS))
refuse_derivatives(*define("shard", f"{TENSORS}, *, {CONFIG}, {SHARD}, bool backward", 1 + FIELDS, _shard, _shard_fake))
refuse_derivatives(
    *define(
        "shard_backward",
        f"Tensor do, {TENSORS}, {SAVED}, *, {CONFIG}, {SHARD}",
        len(DIFFERENTIABLE),
        _shard_backward,
        _shard_backward_fake,
    )
)
