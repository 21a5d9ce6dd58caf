"""Faults in the operator: what chooses, what masks, what is summed, and what is checked before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fuzz.mutations import fault, instead, wrong_result


@instead("leaking selection", "nsa_layer.choose:block_roles", "layer.causality", "layer.choice")
def _leaking(original: Callable, tiles: Any, T: int, *, config: Any, causal: bool) -> Any:
    """Blocks that are complete at the end of a tile, not at its start, are candidates."""
    forced, complete, candidate = original(tiles, T, config=config, causal=causal)
    if causal:
        ends = torch.arange(candidate.shape[1]) * config.block_size + config.block_size - 1
        last = (tiles * config.q_tile + config.q_tile - 1).clamp(max=T - 1)
        complete = candidate = ends <= last.unsqueeze(1)
    return forced, complete, candidate


@instead("one first block", "nsa_layer.choose:block_roles", "layer.is its")
def _first_blocks(original: Callable, tiles: Any, T: int, *, config: Any, causal: bool) -> Any:
    """One first block is forced where there should be several."""
    fewer = config.replace(init_blocks=min(1, config.init_blocks)) if config.local_blocks else config
    return original(tiles, T, config=fewer, causal=causal)


@instead("one local block too many", "nsa_layer.choose:block_roles", "layer.is its")
def _local_blocks(original: Callable, tiles: Any, T: int, *, config: Any, causal: bool) -> Any:
    """The block before the local ones is forced too."""
    more = config.replace(local_blocks=config.local_blocks + 1) if config.local_blocks else config
    return original(tiles, T, config=more, causal=causal)


@wrong_result("own block never chosen", "nsa_layer.choose:block_roles", "layer.is its")
def _own_block(roles: Any) -> Any:
    """A token's own block is left out until it is complete, where no block is forced."""
    forced, complete, _ = roles
    return forced, complete, complete


@instead("first blocks first", "nsa_layer.choose:block_roles", "layer.is its")
def _first_first(original: Callable, tiles: Any, T: int, *, config: Any, causal: bool) -> Any:
    """A list too short for the forced blocks has the first of them, not the tile's own."""
    roomy = config.replace(block_counts=T + config.init_blocks + config.local_blocks + config.q_tile)
    forced, *rest = original(tiles, T, config=roomy, causal=causal)
    return forced & (forced.cumsum(1) <= config.block_counts), *rest


@fault("leaking query", "nsa_layer.choose:tile_queries", "layer.causality", "layer.choice")
def _query(original: Callable) -> Callable:
    """A tile's own queries ask for it, later ones included, where the ones before should."""
    return lambda q, *, config, causal: original(q, config=config, causal=False)


@instead("ties to the later block", "nsa_layer.choose:_tie_broken", "layer.choice")
def _ties(original: Callable, scores: Any, eligible: Any) -> Any:
    """Among equal scores the later block is taken."""
    return original(scores.flip(-1), eligible.flip(-1)).flip(-1)


@instead("forced blocks not counted", "nsa_layer.choose:_list_blocks", "layer.is its")
def _forced(original: Callable, scores: Any, forced: Any, candidate: Any, n: int, *, config: Any) -> Any:
    """The block before a tile is no longer forced."""
    forced = forced.clone()
    own = forced.int().cumsum(-1)
    forced &= ~((own == 2) & (forced.sum(-1, keepdim=True) > 2))
    return original(scores, forced, candidate, n, config=config)


@instead("shares of two", "nsa_layer.eager:gated", "layer.is its")
def _shares(original: Callable, tensors: Any, outputs: Any) -> Any:
    """Without a window the other branches count 1/2 each, not 1/3."""
    if len(outputs) == 2 and tensors.gate == "none":
        outputs = [1.5 * o for o in outputs]
    return original(tensors, outputs)


@fault("int64 wraps", "nsa_layer.checks:lists_in_int32", "layer.lists of")
def _wraps(original: Callable) -> Callable:
    """Numbers beyond int32 become others."""
    return lambda lists: lists.int() if isinstance(lists, torch.Tensor) else lists


@fault("padding is the last block", "nsa_layer.choose:sorted_lists", "layer.lists of")
def _padded(original: Callable) -> Callable:
    """A number behind the sequence's blocks stands for the last one."""
    return lambda index, N, end=None: original(index.clamp(max=N - 1), N, end)


@instead("overlap counted once", "nsa_layer.choose:_in_blocks", "layer.is its", seconds=120.0)
def _overlap(original: Callable, p: Any, T: int, config: Any) -> Any:
    """A compressed key counts only for the block in which it starts."""
    return original(p, T, config.replace(compress_size=config.stride))


