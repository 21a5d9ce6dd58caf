"""Two processes train the layer as one does, by DDP and by FSDP2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEP = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from nsa_layer import NSAConfig, NSAttention

rank, way = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
config = NSAConfig(block_size=8, block_counts=3, q_tile=1, window_size=8)

def layer():
    torch.manual_seed(0)
    return NSAttention(32, num_heads=4, num_kv_heads=2, config=config, compression="mlp", gate="input")

alone, both = layer(), layer()
x = torch.randn(2, 40, 32)
both = DistributedDataParallel(both) if way == "ddp" else fully_shard(both, mesh=init_device_mesh("cpu", (2,)))
for step in range(2):
    alone(x).square().mean().backward()
    both(x[rank : rank + 1]).square().mean().backward()
got = [p.grad.full_tensor() if way == "fsdp" else p.grad for p in both.parameters()]
for d, p in zip(got, alone.parameters(), strict=True):
    torch.testing.assert_close(d, p.grad, rtol=1e-4, atol=1e-6)
dist.destroy_process_group()
"""


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_of_two_processes_are_those_of_one(way: str, tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = ([sys.executable, "-c", STEP, str(rank), way, str(tmp_path / "store")] for rank in range(2))
    options = dict(env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = [subprocess.Popen(command, **options) for command in arguments]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
