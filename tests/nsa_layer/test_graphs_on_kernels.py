"""The kernels in CUDA graphs and under wrappers of training, and packed calls that never wait for the GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stub_kernels import stubbed_layer
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

from nsa_layer import NSAConfig, NSAttention, nsa, nsa_with_kvcache, selected_attention
from nsa_layer.call_spec import SELECTED_ALONE, CallSpec
from nsa_layer.config import ListConfig
from nsa_layer.cute.packing import Packing
from nsa_layer.operators import static_arguments
from nsa_layer.operators.registration import OPS
from nsa_layer.rope import RotaryEmbedding

Tensors = list[torch.Tensor]
FIXED = NSAConfig(deterministic=True)
DIM, HEADS = 256, dict(num_heads=4, num_kv_heads=2, head_dim=64)
LENGTHS, OTHERS = (300, 1, 0, 723), (64, 0, 65, 895)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def starts_of(lengths: tuple[int, ...], device: str = "cuda") -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    "config",
    [NSAConfig(), NSAConfig.paper(), NSAConfig(block_size=32), NSAConfig(block_size=32, q_tile=128)],
    ids=["default", "paper", "small blocks", "tiles"],
)
def test_starts_made_on_the_gpu_are_those_that_the_host_makes(config: NSAConfig) -> None:
    lengths, device = (0, 1, 31, 32, 33, 63, 64, 65, 79, 80, 81, 0, 1000), torch.device("cpu")
    total = sum(lengths)
    want = Packing.of(CallSpec(config, True, 1.0, lengths), device, 3)
    bounds = CallSpec(config, True, 1.0, bound=1000)
    got = Packing.of(bounds, device, 3, cu_seqlens=starts_of(lengths, "cpu"), total=total)
    for name in Packing._fields:
        x, y = getattr(got, name), getattr(want, name)
        if name.startswith("cu_"):
            assert torch.equal(x, y) and x.dtype == torch.int32 and x.data_ptr() % 16 == 0, name
        elif name.startswith("total"):
            assert y <= x <= y + len(lengths) + total // config.stride, name
    assert got[-4:-1] == want[-4:-1] and got.bounded and not want.bounded


@pytest.mark.parametrize("way", ["operator", "call"])
def test_kernels_are_launched_without_a_look_at_starts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a look would wait for it; here it is an error."""
    from nsa_layer import checks, selected
    from nsa_layer.operators import arguments, layer

    for module in (checks, selected):
        monkeypatch.setattr(module, "leaves_starts_on_gpu", lambda *_: True)
        monkeypatch.setattr(module, "check_lists", lambda *_, **__: None)  # which looks at lists on a CPU
    for module in (arguments, layer):
        monkeypatch.setattr(module, "stay_on_gpu", lambda starts: starts is not None)
    for name in ("tolist", "item", "nonzero", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(total, h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    lists, starts = torch.zeros(total, 2, 3, dtype=torch.int32), starts_of(LENGTHS, "cpu")
    given = dict(gate_weight=torch.randn(4, 3, 64, dtype=torch.bfloat16, requires_grad=True), cu_seqlens=starts)
    given |= dict(compress_k_weight=torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True))
    tiles = torch.zeros(sum(-(-length // 32) for length in LENGTHS), 2, 3, dtype=torch.int32)
    blocks = sum(map(NSAConfig().compressed_length, LENGTHS))
    own = {name: torch.randn(blocks, 2, 64, dtype=torch.bfloat16) for name in ("k_cmp", "v_cmp")}
    own |= dict(compress_k_weight=None)
    with stubbed_layer():
        if way == "operator":
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        calls = [
            nsa(q, k, v, **given, backend="cute"),
            nsa(q, k, v, **given, config=NSAConfig(q_tile=32), backend="cute"),
            nsa(q, k, v, **given, config=NSAConfig(q_tile=128), backend="cute"),
            nsa(q, k, v, block_indices=lists, max_seqlen=800, cu_seqlens=starts, backend="cute"),
            nsa(q, k, v, **given | own, block_indices=tiles, config=NSAConfig(q_tile=32), backend="cute"),
            nsa(q, k, v, **given, v_cmp=own["v_cmp"], backend="cute"),
            selected_attention(q, k, v, lists, block_size=64, cu_seqlens=starts, backend="cute"),
            selected_attention(q, k, v, tiles, block_size=64, cu_seqlens=starts, backend="cute"),
        ]
        for o in calls:
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


@pytest.mark.parametrize("q_tile", [1, 128])
def test_packs_of_as_many_tokens_may_be_of_more_or_fewer_sequences(
    q_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose lengths the host does not know keeps nothing that another number of sequences does not fit."""
    from nsa_layer import checks
    from nsa_layer.operators import arguments, layer

    monkeypatch.setattr(checks, "leaves_starts_on_gpu", lambda *_: True)
    for module in (arguments, layer):
        monkeypatch.setattr(module, "stay_on_gpu", lambda starts: starts is not None)
    q, k, v = (torch.randn(sum(LENGTHS), h, 64, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    with stubbed_layer():
        for lengths in (LENGTHS, (sum(LENGTHS),), (500, 524)):
            o = nsa(q, k, v, cu_seqlens=starts_of(lengths, "cpu"), config=NSAConfig(q_tile=q_tile), backend="cute")
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


def test_lists_that_are_returned_have_room_for_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_layer import checks
    from nsa_layer.operators import layer

    monkeypatch.setattr(checks, "leaves_starts_on_gpu", lambda *_: True)
    monkeypatch.setattr(layer, "stay_on_gpu", lambda starts: starts is not None)
    q, k, v = (torch.randn(sum(LENGTHS), h, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
    options = dict(cu_seqlens=starts_of(LENGTHS, "cpu"), config=NSAConfig(q_tile=32), backend="cute")
    with stubbed_layer():
        _, aux = nsa(q, k, v, **options, return_aux=True)
    assert aux.block_indices.shape == (32 + len(LENGTHS) - 1, 2, NSAConfig().list_width(1024))


def layer(**options: object) -> NSAttention:
    torch.manual_seed(0)
    return NSAttention(DIM, **HEADS, **dict(dict(config=FIXED), **options)).to("cuda", torch.bfloat16)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def step(call: Callable[..., torch.Tensor], of: Tensors, *args: object, **more: object) -> Tensors:
    o = call(*args, **more)
    return [o.detach().clone(), *(x.clone() for x in torch.autograd.grad(o.float().square().sum(), of))]


def assert_close(got: Tensors, want: Tensors) -> None:
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        error = (x.float() - y.float()).norm() / y.float().norm().clamp(min=1e-6)
        assert error < 0.02, (i, float(error))


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


MODULES = {
    "default": {},
    "linear": dict(compression="linear"),
    "small tiles": dict(config=FIXED.replace(q_tile=32)),
    "tiles": dict(config=FIXED.replace(q_tile=128, block_size=128)),
    "paper": dict(compression="mlp", kv_per_branch=True, gate="input", rope=RotaryEmbedding(64)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_starts_on_the_gpu_are_not_read(options: dict) -> None:
    """The host waits for nothing, and what comes out is the same."""
    module, x = layer(**options), drawn(sum(LENGTHS), DIM).requires_grad_()
    of = [x, *module.parameters()]
    want = step(module, of, x, cu_seqlens=starts_of(LENGTHS, "cpu"))
    starts = starts_of(LENGTHS)
    step(module, of, x, cu_seqlens=starts)
    with no_waits():
        got = step(module, of, x, cu_seqlens=starts)
        bounded = step(module, of, x, cu_seqlens=starts, max_seqlen=800)
    assert all(x.isfinite().all() for x in got)
    # A gradient of a weight is a product over more rows, and may be summed in another order.
    assert torch.equal(got[0], want[0]) and torch.equal(bounded[0], want[0])
    assert_close(got, want)
    assert_close(bounded, want)


@pytest.mark.gpu
@pytest.mark.parametrize("q_tile", [1, 32, 128])
def test_lists_and_compressed_keys_with_starts_on_the_gpu(q_tile: int) -> None:
    """With as many rows as there are tiles and blocks."""
    config, on_host, on_gpu = FIXED.replace(q_tile=q_tile), starts_of(LENGTHS, "cpu"), starts_of(LENGTHS)
    tiles, blocks = (sum(map(f, LENGTHS)) for f in (config.num_tiles, config.compressed_length))
    q, k, v = (drawn(sum(LENGTHS), h, 64, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    own = [drawn(blocks, 2, 64, seed=seed).requires_grad_() for seed in (7, 8)]
    lists = torch.tensor([[0, 1, -1]], dtype=torch.int32, device="cuda").repeat(tiles, 2, 1)
    call = partial(nsa, config=config, k_cmp=own[0], v_cmp=own[1], block_indices=lists)
    want = step(call, [q, k, v, *own], q, k, v, cu_seqlens=on_host)
    step(call, [q, k, v, *own], q, k, v, cu_seqlens=on_gpu)
    with no_waits():
        got = step(call, [q, k, v, *own], q, k, v, cu_seqlens=on_gpu)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("q_tile", [1, 32, 128])
def test_lists_are_returned_without_a_look_at_starts(q_tile: int) -> None:
    q, k, v = (drawn(sum(LENGTHS), h, 64) for h in (4, 2, 2))
    call = partial(nsa, q, k, v, config=NSAConfig(q_tile=q_tile), return_aux=True)
    want, _ = (call(cu_seqlens=starts_of(LENGTHS, on))[1] for on in ("cpu", "cuda"))
    starts = starts_of(LENGTHS)
    with no_waits():
        got = call(cu_seqlens=starts, max_seqlen=723)[1]
    rows = len(want.block_indices)
    assert (got.block_indices[rows:] == -1).all()
    got.block_indices = got.block_indices[:rows]
    assert all(torch.equal(x, y) for x, y in zip(vars(got).values(), vars(want).values(), strict=True))
    given_back = partial(call, block_indices=got.block_indices)
    assert torch.equal(given_back(cu_seqlens=starts)[0], given_back(cu_seqlens=starts_of(LENGTHS, "cpu"))[0])


@pytest.mark.gpu
def test_one_kind_of_compressed_rows_with_starts_on_the_gpu() -> None:
    """Fewer than there could be blocks."""
    blocks = sum(map(FIXED.compressed_length, LENGTHS))
    q, k, v = (drawn(sum(LENGTHS), h, 64, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    v_cmp = drawn(blocks, 2, 64, seed=7).requires_grad_()
    call = partial(nsa, config=FIXED, v_cmp=v_cmp)
    want = step(call, [q, k, v, v_cmp], q, k, v, cu_seqlens=starts_of(LENGTHS, "cpu"))
    starts = starts_of(LENGTHS)
    step(call, [q, k, v, v_cmp], q, k, v, cu_seqlens=starts)
    with no_waits():
        got = step(call, [q, k, v, v_cmp], q, k, v, cu_seqlens=starts)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [1, 32])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "a head each"])
def test_lists_with_starts_on_the_gpu(heads: tuple[int, int], tile: int) -> None:
    total, keys = sum(LENGTHS), tuple(length + 64 for length in LENGTHS)
    q = drawn(total, heads[0], 64).requires_grad_()
    k, v = (drawn(sum(keys), heads[1], 64, seed=seed).requires_grad_() for seed in (2, 3))
    count = sum(-(-length // tile) for length in LENGTHS)
    lists = torch.tensor([[0, 1, -1]], dtype=torch.int32, device="cuda").repeat(count, heads[1], 1)
    call = partial(selected_attention, block_size=64, deterministic=True)
    on_host, on_gpu = (
        dict(cu_seqlens=starts_of(LENGTHS, device), cu_seqlens_k=starts_of(keys, device)) for device in ("cpu", "cuda")
    )
    for more in ({}, dict(q_offset=3)):
        want, _ = (step(call, [q, k, v], q, k, v, lists, **starts, **more) for starts in (on_host, on_gpu))
        with no_waits():
            got = step(call, [q, k, v], q, k, v, lists, **on_gpu, **more)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
def test_wrong_starts_on_the_gpu_are_found_where_asked_for() -> None:
    q, k = drawn(1, 4, 64), drawn(1, 2, 64)
    starts = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="cu_seqlens must end at the 1 tokens"):
        nsa(q, k, k, cu_seqlens=starts, validate=True)
    lists = torch.zeros(1, 2, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="cu_seqlens must end at the 1 tokens"):
        selected_attention(q, k, k, lists, block_size=64, cu_seqlens=starts, validate=True)
    whole = dict(cu_seqlens=starts.clamp(max=1), validate=True)  # numbers of lists are all right
    assert not selected_attention(q, k, k, lists + 1, block_size=64, **whole).any()
    assert nsa(q, k, k, block_indices=lists + 1, **whole).isfinite().all()


@pytest.mark.gpu
def test_a_captured_call_takes_other_starts() -> None:
    module, x = layer(), drawn(sum(LENGTHS), DIM).requires_grad_()
    of, starts = [x, *module.parameters()], starts_of(LENGTHS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(module, of, x, cu_seqlens=starts)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step(module, of, x, cu_seqlens=starts)
    for lengths in (OTHERS, LENGTHS):
        starts.copy_(starts_of(lengths))
        graph.replay()
        assert_close(static, step(module, of, x, cu_seqlens=starts_of(lengths, "cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_pytorch_finds_nothing_wrong_with_the_operators(packed: bool) -> None:
    total = sum(LENGTHS)
    lead, starts = ((total,), starts_of(LENGTHS)) if packed else ((1, total), None)
    # Heads come first in memory: the strides are not those of a contiguous tensor.
    q, k, v = (drawn(*lead[:-1], h, total, 64, seed=h).transpose(-2, -3).requires_grad_() for h in (4, 2, 2))
    weight, lists = drawn(4, 3, 64), torch.zeros(*lead, 2, 3, dtype=torch.int32, device="cuda")
    how = dict(backend="cute", heads=1, kept=[False, True, True], budget=None, bound=None, needs_grad=True)
    static = static_arguments(CallSpec(FIXED, True, 0.125)) | how
    opcheck(OPS.attend.default, (q, k, v, weight, *[None] * 7, starts, *[None] * 3), static)
    config = ListConfig(block_size=64, q_tile=1, window_size=0)
    static = static_arguments(CallSpec(config, True, 0.125, branches=SELECTED_ALONE)) | how
    opcheck(OPS.attend.default, (q, k, v, *[None] * 8, starts, lists, None, None), static)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """CUDA graphs that are replayed."""
    seen, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (seen.append(graph), replay(graph))[1])
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_reduce_overhead_runs_cuda_graphs(packed: bool, replays: list[object]) -> None:
    """Forward and backward are one each, and take other starts."""
    module, total = layer(), sum(LENGTHS)
    x = drawn(total, DIM) if packed else drawn(2, total, DIM)
    x.requires_grad_()
    of = [x, *module.parameters()]
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    for turn, lengths in enumerate((LENGTHS, OTHERS, LENGTHS, OTHERS)):
        given = dict(cu_seqlens=starts_of(lengths)) if packed else {}
        want = step(module, of, x, **given)
        replays.clear()
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(step(compiled, of, x, **given), want)
        assert turn < 2 or len(replays) == 2, (turn, len(replays))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_reduce_overhead_runs_lists_in_cuda_graphs(replays: list[object]) -> None:
    total = sum(LENGTHS)
    q, k, v = (drawn(total, h, 64, seed=h).requires_grad_() for h in (4, 2, 2))
    lists = torch.tensor([[0, 1, -1]], dtype=torch.int32, device="cuda").repeat(total, 2, 1)
    call = partial(selected_attention, block_size=64)
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    for turn, lengths in enumerate((LENGTHS, OTHERS, LENGTHS)):
        given, starts = (q, k, v, lists), starts_of(lengths)
        want = step(call, [q, k, v], *given, cu_seqlens=starts)
        replays.clear()
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(step(compiled, [q, k, v], *given, cu_seqlens=starts), want)
        assert turn < 2 or len(replays) == 2, (turn, len(replays))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_decodes(mode: str, replays: list[object]) -> None:
    """One graph for all lengths, past the end of a block; its caches are changed in place, and none is copied."""
    config, T, first, room = NSAConfig(block_counts=5, window_size=100), 330, 310, 1 << 16
    q, k, v = (drawn(2, T, h, 64, seed=i) for i, h in enumerate((8, 2, 2)))
    names = "k_cache", "v_cache", "k_cmp_cache", "v_cmp_cache"
    caches = {name: drawn(2, room // (64 if "cmp" in name else 1), 2, 64) for name in names}
    seqlens = torch.zeros(2, dtype=torch.int32, device="cuda")
    want = nsa(q, k, v, config=config, backend="eager")
    decode, tokens = partial(nsa_with_kvcache, config=config, cache_seqlens=seqlens, **caches), (q, k, v)
    start = dict(zip("qkv", (x[:, :first] for x in tokens)))
    decode(**start, backend="eager")
    seqlens += first
    for x in (*caches.values(), seqlens):
        torch._dynamo.mark_static_address(x)

    @partial(torch.compile, fullgraph=True, mode=mode)
    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return decode(q, k=k, v=v) * 1

    counters.clear()
    for t in range(first, T):
        new = [x[:, t : t + 1].clone() for x in tokens]
        replays.clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.compiler.cudagraph_mark_step_begin()
        o = one(*new).clone()
        assert_close([o], [want[:, t : t + 1]])
        if t > first + 2:
            assert torch.cuda.max_memory_allocated() - before < caches["k_cache"].nbytes
            assert len(replays) == (mode == "reduce-overhead")
        seqlens += 1
    assert counters["inductor"]["cudagraph_skips"] == 0 and counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_wrappers_of_distributed_training_run_the_kernels(tmp_path: Path) -> None:
    """In one process, by NCCL."""
    module, x = layer(), drawn(1, 1000, DIM)
    want = [d.clone() for d in torch.autograd.grad(module(x).float().square().mean(), list(module.parameters()))]
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        both = DistributedDataParallel(copy.deepcopy(module)), fully_shard(module, mesh=init_device_mesh("cuda", (1,)))
        for wrapped in both:
            wrapped(x).float().square().mean().backward()
            found = [p.grad for p in wrapped.parameters()]
            assert_close([d.full_tensor() if isinstance(d, DTensor) else d for d in found], want)
    finally:
        dist.destroy_process_group()
