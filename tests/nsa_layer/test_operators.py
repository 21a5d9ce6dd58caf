"""The registered operators: PyTorch's own checks of them, and what they refuse when they are called by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stub_kernels import stubbed_layer
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_layer import NSAConfig, nsa, selected_attention
from nsa_layer.call_spec import SELECTED_ALONE, CallSpec
from nsa_layer.config import ListConfig
from nsa_layer.context_parallel.spec import ContextParallel
from nsa_layer.cute import memory_plan
from nsa_layer.operators import layer, static_arguments
from nsa_layer.operators.registration import OPS

SMALL = NSAConfig(block_size=8, block_counts=3, q_tile=1, window_size=8)
LENGTHS = (7, 0, 18)
T, HQ, HKV, D = 25, 4, 2, 8
OF_SHAPES = ("test_schema", "test_autograd_registration", "test_faketensor")  # where nothing computes numbers


class Noted(TorchDispatchMode):
    """Operators that are called within, with their arguments."""

    def __init__(self, namespace: str = "nsa_layer") -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple, dict]] = []
        self.namespace = namespace

    @property
    def names(self) -> list[str]:
        return [op._opname for op, *_ in self.calls]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == self.namespace:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def check(op: torch._ops.OpOverload, tensors: Sequence[torch.Tensor | None], static: dict, **how: Any) -> None:
    """PyTorch's own checks of an operator, and of its backward from one or two outputs that have gradients."""
    opcheck(op, tuple(tensors), static, **how)
    outputs = [x for x in op(*tensors, **static) if x.requires_grad][-2:]
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    with Noted() as noted:
        found = torch.autograd.grad(outputs, leaves, [torch.randn_like(x) for x in outputs])
    ((backward, args, more),) = noted.calls
    assert backward._opname == f"{op._opname}_backward"
    opcheck(backward, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args), more, **how)
    assert [x.shape for x in found] == [x.shape for x in leaves]


def branches(*, packed: bool, grads: str = "qkv", **config: object) -> tuple[tuple, dict]:
    """Arguments of the operator: weights for keys, and with ``own`` keys and values for the window."""
    own, config = config.pop("own", False), SMALL.replace(**config)
    lead = (T,) if packed else (2, T)
    # Heads come first in memory: the strides are not those of a contiguous tensor.
    q, k, v, k_win, v_win = (
        torch.randn(*lead[:-1], h, T, D, dtype=torch.float64).transpose(-2, -3) for h in (HQ, *[HKV] * 4)
    )
    weight = torch.randn(HKV, D, D, dtype=torch.float64)
    for name, x in dict(q=q, k=k, v=v, w=weight, o=k_win).items():
        x.requires_grad_(name in grads)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int() if packed else None
    own = (k_win, v_win) if own else (None, None)
    tensors = (q, k, v, torch.randn(HQ, 3, D), None, weight, None, None, None, *own, starts, None, None, None)
    return tensors, static_arguments(CallSpec(config, True, D**-0.5)) | IN_PYTORCH


IN_PYTORCH = dict(backend="eager", heads=None, budget=None, kept=[False] * 3, bound=None, needs_grad=True)
ON_KERNELS = IN_PYTORCH | dict(backend="cute")


def of_lists(*tensors: torch.Tensor | None, block_size: int, softmax_scale: float = 0.1) -> tuple[tuple, dict]:
    """Arguments of the operator for q, k, v, lists, offsets and starts of `selected_attention`."""
    q, k, v, lists, offset, starts = tensors
    config = ListConfig(block_size=block_size, q_tile=1, window_size=0)
    static = static_arguments(CallSpec(config, True, softmax_scale, branches=SELECTED_ALONE))
    return (q, k, v, *[None] * 8, starts, lists, offset, None), static


