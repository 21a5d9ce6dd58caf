"""The layer on a GPU that is not the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import NSAConfig
from nsa_layer.call import TENSORS, CallSpec
from nsa_layer.operators import layer, static_arguments
from nsa_tools.testing.cases import Case, make_inputs, run

CONFIG = NSAConfig(block_size=64, q_tile=128, block_counts=4, window_size=128, deterministic=True)


def test_the_gpu_of_the_tensors_is_the_current_one_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from nsa_layer.cute import backend

    entered: list[int] = []

    @contextmanager
    def device_of(x: torch.Tensor) -> Iterator[None]:
        entered.append(x.device.index)
        try:
            yield
        finally:
            entered.pop()

    def asked(*_: object, **__: object) -> None:
        raise RuntimeError(f"asked on {entered}")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(backend, "forward", asked)
    with FakeTensorMode():
        q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="cuda:1")
    static = static_arguments(CallSpec(CONFIG, True, 0.125)).values()
    with pytest.raises(RuntimeError, match=r"asked on \[1\]"):
        layer._forward(q, q, q, *[None] * (len(TENSORS) - 3), *static, 2, None, [False] * 3, None, False)
    assert not entered


def test_each_gpu_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another architecture would not run."""
    pytest.importorskip("cutlass")
    from nsa_layer.kernels import launch

    made: list[str] = []
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_load_or_compile", lambda name, *_: made.append(name) or print)
    with FakeTensorMode():
        for index in (0, 1, 0, 1):
            launch.launch("kernel", object, (64,), 1, torch.empty(2, device=f"cuda:{index}"))
    assert made == ["kernel"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("lengths", [None, (300, 0, 77, 647)], ids=["batch", "packed"])
def test_the_other_gpu_gives_the_same(lengths: tuple[int, ...] | None) -> None:
    torch.cuda.set_device(0)
    sizes = dict(B=2, T=1024, D=64, dtype=torch.bfloat16, compress_weights=True)
    case = Case(**sizes, lengths=lengths, config=CONFIG)
    expected, got = (run("cute", make_inputs(case, f"cuda:{index}")) for index in (0, 1))
    assert torch.cuda.current_device() == 0
    for name, x in got.tensors().items():
        assert torch.equal(x.cpu(), expected.tensors()[name].cpu()), name
