"""Mode "heads": each rank attends with all tokens of a part of the heads, between two all-to-alls.

Source: arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from nsa_layer.call_spec import Aux, CallSpec
from nsa_layer.checks import Arguments, starts_of_lengths
from nsa_layer.context_parallel.checks import KINDS, TILES, TOKENS, WEIGHTS, check_shard
from nsa_layer.context_parallel.layout import ShardLayout, head_steps
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.transport import Exchange, copy, exchange
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory
from nsa_layer.operators.registration import is_recorded

Tensor = torch.Tensor
Layouts = Sequence[ShardLayout]
START, FINISH, WHOLE = "start", "finish", "whole"
OTHER = {START: FINISH, FINISH: START, WHOLE: WHOLE}


def attend(
    nsa: Callable[..., Tensor | tuple[Tensor, Aux]],
    cp: ContextParallel,
    arguments: Arguments,
    *,
    return_aux: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Aux]:
    """`nsa` of a rank's tokens.

    Args:
        arguments: of `nsa`, this rank's shards.
        options: the other arguments of `nsa`.

    Raises:
        TypeError, ValueError: an argument is bad, or the ranks do not divide the key/value heads.
        NotImplementedError: a graph would have to know lengths of packed sequences.
    """
    shard, config = arguments.tensors, arguments.config
    starts, Hkv = shard.cu_seqlens, shard.k.shape[-2]
    # Chunks hold blocks and tiles by length.
    by_length = shard.k_cmp is not None or shard.v_cmp is not None or config.q_tile > 1
    on_gpu = shard.q.is_cuda and getattr(starts, "is_cuda", False)
    spec, layouts = check_shard(arguments, cp, read=by_length or not on_gpu)
    tiles = TOKENS if config.q_tile == 1 else TILES
    tensors = {name: x for name, x in shard._asdict().items() if x is not None}
    kinds = {name: KINDS[name] for name in tensors if name in KINDS}
    kinds |= {name: tiles for name, kind in kinds.items() if kind == TILES}
    for kind in (*kinds.values(), *([tiles] if return_aux else [])):
        if kind not in layouts:
            raise NotImplementedError(f"cp in a graph, with cu_seqlens and rows of {kind}")
    options |= dict(zip(Arguments._fields[1:], arguments[1:]), cu_seqlens=starts)
    if spec.lengths is not None:  # no second look at what may be on a GPU
        options["cu_seqlens"] = starts_of_lengths(spec.lengths)
    tokens = layouts[TOKENS]
    if len(step_sizes(shard.q, tokens, cp, Hkv)) > 1:
        options["memory"] = _policy(arguments, tokens, cp, options["memory"])

    def call(**of_heads: Tensor) -> list[Tensor]:
        if not return_aux:
            return [nsa(**of_heads, **options)]
        o, aux = nsa(**of_heads, **options, return_aux=True)
        return [o, aux.block_indices, aux.gates, aux.lse_cmp.mT, aux.lse_slc.mT, aux.lse_swa.mT]

    o, *rest = over_heads(
        call,
        cp,
        {name: tensors[name] for name in kinds},
        [layouts[kind] for kind in kinds.values()],
        [tokens, layouts[tiles], *[tokens] * 4] if return_aux else [tokens],
        {name: tensors[name] for name in WEIGHTS if name in tensors},
        heads=Hkv,
    )
    return (o, Aux(*rest[:2], *(x.mT.contiguous() for x in rest[2:]))) if return_aux else o


def over_heads(
    call: Callable[..., list[Tensor]],
    cp: ContextParallel,
    tensors: dict[str, Tensor],
    layouts: Layouts,
    output_layouts: Layouts,
    weights: dict[str, Tensor],
    *,
    heads: int,
) -> list[Tensor]:
    """Call with all rows of this rank's heads, a few heads at a time.

    Args:
        call: takes tensors and weights by name, all rows of some heads, and returns tensors of all rows.
        tensors: this rank's rows [B, n, H, ...], packed [n, H, ...]; q is the first.
        layouts, output_layouts: of the tensors, and of what is returned.
        weights: [H, ...], the same on every rank; a rank's gradients of them are those of its heads.
        heads: key/value heads.

    Returns:
        This rank's rows of all heads of what the calls return.
    """
    q = next(iter(tensors.values()))
    steps, own, packed = step_sizes(q, layouts[0], cp, heads), heads // cp.size, q.dim() == 3

    def sizes(count: int) -> list[int]:
        """Each step's part of a rank's heads, of a tensor of `count` heads in all."""
        return [size * count // cp.size // own for size in steps]

    batches = [x[None] if packed else x for x in tensors.values()]
    parts = [_split_heads(x, cp.size, sizes(x.shape[2])) for x in batches]
    weights = {name: w.unflatten(0, (cp.size, -1))[cp.rank].split(sizes(len(w))) for name, w in weights.items()}
    start, finish = (None, WHOLE) if is_recorded(q) else (START, FINISH)

    def send(layouts: Layouts, to_heads: bool, xs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start an exchange; returns what waits for it."""
        together = Exchange(cp)
        if start is not None:
            xs = _Exchange.apply(together, layouts, start, to_heads, *xs)
        return lambda: _Exchange.apply(together, layouts, finish, to_heads, *xs)

    # Backward goes in the opposite order, so that there, too, exchanges start before the attention beside them.
    sent, answers = [send(layouts, True, [part[0] for part in parts])], []
    for step in range(len(steps)):
        if step + 1 < len(steps):
            sent.append(send(layouts, True, [part[step + 1] for part in parts]))
        here = {name: x[0] if packed else x for name, x in zip(tensors, sent.pop(0)())}
        outputs = call(**here, **{name: w[step] for name, w in weights.items()})
        answers.append(send(output_layouts, False, [x[None] if packed else x for x in outputs]))
    by_step = [receive() for receive in answers]
    joined = [_join_heads(parts) for parts in zip(*by_step)]
    return [x[0] if packed else x for x in joined]


