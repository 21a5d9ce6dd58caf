"""Two processes train the layer as one does, by DDP and by FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEP = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from nsa_layer import NSAConfig, NSAttention

rank, way, kind = int(sys.argv[1]), sys.argv[2], sys.argv[4]
on_gpu = kind == "cuda"
if on_gpu:
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
# What the kernels take: heads of 64, blocks of 64, and 16 bits inside.
dim, T = (256, 300) if on_gpu else (32, 40)
config = NSAConfig() if on_gpu else NSAConfig(block_size=8, block_counts=3, q_tile=1, window_size=8)

def layer():
    torch.manual_seed(0)
    with torch.device(kind):
        return NSAttention(dim, num_heads=4, num_kv_heads=2, config=config, compression="mlp", gate="input")

def step(layer, x):
    with torch.autocast(kind, torch.bfloat16, enabled=on_gpu):
        o = layer(x)
    o.float().square().mean().backward()

alone, both = layer(), layer()
x = torch.randn(2, T, dim).to(kind)
if way == "ddp":
    both = DistributedDataParallel(both, device_ids=[rank] if on_gpu else None)
else:
    both = fully_shard(both, mesh=init_device_mesh(kind, (2,)))
for _ in range(2):
    step(alone, x)
    step(both, x[rank : rank + 1])
got = [p.grad.full_tensor() if way == "fsdp" else p.grad for p in both.parameters()]
for d, p in zip(got, alone.parameters(), strict=True):
    if on_gpu:  # gradients of weights are rounded to bf16 before they are added up
        assert (d - p.grad).norm() <= 2**-7 * p.grad.norm(), (d - p.grad).norm() / p.grad.norm()
    else:
        torch.testing.assert_close(d, p.grad, rtol=1e-4, atol=1e-6)
dist.destroy_process_group()
"""


def check(way: str, kind: str, folder: Path) -> None:
    """Run both processes; AssertionError with what they said where one fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {})
    arguments = ([sys.executable, "-c", STEP, str(rank), way, str(folder / "store"), kind] for rank in range(2))
    options = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = [subprocess.Popen(command, **options) for command in arguments]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_of_two_processes_are_those_of_one(way: str, tmp_path: Path) -> None:
    check(way, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_of_two_gpus_are_those_of_one(way: str, tmp_path: Path) -> None:
    check(way, "cuda", tmp_path)