@instead("pair lost", "nsa_layer.token_attention:_Items.total", "layer.is its")
def _pair(original: Callable, items: Any, x: Any) -> Any:
    """The last block of a token's list is not summed."""
    rows = x.flatten(0, 1)
    listed = rows[items.place.view(items.shape)[..., :-1]]
    return listed.sum(2)


@fault("token sees on", "nsa_layer.token_attention:_Items.__init__", "layer.causality", "layer.is its")
def _sees_on(original: Callable) -> Callable:
    """A token sees the token after it where its own block is listed."""
    return lambda items, choice, limit, N, static: original(items, choice, limit + 1, N, static)


@instead("missing tail mask", "nsa_layer.eager:attend_lists", "layer.is its")
def _tail(original: Callable, q: Any, k: Any, v: Any, choice: Any, limit: Any, **static: Any) -> Any:
    """In calls that are not causal the zeros behind the last key of a block are keys as well."""
    S = k.shape[2]
    if bool((limit == S).all()):
        limit = limit + -S % static["size"]
    return original(q, k, v, choice, limit, **static)


@instead("compressed key too early", "nsa_layer.eager:_compressed_plan", "layer")
def _early(original: Callable, q: Any, Tc: int, heads: int, spec: Any, first: int) -> Any:
    """A compressed block is visible one token before its last one is reached."""
    config = spec.config.replace(compress_offset=spec.config.offset - 1)
    return original(q, Tc, heads, replace(spec, config=config), first)


@fault("window of the first queries", "nsa_layer.eager:_window_plan", "layer.stretches")
def _of_first(original: Callable) -> Callable:
    """Queries that begin inside their sequence have the window that its first ones have."""
    return lambda q, S, heads, spec, first: original(q, S, heads, spec, 0)


@wrong_result("half a gradient", "nsa_layer.chunk_attention:ChunkAttention.gradients", "layer.is its")
def _half(grads: Any) -> Any:
    """The gradient of the keys lacks its last one."""
    dk = grads[1].clone()
    dk[..., -1, :] = 0
    return grads[0], dk, *grads[2:]


@fault("log-sum-exp to base 2", "nsa_layer.eager:_unfold", "layer")
def _base(original: Callable) -> Callable:
    """The log-sum-exp comes out in powers of two."""
    return lambda x, T: original(x, T) * (1.4426950408889634 if x.ndim == 4 else 1.0)


@fault("zero taken", "nsa_layer.config:require_int", "options")
def _zero(original: Callable) -> Callable:
    """Sizes of 0 pass."""
    return lambda name, value, *, least=None: original(name, value, least=None if least is None else least - 1)


@instead("packings not compared", "nsa_layer.context_parallel.checks:check_same_on_all_ranks", "ranks")
def _packings(original: Callable, cp: Any, checks: Any, **more: Any) -> None:
    """Ranks compare only the shapes of cu_seqlens."""
    more = {"starts" if name == "cu_seqlens" else name: value for name, value in more.items()}
    original(cp, checks, **more)


@fault("tiles not compared", "nsa_layer.context_parallel.checks:check_same_on_all_ranks", "ranks")
def _tiles(original: Callable) -> Callable:
    """Ranks may have lists of tiles of other sizes."""
    return lambda cp, checks, **more: original(cp, checks, **(more | {"ragged": ("block_indices",)}))


@instead("classes not compared", "nsa_layer.context_parallel.checks:check_same_on_all_ranks", "ranks")
def _classes(original: Callable, cp: Any, checks: Any, **more: Any) -> None:
    """Modes are compared, and not the classes of tensors."""
    plain = {name: x.as_subclass(torch.Tensor) for name, x in more.items() if name == "q"}
    original(cp, checks, **(more | plain))


@instead("options refused alone", "nsa_layer.context_parallel.checks:check_same_on_all_ranks", "ranks")
def _alone(original: Callable, cp: Any, checks: Any, **more: Any) -> None:
    """A rank raises what is wrong with its options before the others can hear of it."""
    for check in checks[:-1]:
        check()
    original(cp, checks, **more)


@fault("parts not compared", "nsa_layer.context_parallel.checks:check_same_on_all_ranks", "ranks")
def _parts(original: Callable) -> Callable:
    """Parts of other shapes are put together."""
    return lambda cp, checks, *, x, **more: None if "dim" in more else original(cp, checks, x=x, **more)
