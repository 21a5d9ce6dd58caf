"""Around the kernels, the layer adds floating-point numbers in an order that a GPU keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_layer import NSAConfig
from nsa_layer.testing import Case, make_inputs, run

# Operators that add through atomics, or in an order that changes, on CUDA tensors of floating point.
UNORDERED = ("index_add", "scatter_add", "scatter_reduce", "index_put", "put", "cumsum", "histc", "bincount")


class Recorder(TorchDispatchMode):
    """The operators that ran, as (name, whether a tensor of floating point took part)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        name = func.overloadpacket.__name__.removesuffix("_")
        self.seen.add((name, any(x.is_floating_point() for x in tensors)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [None, (300, 0, 1, 699)], ids=["batch", "packed"])
@pytest.mark.parametrize("per_head", [False, True])
def test_nothing_is_added_through_atomics(
    per_head: bool, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_layer import autograd, branches

    def forward(q, k, v, **options):
        return torch.ones_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32).mT.contiguous()

    def backward(q, k, v, o, do, lse, *, deterministic, **options):
        assert deterministic
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)

    monkeypatch.setattr(branches, "_flash_attn_fwd", forward)
    monkeypatch.setattr(branches, "_flash_attn_bwd", backward)
    monkeypatch.setattr(branches, "_on_hopper", lambda device: True)
    config = NSAConfig(deterministic=True, block_counts=5, per_head=per_head, block_stride=32)
    case = Case(T=1000, Hq=4, Hkv=2, lengths=lengths, config=config, compress_weights=True)
    inputs = make_inputs(case)
    with Recorder() as recorder:
        run(autograd.attend, inputs)
    assert ("bmm", True) in recorder.seen and ("scatter_add", False) in recorder.seen
    assert not {(name, True) for name in UNORDERED} & recorder.seen
