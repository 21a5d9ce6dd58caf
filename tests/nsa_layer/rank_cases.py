"""What the ranks of a test do: their shards of a case's tensors, and comparisons with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_layer import ContextParallel, NSAConfig
from nsa_layer.call_spec import CallTensors
from nsa_layer.context_parallel import gather, gather_loop, heads, layout
from nsa_layer.context_parallel.checks import BLOCKS, KINDS, TILES, TOKENS, WEIGHTS
from nsa_layer.context_parallel.layout import ShardLayout
from nsa_tools.testing.cases import LSES, Case, make_inputs, run

OnRanks = Callable[..., list[Any]]
SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16, block_counts=5)
MODES = ("heads", "gather")
RANKS = [(2, "zigzag"), (4, "zigzag"), (4, None), (2, None)]
CLOSE = dict(rtol=1e-12, atol=1e-12)


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
    cut = cp, case.lengths or (total,), total // cp.num_chunks
    layouts = {
        TOKENS: ShardLayout.of_tokens(cp, total // cp.size),
        TILES: ShardLayout.of_blocks(*cut, 1, config.q_tile),
    }
    layouts[BLOCKS] = ShardLayout.of_blocks(*cut, config.span, config.stride)

    def part(name: str, x: torch.Tensor) -> torch.Tensor:
        return shard(x, layouts[KINDS.get(name, TOKENS)], cp, -1 if name in LSES else dim)

    shards = {name: x if name in WEIGHTS else part(name, x) for name, x in inputs.tensors("do").items()}
    lists = part("block_indices", lists) if listed else None
    result = run("eager", replace(inputs, **shards), lists, cp=cp)
    chosen = part("block_indices", expected.aux.block_indices)
    here, padding = result.aux.block_indices.tensor_split([chosen.shape[-1]], -1)
    assert torch.equal(here, chosen) and padding.eq(-1).all()
    for name, whole in expected.tensors().items():
        x = result.tensors()[name]
        if name[1:] in WEIGHTS:
            dist.all_reduce(x, group=group)
        else:
            whole = part(name if name in LSES else name[1:], whole)
        torch.testing.assert_close(x, whole, **CLOSE, msg=lambda message: f"{name}: {message}")


def in_steps(work: Callable[..., None], group: Any, *args: Any) -> None:
    """A few heads at a time, however short calls are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "STEPS_FROM", 1)
        work(group, *args)


def own_heads_in_two(tensors: CallTensors, tokens: ShardLayout, cp: ContextParallel) -> list[int]:
    own = tensors.k.shape[-2] // cp.size
    return [1, own - 1][:own]


def compare_steps(group: Any, case: Case, mode: str, load_balance: str | None, listed: bool = False) -> None:
    """As long calls on a GPU: some heads at a time, the next exchange beside attention, or as in the longest behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "_step_sizes", own_heads_in_two)
        patch.setattr(layout, "STEP_TOKENS", 1)
        if load_balance is None:
            patch.setattr(gather_loop, "OVERLAP_BELOW", 1)
        in_steps(compare, group, case, mode, load_balance, listed)


def compare_recorded(group: Any, case: Case, load_balance: str | None, listed: bool) -> None:
    """By the operators of graphs, which know no lengths of packed sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "is_recorded", lambda *_: True)
        in_steps(compare, group, case, "gather", load_balance, listed)
