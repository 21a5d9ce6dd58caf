"""Graphs of ranks that share sequences: exchanges, or a whole call that gathers, are operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import INDEX, MODES, OVERLAPPING, SMALL, by_ranks, in_steps, part_of, shard, step
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_layer import ContextParallel, NSAttention, nsa, selected_attention, shard_sequence
from nsa_layer.context_parallel.layout import ShardLayout
from nsa_layer.context_parallel.transport import OPS, exchange
from nsa_tools.testing.cases import LSES, Case, make_inputs


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (2, 3, 1, 2)])
@by_ranks()
def test_graphs_have_exchanges(group: Any, counts: tuple[int, ...]) -> None:
    cp = ContextParallel(group)
    rows, ranges = ShardLayout(counts, cp), [[slice(1, 4)], [slice(3, sum(counts))]]

    def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole, some = (exchange("gather", [x], [of])[0] for of in (rows, rows._replace(ranges=ranges)))
        (here,) = exchange("to_heads", [x.detach()[:, :, None].expand(-1, -1, 2, -1)], [rows])
        (back,) = exchange("to_tokens", [here], [rows])
        (dx,) = torch.autograd.grad(some.sum(), x)
        return whole, some, here, back, dx

    x = torch.randn(2, rows.local, 3, requires_grad=True)
    traced = make_fx(there_and_back)(x)
    assert [node.target for node in traced.graph.nodes].count(OPS.exchange.default) == 5
    for run in (there_and_back, traced):
        whole, some, here, back, dx = run(x if run is there_and_back else x.detach())
        assert whole.equal(here) and some.equal(whole[:, ranges[cp.rank][0]])
        assert all(back[:, :, r].equal(x) for r in range(2))
        readers = [sum(at in range(8)[of[0]] for of in ranges) for at in range(8)]
        own = shard(torch.arange(8), rows, cp, 0).tolist()
        assert dx[0, :, 0].tolist() == [readers[i] for i in own]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["layer", "lists", "index"])
@by_ranks()
@in_steps
def test_a_call_compiles(group: Any, mode: str, kind: str, packed: bool) -> None:
    """One graph for two lengths, with the exchanges in it, or with the whole call."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd  # not by every rank: it takes long
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    cp, graphs, calls = ContextParallel(group, mode=mode), [], []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes if "nsa_layer." in str(node.target)])
        return make_boxed_func(graph.forward)

    function = selected_attention if kind == "lists" else nsa

    def trace(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls.append(graph.print_readable(print_output=False))
        return aot_autograd(**how)(graph, inputs)

    how = dict(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(function, fullgraph=True, backend=trace, dynamic=True)
    for T in (32, 48):
        lengths = (T - 20, 0, 20) if packed else None
        of_index = dict(config=INDEX, gate="none", index_dim=4, one_key=True) if kind == "index" else {}
        inputs = make_inputs(Case(**dict(T=T, lengths=lengths, D=8, config=SMALL, gate="given") | of_index))
        tensors = part_of(inputs.tensors("do"), cp, 0 if packed else 1)
        lists = torch.zeros(*tensors["k"].shape[:-1], 1, dtype=torch.int32)
        given = dict(block_indices=lists, block_size=8, return_lse=True)
        if kind == "layer":
            given = dict(config=SMALL, gates=tensors["gates"], k_win=tensors["v"], return_aux=True)
        elif kind == "index":
            given = dict(config=INDEX, return_index_loss=True)

        def run(attend: Any) -> list[torch.Tensor]:
            *found, aux = step(partial(attend, **given, cu_seqlens=inputs.cu_seqlens, cp=cp), tensors)
            if kind != "layer":
                return [*found, aux]
            width = SMALL.list_width(max(lengths or (T,)))  # without the capacity that a graph has
            return [*found, aux.block_indices[..., :width], aux.gates, *(getattr(aux, name) for name in LSES)]

        torch.testing.assert_close(run(compiled), run(function))
    forward, backward = graphs
    of_loss = ["nsa_layer.exchange.default"] * (kind == "index")
    if mode == "gather":
        assert (forward, backward) == (["nsa_layer.gather.default", *of_loss], ["nsa_layer.gather_backward.default"])
    else:
        assert [graph.count("nsa_layer.exchange.default") for graph in graphs] == [2 + len(of_loss), 2]
    of_ranks: list[Any] = [None] * cp.size  # by which PyTorch's cache keeps graphs
    dist.all_gather_object(of_ranks, calls, group=group)
    assert len(calls) == 1 and of_ranks[0] != of_ranks[1]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
@by_ranks()
def test_a_layer_that_compresses_compiles(group: Any, mode: str) -> None:
    """With blocks that reach into the next rank's tokens; of packed sequences a graph does not know the blocks."""
    torch.manual_seed(0)
    layer = NSAttention(16, num_heads=4, num_kv_heads=2, config=OVERLAPPING, compression="mlp", kv_per_branch=True)
    layer.set_context_parallel(cp := ContextParallel(group, mode=mode))
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), shard_sequence(torch.randn(1, 72, 16), cp)
    found = []
    for run in (layer, compiled):
        leaf = x.clone().requires_grad_()
        o = run(leaf)
        found.append([o.detach(), *torch.autograd.grad(o.square().sum(), [leaf, *layer.parameters()])])
    torch.testing.assert_close(*found)
    with pytest.raises(Exception, match="cp in a graph, with cu_seqlens and rows of blocks"):
        compiled(x[0], cu_seqlens=torch.tensor([0, 72], dtype=torch.int32))
