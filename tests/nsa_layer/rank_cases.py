"""What the ranks of a test do: their shards of a case's tensors, and comparisons with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_layer import ContextParallel, NSAConfig, shard_sequence
from nsa_layer.call import Call
from nsa_layer.context_parallel import gather, gather_loop, heads, layout
from nsa_layer.context_parallel.checks import BLOCKS, KINDS, TILES, TOKENS, WEIGHTS
from nsa_layer.context_parallel.layout import ShardLayout, block_layout
from nsa_tools.testing.cases import LSES, Case, make_inputs, run

OnRanks = Callable[..., list[Any]]
SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16, block_counts=5)
INDEX = SMALL.replace(rule="index", branches=("selected",), init_blocks=0, local_blocks=1)  # three are free
MODES = ("heads", "gather")
RANKS = [(2, "zigzag"), (4, "zigzag"), (4, None), (2, None)]
CLOSE = dict(rtol=1e-12, atol=1e-12)


def by_ranks(size: int | None = 2, fixture: str = "on_ranks") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that each rank of a group does: its first argument is the group, the others are those of the test.

    Args:
        size: of the group; None: an argument of the test.
        fixture: has ranks do work.
    """

    def decorate(work: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            run = given.pop(fixture)
            run(given.pop("size") if size is None else size, _do, work.__module__, work.__name__, given)

        names = [*list(signature(work).parameters)[1:], fixture, *(["size"] if size is None else [])]
        test.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])
        test.__name__, test.__module__, test.__doc__, test.work = work.__name__, work.__module__, work.__doc__, work
        return test

    return decorate


def _do(group: Any, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).work(group, **given)


def part_of(tensors: dict[str, torch.Tensor], cp: ContextParallel, dim: int) -> dict[str, torch.Tensor]:
    """A rank's tokens of whole tensors, in memory of their own."""
    return {name: shard_sequence(x, cp, dim=dim).detach().clone() for name, x in tensors.items()}


def step(attend: Callable[..., Any], tensors: dict[str, torch.Tensor], *lists: torch.Tensor) -> list[torch.Tensor]:
    """o of q, k, v and an index, their gradients by do and by the index' loss, and what else is returned."""
    names = (*"qkv", *[name for name in ("q_index", "k_index") if name in tensors])
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}
    qkv = [leaves[name] for name in "qkv"]
    outputs = attend(*qkv, *lists, **{name: leaves[name] for name in names[3:]})
    o, *more = outputs if isinstance(outputs, tuple) else (outputs,)
    losses = more[-1:] if len(names) > 3 else []
    of_results = [tensors["do"], *map(torch.ones_like, losses)]
    grads = torch.autograd.grad([o, *losses], list(leaves.values()), of_results)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in (o, *grads, *more)]


def shard(x: torch.Tensor, rows: ShardLayout, cp: ContextParallel, dim: int) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    chunks = x.split(rows.counts, dim)
    return torch.cat([chunks[chunk] for chunk in cp.chunks], dim)


def compare(group: Any, case: Case, mode: str, load_balance: str | None, listed: bool = False) -> None:
    """On each rank: its part of everything is that of one process."""
    cp, inputs, dim = ContextParallel(group, mode=mode, load_balance=load_balance), make_inputs(case), 1
    if case.lengths:
        dim = 0
    lists = run("eager", inputs).aux.block_indices if listed else None
    expected, total, config = run("eager", inputs, lists), inputs.q.shape[dim], case.config
    tokens, lengths = ShardLayout.of_tokens(cp, total // cp.size), case.lengths or (total,)
    layouts = {TOKENS: tokens, TILES: block_layout(tokens, lengths, 1, config.q_tile)}
    layouts[BLOCKS] = block_layout(tokens, lengths, config.span, config.stride)

    def part(name: str, x: torch.Tensor) -> torch.Tensor:
        return shard(x, layouts[KINDS.get(name, TOKENS)], cp, -1 if name in LSES else dim)

    shards = {name: x if name in WEIGHTS else part(name, x) for name, x in inputs.tensors("do").items()}
    lists = part("block_indices", lists) if listed else None
    result = run("eager", replace(inputs, **shards), lists, cp=cp)
    for name, padding in (("block_indices", -1), ("index_scores", -torch.inf)):
        chosen, here = (getattr(of.aux, name) for of in (expected, result))
        if chosen is None:
            assert here is None and (name != "block_indices" or "selected" not in config.branches)
            continue
        here, more = here.tensor_split([chosen.shape[-1]], -1)
        torch.testing.assert_close(here, part(name, chosen), **CLOSE)
        assert more.eq(padding).all()
    for name, whole in expected.tensors().items():
        if name == "index_scores":  # as compared above
            continue
        x = result.tensors()[name]
        if name[1:] in WEIGHTS:
            dist.all_reduce(x, group=group)
        elif name != "index_loss":
            whole = part(name if name in LSES else name[1:], whole)
        torch.testing.assert_close(x, whole, **CLOSE, msg=lambda message: f"{name}: {message}")


def in_steps(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work a few heads at a time, however short calls are."""

    @wraps(work)
    def worked(*args: Any, **given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "STEPS_FROM", 1)
            return work(*args, **given)

    return worked


def own_heads_in_two(call: Call, tokens: ShardLayout, cp: ContextParallel) -> list[int]:
    own = call.k.shape[-2] // cp.size
    return [1, own - 1][:own]


def compare_steps(group: Any, case: Case, mode: str, load_balance: str | None, listed: bool = False) -> None:
    """As long calls on a GPU: some heads at a time, the next exchange beside attention, or as in the longest behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "step_sizes", own_heads_in_two)
        patch.setattr(layout, "STEP_TOKENS", 1)
        if load_balance is None:
            patch.setattr(gather_loop, "OVERLAP_BELOW", 1)
        in_steps(compare)(group, case, mode, load_balance, listed)


def compare_recorded(group: Any, case: Case, load_balance: str | None, listed: bool) -> None:
    """By the operators of graphs, which know no lengths of packed sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "dispatcher_sees", lambda *_: True)
        in_steps(compare)(group, case, "gather", load_balance, listed)
