"""Mode "heads": each rank attends with all tokens of a part of the heads, between two all-to-alls.

Source: arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nsa_layer.call import Aux, Call
from nsa_layer.checks import starts_of_lengths
from nsa_layer.context_parallel.checks import KINDS, TILES, TOKENS, WEIGHTS, check_shard
from nsa_layer.context_parallel.gather import kept_of_shard
from nsa_layer.context_parallel.layout import ShardLayout, head_steps
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import INVERSE, Exchange, copy, exchange
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.operators.registration import dispatcher_sees

Tensor = torch.Tensor
Layouts = Sequence[ShardLayout]
OF_AUX = (TOKENS, TILES, *[TOKENS] * 4)  # kinds of rows of o, and of `Aux`


def attend_layer(
    nsa: Callable[..., Tensor | tuple[Tensor, Aux]],
    cp: ContextParallel,
    call: Call,
    static: dict[str, Any],
    *,
    memory: MemoryPolicy,
    return_aux: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Aux]:
    """`nsa` of a rank's tokens; arguments as there.

    Args:
        static: config, softmax_scale, max_seqlen and causal.
    """
    config = static["config"]
    # Chunks hold blocks and tiles by length.
    by_length = call.k_cmp is not None or call.v_cmp is not None or config.q_tile > 1
    on_gpu = call.q.is_cuda and getattr(call.cu_seqlens, "is_cuda", False)
    spec, layouts = check_shard(call, cp, **static, read=by_length or not on_gpu)
    if spec.lengths is not None:  # no second look at what may be on a GPU
        call = call._replace(cu_seqlens=starts_of_lengths(spec.lengths))
    if len(_step_sizes(call, layouts[TOKENS], cp)) > 1 and memory.recompute == "auto" and memory.budget is None:
        # One plan for all steps, by the memory of all of them: else the first would take what the last one needs.
        total = layouts[TOKENS].total
        kept = kept_of_shard(call._replace(spec=spec), total, memory, queries=total, ranks=cp.size)
        memory = replace(memory, recompute="none" if all(kept) else "all")
    options |= dict(static, memory=memory, return_aux=return_aux)
    return attend(partial(nsa, **options), cp, call, layouts, OF_AUX if return_aux else (TOKENS,))


def attend(
    function: Callable[..., Any],
    cp: ContextParallel,
    call: Call,
    layouts: dict[str, ShardLayout],
    output_kinds: Sequence[str],
) -> Any:
    """A function of all rows of some heads, called for a few of this rank's heads at a time.

    Args:
        function: takes tensors by name, and returns o, or a pair of o and `Aux` or the LSE. A rank's gradients of
            weights are those of its heads.
        tensors: this rank's rows [B, n, H, ...], packed [n, H, ...]; weights [H, ...] are the same on every rank.
        layouts: of each kind of rows.
        output_kinds: kinds of rows of o, and of the rest.

    Returns:
        This rank's rows of all heads of what the function returns.

    Raises:
        NotImplementedError: a graph would have to know lengths of packed sequences.
    """
    q, packed, given = call.q, call.q.dim() == 3, call.arguments()
    rows = {name: x[None] if packed else x for name, x in given.items() if name in KINDS and x is not None}
    for kind in (*map(KINDS.get, rows), *output_kinds):
        if kind not in layouts:
            raise NotImplementedError(f"cp in a graph, with cu_seqlens and rows of {kind}")
    to_heads, to_tokens = [layouts[KINDS[name]] for name in rows], [layouts[kind] for kind in output_kinds]
    steps, own = _step_sizes(call, layouts[TOKENS], cp), call.k.shape[-2] // cp.size

    def sizes(count: int) -> list[int]:
        """Each step's part of a rank's heads, of a tensor of `count` heads in all."""
        return [size * count // cp.size // own for size in steps]

    parts = [_split_heads(x, sizes(x.shape[2])) for x in rows.values()]
    weights = {name: given[name] for name in WEIGHTS if given[name] is not None}
    weights = {name: w.unflatten(0, (cp.size, -1))[cp.rank].split(sizes(len(w))) for name, w in weights.items()}

    def send(way: str, layouts: Layouts, xs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start an exchange, outside graphs; returns what waits for it."""
        if dispatcher_sees(q):
            return partial(exchange, way, xs, layouts, cp)
        halves = partial(_Half.apply, Exchange(cp), layouts)
        sent = halves(way, True, *xs)
        return lambda: halves(way, False, *sent)

    # Backward goes in the opposite order, so that there, too, exchanges start before the attention beside them.
    sent, answers = [send("to_heads", to_heads, [part[0] for part in parts])], []
    for step in range(len(steps)):
        if step + 1 < len(steps):
            sent.append(send("to_heads", to_heads, [part[step + 1] for part in parts]))
        here = {name: x[0] if packed else x for name, x in zip(rows, sent.pop(0)())}
        here |= {name: w[step] for name, w in weights.items()}
        outputs = _by_rows(function(**here, cu_seqlens=call.cu_seqlens))
        answers.append(send("to_tokens", to_tokens, [x[None] if packed else x for x in outputs]))
    joined = [_join_heads(parts) for parts in zip(*[receive() for receive in answers])]
    o, *more = [x[0] if packed else x for x in joined]
    if len(more) < 2:
        return (o, more[0].mT.contiguous()) if more else o
    return o, Aux(*more[:2], *(lse.mT.contiguous() for lse in more[2:]))


