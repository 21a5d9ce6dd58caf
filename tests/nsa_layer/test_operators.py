"""The registered operators: PyTorch's own checks of them, and what they refuse when they are called by themselves."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_calls import Noted, by_place, operator_call
from stub_kernels import stubbed_layer
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from nsa_layer import NSAConfig, nsa, selected_attention
from nsa_layer.call import DIFFERENTIABLE, Call
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute import memory_plan
from nsa_layer.operators import layer
from nsa_layer.operators.registration import OPS
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs

SMALL = NSAConfig(block_size=8, block_counts=3, q_tile=1, window_size=8)
T, HQ, HKV, D = 25, 4, 2, 8
OF_SHAPES = ("test_schema", "test_autograd_registration", "test_faketensor")  # where nothing computes numbers


def check(tensors: Call, static: dict, **how: Any) -> None:
    """PyTorch's own checks of the operator, and of its backward from one or two outputs that have gradients."""
    opcheck(OPS.attend.default, tensors.tensors, static, **how)
    outputs = [x for x in OPS.attend(*tensors.tensors, **static) if x.requires_grad][-2:]
    leaves = [x for x in tensors.tensors if x is not None and x.requires_grad]
    if not leaves:
        return
    with Noted() as noted:
        found = torch.autograd.grad(outputs, leaves, [torch.randn_like(x) for x in outputs])
    ((backward, args, more),) = noted.calls
    assert backward._opname == "attend_backward"
    opcheck(backward, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args), more, **how)
    assert [x.shape for x in found] == [x.shape for x in leaves]


BATCH = Case(B=2, T=T, D=D, dtype=torch.float64, config=SMALL, compress_weights=True)
PACKED = dataclasses.replace(BATCH, lengths=(7, 0, 18))
SEED = dict(rule="seed", q_tile=16, compress_offset=0, init_blocks=0, local_blocks=0)
ALONE, SOME = dict(alone=True, lists=2), ("k", "compress_k_weight", "k_win")


def other(case: Case, gate: str = "weight", own: tuple[str, ...] = (), **config: object) -> Case:
    return dataclasses.replace(case, config=case.config.replace(**config), gate=gate, own_keys=own)


BY_INDEX = dict(rule="index", branches=("selected",))
INDEX = dataclasses.replace(other(BATCH, **BY_INDEX), compress_weights=False, index_dim=4, one_key=True)
PLAIN = {
    "batch": (BATCH, dict(grads="qkv")),
    "packed": (PACKED, dict(grads="qkv")),
    "some gradients": (other(BATCH, own=("k_win", "v_win")), dict(grads=SOME)),
    "packed tiles": (other(PACKED, q_tile=16), dict(grads="q")),
    "no window": (other(PACKED, window_size=0), dict(grads="qkv")),
    "no gradient": (other(BATCH, **SEED), dict(grads=())),
    "index": (INDEX, {}),
    "packed index, all branches": (
        dataclasses.replace(INDEX, lengths=(7, 0, 18), config=SMALL.replace(rule="index")),
        {},
    ),
    "lists alone": (BATCH, ALONE),
    "packed lists alone": (PACKED, ALONE),
}


@pytest.mark.parametrize("name", PLAIN)
def test_pytorch_finds_nothing_wrong_with_plain_pytorch(name: str) -> None:
    tensors, static = operator_call(PLAIN[name][0], **PLAIN[name][1])
    if "alone" in name:
        tensors = tensors._replace(q_offset=torch.zeros(3 if "packed" in name else 2, dtype=torch.int32))
    check(tensors, static)


