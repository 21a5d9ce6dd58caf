"""The starts of packed sequences may lie, and change, as they like. The numbers: `fuzz/properties/layer.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nsa_layer import NSAConfig, NSAttention, nsa
from nsa_layer.call_spec import CallSpec, CallTensors
from nsa_layer.checks import Arguments, check_inputs
from nsa_layer.cute import host_numbers, packing
from nsa_layer.cute.host_numbers import HostCopy, starts_on
from nsa_layer.cute.packing import Packing
from nsa_layer.rope import RotaryEmbedding
from nsa_tools.testing.cases import Case, Inputs, make_inputs, run

SMALL = NSAConfig(block_size=16, block_counts=6, q_tile=64, window_size=24)
LENGTHS = (33, 0, 1, 15, 16, 130, 0)


def test_starts_on_the_host_are_copied_once() -> None:
    """To the device that everything else is on."""
    first, second = (Packing.of(CallSpec(SMALL, True, 1.0, LENGTHS), torch.device("meta")) for _ in range(2))
    assert first.cu_seqlens is second.cu_seqlens and first.cu_tiles is second.cu_tiles
    assert first.cu_seqlens.device.type == "meta" and first.cu_seqlens.shape == (len(LENGTHS) + 1,)


@pytest.mark.parametrize("sequences", range(1, 6))
def test_starts_are_aligned(sequences: int) -> None:
    """Attention would copy them otherwise, whenever it is called."""
    packing = Packing.of(CallSpec(SMALL, True, 1.0, (7,) * sequences), torch.device("cpu"))
    for starts in (packing.cu_seqlens, packing.cu_blocks, packing.cu_tiles):
        assert starts.data_ptr() % 16 == 0 and starts.is_contiguous()


def test_copies_that_a_transform_wraps_are_not_for_later_calls() -> None:
    device, spec = torch.device("meta"), CallSpec(SMALL, True, 1.0, (7, 9))
    starts, made = torch.tensor([0, 7, 16], dtype=torch.int32), []

    def make(x: torch.Tensor) -> torch.Tensor:
        made.extend((Packing.of(spec, device).cu_seqlens, starts_on(starts, device)))
        return x

    torch.func.grad(make)(torch.ones(()))
    with FakeTensorMode():
        make(torch.ones(()))
    make(torch.ones(()))
    plain = [type(x) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x) for x in made]
    assert plain == [False] * 4 + [True] * 2


def test_a_capture_keeps_what_it_reads_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known, new = (CallSpec(SMALL, True, 1.0, lengths) for lengths in ((5, 6), (6, 5)))
    device = torch.device("meta")
    before = Packing.of(known, device)
    monkeypatch.setattr(host_numbers, "_is_captured", lambda device: True)
    monkeypatch.setattr(host_numbers, "_held", {})
    captured = Packing.of(known, device)
    assert captured.cu_seqlens is before.cu_seqlens
    (held,) = host_numbers._held.values()
    assert held is captured.cu_seqlens._base is captured.cu_blocks._base is captured.cu_tiles._base
    with pytest.raises(RuntimeError, match="make it once before"):
        Packing.of(new, device)


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
    copy = HostCopy(Numbers(), Stream("main"), "sent")
    current = Stream("main")
    assert copy.ready() is copy.numbers and done == []
    current = Stream("side")
    assert copy.ready() is copy.numbers and done == [("side", "waits for", "sent"), ("kept for", "side")]


def launched_with(given: torch.Tensor) -> int:
    """Tensors that kernels were launched with; none of them is, or is made of, the one that is given."""
    tensors = [x for x in tree_leaves([args for _, args in LAUNCHED]) if isinstance(x, torch.Tensor)]
    memory = given.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() != memory for x in tensors if x.numel())
    return len(tensors)


@pytest.mark.parametrize("strided", [False, True])
def test_kernels_never_read_the_starts_of_the_caller(strided: bool) -> None:
    """They may be refilled before backward, and lie in memory as they like."""
    case = Case(lengths=(300, 0, 70), Hq=4, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=4))
    inputs = make_inputs(case)
    if strided:
        table = torch.stack([inputs.cu_seqlens] * 2, dim=1)
        inputs = replace(inputs, cu_seqlens=table[:, 0])
    with stubbed_layer():
        LAUNCHED.clear()
        run("cute", inputs)
        assert launched_with(inputs.cu_seqlens) > 20


def refilled(inputs: Inputs, backend: str, way: str) -> list[torch.Tensor]:
    """Outputs and gradients of two packings in one buffer, which holds a third one when backward comes."""
    case, other = inputs.case, tuple(reversed(inputs.case.lengths))
    packings = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (case.lengths, other)]
    with torch.inference_mode(way == "inference"):
        buffer = torch.empty_like(packings[0], device=inputs.q.device)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.gate_weight)]

    def fill(starts: torch.Tensor) -> None:
        with torch.inference_mode(way == "inference"):
            buffer.copy_(starts)

    def call() -> torch.Tensor:
        q, k, v, gate_weight = leaves
        starts = buffer.clone() if way == "copied" else buffer
        return nsa(q, k, v, gate_weight=gate_weight, cu_seqlens=starts, config=case.config, backend=backend)

    outputs = []
    for starts in packings:
        fill(starts)
        outputs.append(call())
    fill(torch.tensor([0, *[sum(case.lengths)] * len(case.lengths)]))
    do = [inputs.do, inputs.do.flip(0)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, do)]


@pytest.mark.parametrize("way", ["refilled", "inference"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_starts_refilled_before_backward(device: str, way: str) -> None:
    if device == "cpu":
        inputs, backend = make_inputs(Case(lengths=LENGTHS, config=SMALL)), "eager"
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    else:
        config = NSAConfig(block_counts=6, deterministic=True)
        case = Case(lengths=(300, 0, 1, 700), Hq=8, Hkv=2, D=64, dtype=torch.bfloat16, config=config)
        inputs, backend = make_inputs(case, "cuda"), "cute"
    for x, y in zip(refilled(inputs, backend, way), refilled(inputs, backend, "copied"), strict=True):
        assert torch.equal(x, y)


def test_starts_copied_under_inference_mode_serve_training() -> None:
    layer = NSAttention(24, num_heads=4, num_kv_heads=2, config=SMALL, rope=RotaryEmbedding(6), device="meta")
    x, starts = torch.empty(23, 24, device="meta"), torch.tensor([0, 11, 23], dtype=torch.int32)
    with torch.inference_mode():
        layer(x, cu_seqlens=starts)
    layer(x, cu_seqlens=starts).sum().backward()
    assert layer.q_proj.weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [True, False])
def test_forgotten_copies_outlive_what_reads_them(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `record_stream` their memory is given to the next tensor while another stream has still to read it."""
    device, spec = torch.device("cuda", torch.cuda.current_device()), CallSpec(SMALL, True, 1.0, (30, 40, 50))
    if not kept:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    Packing.of(spec, device)
    torch.cuda.synchronize()
    side, place, others = torch.cuda.Stream(), Packing.of(spec, device).cu_seqlens.data_ptr(), []
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 30)
        read = Packing.of(spec, device).cu_seqlens.clone()
    packing._starts.cache_clear()
    for _ in range(10_000):  # until the allocator's other free blocks of the size are used up
        others.append(torch.full((3, 4), -1, dtype=torch.int32, device=device))
        if others[-1].data_ptr() == place:
            break
    torch.cuda.synchronize()
    assert (read.tolist() == [0, 30, 70, 120]) == kept


def test_starts_on_the_host_go_with_tokens_on_a_gpu() -> None:
    """Nothing on the GPU is read: these tokens are nowhere."""
    starts = torch.tensor([0, 3, 20], dtype=torch.int32)
    with FakeTensorMode():
        q, k, v = (torch.empty(20, H, 8, device="cuda") for H in (4, 2, 2))
    tensors = CallTensors(q, k, v, cu_seqlens=starts)
    spec = check_inputs(Arguments(tensors, SMALL, softmax_scale=None, max_seqlen=None, causal=True))
    assert spec.lengths == (3, 17)
