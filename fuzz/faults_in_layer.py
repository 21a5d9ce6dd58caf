"""Faults in the operator, its options, ranks, caches and commands, and in what decides about tiles and lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fuzz.mutations import Change, always, fault, faults, given, instead, result

IS_ITS, WRONG, STEPS = "layer.is its", "caches.wrong", "caches.steps"
SELECT, CHUNKED, LISTED = (f"nsa_layer.eager.{name}" for name in ("select_blocks", "chunk_attention", "list_attention"))
INDEX, OF_INDEX = "nsa_layer.eager.index", "layer.index is its"
SAME_ON_RANKS = "nsa_layer.context_parallel.checks:check_same_on_all_ranks"


def without(words: str) -> Change:
    """Leave out the errors whose message has these words."""

    def wrong(original: Callable, *args: Any, **more: Any) -> Any:
        try:
            return original(*args, **more)
        except ValueError as error:
            if words not in str(error):
                raise

    return instead(wrong)


faults(
    ("one first block", SELECT + ":block_roles", IS_ITS,
     "One first block is forced where there should be several.",
     given(config=lambda c: c.replace(init_blocks=min(1, c.init_blocks)) if c.local_blocks else c)),
    ("one local block too many", SELECT + ":block_roles", IS_ITS, "The block before the local ones is forced.",
     given(config=lambda c: c.replace(local_blocks=c.local_blocks + (c.local_blocks > 0)))),
    ("own block never chosen", SELECT + ":block_roles", IS_ITS,
     "A token's own block is left out until it is complete, where no block is forced.",
     result(lambda roles: (*roles[:2], roles[1]))),
    ("leaking query", SELECT + ":tile_queries", ("layer.causality", "layer.choice"),
     "The mean of a tile's own queries, later ones included, is its query.", given(causal=False)),
    ("forced blocks not counted", SELECT + ":_list_blocks", IS_ITS,
     "The block before a tile is not forced.",
     given(forced=lambda x: x & ((x.int().cumsum(-1) != 2) | (x.sum(-1, keepdim=True) <= 2)))),
    ("int64 wraps", "nsa_layer.checks:lists_in_int32", "layer.lists of", "Numbers beyond int32 become others.",
     instead(lambda original, lists: lists.int() if isinstance(lists, torch.Tensor) else lists)),
    ("padding is the last block", LISTED + ":BlockPairs.__init__", "layer.lists of",
     "A number behind the sequence's blocks stands for the last one.",
     instead(lambda original, pairs, lists, limit, N, size: original(pairs, lists.clamp(max=N - 1), limit, N, size))),
    ("overlap counted once", SELECT + ":_in_blocks", IS_ITS,
     "A compressed key counts only for the block in which it starts.",
     given(config=lambda config: config.replace(compress_size=config.stride)), dict(seconds=120.0)),
    ("token sees on", LISTED + ":BlockPairs.__init__", ("layer.causality", IS_ITS),
     "A token sees the token after it where its own block is listed.", given(limit=lambda limit: limit + 1)),
    ("pair lost", LISTED + ":BlockPairs.total", IS_ITS, "The last block of a token's list is not summed.",
     instead(lambda _, pairs, x: x.flatten(0, 1)[pairs.slot.view(pairs.shape)[..., :-1]].sum(2))),
    ("unfinished block whole", INDEX + ":score_blocks", OF_INDEX, "A query sees one token more of its own block.",
     given(t=lambda t: (t + 1).clamp(max=int(t.max())))),
    ("later of equal blocks", INDEX + ":score_blocks", OF_INDEX, "A tie goes to the block with the larger number.",
     result(lambda x: x + 1e-9 * torch.arange(x.shape[-1], dtype=x.dtype))),
    ("forced blocks in the loss", INDEX + ":is_free", OF_INDEX, "The index' loss counts forced blocks.",
     instead(lambda original, lists, t, config: lists >= 0)),
    ("one key for all lists", INDEX + ":_keys", OF_INDEX, "All lists' losses read the first list's keys.",
     given(k_index=lambda x: x[:, :, :1])),
    ("shares of two", "nsa_layer.eager.forward:gated_sum", IS_ITS,
     "Without a window the other branches count 1/2 each, not 1/3.",
     instead(lambda original, g, *outputs: original(
         1.5 * g if outputs[-1] is None and bool((g == g.flatten()[0]).all()) else g, *outputs))),
    ("missing tail mask", LISTED + ":BlockPairs.__init__", IS_ITS,
     "In calls that are not causal the zeros behind the last key of a block are keys as well.",
     instead(lambda original, pairs, lists, limit, N, size: original(
         pairs, lists, limit.masked_fill((limit == limit[0]).all(), N * size), N, size))),
    ("half a gradient", CHUNKED + ":attend_chunks_backward", IS_ITS, "The gradient of the keys lacks its last one.",
     result(lambda grads: (grads[0], torch.cat([grads[1][:, :-1], 0 * grads[1][:, -1:]], 1), *grads[2:]))),
    ("columns of two branches", "nsa_layer.eager.forward:gated_sum", OF_INDEX,
     "Where a branch is left out the others have each other's gates.",
     given(g=lambda g: g.flip(-1) if g.shape[-1] == 2 else g)),
    ("index rows of a cache", "nsa_layer.kvcache.eager:_write", "caches.any",
     "A call writes its index keys in reverse order.",
     given(new=lambda new: new if new.k_index is None else new._replace(k_index=new.k_index.flip(0)))),
    ("compressed key too early", CHUNKED + ":visible_compressed", "layer",
     "A compressed block is visible one token before its last one is reached.",
     given(spec=lambda s: replace(s, config=s.config.replace(compress_offset=s.config.offset - 1)))),
    ("window of the first queries", CHUNKED + ":visible_window", "layer.shards",
     "Queries that begin inside their sequence have the window that its first ones have.", given(q_offset=0)),
    ("log-sum-exp to base 2", CHUNKED + ":attend_chunks", "layer",
     "The log-sum-exp comes out in powers of two.", result(lambda pair: (pair[0], pair[1] / math.log(2)))),
    ("zero taken", "nsa_layer.config:require_int", "options", "Sizes of 0 pass.",
     instead(lambda original, name, value, *, least=None: original(name, value, least=least and least - 1))),
    ("packings not compared", SAME_ON_RANKS, "ranks", "Ranks compare only the shapes of cu_seqlens.",
     instead(lambda original, cp, checks, cu_seqlens=None, **more: original(cp, checks, starts=cu_seqlens, **more))),
    ("classes not compared", SAME_ON_RANKS, "ranks", "Modes are compared, and not the classes of tensors.",
     instead(lambda original, cp, checks, **more: original(
         cp, checks, **{n: x.as_subclass(torch.Tensor) if n == "q" else x for n, x in more.items()}))),
    ("tiles not compared", SAME_ON_RANKS, "ranks", "Ranks may have lists of tiles of other sizes.",
     given(ragged=("block_indices",))),
    ("parts not compared", SAME_ON_RANKS, "ranks", "Parts of other shapes are put together.",
     instead(lambda original, *args, **more: None if "dim" in more else original(*args, **more))),
    ("loss of one rank", "nsa_layer.context_parallel.attend:sum_over_ranks", "ranks",
     "A rank's index loss is that of its own queries or heads.", instead(lambda original, x, cp: x)),
    ("page twice", "nsa_layer.cache_slots:check_slots", WRONG, "A sequence may have a page twice.", without("twice")),
    ("shared page written", "nsa_layer.cache_slots:check_slots", WRONG,
     "A sequence may write where another one has tokens.", without("another has tokens")),
    ("expanded cache written", "nsa_layer.cache_slots:refuse_aliases", WRONG,
     "Caches that are written to may be expanded, or overlap.", always(None)),
    ("caches overlap", "nsa_layer.cache_slots:_meet", WRONG, "Keys and values may be written to one cache.",
     always(False)),
    ("expanded output", "nsa_layer.cache_slots:refuse_overlap", WRONG,
     "An expanded output fails when it is written, after the caches are.",
     instead(lambda original, name, x: None if name == "out" else original(name, x))),
    ("validate not passed on", "nsa_layer.kvcache.nsa_cache:NSACache.attend", STEPS,
     "`NSACache.attend` has the option and checks nothing.",
     instead(lambda original, *args, validate=False, **more: original(*args, **more))),
    ("cache of inference mode", "nsa_layer.kvcache.nsa_cache:NSACache.__init__", STEPS,
     "A cache that is made under inference mode cannot be written to outside of it.",
     lambda original: original.__wrapped__),
    ("graph cut", "nsa_layer.kvcache.operator:refuse_gradients", "caches.no gradient",
     "Cached tokens cut the graph without an error.", instead(lambda original, call, out, o, lses: (o, lses))),
    ("blocks of any length", "nsa_layer.config:NSAConfig.__post_init__", "options.good",
     "Blocks may be as long as positions go.", without("tokens, got")),
    ("no dictionary taken", "nsa_layer.config:NSAConfig.from_dict", "options.good",
     "`from_dict` reads what is no dictionary as one without fields.",
     given(values=lambda values: values if isinstance(values, dict) and 1 not in values else {})),
    ("option not read", "nsa_tools.commands.options:CommandParser.refuse_unread", "commands",
     "Options that the command does not read pass.", always(None)),
    ("file tried at the end", "nsa_tools.commands.options:output_file", "commands",
     "A chart's file is first opened once it is measured.", lambda original: Path),
)  # fmt: skip


@fault("leaking selection", SELECT + ":block_roles", "layer.causality", "layer.choice")
@instead
def _leaking(original: Callable, tiles: Any, T: int, *, config: Any, causal: bool) -> Any:
    """Blocks that are complete at the end of a tile, not at its start, are candidates."""
    forced, complete, candidate = original(tiles, T, config=config, causal=causal)
    if causal:
        ends = torch.arange(candidate.shape[1]) * config.block_size + config.block_size - 1
        last = (tiles * config.q_tile + config.q_tile - 1).clamp(max=T - 1)
        complete = candidate = ends <= last.unsqueeze(1)
    return forced, complete, candidate


@fault("index keys one token late", "nsa_layer.eager.forward:batches", OF_INDEX)
@instead
def _late(original: Callable, call: Any) -> Any:
    """A packed sequence's index keys start one token late."""
    for batch, *at in original(call):
        if call.spec.lengths is not None and batch.k_index is not None:
            batch = batch._replace(k_index=batch.k_index.roll(1, 1))
        yield batch, *at


