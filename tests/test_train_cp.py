"""`examples/train_cp.py`: ranks that share sequences learn as one does, and go on with another number of ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from fuzz.rank_processes import ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_cp.py"
SLOW = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo")  # to import
TINY = "--tokens 64 --dim 32 --layers 1 --batch 2 --block 8".split()


def losses(ranks: int, *options: str) -> dict[int, float]:
    """Loss by step of a run on so many processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [*launch, str(EXAMPLE), *TINY, *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", result.stdout, re.M)}


def train(group: Any, folder: str) -> list[float]:
    """Two steps with a checkpoint between them, and the second one again from it."""
    spec = importlib.util.spec_from_file_location("train_cp", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    given = example.options(TINY)
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("dp", "cp"))
    cp = example.ContextParallel(mesh["cp"])
    found = []
    for _ in range(2):
        run = example.Run(example.build(mesh, cp, given), Path(folder))
        while run.step < 2:
            found.append(example.take_step(run, mesh, cp, given))
            if run.step == 1:
                run.save()
    return found


def test_a_step_after_a_checkpoint_is_the_same(tmp_path: Path) -> None:
    with ranks((2,), str(tmp_path / "store"), preload=SLOW) as run:
        first, second = run(2, train, str(tmp_path / "run"))
    assert first == second and len(first) == 3
    assert first[1] == first[2] < first[0]


@pytest.mark.sweep
@pytest.mark.parametrize("options", ["--mode heads", "--mode gather --packed", "--load-balance none --packed"])
def test_ranks_that_share_sequences_learn_as_one(options: str) -> None:
    alone, shared = losses(1, "--steps", "3"), losses(2, "--steps", "3", "--cp", "2", *options.split())
    assert alone.keys() == shared.keys() == {1, 2, 3}
    assert all(abs(shared[step] - loss) <= 2e-4 for step, loss in alone.items()), (alone, shared)
    assert alone[3] < alone[1]


@pytest.mark.sweep
def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    whole = losses(2, "--cp", "2", "--steps", "4")
    saved = ("--cp", "2", "--checkpoint", str(tmp_path))
    first, rest = losses(2, "--steps", "2", *saved), losses(4, "--steps", "4", *saved)
    assert first.keys() == {1, 2} and rest.keys() == {3, 4}
    assert all(abs((first | rest)[step] - loss) <= 2e-4 for step, loss in whole.items()), (whole, first, rest)