ON_KERNELS = dict(B=2, T=370, D=64, dtype=torch.bfloat16)
TOKENS, TILES = (Case(**ON_KERNELS, config=NSAConfig(q_tile=q_tile)) for q_tile in (1, 128))
PACK, PACK_OF_TILES = (dataclasses.replace(case, lengths=(300, 0, 70)) for case in (TOKENS, TILES))
PROJECTED, ALL = dict(compress_weights=True), dict(kept=[True] * 3)
OWN = other(PACK_OF_TILES, own=OWN_KEYS)
KERNELS = {
    "by token": (TOKENS, dict(heads=2, **ALL)),
    "by token, equal shares": (other(TOKENS, "none"), dict(heads=2, **ALL, grads=("k",))),
    "packed, recomputed": (dataclasses.replace(PACK, **PROJECTED), dict(heads=2)),
    "packed, recomputed, gates": (dataclasses.replace(PACK, **PROJECTED, gate="given"), dict(heads=2)),
    "small tiles in groups": (other(PACK, q_tile=32), dict(heads=1, kept=[False, True, True])),
    "tiles in groups": (dataclasses.replace(TILES, **PROJECTED), dict(heads=1, **ALL)),
    "packed tiles, own keys": (OWN, dict(heads=2, **ALL)),
    "packed in groups": (PACK, dict(heads=1, kept=[False, True, True])),
    "blocks past the end": (dataclasses.replace(other(TILES, block_size=256), T=257), {}),
    "given": (PACK, dict(heads=1, lists=3, **ALL)),
    "given to heads": (other(TILES, q_tile=32), dict(heads=1, lists=3, by_head=True, **ALL)),
    "index": (dataclasses.replace(other(TOKENS, "none", **BY_INDEX), index_dim=32), dict(heads=2)),
    "index in groups": (
        dataclasses.replace(other(TOKENS, "none", **BY_INDEX), index_dim=32, one_key=True),
        dict(heads=1, index_scores=True),
    ),
    "packed index, gates": (
        dataclasses.replace(other(PACK, **BY_INDEX), index_dim=16, one_key=True),
        dict(heads=1, **ALL),
    ),
    "lists alone": (TOKENS, dict(alone=True, lists=3)),
    "packed lists alone": (PACK, dict(alone=True, lists=3)),
}


def on_kernels(name: str, device: str = "cpu") -> tuple[Call, dict]:
    case, how = KERNELS[name]
    return operator_call(case, device, backend="cute", **how)


@pytest.mark.parametrize("name", KERNELS)
def test_what_the_kernels_make_has_the_shapes_that_a_graph_expects(name: str) -> None:
    with stubbed_layer():
        check(*on_kernels(name), test_utils=OF_SHAPES)


GROUPED = "by token", "packed, recomputed, gates", "packed tiles, own keys", "packed in groups", "index in groups"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*GROUPED, "lists alone", "packed lists alone"])
def test_pytorch_finds_nothing_wrong_with_the_kernels(name: str) -> None:
    tensors, static = on_kernels(name, "cuda")
    check(tensors, static | dict(deterministic=True))


@pytest.mark.parametrize("where", ["plain PyTorch", "stubs", pytest.param("kernels", marks=pytest.mark.gpu)])
def test_pytorch_finds_nothing_wrong_with_shards(where: str) -> None:
    """Those of a rank that gathers keys in a graph; outside of one gradients have the same shapes."""
    device, case = "cpu", Case(B=2, T=20, Hq=HQ, Hkv=HKV, D=D, config=SMALL, compress_weights=True)
    if where != "plain PyTorch":
        device, case = "cuda" if where == "kernels" else "cpu", dataclasses.replace(case, **ON_KERNELS)
        case = dataclasses.replace(case, config=NSAConfig(deterministic=True))
    of_name = dict(packed=dataclasses.replace(case, lengths=(7, 0, case.T - 7)), own=other(case, own=OWN_KEYS))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with stubbed_layer() if where == "stubs" else nullcontext():
            for name, each in (dict(batch=case) | of_name).items():
                check_shards(each, device, name, "eager" if where == "plain PyTorch" else "cute")
    finally:
        dist.destroy_process_group()


def check_shards(case: Case, device: str, name: str, backend: str) -> None:
    inputs = make_inputs(case, device)
    lists = torch.zeros(*inputs.k.shape[:-1], 3, dtype=torch.int32, device=device)
    cp = ContextParallel(dist.group.WORLD, mode="gather")
    of_lists = dict(block_size=case.config.block_size, block_indices=lists, cu_seqlens=inputs.cu_seqlens)
    more = dict(block_indices=lists) if name == "packed" else {}
    calls = [partial(nsa, **inputs.tensors(), **more, config=case.config, cu_seqlens=inputs.cu_seqlens)]
    calls.append(partial(selected_attention, inputs.q, inputs.k, inputs.v, **of_lists))
    for call in calls:
        leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        grads = torch.autograd.grad(call(cp=cp, backend=backend).sum(), leaves)
        with Noted() as noted:
            found = torch.autograd.grad(call(cp=cp, backend=backend).sum(), leaves)
        assert [x.shape for x in found] == [x.shape for x in grads] == [x.shape for x in leaves]
        assert noted.names == ["gather", "gather_backward"]
        for op, args, _ in noted.calls:
            given = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            opcheck(op, given, **({} if device == "cuda" else dict(test_utils=OF_SHAPES)))
            first, structure = tree_flatten(given)

            def run(x: torch.Tensor) -> Any:
                return op(*tree_unflatten([x, *first[1:]], structure))[0]

            with pytest.raises(RuntimeError, match=f"{op.name()} has no derivatives of its own"):
                run(first[0].clone().requires_grad_())
            with pytest.raises(NotImplementedError, match="nsa: forward mode"):
                torch.func.jvp(run, (first[0],), (first[0],))


