"""Packed sequences: starts of everything, that may lie, stay on the GPU and change as they like.

The numbers are a property of `fuzz/properties/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from layer_calls import assert_near, no_waits, step
from stub_kernels import LAUNCHED, stubbed_layer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_layer import NSAConfig, NSAttention, checks, nsa, selected_attention
from nsa_layer.call import Call, CallSpec
from nsa_layer.checks import check_inputs, starts_of_lengths
from nsa_layer.cute import host_constants
from nsa_layer.cute.host_constants import numbers_on, starts_on
from nsa_layer.cute.varlen import Varlen
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.measure.timing import capture
from nsa_tools.testing.cases import Case, Inputs, make_inputs, run

Tensor = torch.Tensor
SMALL = NSAConfig(block_size=16, block_counts=6, q_tile=64, window_size=24)
FIXED = NSAConfig(deterministic=True)
SHORT = (0, 1, 31, 32, 33, 63, 64, 65, 79, 80, 81, 0, 1000)
LENGTHS, OTHERS = (300, 1, 0, 723), (64, 0, 65, 895)
CONFIGS = {
    "default": NSAConfig(),
    "paper": NSAConfig.paper(),
    "small blocks": NSAConfig(block_size=32),
    "small blocks, tiles": NSAConfig(block_size=32, q_tile=128),
    "large blocks, tiles": NSAConfig(block_size=128, q_tile=128),
    "stride": NSAConfig(compress_stride=16),
}


def starts_by_host(lengths: tuple[int, ...], device: str = "meta", config: NSAConfig = SMALL) -> Varlen:
    return Varlen.of(three_heads(CallSpec(config, True, 1.0, lengths), sum(lengths), device))


def three_heads(spec: CallSpec, total: int, device: str = "cpu") -> Call:
    q, k = (torch.empty(total, heads, 1, device=device) for heads in (3, 1))
    return Call(q, k, k, spec=spec)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_starts_of_everything(config: NSAConfig) -> None:
    """As the host makes them of lengths, and the GPU of starts; attention would copy them if they were not aligned."""
    host, total = starts_by_host(SHORT, "cpu", config), sum(SHORT)
    counts = dict(cu_seqlens=lambda T: T, cu_compressed=config.compressed_length)
    counts |= dict(cu_tiles=config.num_tiles, cu_key_blocks=config.num_blocks)
    for name, count in counts.items():
        assert getattr(host, name).tolist() == [*accumulate(map(count, SHORT), initial=0)], name
    for bound, starts in ((host.total_compressed, host.cu_compressed), (host.total_key_blocks, host.cu_key_blocks)):
        assert starts[-1] <= bound <= starts[-1] + len(SHORT) + total // config.stride
    assert (host.longest, host.longest_compressed) == (1000, config.compressed_length(1000))
    call = three_heads(CallSpec(config, True, 1.0, bound=1000), total)
    gpu = Varlen.of(call._replace(cu_seqlens=starts_of_lengths(SHORT)))
    for name in Varlen._fields:
        x, y = getattr(gpu, name), getattr(host, name)
        if name.startswith("cu_"):
            assert torch.equal(x, y) and x.dtype == y.dtype == torch.int32, name
        elif name == "total_row_tiles":
            assert y == host.cu_row_tiles[-1] <= x < y + len(SHORT)
        else:
            assert x == y, name
    for each in (gpu, *(starts_by_host(SHORT[-n:], "cpu", config) for n in range(1, 6))):
        cu = [x for name, x in each._asdict().items() if name.startswith("cu_") and x is not None]
        assert all(x.data_ptr() % 16 == 0 and x.is_contiguous() for x in cu)


def test_copies_that_a_transform_wraps_are_not_for_later_calls() -> None:
    made, starts = [], starts_of_lengths((7, 9))

    def make(x: Tensor) -> Tensor:
        made.extend((starts_by_host((7, 9)).cu_seqlens, starts_on(starts, torch.device("meta"))))
        return x

    torch.func.grad(make)(torch.ones(()))
    with FakeTensorMode():
        make(torch.ones(()))
    make(torch.ones(()))
    plain = [type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x) for x in made]
    assert plain == [False] * 4 + [True] * 2


def test_copies_are_made_once_and_kept_by_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    before = starts_by_host((5, 6))
    assert before.cu_seqlens.device.type == "meta" and before.cu_seqlens.shape == (3,)
    monkeypatch.setattr(host_constants, "_is_captured", lambda device: True)
    monkeypatch.setattr(host_constants, "_held", {})

    class Recording(TorchDispatchMode):
        """A mode with plain tensors, as PyTorch records graphs in."""

        def __torch_dispatch__(self, function: Callable, types: object, args: tuple = (), kwargs: object = None):
            return function(*args, **(kwargs or {}))

    with Recording():
        within = starts_by_host((5, 6))
    assert within.cu_seqlens is before.cu_seqlens
    (held,) = host_constants._held.values()
    assert held is within.cu_seqlens._base is within.cu_compressed._base is within.cu_tiles._base
    with pytest.raises(RuntimeError, match="run a call with these lengths once before capturing it"):
        starts_by_host((6, 5))


def test_copies_are_kept_for_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what it has still to do when the caches forget them; their own stream waits for nothing."""
    done: list[object] = []

    class Stream(str):
        def wait_event(self, event: str) -> None:
            done.append((self, "waits for", event))

    class Numbers:
        device = torch.device("meta")

        def record_stream(self, stream: Stream) -> None:
            done.append(("kept for", stream))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    rows = [torch.zeros(1)]
    monkeypatch.setattr(host_constants, "_copied", lambda *_: (Numbers(), rows, (Stream("main"), "sent")))
    current = Stream("main")
    assert numbers_on(((0,),), Numbers.device) is rows and done == []
    current = Stream("side")
    assert numbers_on(((0,),), Numbers.device) is rows
    assert done == [("side", "waits for", "sent"), ("kept for", "side")]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("way", ["plain", "strided", "inference"])
