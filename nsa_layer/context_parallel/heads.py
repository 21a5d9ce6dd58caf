"""Each rank attends with all tokens of a part of the heads: exchanges before and after a call that knows nothing of it.

Source: arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nsa_layer.call_spec import Aux, CallSpec
from nsa_layer.checks import Arguments, starts_of_lengths
from nsa_layer.context_parallel.collectives import divided, exchange_for, joined, receive, send
from nsa_layer.context_parallel.overlapped import steps_of
from nsa_layer.context_parallel.rows import Rows
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.context_parallel.whole import BLOCKS, TILES, TOKENS, WEIGHTS, check_whole
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory

Tensor = torch.Tensor
OF_TOKENS = ("q", "k", "v", "gates", "k_win", "v_win")


class Tokens(NamedTuple):
    """A tensor of rows by rank and heads: x [B, n, H, ...], packed [n, H, ...]."""

    x: Tensor
    rows: Rows


def attend(
    nsa: Callable[..., Tensor | tuple[Tensor, Aux]],
    cp: ContextParallel,
    given: Arguments,
    *,
    return_aux: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Aux]:
    """`nsa` of a rank's tokens.

    Args:
        given: arguments of `nsa` that are a rank's parts.
        options: the others of `nsa`.

    Raises:
        TypeError, ValueError: an argument is bad, or the ranks do not divide the key/value heads.
    """
    whole = given.tensors
    of_lengths = whole.k_cmp is not None or whole.v_cmp is not None or given.config.q_tile > 1
    on_gpu = whole.q.is_cuda and getattr(whole.cu_seqlens, "is_cuda", False)
    spec, held = check_whole(given, cp, read=of_lengths or not on_gpu)
    packed, tiles = whole.cu_seqlens is not None, TOKENS if given.config.q_tile == 1 else TILES
    kinds = dict.fromkeys(OF_TOKENS, TOKENS) | dict(k_cmp=BLOCKS, v_cmp=BLOCKS, block_indices=tiles)
    tensors = {name: x for name, x in whole._asdict().items() if x is not None}
    named = {name: tensors[name] for name in kinds if name in tensors}
    asked = [kinds[name] for name in named] + [tiles] * return_aux
    missing = [kind for kind in asked if kind not in held]
    if missing:
        raise NotImplementedError(f"cp in a graph, with cu_seqlens and rows of {missing[0]}")
    parts = {name: Tokens(x, held[kinds[name]]) for name, x in named.items()}
    weights = {name: tensors[name] for name in WEIGHTS if name in tensors}
    options |= dict(zip(Arguments._fields[1:], given[1:]), cu_seqlens=whole.cu_seqlens)
    if spec.lengths is not None:  # no second look at what may be on a GPU
        options["cu_seqlens"] = starts_of_lengths(spec.lengths)
    rows = held[TOKENS]
    if len(heads_of_steps(whole.q, rows, cp, whole.k.shape[-2])) > 1:
        options["memory"] = _policy(given, rows, cp, options["memory"])

    def call(**tensors: Tensor) -> list[Tokens]:
        made = nsa(**tensors, **options, return_aux=return_aux)
        if not return_aux:
            return [Tokens(made, rows)]
        o, aux = made
        lses = (x.mT for x in (aux.lse_cmp, aux.lse_slc, aux.lse_swa))
        return [Tokens(o, rows), Tokens(aux.block_indices, held[tiles]), *(Tokens(x, rows) for x in (aux.gates, *lses))]

    o, *rest = over_heads(call, cp, parts, weights, packed=packed, heads=whole.k.shape[-2])
    if not return_aux:
        return o
    return o, Aux(*rest[:2], *(x.mT.contiguous() for x in rest[2:]))


def heads_of_steps(x: Tensor, rows: Rows, cp: ContextParallel, heads: int) -> list[int]:
    """Numbers of key/value heads of the calls that a rank makes one after the other, of rows like x."""
    own = heads // cp.size
    if not x.is_cuda or torch.compiler.is_compiling():
        return [own]
    return [end - first for first, end in steps_of(own, sum(rows.counts))]


def _policy(given: Arguments, rows: Rows, cp: ContextParallel, memory: MemoryPolicy) -> MemoryPolicy:
    """The plan of what calls recompute, from the memory of all: the first one would take what the last one needs."""
    if memory.recompute != "auto" or memory.budget is not None:
        return memory
    (q, k, v), lead = given.tensors[:3], (*given.tensors.q.shape[:-3], sum(rows.counts))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    named = {name: getattr(given.tensors, name) for name in ("q", "k", "v", "block_indices")}
    shapes = {name: (*lead, x.shape[-2] // cp.size, x.shape[-1]) for name, x in named.items() if x is not None}
    here = {name: torch.empty(shape, dtype=q.dtype, device="meta") for name, shape in shapes.items()}
    spec = CallSpec(given.config, given.causal, 1.0)
    sizes = Sizes.of(given.tensors._replace(**here), spec=spec, needs_grad=needs_grad)
    kept = plan_memory(sizes, memory, q.device).kept
    return replace(memory, recompute="none" if all(kept) else "all")


def over_heads(
    call: Callable[..., list[Tokens]],
    cp: ContextParallel,
    parts: dict[str, Tokens],
    weights: dict[str, Tensor],
    *,
    packed: bool,
    heads: int,
) -> list[Tensor]:
    """Call with all rows of this rank's heads, a few at a time.

    Args:
        call: takes the tensors and weights by name, all rows of some heads, and gives tensors of the same kind.
        weights: [H, ...], the same on every rank; of their gradients each rank has those of its heads.
        heads: key/value heads.

    Returns:
        This rank's rows of all heads of what the calls give.
    """
    first, of_parts = next(iter(parts.values())), tuple(rows for _, rows in parts.values())
    of_steps = heads_of_steps(*first, cp, heads)
    steps, own = len(of_steps), heads // cp.size

    def sizes(count: int) -> list[int]:
        """Heads of each step on one rank, where all ranks have so many together."""
        return [n * count // cp.size // own for n in of_steps]

    batches = [x[None] if packed else x for x, _ in parts.values()]
    divisions = [divided(x, cp.size, sizes(x.shape[2])) for x in batches]
    mine = {name: w.unflatten(0, (cp.size, -1))[cp.rank].split(sizes(len(w))) for name, w in weights.items()}

    def send_heads(step: int) -> tuple[Tensor, ...]:
        return send([part[step] for part in divisions], of_parts, exchanges[step], to_heads=True)

    # Backward goes in the opposite order, so that there, too, exchanges are launched before the attention beside them.
    exchanges = [exchange_for(first.x, cp) for _ in range(steps)]
    sent, answers = send_heads(0), []
    for step in range(steps):
        following = send_heads(step + 1) if step + 1 < steps else ()
        received = receive(sent, of_parts, exchanges[step], to_heads=True)
        received = {name: x[0] if packed else x for name, x in zip(parts, received)}
        made, of_made = zip(*call(**received, **{name: w[step] for name, w in mine.items()}))
        made, exchange = [x[None] if packed else x for x in made], exchange_for(first.x, cp)
        answers.append((send(made, of_made, exchange, to_heads=False), of_made, exchange))
        sent = following
    results = zip(*(receive(*answer, to_heads=False) for answer in answers))
    wholes = [joined(parts_of_steps) for parts_of_steps in results]
    return [whole[0] if packed else whole for whole in wholes]
