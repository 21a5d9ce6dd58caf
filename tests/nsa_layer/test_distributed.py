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
@pytest.mark.parametrize("rule", ["nsa", "index", "index alone"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@by_ranks(fixture="own_ranks")
def test_gradients_of_two_processes_are_those_of_one(group: Any, way: str, rule: str, kind: str) -> None:
    """Two steps of the layer alone on each sequence of a batch, and of this rank on its own: the same gradients."""
    on_gpu, rank = kind == "cuda", group.rank()
    # What the kernels take: heads of 64, blocks of 64, and 16 bits inside.
    dim, T = (256, 600) if on_gpu else (32, 60)
    config = NSAConfig(block_counts=6) if on_gpu else NSAConfig(block_size=8, block_counts=5, q_tile=1, window_size=8)
    options = dict(compression="mlp", gate="input", config=config)
    if rule != "nsa":
        options = dict(config=config.replace(rule="index", branches=("selected",)), index_dim=16 if on_gpu else 4)

    def layer() -> NSAttention:
        torch.manual_seed(0)
        with torch.device(kind):
            made = NSAttention(dim, num_heads=4, num_kv_heads=2, **options)
        for name, x in made.named_parameters():
            x.requires_grad_(rule != "index alone" or "_index" in name)
        return made

    def step(layer: torch.nn.Module, x: torch.Tensor, share: float = 1.0) -> None:
        with torch.autocast(kind, torch.bfloat16, enabled=on_gpu):
            o = layer(x)
        assert o.requires_grad == (rule != "index alone")
        loss = o.float().square().mean() * o.requires_grad + (0 if rule == "nsa" else index_loss(layer))
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
        assert (whole.grad is None) == (parameter.grad is None) == (not whole.requires_grad)
        if whole.grad is None:
            continue
        d = parameter.grad.full_tensor() if way == "fsdp" else parameter.grad
        if on_gpu:  # gradients of weights are rounded to bf16 before they are added up
            assert (d - whole.grad).norm() <= 2**-7 * whole.grad.norm(), (d - whole.grad).norm() / whole.grad.norm()
        else:
            torch.testing.assert_close(d, whole.grad, rtol=1e-4, atol=1e-6)