def step_sizes(q: Tensor, tokens: ShardLayout, cp: ContextParallel, heads: int) -> list[int]:
    """Key/value heads of each call that a rank makes: some at a time in long calls on a GPU, outside graphs."""
    own = heads // cp.size
    if not q.is_cuda or torch.compiler.is_compiling():
        return [own]
    return [end - first for first, end in head_steps(own, tokens.total)]


def _policy(arguments: Arguments, tokens: ShardLayout, cp: ContextParallel, memory: MemoryPolicy) -> MemoryPolicy:
    """One plan for all steps, by the memory of all of them: else the first would take what the last one needs."""
    if memory.recompute != "auto" or memory.budget is not None:
        return memory
    shard, lead = arguments.tensors, (*arguments.tensors.q.shape[:-3], tokens.total)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in shard[:3])

    def on_rank(x: Tensor) -> Tensor:
        return torch.empty((*lead, x.shape[-2] // cp.size, x.shape[-1]), dtype=shard.q.dtype, device="meta")

    spec = CallSpec(arguments.config, arguments.causal, 1.0)
    sizes = Sizes.of(shard.map(on_rank, ("q", "k", "v", "block_indices")), spec=spec, needs_grad=needs_grad)
    kept = plan_memory(sizes, memory, shard.q.device).kept
    return replace(memory, recompute="none" if all(kept) else "all")


class _Exchange(torch.autograd.Function):
    """A whole exchange, or half of one: backward is the other half of the one in the opposite direction.

    Args:
        phase: START: send, and return empty tensors; FINISH: wait, and return what was received; WHOLE: both.
        to_heads: from this rank's rows of all heads [B, n, R, h, ...] to all rows of its heads [B, N, h, ...].
    """

    @staticmethod
    def forward(
        ctx: Any, together: Exchange, layouts: Layouts, phase: str, to_heads: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.static = together, layouts, phase, to_heads
        outputs = _exchange(together, layouts, phase, to_heads, xs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, needed in zip(outputs, ctx.needs_input_grad[4:]) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *ds: Tensor | None) -> tuple[Tensor | None, ...]:
        together, layouts, phase, to_heads = ctx.static
        # A graph makes zeros of the gradients that are not needed.
        ds = tuple(d if needed else None for d, needed in zip(ds, ctx.needs_input_grad[4:], strict=True))
        return *(None,) * 4, *_exchange(together, layouts, OTHER[phase], not to_heads, ds)


def _exchange(
    together: Exchange, layouts: Layouts, phase: str, to_heads: bool, xs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    way = "to_heads" if to_heads else "to_tokens"
    if phase == WHOLE:
        present = [(x, layout) for x, layout in zip(xs, layouts, strict=True) if x is not None]
        outputs = iter(exchange(way, *map(list, zip(*present)), together.cp))
        return tuple(None if x is None else next(outputs) for x in xs)
    if phase == FINISH:
        together.wait()
        outputs, together.held = together.held, ()
        return outputs
    add = getattr(together, way)
    together.held = tuple(None if x is None else add(x, layout) for x, layout in zip(xs, layouts, strict=True))
    together.start()
    return tuple(None if x is None else x.new_empty(0) for x in xs)


def _split_heads(x: Tensor, ranks: int, sizes: list[int]) -> tuple[Tensor, ...]:
    """x [B, n, H, ...] by step, each [B, n, R, h, ...]."""
    return _SplitHeads.apply(x, ranks, sizes) if len(sizes) > 1 else (x.unflatten(2, (ranks, -1)),)


def _join_heads(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_split_heads`."""
    return _JoinHeads.apply(*parts) if len(parts) > 1 else parts[0].flatten(2, 3)


class _SplitHeads(torch.autograd.Function):
    """Views; the gradient is copied by `copy`, which PyTorch's own derivative does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.unflatten(2, (ranks, -1)).split(sizes, 3)

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(parts), None, None


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[3] for part in parts]
        return _joined(parts)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        return d.unflatten(2, (-1, sum(ctx.sizes))).split(ctx.sizes, 3)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    (B, n, R, _, *rest), sizes = parts[0].shape, [part.shape[3] for part in parts]
    whole = parts[0].new_empty((B, n, R, sum(sizes), *rest))
    for into, part in zip(whole.split(sizes, 3), parts, strict=True):
        copy(into, part)
    return whole.flatten(2, 3)