def test_kernels_never_read_the_callers_starts(way: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be refilled before backward, and lie in memory as they like."""
    monkeypatch.setattr(checks, "is_on_gpu", lambda starts: on_gpu)
    inputs = make_inputs(Case(lengths=(300, 0, 70), D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=4)))
    with torch.inference_mode(way == "inference"):
        starts = torch.stack([inputs.cu_seqlens] * 2, dim=1)[:, 0] if way == "strided" else inputs.cu_seqlens.clone()
    memory, tensors = starts.untyped_storage().data_ptr(), []
    with stubbed_layer(), saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        LAUNCHED.clear()
        run("cute", replace(inputs, cu_seqlens=starts))
        tensors += [x for x in tree_leaves([args for _, args in LAUNCHED]) if isinstance(x, Tensor)]
    assert len(tensors) > 20 and all(x.untyped_storage().data_ptr() != memory for x in tensors if x.numel())


def refilled(inputs: Inputs, way: str) -> list[Tensor]:
    """Outputs and gradients of two packings in one buffer, which holds a third one when backward comes."""
    case, lengths = inputs.case, inputs.case.lengths
    with torch.inference_mode(way == "inference"):
        buffer = torch.empty_like(inputs.cu_seqlens)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.gate_weight)]

    def fill(lengths: tuple[int, ...]) -> None:
        with torch.inference_mode(way == "inference"):
            buffer.copy_(starts_of_lengths(lengths))

    def call(lengths: tuple[int, ...]) -> Tensor:
        fill(lengths)
        q, k, v, gate_weight = leaves
        starts = buffer.clone() if way == "copied" else buffer
        return nsa(q, k, v, gate_weight=gate_weight, cu_seqlens=starts, config=case.config)

    outputs = [call(lengths), call(lengths[::-1])]
    fill((sum(lengths), *[0] * (len(lengths) - 1)))
    return [*outputs, *torch.autograd.grad(outputs, leaves, [inputs.do, inputs.do.flip(0)])]


@pytest.mark.parametrize("way", ["refilled", "inference"])
def test_starts_refilled_before_backward(way: str) -> None:
    inputs = make_inputs(Case(lengths=(33, 0, 1, 15, 16, 130, 0), config=SMALL))
    for x, y in zip(refilled(inputs, way), refilled(inputs, "copied"), strict=True):
        assert torch.equal(x, y)


def test_starts_copied_under_inference_mode_serve_training() -> None:
    layer = NSAttention(24, num_heads=4, num_kv_heads=2, config=SMALL, rope=RotaryEmbedding(6), device="meta")
    x, starts = torch.empty(23, 24, device="meta"), starts_of_lengths((11, 12))
    with torch.inference_mode():
        layer(x, cu_seqlens=starts)
    layer(x, cu_seqlens=starts).sum().backward()
    assert layer.q_proj.weight.grad is not None


def test_starts_on_the_host_go_with_tokens_on_a_gpu() -> None:
    """Nothing on the GPU is read: these tokens are nowhere."""
    with FakeTensorMode():
        q, k, v = (torch.empty(20, H, 8, device="cuda") for H in (4, 2, 2))
    call = Call(q, k, v, cu_seqlens=starts_of_lengths((3, 17)))
    spec = check_inputs(call, config=SMALL, softmax_scale=None, max_seqlen=None, causal=True)
    assert spec.lengths == (3, 17)


@pytest.fixture
def left_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts count as those on a GPU, whose values the host has not read."""
    monkeypatch.setattr(checks, "is_on_gpu", lambda starts: True)


def halves(*heads: int) -> list[Tensor]:
    return [torch.randn(sum(LENGTHS), h, 64, dtype=torch.bfloat16, requires_grad=True) for h in heads]


@pytest.mark.parametrize("name", ["k_cmp", "v_cmp"])
def test_means_beside_too_few_rows_of_the_caller_stay_in_memory(name: str, left_on_gpu: None) -> None:
    """Kernels write as many as the starts ask for, which nobody has read."""
    q, k, v = halves(4, 2, 2)
    few = {name: torch.zeros(1, 2, 64, dtype=torch.bfloat16)}
    with stubbed_layer():
        LAUNCHED.clear()
        nsa(q, k, v, cu_seqlens=starts_of_lengths(LENGTHS), backend="cute", **few)
    (args,) = (args for (kernel, *_), args in LAUNCHED if "mean_pool" in str(kernel))
    means = [x for x in args[2:5] if x is not None]
    assert means and all(len(x) >= sum(map(NSAConfig().compressed_length, LENGTHS)) for x in means)


@pytest.mark.parametrize("way", ["operator", "call"])
def test_kernels_launch_without_reading_starts(way: str, left_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a look would wait for it; here it is an error."""
    monkeypatch.setattr(checks, "check_lists", lambda *_, **__: None)  # which looks at lists on a CPU
    for name in ("tolist", "item", "nonzero", "__bool__"):
        monkeypatch.setattr(Tensor, name, None)
    starts, config, of_tiles = starts_of_lengths(LENGTHS), NSAConfig(), NSAConfig(q_tile=32)
    q, k, v = halves(4, 2, 2)
    weights = torch.randn(4, 3, 64, dtype=torch.bfloat16), torch.randn(2, 64, 64, dtype=torch.bfloat16)
    given = dict(zip(("gate_weight", "compress_k_weight"), (x.requires_grad_() for x in weights)))
    lists, tiles = (torch.zeros(sum(map(c.num_tiles, LENGTHS)), 2, 3, dtype=torch.int32) for c in (config, of_tiles))
    blocks = sum(map(config.compressed_length, LENGTHS))
    own = {name: torch.randn(blocks, 2, 64, dtype=torch.bfloat16) for name in ("k_cmp", "v_cmp")}
    calls = [
        *(given | dict(config=c) for c in (config, of_tiles, NSAConfig(q_tile=128))),
        dict(block_indices=lists, max_seqlen=800),
        given | own | dict(compress_k_weight=None, block_indices=tiles, config=of_tiles),
        given | dict(v_cmp=own["v_cmp"]),
    ]
    with stubbed_layer():
        if way == "operator":
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        outputs = [nsa(q, k, v, **call, cu_seqlens=starts, backend="cute") for call in calls]
        for each in (lists, tiles):
            outputs.append(selected_attention(q, k, v, each, block_size=64, cu_seqlens=starts, backend="cute"))
        for o in outputs:
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


@pytest.mark.parametrize("q_tile", [1, 32, 128])
def test_packs_of_as_many_tokens_may_be_of_more_or_fewer_sequences(q_tile: int, left_on_gpu: None) -> None:
    """A call whose lengths the host does not know keeps nothing that another number of sequences does not fit, and
    returns lists with the capacity for any lengths."""
    (q, k, v), options = halves(4, 2, 2), dict(config=NSAConfig(q_tile=q_tile), backend="cute", return_aux=True)
    with stubbed_layer():
        for lengths in (LENGTHS, (sum(LENGTHS),), (500, 524)):
            o, aux = nsa(q, k, v, cu_seqlens=starts_of_lengths(lengths), **options)
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
            tiles = 1024 // q_tile + (len(lengths) - 1) * (q_tile > 1)
            assert aux.block_indices.shape == (tiles, 2, NSAConfig().list_width(1024))


def assert_unread(
    call: Callable[..., Tensor], of: list[Tensor], *, exact: bool = True, **lengths: tuple[int, ...]
) -> None:
    """A step with starts on the GPU, that the host does not wait for, is that with starts that it knows.

    exact: gradients too, to the bit.
    """
    on_host, on_gpu = ({name: starts_of_lengths(x, on) for name, x in lengths.items()} for on in ("cpu", "cuda"))
    want, _ = (step(call, of, **starts) for starts in (on_host, on_gpu))
    with no_waits():
        got = step(call, of, **on_gpu)
    assert all(x.isfinite().all() for x in got) and torch.equal(got[0], want[0])
    assert_near(got, want)
    assert not exact or all(map(torch.equal, got, want))


def few_blocks(tiles: int) -> Tensor:
    return torch.tensor([[0, 1, -1]], dtype=torch.int32, device="cuda").repeat(tiles, 2, 1)


MODULES = {
    "default": {},
    "linear": dict(compression="linear"),
    "small tiles": dict(config=FIXED.replace(q_tile=32)),
    "tiles": dict(config=FIXED.replace(q_tile=128, block_size=128)),
    "paper": dict(compression="mlp", kv_per_branch=True, gate="input", rope=RotaryEmbedding(64)),
}


def module_and_tokens(**options: object) -> tuple[NSAttention, Tensor]:
    torch.manual_seed(0)
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=64)
    module = NSAttention(256, **sizes, **dict(config=FIXED) | options).to("cuda", torch.bfloat16)
    return module, torch.randn(sum(LENGTHS), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_a_module_does_not_read_starts_on_the_gpu(options: dict) -> None:
    """What comes out is the same, with a bound of the lengths too."""
    module, x = module_and_tokens(**options)
    for bound in ({}, dict(max_seqlen=800)):
        # A gradient of a weight is a product over more rows, summed in another order.
        assert_unread(partial(module, x, **bound), [x, *module.parameters()], exact=False, cu_seqlens=LENGTHS)


OWN = ("k_cmp", "v_cmp")


@pytest.mark.gpu
@pytest.mark.parametrize("q_tile, own, lists", [(1, OWN, True), (32, OWN, True), (128, OWN, True), (1, OWN[1:], False)])
def test_lists_and_compressed_keys_with_starts_on_the_gpu(q_tile: int, own: tuple[str, ...], lists: bool) -> None:
    """As many rows as there are tiles and blocks, fewer than there could be."""
    config = FIXED.replace(q_tile=q_tile)
    case = Case(lengths=LENGTHS, D=64, dtype=torch.bfloat16, config=config, own_keys=own, gate="none")
    given = {name: x.requires_grad_() for name, x in make_inputs(case, "cuda").tensors().items()}
    block_indices = few_blocks(sum(map(config.num_tiles, LENGTHS))) if lists else None
    call = partial(nsa, **given, block_indices=block_indices, config=config)
    assert_unread(call, list(given.values()), cu_seqlens=LENGTHS)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, dict(q_offset=3)], ids=str)
@pytest.mark.parametrize("tile", [1, 32])
@pytest.mark.parametrize("Hq", [4, 2], ids=["grouped", "a head each"])
def test_lists_alone_with_starts_on_the_gpu(Hq: int, tile: int, more: dict) -> None:
    keys = tuple(length + 64 for length in LENGTHS)
    tokens = (sum(LENGTHS), Hq), (sum(keys), 2), (sum(keys), 2)
    q, k, v = of = [torch.randn(*x, 64, device="cuda").bfloat16().requires_grad_() for x in tokens]
    lists = few_blocks(sum(-(-length // tile) for length in LENGTHS))
    call = partial(selected_attention, q, k, v, lists, block_size=64, deterministic=True, **more)
    assert_unread(call, of, cu_seqlens=LENGTHS, cu_seqlens_k=keys)


@pytest.mark.gpu
@pytest.mark.parametrize("q_tile", [1, 32, 128])
def test_lists_are_returned_without_a_look_at_starts(q_tile: int) -> None:
    q, k, v = (x.detach().cuda() for x in halves(4, 2, 2))
    call, starts = (
        partial(nsa, q, k, v, config=NSAConfig(q_tile=q_tile), return_aux=True),
        starts_of_lengths(LENGTHS, "cuda"),
    )
    want, _ = (call(cu_seqlens=x)[1] for x in (starts.cpu(), starts))
    with no_waits():
        got = call(cu_seqlens=starts, max_seqlen=723)[1]
    rows, columns = len(want.block_indices), want.block_indices.shape[-1]
    assert (got.block_indices[rows:] == -1).all() and (got.block_indices[..., columns:] == -1).all()
    got.block_indices = got.block_indices[:rows, ..., :columns]
    assert got.index_scores is None
    for name in ("block_indices", "gates", "lse_cmp", "lse_slc", "lse_swa"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    given_back = partial(call, block_indices=got.block_indices)
    assert torch.equal(given_back(cu_seqlens=starts)[0], given_back(cu_seqlens=starts.cpu())[0])


@pytest.mark.gpu
def test_wrong_starts_on_the_gpu_are_found_where_asked_for() -> None:
    q, k = (torch.randn(1, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2))
    starts, lists = starts_of_lengths((2,), "cuda"), torch.zeros(1, 2, 1, dtype=torch.int32, device="cuda")
    for call in (partial(nsa, q, k, k), partial(selected_attention, q, k, k, lists, block_size=64)):
        with pytest.raises(ValueError, match="cu_seqlens must end at the 1 tokens"):
            call(cu_seqlens=starts, validate=True)
    whole = dict(cu_seqlens=starts.clamp(max=1), validate=True)  # numbers of lists are all right
    assert not selected_attention(q, k, k, lists + 1, block_size=64, **whole).any()
    assert nsa(q, k, k, block_indices=lists + 1, **whole).isfinite().all()


@pytest.mark.gpu
def test_a_captured_call_takes_other_starts() -> None:
    module, x = module_and_tokens()
    of, starts = [x, *module.parameters()], starts_of_lengths(LENGTHS, "cuda")
    graph, static = capture(lambda: step(partial(module, x), of, cu_seqlens=starts), warm_ups=3)
    for lengths in (OTHERS, LENGTHS):
        starts.copy_(starts_of_lengths(lengths))
        graph.replay()
        assert_near(static, step(partial(module, x), of, cu_seqlens=starts_of_lengths(lengths)))
