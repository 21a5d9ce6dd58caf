"""The layer in a CUDA graph: forward and backward are captured once and replayed on other values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.call_spec import CallSpec
from nsa_layer.cute.host_numbers import starts_on
from nsa_layer.cute.varlen import Varlen
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import Case, make_inputs

pytestmark = pytest.mark.gpu

Tensors = dict[str, torch.Tensor]
SMALL = dict(T=1000, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16)


def draw(case: Case, seed: int) -> Tensors:
    """Inputs of the case, and do."""
    return make_inputs(replace(case, seed=seed), "cuda").tensors("do")


def step(case: Case, tensors: Tensors) -> Tensors:
    """Output and gradients; packed sequences start where the host says."""
    given = {name: x for name, x in tensors.items() if name != "do"}
    starts = None if case.lengths is None else torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    o = nsa(**given, config=case.config, causal=case.causal, cu_seqlens=starts)
    grads = torch.autograd.grad(o, list(given.values()), tensors["do"])
    return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(given, grads, strict=True)}


def captured(call: Callable[[], Tensors]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
    """The graph of a call, after three on a side stream, as PyTorch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = call()
    return graph, static


def needs_hopper(config: NSAConfig) -> None:
    if config.deterministic and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


CASES = [
    Case(**SMALL, config=NSAConfig(deterministic=True)),
    Case(**SMALL, config=NSAConfig(q_tile=128, deterministic=True), gate="given", compress_weights=True),
    Case(**SMALL, config=NSAConfig(deterministic=True, compress_stride=32), gate="none"),
    Case(**SMALL | dict(D=64, Hq=2), config=NSAConfig(q_tile=128, deterministic=True)),
    Case(**SMALL | dict(T=4096), config=NSAConfig(deterministic=True)),
    Case(**SMALL, config=NSAConfig()),
    Case(**SMALL | dict(lengths=(300, 0, 1, 700)), config=NSAConfig(deterministic=True)),
    Case(**SMALL | dict(lengths=(300, 0, 1, 700)), config=NSAConfig(q_tile=128, deterministic=True)),
    Case(**SMALL, config=NSAConfig(q_tile=128, block_size=128), causal=False),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_replays_equal_eager_calls(case: Case) -> None:
    needs_hopper(case.config)
    tensors = draw(case, 0)
    for name, x in tensors.items():
        x.requires_grad_(name != "do")
    graph, static = captured(lambda: step(case, tensors))
    for seed in (1, 2):
        fresh = draw(case, seed)
        with torch.no_grad():
            for name, x in tensors.items():
                x.copy_(fresh[name])
            for x in static.values():
                x.fill_(float("nan"))
        graph.replay()
        for name, x in fresh.items():
            x.requires_grad_(name != "do")
        want = step(case, fresh)
        for name, x in static.items():
            if case.config.deterministic:
                assert torch.equal(x, want[name]), (name, seed)
            else:
                torch.testing.assert_close(x.float(), want[name].float(), rtol=0.02, atol=0.02, msg=f"{name}, {seed}")


def test_packed_sequences_whose_starts_are_on_the_cpu() -> None:
    """The host knows the lengths, so nothing waits for the GPU; their copies outlive any other packing's."""
    lengths, config = (300, 1, 64, 500, 35), NSAConfig(deterministic=True)
    needs_hopper(config)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    torch.manual_seed(0)
    layer = NSAttention(512, num_heads=8, num_kv_heads=2, head_dim=64, config=config, rope=RotaryEmbedding(64))
    layer.to("cuda", torch.bfloat16)

    def step(x: torch.Tensor, do: torch.Tensor, cu_seqlens: torch.Tensor) -> Tensors:
        o = layer(x, cu_seqlens=cu_seqlens)
        return {"o": o.detach(), "dx": torch.autograd.grad(o, x, do)[0]}

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randn(2, 900, 512, device="cuda", dtype=torch.bfloat16)

    x, do = drawn(0)
    x = x.clone().requires_grad_()
    graph, static = captured(lambda: step(x, do, starts))
    for others in range(70):  # more packings than are remembered
        starts_on(torch.tensor([0, others + 1], dtype=torch.int32), torch.device("cuda", 0))
        Varlen.of(CallSpec(config, True, 1.0, (others + 1,)), torch.device("cuda", 0))
    for seed in (1, 2):
        fresh, fresh_do = drawn(seed)
        with torch.no_grad():
            x.copy_(fresh)
            do.copy_(fresh_do)
        graph.replay()
        want = step(fresh.requires_grad_(), fresh_do, starts.cuda())
        assert all(torch.equal(static[name], want[name]) for name in want), seed


def test_graphed_module() -> None:
    """A training step of the module: output and the gradients of every parameter and of x."""
    config = NSAConfig(deterministic=True, block_counts=8)
    needs_hopper(config)
    torch.manual_seed(0)
    options = dict(num_heads=8, num_kv_heads=2, config=config, compression="linear")
    layer = NSAttention(512, **options, device="cuda", dtype=torch.bfloat16)
    own = NSAttention(512, **options, device="cuda", dtype=torch.bfloat16)
    own.load_state_dict(layer.state_dict())
    x = torch.randn(2, 640, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (x.detach().clone().requires_grad_(),))
    for _ in range(2):
        x = torch.randn_like(x).requires_grad_()
        do = torch.randn_like(x)
        got = graphed(x)
        got_grads = torch.autograd.grad(got, [x, *layer.parameters()], do)
        got, got_grads = got.clone(), [g.clone() for g in got_grads]
        want = own(x)
        want_grads = torch.autograd.grad(want, [x, *own.parameters()], do)
        assert torch.equal(got, want)
        for name, a, b in zip(("x", *dict(own.named_parameters())), got_grads, want_grads, strict=True):
            assert torch.equal(a, b), name