def _by_rows(outputs: Any) -> list[Tensor]:
    """o, and what comes with it, with rows before heads."""
    o, more = outputs if isinstance(outputs, tuple) else (outputs, None)
    if isinstance(more, Aux):
        return [o, more.block_indices, more.gates, *(lse.mT for lse in (more.lse_cmp, more.lse_slc, more.lse_swa))]
    return [o] if more is None else [o, more.mT]


def _step_sizes(call: Call, tokens: ShardLayout, cp: ContextParallel) -> list[int]:
    """Key/value heads of each call that a rank makes: some at a time in long calls on a GPU, outside graphs."""
    own = call.k.shape[-2] // cp.size
    if not call.q.is_cuda or torch.compiler.is_compiling():
        return [own]
    return [end - first for first, end in head_steps(own, tokens.total)]


class _Half(torch.autograd.Function):
    """Half of an exchange: backward is the other half of the one in the opposite direction.

    Args:
        starts: send, and return empty tensors; else wait, and return what was received.
    """

    @staticmethod
    def forward(
        ctx: Any, together: Exchange, layouts: Layouts, way: str, starts: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.static = together, layouts, way, starts
        outputs = _half(*ctx.static, xs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, needed in zip(outputs, ctx.needs_input_grad[4:]) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *ds: Tensor | None) -> tuple[Tensor | None, ...]:
        together, layouts, way, starts = ctx.static
        return *(None,) * 4, *_half(together, layouts, INVERSE[way], not starts, ds)


def _half(
    together: Exchange, layouts: Layouts, way: str, starts: bool, xs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    if not starts:
        together.wait()
        received, together.held = together.held, ()
        return received
    add = getattr(together, way)
    together.held = tuple(None if x is None else add(x, layout) for x, layout in zip(xs, layouts, strict=True))
    together.start()
    return tuple(None if x is None else x.new_empty(0) for x in xs)


def _split_heads(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """x [B, n, H, ...] by step, each [B, n, R, h, ...]."""
    return _BySteps.apply(sizes, x) if len(sizes) > 1 else (x.unflatten(2, (-1, sizes[0])),)


def _join_heads(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_split_heads`."""
    if len(parts) == 1:
        return parts[0].flatten(2, 3)
    return _BySteps.apply([part.shape[3] for part in parts], *parts)[0]


class _BySteps(torch.autograd.Function):
    """Heads by step, as views, or joined; gradients are copied by `copy`, which PyTorch's own derivatives do not."""

    @staticmethod
    def forward(ctx: Any, sizes: list[int], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.joins = sizes, len(xs) > 1
        return _by_steps(sizes, ctx.joins, xs)

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_by_steps(ctx.sizes, not ctx.joins, ds)


def _by_steps(sizes: list[int], join: bool, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not join:
        return xs[0].unflatten(2, (-1, sum(sizes))).split(sizes, 3)
    B, n, R, _, *rest = xs[0].shape
    whole = xs[0].new_empty((B, n, R, sum(sizes), *rest))
    for into, x in zip(whole.split(sizes, 3), xs, strict=True):
        copy(into, x)
    return (whole.flatten(2, 3),)
