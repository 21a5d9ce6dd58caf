"""Two processes train the layer as one does, by DDP and by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import OnRanks, by_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fuzz.rank_processes import ranks
from nsa_layer import NSAConfig, NSAttention, index_loss


@pytest.fixture
def own_ranks(tmp_path: Path, kind: str) -> Iterator[OnRanks]:
    """Processes of the test's own: all-gathers on gloo may end them (docs/distributed.md)."""
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with ranks((2,), str(tmp_path / "store"), gpus=kind == "cuda") as run:
        yield run


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("rule", ["nsa", "index"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@by_ranks(fixture="own_ranks")
def test_gradients_of_two_processes_are_those_of_one(group: Any, way: str, rule: str, kind: str) -> None:
    """Two steps of the layer alone on each sequence of a batch, and of this rank on its own: the same gradients."""
    on_gpu, rank = kind == "cuda", group.rank()
    # What the kernels take: heads of 64, blocks of 64, and 16 bits inside.
    dim, T = (256, 600) if on_gpu else (32, 60)
    config = NSAConfig(block_counts=6) if on_gpu else NSAConfig(block_size=8, block_counts=5, q_tile=1, window_size=8)
    options = dict(compression="mlp", gate="input", config=config)
    if rule == "index":
        options = dict(config=config.replace(rule="index", branches=("selected",)), index_dim=16 if on_gpu else 4)

    def layer() -> NSAttention:
        torch.manual_seed(0)
        with torch.device(kind):
            return NSAttention(dim, num_heads=4, num_kv_heads=2, **options)

    def step(layer: torch.nn.Module, x: torch.Tensor, share: float = 1.0) -> None:
        with torch.autocast(kind, torch.bfloat16, enabled=on_gpu):
            o = layer(x)
        loss = o.float().square().mean() + (index_loss(layer) if rule == "index" else 0)
        (share * loss).backward()

    alone, both = layer(), layer()
    x = torch.randn(2, T, dim).to(kind)
    if way == "ddp":
        both = DistributedDataParallel(both, device_ids=[rank] if on_gpu else None, process_group=group)
    else:
        both = fully_shard(both, mesh=DeviceMesh.from_group(group, kind))
    for _ in range(2):
        for part in x.split(1):  # accumulated: a loss of an index is no mean over sequences
            step(alone, part, 1 / len(x))
        step(both, x[rank : rank + 1])
    for whole, parameter in zip(alone.parameters(), both.parameters(), strict=True):
        d = parameter.grad.full_tensor() if way == "fsdp" else parameter.grad
        if on_gpu:  # gradients of weights are rounded to bf16 before they are added up
            assert (d - whole.grad).norm() <= 2**-7 * whole.grad.norm(), (d - whole.grad).norm() / whole.grad.norm()
        else:
            torch.testing.assert_close(d, whole.grad, rtol=1e-4, atol=1e-6)
