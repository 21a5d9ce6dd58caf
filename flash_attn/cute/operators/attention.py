"""`flash_attn_func` and `flash_attn_varlen_func` as operators, for graphs of `torch.compile`.

Arguments are flat, the number of outputs is fixed (missing ones are empty, never None), and output shapes depend on
input shapes alone. Block lists and scheduler metadata are lists of their tensors. The host reads no tensor except with
``validate``.
"""

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, Optional

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.validate_calls import validate_call
from flash_attn.cute.operators.registration import (
    NAMESPACE,
    Differentiated,
    Tensors,
    define,
    differentiate,
    differentiate_once,
)
from flash_attn.cute.prepare_scheduler import SchedulerMetadataTensorsTorch
from flash_attn.cute.runtime.call_options import edges

Tensor, Lists = torch.Tensor, Optional[BlockSparseTensorsTorch]
OPS = getattr(torch.ops, NAMESPACE)

INPUTS = "Tensor? q, Tensor? k, Tensor v, Tensor? qv, Tensor? learnable_sink"
MADE = "Tensor out, Tensor lse, Tensor p, Tensor row_max, Tensor o_lo"
INDICES = ("gather_kv_indices", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
BOTH = f"{', '.join(f'Tensor? {name}' for name in INDICES)}, Tensor?[] lists, Tensor?[] lists_bwd"
STATIC = (
    "int[] list_options, int[] list_options_bwd, SymInt? max_seqlen_q, SymInt? max_seqlen_k, SymInt? min_seqlen_k, "
    "float? softmax_scale, bool causal, SymInt? window_size_left, SymInt? window_size_right, float softcap, bool "
    "deterministic, bool return_lse, bool gather_bwd_recompute_p, int? gather_bwd_token_chunk, int compress_factor, "
    "SymInt compress_offset"
)
FORWARD_ARGS = (
    "int num_splits, bool? pack_gqa, SymInt? seqlen_k_per_split, bool disable_scheduler_metadata, bool needs_grad, "
    "bool validate"
)
OF_FORWARD = tuple(argument.split()[-1] for argument in FORWARD_ARGS.split(", "))
LIST_OPTIONS = ("block_size", "spt", "plan_per_group", "passes")
LIST_TENSORS = tuple(name for name in BlockSparseTensorsTorch._fields if name not in LIST_OPTIONS)
# Options that kernels with qv do not have.
MASKS = tuple("softcap deterministic compress_factor compress_offset window_size_left window_size_right".split())
CALLABLES = ("score_mod", "score_mod_bwd", "mask_mod")
OUTSIDE = (
    "flash_attn.cute: a call with score_mod, score_mod_bwd or mask_mod, which are Python functions, or with max_seqlen "
    "in a tensor, which the host would read, runs outside of graphs"
)


def attention(public: str, function: type[torch.autograd.Function], validate: bool, *args: Any) -> Any:
    """``function.apply(*args)``, and in a graph the operator.

    public: name of the called function, which is called again outside of the graph if the operator does not support an
    argument.
    """
    if not torch.compiler.is_compiling():
        return function.apply(*args)
    given = dict(zip(_names(public), args, strict=True))
    hints = given.get("max_seqlen_q"), given.get("max_seqlen_k")
    if any(given[name] is not None for name in CALLABLES) or any(isinstance(hint, Tensor) for hint in hints):
        _make_outside()
        return _outside(public, given, validate)
    return _in_graph(given, validate)


def _names(public: str) -> tuple[str, ...]:
    from flash_attn.cute import interface

    functions = dict(flash_attn_func=interface.FlashAttnFunc, flash_attn_varlen_func=interface.FlashAttnVarlenFunc)
    return tuple(signature(functions[public].forward).parameters)[1:]


def _make_outside() -> None:
    """Exclude `_outside` from graphs; at the first trace, since torch._dynamo takes long to import."""
    global _outside
    if not hasattr(_outside, "_torchdynamo_disable"):
        _outside = torch.compiler.disable(_outside, reason=OUTSIDE)


_names._dynamo_marked_constant = _make_outside._dynamo_marked_constant = True  # called while tracing


def _outside(public: str, given: dict[str, Any], validate: bool) -> tuple[Tensor, Optional[Tensor]]:
    from flash_attn.cute import interface

    return getattr(interface, public)(**given, validate=validate)


def _in_graph(given: dict[str, Any], validate: bool) -> tuple[Tensor, Optional[Tensor]]:
    q, k, v, qv, sink = (given.pop(name) for name in ("q", "k", "v", "qv", "learnable_sink"))
    for name in (*CALLABLES, "aux_tensors", "aux_scalars"):  # only callables read the latter
        del given[name]
    if k is v and v.shape[-1] == 512:  # as in the autograd functions
        qv, q, k = (q if qv is None else qv), None, None
    needs_grad = any(x is not None and x.requires_grad for x in (q, k, v, qv, sink))
    given["window_size_left"], given["window_size_right"] = given.pop("window_size")
    lists, given["list_options"] = _flat(given.pop("block_sparse_tensors"))
    lists_bwd, given["list_options_bwd"] = _flat(given.pop("block_sparse_tensors_bwd"))
    indices = (given.pop(name, None) for name in INDICES)
    rest = given.pop("page_table", None), list(given.pop("scheduler_metadata", None) or ())
    given.setdefault("disable_scheduler_metadata", False)
    for name in ("max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "seqlen_k_per_split"):
        given.setdefault(name, None)
    tensors = (q, k, v, qv, sink, *indices, lists, lists_bwd, *rest)
    out, lse, *_ = OPS.attention(*tensors, **given, needs_grad=needs_grad, validate=validate)
    return out, lse if needs_grad or given["return_lse"] else None


def _flat(lists: Lists) -> tuple[list[Optional[Tensor]], list[int]]:
    """Block lists as (tensors, options as ints, -1 for None)."""
    if lists is None:
        return [], []
    options = (*(lists.block_size or (None, None)), lists.spt, lists.plan_per_group, lists.passes)
    return [getattr(lists, name) for name in LIST_TENSORS], [-1 if x is None else int(x) for x in options]


def _lists(tensors: Sequence[Optional[Tensor]], options: Sequence[int]) -> Lists:
    """Inverse of `_flat`."""
    if not tensors:
        return None
    q_size, k_size, spt, per_group, passes = (None if x < 0 else x for x in options)
    size = None if q_size is None else (q_size, k_size)
    spt, per_group = (None if x is None else bool(x) for x in (spt, per_group))
    rest = dict(block_size=size, spt=spt, plan_per_group=per_group, passes=passes)
    return BlockSparseTensorsTorch(**dict(zip(LIST_TENSORS, tensors)), **rest)


def _shapes(
    q: Optional[Tensor], k: Optional[Tensor], v: Tensor, qv: Optional[Tensor], sink: Optional[Tensor],
    gathered: Optional[Tensor], *_: Any, **static: Any,
) -> Iterator[tuple[Sequence[int], torch.dtype]]:  # fmt: skip
    """Shape and dtype of each output."""
    *lead, H, _ = (qv if q is None else q).shape
    low, none = torch.bfloat16 if v.dtype.itemsize == 1 else v.dtype, ((0,), torch.float32)
    out = (*lead, H, v.shape[-1]), low
    yield out
    rows = (*lead, H) if qv is not None else (*lead[:-1], H, lead[-1])
    yield (rows, torch.float32) if static["return_lse"] or static["needs_grad"] else none
    if gathered is None or not static["needs_grad"]:
        yield from [none] * 3
        return
    width = gathered.shape[-1]
    kept = ((*lead, H, width), low), ((*lead, width // 128, H), torch.float32)
    yield from [none] * 2 if static["gather_bwd_recompute_p"] else kept
    yield out


def _attention(*tensors: Any, **static: Any) -> Tensors:
    from flash_attn.cute import interface

    shapes = _shapes(*tensors, **static)
    q, k, v, qv, sink, gathered, *starts, lists, lists_bwd, page_table, metadata = tensors
    of_keys = dict(zip(INDICES[1:], starts), page_table=page_table)
    lists, lists_bwd = _lists(lists, static.pop("list_options")), _lists(lists_bwd, static.pop("list_options_bwd"))
    needs_grad, validate = static.pop("needs_grad"), static.pop("validate")
    for name in ("deterministic", "gather_bwd_token_chunk"):  # of backward alone
        del static[name]
    edge, one_sided = (None, None), (lists is None) != (lists_bwd is None)
    if needs_grad and one_sided and (static["compress_factor"], static["compress_offset"]) == (1, 0):
        edge = edges(static["causal"], (static["window_size_left"], static["window_size_right"]))
    validate_call(validate, lists, lists_bwd, q, k, **of_keys, window=None if edge == (None, None) else edge)
    if needs_grad and qv is not None and not v.requires_grad:
        v = v.detach().requires_grad_()  # kernels with qv ask tensors what to save
    static["return_lse"] |= needs_grad
    static |= of_keys | dict(scheduler_metadata=SchedulerMetadataTensorsTorch(*metadata) if metadata else None)
    made = interface._flash_attn_fwd(
        q, k, v, qv, learnable_sink=sink, gather_kv_indices=gathered, block_sparse_tensors=lists, **static
    )  # fmt: skip
    return tuple(v.new_empty(of, dtype=kind) if x is None else x for x, (of, kind) in zip(made, shapes, strict=True))


def _attention_fake(*tensors: Any, **static: Any) -> Tensors:
    return tuple(tensors[2].new_empty(shape, dtype=dtype) for shape, dtype in _shapes(*tensors, **static))


def _attention_backward(dout: Optional[Tensor], dlse: Optional[Tensor], *tensors: Any, **static: Any) -> Tensors:
    from flash_attn.cute import interface

    q, k, v, qv, sink, out, lse, p, row_max, o_lo, gathered, *starts, lists, lists_bwd = tensors
    recompute_p, token_chunk, min_seqlen_k, return_lse, *options = (
        static.pop(name)
        for name in (
            "gather_bwd_recompute_p", "gather_bwd_token_chunk", "min_seqlen_k", "return_lse", "list_options",
            "list_options_bwd",
        )
    )  # fmt: skip
    dout, dlse = torch.zeros_like(out) if dout is None else dout, dlse if return_lse else None
    static |= dict(zip(INDICES[1:], starts), learnable_sink=sink)
    if qv is not None:
        static = {name: x for name, x in static.items() if name not in MASKS}
        p, row_max = (None, None) if recompute_p else (p, row_max)
        made = interface._flash_attn_bwd_sparse_mla(
            q, k, v, qv, out, dout, lse, p, row_max, gathered, **static, min_seqlen_k=min_seqlen_k,
            recompute_p=recompute_p, token_chunk=token_chunk, o_lo=o_lo,
        )  # fmt: skip
    else:
        into = dict(dq=q.new_empty(q.shape), dk=k.new_empty(k.shape), dv=v.new_empty(v.shape))
        forward, backward = map(_lists, (lists, lists_bwd), options)
        dq, dk, dv, *dsink = interface._flash_attn_bwd(
            q, k, v, out, dout, lse, **static, **into, dlse=dlse, block_sparse_tensors=backward,
            block_sparse_tensors_fwd=forward,
        )  # fmt: skip
        made = dq, dk, dv, None, *(dsink or [None])
    return tuple(v.new_empty(0) if x is None else x.contiguous() for x in made)


def _attention_backward_fake(*tensors: Any, **static: Any) -> Tensors:
    q, k, v, qv, sink = tensors[2:7]
    of_keys = v.dtype if qv is None else torch.float32  # kernels with qv leave rounding to autograd
    dtypes = v.dtype, of_keys, of_keys, v.dtype, None if sink is None else sink.dtype
    inputs = zip((q, k, v, qv, sink), dtypes, strict=True)
    return tuple(v.new_empty(0) if x is None else x.new_empty(x.shape, dtype=kind) for x, kind in inputs)


class _Attention(Differentiated):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensors) -> None:
        _, static, *tensors, lists, lists_bwd, _, _ = inputs
        ctx.save_for_backward(*tensors[:5], *output, *tensors[5:], *lists, *lists_bwd)
        ctx.static, ctx.lists = {name: x for name, x in static.items() if name not in OF_FORWARD}, len(lists)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor], *_: Any) -> tuple[Optional[Tensor], ...]:
        tensors, lists = ctx.saved_tensors[:15], ctx.saved_tensors[15:]
        made = OPS.attention_backward(dout, dlse, *tensors, lists[: ctx.lists], lists[ctx.lists :], **ctx.static)
        needs = ctx.needs_input_grad[2:]
        return None, None, *(d if need else None for d, need in zip(made, needs)), *[None] * (len(needs) - 5)


define(
    "attention", f"{INPUTS}, {BOTH}, Tensor? page_table, Tensor?[] scheduler_metadata, *, {STATIC}, {FORWARD_ARGS}", 5,
    _attention, _attention_fake,
)  # fmt: skip
define(
    "attention_backward", f"Tensor? dout, Tensor? dlse, {INPUTS}, {MADE}, {BOTH}, *, {STATIC}", 5, _attention_backward,
    _attention_backward_fake,
)  # fmt: skip
differentiate("attention", _Attention)
differentiate_once("attention_backward")