def test_rows_of_packed_calls_on_the_kernels_are_counted_when_they_run() -> None:
    """A graph has no lengths: compressed keys may have more rows, and nothing that kernels read has too few."""
    compressed, lists = ("k_cmp", "v_cmp"), ("block_indices",)
    with stubbed_layer():
        for case, names in (("packed tiles, own keys", compressed), ("given", lists), ("packed lists alone", lists)):
            tensors, static = on_kernels(case)
            few = tensors.map(lambda x: x[:-1], names)
            with pytest.raises(ValueError, match=r"k_cmp must have|block_indices must have( shape \(370, )?"):
                OPS.attend(*few.tensors, **static)
        tensors, static = on_kernels("packed tiles, own keys")
        more = tensors.map(lambda x: torch.cat([x, x.new_full((2, *x.shape[1:]), 9)]), compressed)
        padding = torch.autograd.grad(OPS.attend(*more.tensors, **static)[0].sum(), (more.k_cmp, more.v_cmp))
    assert all(d.shape == x.shape and not d[-2:].any() for d, x in zip(padding, (more.k_cmp, more.v_cmp)))


def test_a_graph_of_the_kernels_takes_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    monkeypatch.setattr(memory_plan, "_total_memory", lambda index: 80 << 30)
    monkeypatch.setattr(memory_plan, "_free_budget", None)  # a plan of fake tensors asks no GPU

    class Call(torch.nn.Module):
        def forward(self, q, k, v, weight, starts):
            return nsa(q, k, v, gate_weight=weight, cu_seqlens=starts, max_seqlen=None if starts is None else 2000)

    T = torch.export.Dim("T", min=2048, max=1 << 20)
    for packed in (False, True):
        lead, at = ((4096,), 0) if packed else ((2, 4096), 1)
        with FakeTensorMode() as mode:
            half = dict(dtype=torch.bfloat16, device="cuda")
            q, k, v = (torch.empty(*lead, h, 128, **half) for h in (8, 2, 2))
            starts = torch.empty(4, dtype=torch.int32, device="cuda") if packed else None
            arguments = (q, k, v, torch.empty(8, 3, 128, **half), starts)
            shapes = ({at: T}, {at: T}, {at: T}, None, None)
            graph = torch.export.export(Call(), arguments, dynamic_shapes=shapes, strict=True).graph
        for within in (mode, nullcontext()):
            with within:
                assert nsa(q, k, v, cu_seqlens=starts).shape == q.shape
        calls = [node for node in graph.nodes if node.target is OPS.attend.default]
        assert [(node.args[-5], node.args[-2]) for node in calls] == [(None, 2000 if packed else None)]


