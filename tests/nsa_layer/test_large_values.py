"""Values near the end of their dtype's range: what is in range comes out, and what is not seen disturbs nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nsa_layer import NSAConfig, nsa, reference
from nsa_layer.eager.pooling import mean_pool
from nsa_layer.eager.select_blocks import tile_queries
from nsa_tools.testing import row_oracle

Tensor = torch.Tensor

LARGE = 2.0**127  # times a number in [1, 2): the last of fp32's and bf16's exponents
POOLINGS = [(1, 1), (64, 64), (64, 8), (7, 7), (12, 3)]


def config_of(pooling: tuple[int, int]) -> NSAConfig:
    l, d = pooling
    return NSAConfig(block_size=l, compress_stride=d, q_tile=l & -l)


def of_size_one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [1, 2), which fp32 and bf16 can hold 2**127 times, half of them negative."""
    torch.manual_seed(0)
    magnitude = 1 + torch.rand(shape).to(dtype).clamp(max=0.99)
    return torch.where(torch.rand(shape[-1]) < 0.5, magnitude, -magnitude)


MEANS: dict[str, Callable[[Tensor, NSAConfig], Tensor]] = {
    "mean_pool": lambda x, config: mean_pool(x, config=config),
    "tile_queries": lambda x, config: tile_queries(x, config=config, causal=True),
    "reference.compress": lambda x, config: reference.compress(x[0], None, config=config),
    "reference.tile_query": lambda x, config: reference.tile_query(x[0], config=config, causal=True),
    "row_oracle.compressed": lambda x, config: row_oracle.compressed(x[0, :, 0], config=config, dtype=torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_exact_at_the_end_of_the_range(name: str, pooling: tuple[int, int], dtype: torch.dtype) -> None:
    x, config = of_size_one(2, 200, 3, 4, dtype=dtype), config_of(pooling)
    expected = MEANS[name](x, config)
    assert torch.equal(MEANS[name](x * LARGE, config), expected * LARGE)


@pytest.mark.parametrize("pooling", [(64, 64), (32, 16), (64, 8), (96, 32)], ids=str)
def test_the_gradient_of_a_mean_is_exact_at_the_end_of_the_range(pooling: tuple[int, int]) -> None:
    x = torch.zeros(1, 200, 2, 4, requires_grad=True)
    mean = mean_pool(x, config=config_of(pooling))
    d_mean = of_size_one(*mean.shape)
    scale = LARGE if pooling[0] & (pooling[0] - 1) == 0 else LARGE / 4
    (expected,) = torch.autograd.grad(mean, x, d_mean, retain_graph=True)
    (got,) = torch.autograd.grad(mean, x, d_mean * scale)
    assert torch.equal(got, expected * scale)


LATE = torch.arange(1024, 1088)
SMALL = NSAConfig(block_size=16, q_tile=16, block_counts=4, window_size=32)
BACKENDS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("eager", "cpu", id="eager"),
    pytest.param("eager", "cuda", id="eager-cuda", marks=pytest.mark.gpu),
    pytest.param("cute", "cuda", id="cute", marks=pytest.mark.gpu),
]


def call(backend: str, qkv: dict[str, Tensor], until: int) -> dict[str, Tensor]:
    """The rows before `until`, and the gradients of those rows with respect to v: none of them sees what is later."""
    config = SMALL if backend != "cute" else SMALL.replace(block_size=64, q_tile=128, window_size=128)
    v = qkv["v"].clone().requires_grad_()
    o = nsa(qkv["q"], qkv["k"], v, config=config, backend=backend)[:, :until]
    # So small that do . v stays in range.
    (dv,) = torch.autograd.grad(o, v, torch.full_like(o, 2.0**-10))
    return {"o": o, "dv": dv[:, :until]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("backend,device", BACKENDS)
def test_unseen_large_values_disturb_no_row(backend: str, device: str, name: str, dtype: torch.dtype) -> None:
    if backend == "cute" and dtype == torch.float32:
        dtype = torch.bfloat16
    torch.manual_seed(0)
    qkv = {name: torch.randn(1, 1300, 2, 64, dtype=dtype, device=device) for name in "qkv"}
    expected = call(backend, qkv | {name: qkv[name].clone().index_fill_(1, LATE.to(device), 0)}, 1024)
    qkv[name][:, 1024:1088] = min(1e38, torch.finfo(dtype).max)
    got = call(backend, qkv, 1024)
    assert torch.equal(got["o"], expected["o"])
    if name == "v":  # rows that see such a k have no probabilities to give gradients by
        assert torch.equal(got["dv"], expected["dv"])
