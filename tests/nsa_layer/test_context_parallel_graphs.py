"""Graphs of ranks that share sequences: exchanges that a compiler sees, in an order that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import MODES, SMALL, OnRanks, in_steps
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_layer import ContextParallel, nsa, selected_attention, shard_sequence
from nsa_layer.context_parallel.layout import ShardLayout
from nsa_layer.context_parallel.transport import OPS, Collectives
from nsa_tools.testing.cases import LSES, Case, make_inputs

PASSED_ON = [getattr(torch.ops.aten, name).default for name in ("view", "alias", "squeeze", "unsqueeze", "clone")]


def assert_waits_for_collectives(graph: torch.fx.Graph) -> None:
    """Not for views: Inductor writes to what is sent as soon as nothing reads it up to a wait for the collective."""
    waits = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
    sent = [str(node.args[0].target) for node in waits]
    assert sent and all(target.startswith("_c10d_functional.") for target in sent), sent


def writes_in_a_row(graph: torch.fx.Graph) -> int:
    """To parts of one tensor. With each of them Inductor's expressions double."""
    writes = (torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default)
    found: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        before = max((found[each] for each in node.all_input_nodes), default=0)
        found[node] = before + 1 if node.target in writes else before if node.target in PASSED_ON else 0
    return max(found.values())


def exchange_in_graphs(group: Any, counts: tuple[int, ...]) -> None:
    cp, rows = ContextParallel(group), ShardLayout(counts, 2, "zigzag")
    exchange = Collectives(cp)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        whole = exchange.gathered(exchange.all_gather(x, rows), rows)
        exchange.gathered(exchange.to_heads(x[:, :, None].expand(-1, -1, 2, -1), rows), rows)
        exchange.by_head(exchange.to_tokens(whole, rows), rows)
        return exchange.sum(exchange.reduce_scatter([(slice(0, sum(counts)), whole)], rows), rows)

    x = torch.randn(2, sum(rows.rank_counts(cp.rank)), 3)
    traced = make_fx(there_and_back)(x)
    assert_waits_for_collectives(traced.graph)
    assert OPS.all_gather_into_tensor.default not in [node.target for node in traced.graph.nodes], "see all_gather"
    assert torch.equal(traced(x), 2 * x)


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (2, 3, 1, 2)])
def test_graphs_wait_for_collectives(counts: tuple[int, ...], on_ranks: OnRanks) -> None:
    on_ranks(2, exchange_in_graphs, counts)


def compile_a_call(group: Any, mode: str, alone: bool, packed: bool) -> None:
    """One graph, by heads for two lengths, with the exchanges in it, those of the next heads before attention."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd  # not by every rank: it takes long
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    cp, graphs, calls = ContextParallel(group, mode=mode), [], []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        assert_waits_for_collectives(graph.graph)
        assert writes_in_a_row(graph.graph) <= 4
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    function = selected_attention if alone else nsa

    def trace(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls.append(graph.print_readable(print_output=False))
        return aot_autograd(**how)(graph, inputs)

    how = dict(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(function, fullgraph=True, backend=trace, dynamic=True)
    for T in (32, 48)[: 1 if mode == "gather" else 2]:
        lengths = (T - 20, 0, 20) if packed else None
        inputs = make_inputs(Case(T=T, lengths=lengths, Hq=4, Hkv=2, D=8, config=SMALL, gate="given"))
        names = ("q", "k", "v", "do", "gates")
        parts = [shard_sequence(getattr(inputs, name), cp, dim=0 if packed else 1) for name in names]
        lists = torch.zeros(*parts[0].shape[:-2], 2, 1, dtype=torch.int32)
        given = dict(block_indices=lists, block_size=8) if alone else dict(config=SMALL, gates=parts[4])
        if not alone:
            given |= dict(k_win=parts[2], return_aux=True)

        def step(attend: Any) -> list[torch.Tensor]:
            leaves = [x.detach().clone().requires_grad_() for x in parts[:3]]
            o = attend(*leaves, **given, cu_seqlens=inputs.cu_seqlens, cp=cp)
            o, aux = (o, None) if alone else o
            found = [o.detach(), *torch.autograd.grad(o, leaves, parts[3])]
            if alone:
                return found
            width = SMALL.list_width(max(lengths or (T,)))  # without the room that a graph has
            return [*found, aux.block_indices[..., :width], aux.gates, *(getattr(aux, name) for name in LSES)]

        torch.testing.assert_close(step(compiled), step(function))
    assert len(graphs) == 2
    if mode == "gather":
        of_ranks: list[Any] = [None] * cp.size  # by which PyTorch's cache keeps graphs
        dist.all_gather_object(of_ranks, calls, group=group)
        assert len(calls) == 1 and of_ranks[0] != of_ranks[1]
        first = graphs[0].index(getattr(torch.ops.nsa_layer, "attend" if alone else "shard").default)
        gathers = [n for n, x in enumerate(graphs[0]) if x is OPS.all_to_all_single.default]  # on a CPU
        assert len(gathers) >= 4 and gathers[-1] < first


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alone, packed", [(False, False), (False, True), (True, False), (True, True)])
def test_a_call_compiles(mode: str, alone: bool, packed: bool, on_ranks: OnRanks) -> None:
    on_ranks(2, partial(in_steps, compile_a_call), mode, alone, packed)
