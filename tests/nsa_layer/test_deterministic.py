"""Around the kernels, the layer adds floating-point numbers in an order that a GPU keeps."""

from __future__ import annotations

import pytest
import torch
from stub_kernels import stubs
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
def test_nothing_is_added_through_atomics(lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks that PyTorch makes the lists of, and launches that do nothing."""
    from nsa_layer import autograd, heads

    def choose(q, k_cmp, *, problem, packing):
        """The first blocks, for every tile."""
        chosen = 2, 8 if packing is None else packing.total_tiles, 5
        indices = torch.arange(5, dtype=torch.int32).expand(chosen)
        indices = indices.contiguous() if packing else indices[None].contiguous()
        return indices, torch.full(indices.shape[:-1], 5, dtype=torch.int32)

    monkeypatch.setattr(heads, "choose", choose)
    config = NSAConfig(deterministic=True, block_counts=5, block_size=32)
    sizes = dict(T=1000, Hq=4, Hkv=2, D=128, dtype=torch.bfloat16)
    case = Case(**sizes, lengths=lengths, config=config, compress_weights=True)
    autograd._forward.clear(), autograd._backward.clear()
    with stubs(), Recorder() as recorder:
        run(autograd.attend, make_inputs(case))
    autograd._forward.clear(), autograd._backward.clear()
    assert ("bmm", True) in recorder.seen and ("scatter_add", False) in recorder.seen
    assert not {(name, True) for name in UNORDERED} & recorder.seen
