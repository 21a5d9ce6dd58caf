"""The layer in CUDA graphs, captured by hand and by `torch.compile`: replayed on other values they give theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from layer_calls import assert_near, needs_hopper, step
from torch._dynamo.utils import counters

from nsa_layer import NSAConfig, NSAttention, nsa, nsa_with_kvcache, selected_attention
from nsa_layer.checks import starts_of_lengths
from nsa_tools.measure.timing import capture
from nsa_tools.testing.cases import Case, make_inputs

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
SMALL = dict(T=1000, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16)
FIXED, TILES = NSAConfig(deterministic=True), NSAConfig(q_tile=128, deterministic=True)
LENGTHS, OTHERS = (300, 1, 0, 723), (64, 0, 65, 895)
CASES = [
    Case(**SMALL, config=FIXED),
    Case(**SMALL, config=TILES, gate="given", compress_weights=True),
    Case(**SMALL, config=FIXED.replace(compress_stride=32), gate="none"),
    Case(**SMALL | dict(D=64, Hq=2), config=TILES),
    Case(**SMALL | dict(T=4096), config=FIXED),
    Case(**SMALL, config=NSAConfig()),
    Case(**SMALL | dict(lengths=(300, 0, 1, 700)), config=FIXED),
    Case(**SMALL | dict(lengths=(300, 0, 1, 700)), config=TILES),
    Case(**SMALL | dict(lengths=(300, 0, 1, 700)), config=NSAConfig()),
    Case(**SMALL, config=NSAConfig(q_tile=128, block_size=128), causal=False),
    Case(**SMALL, config=NSAConfig(rule="index", branches=("selected",), block_counts=5), gate="none", index_dim=32),
]


def assert_replays(
    call: Callable[..., Tensor], draw: Callable[[int], tuple[list[Tensor], Tensor]], *, exact: bool = True
) -> None:
    """A graph of a step gives what the step does for other tensors; `draw` gives those, and do, of a seed."""
    of, do = draw(0)
    of = [x.requires_grad_() for x in of]
    graph, static = capture(lambda: step(lambda: call(*of), of, do), warm_ups=3)
    for seed in (1, 2):
        fresh, fresh_do = draw(seed)
        with torch.no_grad():
            for x, y in zip((*of, do), (*fresh, fresh_do), strict=True):
                x.copy_(y)
            for x in static:
                x.fill_(torch.nan)
        graph.replay()
        fresh = [x.requires_grad_() for x in fresh]
        for i, (x, y) in enumerate(zip(static, step(lambda: call(*fresh), fresh, fresh_do), strict=True)):
            if exact:
                assert torch.equal(x, y), (i, seed)
            else:
                torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02, msg=f"{i}, {seed}")


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_replays_equal_eager_calls(case: Case) -> None:
    """Packed sequences start where the host says."""
    if case.config.deterministic:
        needs_hopper()
    names, starts = list(make_inputs(case).tensors()), None if case.lengths is None else starts_of_lengths(case.lengths)

    def draw(seed: int) -> tuple[list[Tensor], Tensor]:
        inputs = make_inputs(replace(case, seed=seed), "cuda")
        return list(inputs.tensors().values()), inputs.do

    def call(*tensors: Tensor) -> Tensor:
        options = dict(config=case.config, causal=case.causal, cu_seqlens=starts, return_index_loss=case.index_dim > 0)
        result = nsa(**dict(zip(names, tensors)), **options)
        return result[0] + result[1].to(result[0].dtype) if case.index_dim else result

    assert_replays(call, draw, exact=case.config.deterministic)


def test_graphed_module() -> None:
    """A training step of the module: output and the gradients of every parameter and of x."""
    needs_hopper()
    options = dict(num_heads=8, num_kv_heads=2, config=FIXED.replace(block_counts=8), compression="linear")
    layer, own = (NSAttention(512, **options, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    own.load_state_dict(layer.state_dict())
    x = torch.randn(2, 640, 512, device="cuda", dtype=torch.bfloat16)
    graphed = torch.cuda.make_graphed_callables(layer, (x.clone().requires_grad_(),))
    for _ in range(2):
        x, do = torch.randn_like(x).requires_grad_(), torch.randn_like(x)
        got = step(lambda: graphed(x), [x, *layer.parameters()], do)
        want = step(lambda: own(x), [x, *own.parameters()], do)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """CUDA graphs that are replayed, of what was not compiled before."""
    torch._dynamo.reset()
    counters.clear()
    seen, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (seen.append(graph), replay(graph))[1])
    return seen


def drawn(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("kind", ["batch", "packed", "lists"])
def test_reduce_overhead_runs_cuda_graphs(kind: str, replays: list[object]) -> None:
    """Forward and backward are one each, and take other starts."""
    total = sum(LENGTHS)
    if kind == "lists":
        of = [drawn(total, h, 64, seed=h).requires_grad_() for h in (4, 2, 2)]
        lists = torch.tensor([[0, 1, -1]], dtype=torch.int32, device="cuda").repeat(total, 2, 1)
        call, arguments = partial(selected_attention, block_size=64), (*of, lists)
    else:
        call = NSAttention(256, num_heads=4, num_kv_heads=2, config=FIXED).to("cuda", torch.bfloat16)
        arguments = (drawn(*(() if kind == "packed" else (2,)), total, 256).requires_grad_(),)
        of = [*arguments, *call.parameters()]
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for turn, lengths in enumerate((LENGTHS, OTHERS, LENGTHS, OTHERS)):
        given = {} if kind == "batch" else dict(cu_seqlens=starts_of_lengths(lengths, "cuda"))
        want = step(partial(call, *arguments), of, **given)
        replays.clear()
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(step(partial(compiled, *arguments), of, **given), want)
        assert turn < 2 or len(replays) == 2, (turn, len(replays))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_decodes(mode: str, replays: list[object]) -> None:
    """One graph for all lengths, past the end of a block; its caches are changed in place, and none is copied."""
    config, T, first, capacity = NSAConfig(block_counts=5, window_size=100), 330, 310, 1 << 16
    q, k, v = (drawn(2, T, h, 64, seed=i) for i, h in enumerate((8, 2, 2)))
    names = "k_cache", "v_cache", "k_cmp_cache", "v_cmp_cache"
    caches = {name: drawn(2, capacity // (64 if "cmp" in name else 1), 2, 64) for name in names}
    seqlens = torch.zeros(2, dtype=torch.int32, device="cuda")
    want = nsa(q, k, v, config=config, backend="eager")
    decode, tokens = partial(nsa_with_kvcache, config=config, cache_seqlens=seqlens, **caches), (q, k, v)
    start = dict(zip("qkv", (x[:, :first] for x in tokens)))
    decode(**start, backend="eager")
    seqlens += first
    for x in (*caches.values(), seqlens):
        torch._dynamo.mark_static_address(x)

    @partial(torch.compile, fullgraph=True, mode=mode)
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode(q, k=k, v=v) * 1

    for t in range(first, T):
        new = [x[:, t : t + 1].clone() for x in tokens]
        replays.clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.compiler.cudagraph_mark_step_begin()
        o = one(*new).clone()
        assert_near([o], [want[:, t : t + 1]])
        if t > first + 2:
            assert torch.cuda.max_memory_allocated() - before < caches["k_cache"].nbytes
            assert len(replays) == (mode == "reduce-overhead")
        seqlens += 1
    assert counters["inductor"]["cudagraph_skips"] == 0 and counters["stats"]["unique_graphs"] == 1