@fault("first blocks first", SELECT + ":block_roles", IS_ITS)
@instead
def _first_first(original: Callable, tiles: Any, T: int, *, config: Any, causal: bool) -> Any:
    """A list too short for the forced blocks has the first of them, not the tile's own."""
    wide = config.replace(block_counts=T + config.init_blocks + config.local_blocks + config.q_tile)
    forced, *rest = original(tiles, T, config=wide, causal=causal)
    return forced & (forced.cumsum(1) <= config.block_counts), *rest


@fault("ties to the later block", SELECT + ":_list_blocks", "layer.choice")
@instead
def _ties(original: Callable, scores: Any, forced: Any, candidate: Any, n: int) -> Any:
    """Among equal scores the later block is selected."""
    lists = original(*(x.flip(-1) for x in (scores, forced, candidate)), n)
    N = scores.shape[-1]
    lists = (N - 1 - lists).sort(-1).values  # padding is block N
    return lists.masked_fill(lists == N, -1)


@fault("options refused alone", SAME_ON_RANKS, "ranks")
@instead
def _alone(original: Callable, cp: Any, checks: Any, **more: Any) -> None:
    """A rank raises what is wrong with its options before the others can hear of it."""
    for check in checks[:-1]:
        check()
    original(cp, checks, **more)