def test_a_graph_saves_what_the_policy_says_and_groups_heads_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length: it is made once."""
    plans, plan_of = [], memory_plan.plan_of
    monkeypatch.setattr(layer, "plan_of", lambda *args: plans.append(plan_of(*args)) or plans[-1])
    counter = CompileCounterWithBackend("aot_eager")
    with stubbed_layer():
        for recompute, kept in (("auto", (True,) * 3), ("all", (False,) * 3)):
            policy = memory_plan.MemoryPolicy(budget=1 << 22, recompute=recompute)
            call = torch.compile(partial(nsa, backend="cute", memory=policy), fullgraph=True, backend=counter)
            torch._dynamo.reset()
            counter.frame_count = 0
            for T in (300, 3000, 700):
                tensors = [torch.randn(1, T, h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
                for x in tensors:
                    torch._dynamo.mark_dynamic(x, 1)
                torch.autograd.grad(call(*tensors).sum(), tensors)
            assert counter.frame_count == 1
            assert {plan.kept for plan in plans} == {kept}
            assert [len(plan.groups) for plan in plans[::2]] == [1, 2, 1]
            plans.clear()


@pytest.mark.parametrize("packed", [False, True])
def test_calls_on_the_kernels_are_operators_where_they_are_seen(packed: bool) -> None:
    inputs, name = make_inputs(PACK if packed else TOKENS), "attend"
    q, k, v, starts = *(x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)), inputs.cu_seqlens
    lists = torch.zeros(*q.shape[:-2], 2, 3, dtype=torch.int32)
    calls = (
        partial(nsa, gate_weight=inputs.gate_weight),
        partial(selected_attention, block_indices=lists, block_size=64),
    )
    with stubbed_layer():
        for call in calls:
            with Noted() as noted:
                call(q, k, v, cu_seqlens=starts, backend="cute").sum().backward()
            assert noted.names == [name, f"{name}_backward"]
            o = call(q, k, v, cu_seqlens=starts, backend="cute")
            with Noted() as noted:
                o.sum().backward()
            assert noted.names == [f"{name}_backward"]
            _, gradients = torch.func.vjp(lambda *x: call(*x, cu_seqlens=starts, backend="cute"), q, k, v)
            assert [x.shape for x in gradients(torch.ones_like(q))] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("case", ["small tiles in groups", "tiles in groups", "given"])
def test_a_group_of_heads_gets_back_what_it_left(case: str, dispatched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, static = on_kernels(case)
    left = []

    with stubbed_layer():
        from nsa_layer.cute import backward, forward

        join_saved, backward_group = forward.join_saved, backward.backward_group

        def filled(saved: Any, part: Any, group: tuple[int, int], heads: int) -> Any:
            left.append(part)
            for i, x in enumerate(part):
                if x is not None:
                    x.copy_(torch.randint(100, x.shape, generator=torch.Generator().manual_seed(13 * len(left) + i)))
            return join_saved(saved, part, group, heads)

        def compared(part: Any, varlen: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
            want = left.pop(0)
            if part.block_indices is not None:
                want = want._replace(block_indices=part.block_indices)
            for name, x, y in zip(saved._fields, saved, want, strict=True):
                assert x is y is None or torch.equal(x, y), name
            return backward_group(part, varlen, saved, *args, **kwargs)

        monkeypatch.setattr(forward, "join_saved", filled)
        monkeypatch.setattr(backward, "backward_group", compared)
        q, count, more = tensors[0], len(DIFFERENTIABLE), by_place(static)
        forward, backward = layer._forward, layer._backward
        if dispatched:
            forward, backward = layer._compute, layer._compute_backward
        _, *saved = forward(*tensors.tensors, *more)
        needs = [x is not None for x in tensors[:count]]
        lists = tensors.block_indices
        backward(torch.ones_like(q), None, *tensors[:count], lists, None, None, *saved, *more, needs)
    assert not left


@pytest.mark.parametrize("q_tile", [1, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_aux_is_that_of_a_call_that_is_not_seen(q_tile: int, packed: bool) -> None:
    """A call on the kernels outside of graphs: its lists have no capacity for other lengths."""
    case = {(1, False): TOKENS, (1, True): PACK, (128, False): TILES, (128, True): PACK_OF_TILES}[q_tile, packed]
    inputs = make_inputs(case)
    call = partial(nsa, inputs.q, inputs.k, inputs.v, cu_seqlens=inputs.cu_seqlens, config=case.config)
    call = partial(call, backend="cute", return_aux=True)
    with stubbed_layer():
        want = call()[1]
        with Noted():
            got = call()[1]
    fields = [field.name for field in dataclasses.fields(got) if field.name != "index_scores"]
    got, want = ([getattr(aux, name).shape for name in fields] for aux in (got, want))
    assert got == want


def test_positions_are_looked_at_once_and_when_a_graph_runs() -> None:
    q, k, v = (torch.randn(2, T, h, D) for h in (HQ, HKV, HKV))
    starts, before = torch.tensor([0, 20, T], dtype=torch.int32), torch.tensor([0, 15, T], dtype=torch.int32)
    lists = torch.zeros(2, T, HKV, 2, dtype=torch.int32)
    whole = partial(selected_attention, block_size=8, backend="eager")
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    with Noted("aten") as noted, Noted() as seen:
        whole(q, k, v, lists)
        nsa(q, k, v, block_indices=lists, config=SMALL, backend="eager")
    assert seen.names == ["attend"] * 2 and "nonzero" not in noted.names
    for call in (whole, compiled):
        assert not call(q, k, v, torch.full_like(lists, 4)).any()
        with pytest.raises(ValueError, match="q_offset must be at least 0, got -1"):
            call(q, k, v, lists, q_offset=torch.tensor([0, -1], dtype=torch.int32))
        with pytest.raises(ValueError, match="k must have at least as many tokens as q .* got 5 fewer"):
            call(q[0], k[0], v[0], lists[0], cu_seqlens=starts, cu_seqlens_k=before)