CASES = {
    "batch": dict(packed=False),
    "packed": dict(packed=True),
    "some gradients": dict(packed=False, grads="kwo", own=True),
    "packed tiles": dict(packed=True, q_tile=16, grads="q"),
    "no window": dict(packed=True, window_size=0),
    "no gradient": dict(
        packed=False, grads="", rule="seed", q_tile=16, compress_offset=0, init_blocks=0, local_blocks=0
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pytorch_finds_nothing_wrong_with_plain_pytorch(case: str) -> None:
    tensors, static = branches(**CASES[case])
    if case == "no gradient":
        opcheck(OPS.attend.default, tensors, static)
    else:
        check(OPS.attend.default, tensors, static)


@pytest.mark.parametrize("packed", [False, True])
def test_pytorch_finds_nothing_wrong_with_lists_of_a_callers_own(packed: bool) -> None:
    lead = (T,) if packed else (2, T)
    q, k, v = (torch.randn(*lead, h, D, dtype=torch.float64, requires_grad=True) for h in (HQ, HKV, HKV))
    lists = torch.zeros(*lead, HKV, 2, dtype=torch.int32)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int() if packed else None
    offset = torch.zeros(3 if packed else 2, dtype=torch.int32)
    tensors, static = of_lists(q, k, v, lists, offset, starts, block_size=8, softmax_scale=0.5)
    check(OPS.attend.default, tensors, static | IN_PYTORCH)


@pytest.mark.parametrize("packed", [False, True])
def test_lists_on_the_kernels_have_the_shapes_that_a_graph_expects(packed: bool) -> None:
    lead = (370,) if packed else (2, 370)
    inputs = [torch.randn(*lead, h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
    lists = torch.zeros(*lead, 2, 3, dtype=torch.int32)
    starts = torch.tensor([0, 300, 300, 370], dtype=torch.int32) if packed else None
    tensors, static = of_lists(*inputs, lists, None, starts, block_size=64)
    with stubbed_layer():
        check(OPS.attend.default, tensors, static | ON_KERNELS, test_utils=OF_SHAPES)


def test_what_cannot_be_had_is_refused() -> None:
    tensors, static = branches(packed=False)
    q, *rest = tensors

    def of(q: torch.Tensor) -> torch.Tensor:
        return OPS.attend(q, *rest, **static)[0]

    with pytest.raises(NotImplementedError, match="nsa: forward mode"):
        torch.func.jvp(of, (q.detach(),), (q.detach(),))
    with pytest.raises(NotImplementedError, match="nsa: vmap"):
        torch.func.vmap(of)(torch.stack([q.detach()] * 2))
    (dq,) = torch.autograd.grad(of(q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="nsa: second derivatives"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="nsa: second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: of(q).sum())(q).sum())(q.detach())
    torch.testing.assert_close(torch.func.grad(lambda q: of(q).sum())(q.detach()), dq.detach(), rtol=0, atol=0)

    def value_within(q: torch.Tensor) -> torch.Tensor:  # what the inner transform passes on has the outer derivative
        return torch.func.grad_and_value(lambda q: of(q).sum())(q)[1]

    torch.testing.assert_close(torch.func.grad(value_within)(q.detach()), dq.detach(), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="nsa: forward mode"):
        torch.func.jvp(value_within, (q.detach(),), (q.detach(),))


def test_starts_are_those_of_the_call() -> None:
    """A caller may refill its own before backward."""
    tensors, static = branches(packed=True)
    starts = tensors[11]
    made, again = (OPS.attend(*tensors, **static)[0].sum() for _ in range(2))
    want = torch.autograd.grad(made, tensors[0])
    starts.copy_(torch.tensor([0, 1, 2, T]))
    assert torch.equal(torch.autograd.grad(again, tensors[0])[0], want[0])


def on_kernels(
    *, q_tile: int, packed: bool, heads: int, kept: list[bool], gate: str = "weight", **more: bool
) -> tuple[tuple, dict]:
    """Arguments of the operator of the kernels; more: "projected", "own" keys and values, lists that are "given", or
    gradients of "some" tensors alone. Heads come first in memory."""
    config, lengths = NSAConfig(q_tile=q_tile), (300, 0, 70)
    lead, tiles, blocks = (2, 370), (2, config.num_tiles(370)), (2, config.compressed_length(370))
    if packed:
        lead, tiles, blocks = (370,), *((sum(map(f, lengths)),) for f in (config.num_tiles, config.compressed_length))

    def made(*shape: int, asked: bool = True) -> torch.Tensor | None:
        x = torch.randn(*shape, dtype=torch.bfloat16)
        return x.transpose(-2, -3).contiguous().transpose(-2, -3).requires_grad_() if asked else None

    q, k, v = made(*lead, 4, 64), made(*lead, 2, 64), made(*lead, 2, 64)
    weights = (made(2, 64, 64, asked=more.get("projected", False)) for _ in range(2))
    own = (made(*of, 2, 64, asked=more.get("own", False)) for of in (blocks, blocks, lead, lead))
    starts = torch.tensor([0, *lengths]).cumsum(0).int() if packed else None
    lists = torch.zeros(*tiles, 2, 3, dtype=torch.int32) if more.get("given") else None
    static = dict(static_arguments(CallSpec(config, True, 0.1)), heads=heads, kept=kept)
    static |= dict(backend="cute", budget=None, bound=None, needs_grad=True)
    gates = made(4, 3, 64, asked=gate == "weight"), made(*lead, 4, 3, asked=gate == "given")
    if more.get("some"):
        q, v = q.detach(), v.detach()
    return (q, k, v, *gates, *weights, *own, starts, lists, None, None), static


KERNELS = {
    "by token": dict(q_tile=1, packed=False, heads=2, kept=[True] * 3),
    "packed, recomputed": dict(q_tile=1, packed=True, heads=2, kept=[False] * 3, projected=True),
    "small tiles in groups": dict(q_tile=32, packed=True, heads=1, kept=[False, True, True]),
    "tiles in groups": dict(q_tile=128, packed=False, heads=1, kept=[True] * 3, projected=True),
    "packed tiles, own keys": dict(q_tile=128, packed=True, heads=2, kept=[True] * 3, own=True),
    "given": dict(q_tile=1, packed=True, heads=1, kept=[True] * 3, given=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case, gate", [("by token", "weight"), ("packed, recomputed", "given"), ("packed tiles, own keys", "none")]
)
def test_pytorch_finds_nothing_wrong_with_the_kernels(case: str, gate: str) -> None:
    tensors, static = on_kernels(**KERNELS[case], gate=gate, some=gate == "none")
    tensors = [None if x is None else x.detach().cuda().requires_grad_(x.requires_grad) for x in tensors]
    check(OPS.attend.default, tensors, static | dict(deterministic=True))


@pytest.mark.gpu
def test_pytorch_finds_nothing_wrong_with_lists_on_the_kernels() -> None:
    inputs = [torch.randn(2, h, 370, 64, device="cuda").bfloat16().transpose(1, 2) for h in (4, 2, 2)]
    lists = torch.zeros(2, 370, 2, 3, dtype=torch.int32, device="cuda")
    tensors, static = of_lists(*(x.requires_grad_() for x in inputs), lists, None, None, block_size=64)
    check(OPS.attend.default, tensors, static | ON_KERNELS)


@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", id="cpu"), pytest.param("nccl", id="cuda", marks=pytest.mark.gpu)]
)
def test_pytorch_finds_nothing_wrong_with_shards(backend: str) -> None:
    """Those of a rank that gathers keys in a graph."""
    device, tokens, size, dtype, config = "cuda", 200, 64, torch.bfloat16, NSAConfig(deterministic=True)
    if backend == "gloo":
        device, tokens, size, dtype, config = "cpu", 20, D, torch.float32, SMALL
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for packed in (False, True):
            lead = (tokens,) if packed else (2, tokens)
            q, k, v = (torch.randn(*lead, h, size, device=device).to(dtype).requires_grad_() for h in (HQ, HKV, HKV))
            more = dict(cp=ContextParallel(dist.group.WORLD, mode="gather"), config=config)
            if packed:
                starts = torch.tensor([0, 7, 7, tokens], dtype=torch.int32, device=device)
                more |= dict(cu_seqlens=starts, block_indices=starts.new_zeros(*lead, HKV, 3))
            with Noted() as noted:
                nsa(q, k, v, **more).sum().backward()
            assert set(noted.names) == {"shard", "shard_backward"}
            for op, args, _ in (noted.calls[0], noted.calls[-1]):
                given = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
                opcheck(op, given, **({} if device == "cuda" else dict(test_utils=OF_SHAPES)))
                x, *rest = given
                with pytest.raises(RuntimeError, match=f"{op.name()} has no derivatives of its own"):
                    op(x.clone().requires_grad_(), *rest)
                with pytest.raises(NotImplementedError, match="nsa: forward mode"):
                    torch.func.jvp(lambda x: op(x, *rest)[0], (x,), (x,))
    finally:
        dist.destroy_process_group()


GATES = [*((case, "weight") for case in KERNELS), ("by token", "none"), ("packed, recomputed", "given")]


@pytest.mark.parametrize("case, gate", GATES)
def test_what_the_kernels_make_has_the_shapes_that_a_graph_expects(case: str, gate: str) -> None:
    tensors, static = on_kernels(**KERNELS[case], gate=gate, some=gate == "none")
    with stubbed_layer():
        check(OPS.attend.default, tensors, static, test_utils=OF_SHAPES)


def test_rows_of_packed_calls_on_the_kernels_are_counted_when_they_run() -> None:
    """A graph has no lengths: compressed keys may have more rows, and nothing that kernels read has too few."""
    for case, at in (("packed tiles, own keys", (7, 8)), ("given", (12,))):
        tensors, static = on_kernels(**KERNELS[case])
        few = [x[:-1] if i in at else x for i, x in enumerate(tensors)]
        with stubbed_layer(), pytest.raises(ValueError, match="k_cmp and v_cmp must have|block_indices must have"):
            OPS.attend(*few, **static)
    tensors, static = on_kernels(**KERNELS["packed tiles, own keys"])
    more = [torch.cat([x, x.new_full((2, *x.shape[1:]), 9)]) if i in (7, 8) else x for i, x in enumerate(tensors)]
    with stubbed_layer():
        room = torch.autograd.grad(OPS.attend(*more, **static)[0].sum(), more[7:9])
    assert all(d.shape == x.shape and not d[-2:].any() for d, x in zip(room, more[7:9]))
    lists = torch.zeros(369, 2, 3, dtype=torch.int32)
    tensors, static = of_lists(*tensors[:3], lists, None, tensors[11], block_size=64)
    with stubbed_layer(), pytest.raises(ValueError, match=r"block_indices must have shape \(370, "):
        OPS.attend(*tensors, **static, **ON_KERNELS)


def test_a_graph_of_the_kernels_takes_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    monkeypatch.setattr(memory_plan, "_total_memory", lambda index: 80 << 30)

    class Call(torch.nn.Module):
        def forward(self, q, k, v, weight, starts):
            return nsa(q, k, v, gate_weight=weight, cu_seqlens=starts, max_seqlen=None if starts is None else 2000)

    T = torch.export.Dim("T", min=2048, max=1 << 20)
    for packed in (False, True):
        lead, at = ((4096,), 0) if packed else ((2, 4096), 1)
        with FakeTensorMode():
            half = dict(dtype=torch.bfloat16, device="cuda")
            q, k, v = (torch.empty(*lead, h, 128, **half) for h in (8, 2, 2))
            starts = torch.empty(4, dtype=torch.int32, device="cuda") if packed else None
            arguments = (q, k, v, torch.empty(8, 3, 128, **half), starts)
            shapes = ({at: T}, {at: T}, {at: T}, None, None)
            graph = torch.export.export(Call(), arguments, dynamic_shapes=shapes, strict=True).graph
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


def test_a_plan_of_fake_tensors_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_90")
    monkeypatch.setattr(memory_plan, "_total_memory", lambda index: 80 << 30)
    monkeypatch.setattr(memory_plan, "_free_budget", None)
    with FakeTensorMode() as mode:
        q, k = (torch.empty(1, 4096, h, 64, dtype=torch.bfloat16, device="cuda") for h in (4, 2))
    for within in (mode, nullcontext()):
        with within:
            assert nsa(q, k, k).shape == q.shape


@pytest.mark.parametrize("packed", [False, True])
def test_calls_on_the_kernels_are_operators_where_they_are_seen(packed: bool) -> None:
    (q, k, v, weight, *_, starts, _, _, _), _ = on_kernels(q_tile=1, packed=packed, heads=2, kept=[])
    lists = torch.zeros(*q.shape[:-2], 2, 3, dtype=torch.int32)
    calls = partial(nsa, gate_weight=weight), partial(selected_attention, block_indices=lists, block_size=64)
    name = "attend"
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


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("case", ["small tiles in groups", "tiles in groups", "given"])
def test_a_group_of_heads_gets_back_what_it_left(case: str, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, static = on_kernels(**KERNELS[case])
    left = []

    with stubbed_layer():
        from nsa_layer.cute import head_groups

        forward, backward = head_groups.forward, head_groups.backward

        def filled(*args: Any, **kwargs: Any) -> Any:
            left.append(forward(*args, **kwargs))
            for i, x in enumerate(left[-1]):
                if x is not None:
                    x.copy_(torch.randint(100, x.shape, generator=torch.Generator().manual_seed(13 * len(left) + i)))
            return left[-1]

        def compared(tensors: Any, packing: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
            for name, x, y in zip(saved._fields, saved, left.pop(0), strict=True):
                assert x is y is None or torch.equal(x, y), name
            return backward(tensors, packing, saved, *args, **kwargs)

        monkeypatch.setattr(head_groups, "forward", filled)
        monkeypatch.setattr(head_groups, "backward", compared)
        q = tensors[0]
        _, *made = layer._attend(*tensors, **static, room=room)
        needs = [x is not None for x in tensors[:11]]
        layer._attend_backward(torch.ones_like(q), *tensors[:11], tensors[12], None, None, *made, needs=needs, **static)
    assert not left


@pytest.mark.parametrize("q_tile", [1, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_aux_is_that_of_a_call_that_is_not_seen(q_tile: int, packed: bool) -> None:
    """A call on the kernels outside of graphs: its lists have no room for other lengths."""
    (q, k, v, *_, starts, _, _, _), _ = on_kernels(q_tile=q_tile, packed=packed, heads=2, kept=[])
    call = partial(nsa, cu_seqlens=starts, config=NSAConfig(q_tile=q_tile), backend="cute", return_aux=True)
    with stubbed_layer():
        want = call(q, k, v)[1]
        with Noted():
            got = call(q, k, v)[1]
    got, want = ([getattr(aux, field.name).shape for field in dataclasses.fields(aux)] for aux in (got, want))
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