@fault("no copy on write", "nsa_layer.kvcache.page_allocator:PageAllocator.reserve", STEPS)
@instead
def _copy(original: Callable, pages: Any, spans: Any) -> None:
    """A page that several sequences have is written to by each."""
    users, pages.users = pages.users, [min(n, 1) for n in pages.users]
    original(pages, spans)
    pages.users = [max(before, now) for before, now in zip(users, pages.users)]


@fault("copy of inference mode", "nsa_layer.kvcache.nsa_cache:LastingTensors.__deepcopy__", STEPS)
@instead
def _copied(original: Callable, cache: Any, memo: dict) -> Any:
    """A copy that is made under inference mode cannot be written to outside of it."""
    copied = copy(cache)
    copied.__dict__.update(deepcopy(cache.__dict__, memo))
    return copied


faults(
    ("first tile off by one", "flash_attn.cute.compressed_causal.schedule:first_query_tile", "compress",
     "Backward starts one tile late for every key.", result(lambda tile: tile + 1)),
    ("shares overlap", "flash_attn.cute.compressed_causal.schedule:query_shares", "compress",
     "The last of several shares of the queries is left out.",
     result(lambda plan: plan._replace(count=plan.count - (plan.count > 1)))),
    ("swapped write order", "flash_attn.cute.lists.write_order:compute_dq_write_order",
     ("lists.write order", "lists.merged"),
     "The first two key blocks that add to a query block have each other's semaphore value.",
     result(lambda orders: tuple(None if t is None else torch.where(t < 2, 1 - t, t) for t in orders))),
    ("launch order ignored", "flash_attn.cute.lists.write_order:as_launch_order",
     ("schedule.right orders", "lists.write order"),
     "Semaphore values follow the key blocks' numbers whatever their launch is: the GPU would hang.", always(None)),
    ("merged by block", "flash_attn.cute.lists.write_order:sorted_entries", "lists.merged",
     "Among equal semaphore values the merged list goes the other way.",
     given(descending=lambda descending: not descending)),
    ("ranks forgotten", "flash_attn.cute.lists.backward_plan:_work_tiles", ("schedule.plans", "lists.plan"),
     "All work tiles that add to the same dk and dv have the first rank.",
     result(lambda plan: plan.index_fill(1, torch.tensor([5]), 0))),
    ("full across the end", "flash_attn.cute.block_lists:lists_from_blocks", ("windows.dense", "lists.made"),
     "The last block of keys counts as full wherever the one before it is: a missing tail mask.",
     given(full=lambda full: full if full is None or full.shape[-1] < 2 else torch.cat(
         [full[..., :-1], full[..., -1:] | full[..., -2:-1]], -1))),
    ("window one too wide", "flash_attn.cute.block_lists:_ranges", "windows.lists",
     "The full blocks of a window begin one block early.", given(skip=lambda skip: (skip - 1).clamp(min=0))),
    ("blind to duplicates", "flash_attn.cute.lists.validate:_check_duplicates", ("lists.wrong", "packed.wrong"),
     "The check of lists overlooks a block that is listed twice.", always(None)),
    ("blind to semaphore values", "flash_attn.cute.lists.validate:_check_locks", "lists.wrong",
     "The check of lists takes any semaphore values.", always(None)),
    ("tails cut off", "flash_attn.cute.lists.formats:cu_total_blocks", "packed",
     "Blocks of a packed sequence are counted without its short last one.",
     instead(lambda original, starts, size: torch.tensor([0, *starts.diff() // size]).cumsum(0, dtype=torch.int32))),
    ("a line lost", "patches.codec:_span", "patches", "A copy of more than two lines loses its last.",
     given(count=lambda count: count - (count > 2))),
)  # fmt: skip


@fault("dropped last block", "flash_attn.cute.block_lists:transpose_lists", "lists.transposed")
@instead
def _dropped(original: Callable, lists: Any, *args: Any, **more: Any) -> Any:
    """The transpose loses the last entry of a full row."""
    turned = original(lists, *args, **more)
    full = turned.mask_block_cnt == lists.mask_block_cnt.shape[2]
    return turned._replace(mask_block_cnt=turned.mask_block_cnt - full.int())


@fault("plan loses the remainder", "flash_attn.cute.lists.backward_plan:_work_tiles", "lists.plan", "schedule.plans")
@instead
def _remainder(original: Callable, counts: Any, pieces: Any, *args: Any) -> Any:
    """The last entry of the last work tile of a list that is cut is left out."""
    plan = original(counts, pieces, *args).clone()
    last = plan[:, 4] == counts[plan[:, 0].long(), plan[:, 1].long(), plan[:, 2].long()]
    plan[:, 4] -= ((plan[:, 3] > 0) & last).int()
    return plan


@fault("codec hangs", "patches.codec:_shift", "patches", seconds=240.0)
@instead
def _hang(original: Callable, line: str, indent: int) -> str:
    """Indenting a line never ends: what the watchdog is for."""
    while indent:
        pass
    return original(line, indent)
