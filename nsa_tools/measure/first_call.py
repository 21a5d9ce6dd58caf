"""The first call of a process: imports of the layer, kernels from the cache, forward and backward."""

from __future__ import annotations

import pickle
import subprocess
import sys

import torch

from nsa_layer.api import nsa
from nsa_tools.shape import Shape

# PyTorch's import and the GPU's context are not the layer's.
PROGRAM = """
import pickle, sys, time
import torch
torch.ones(1, device=sys.argv[1]) + 1
begin = time.perf_counter()
from nsa_tools.measure.first_call import call
call(*pickle.load(sys.stdin.buffer))
print(time.perf_counter() - begin)
"""


def call(shape: Shape, backend: str) -> None:
    """One step of a shape, to its end."""
    inputs = shape.inputs()
    with torch.set_grad_enabled(shape.backward):
        o = nsa(**inputs, **shape.options(), backend=backend)
    if shape.backward:
        # A loss, as in training: where it is given a gradient instead, PyTorch first imports sympy.
        torch.autograd.grad(o.square().sum(), list(inputs.values()))
    if o.is_cuda:
        torch.cuda.synchronize()


def seconds(shape: Shape, backend: str, *, processes: int = 3) -> list[float]:
    """The first call's seconds in one process after the other.

    Raises:
        RuntimeError: a process failed; the message says why.
    """
    found = []
    for _ in range(processes):
        command = [sys.executable, "-c", PROGRAM, shape.device]
        result = subprocess.run(command, input=pickle.dumps((shape, backend)), capture_output=True)
        if result.returncode:
            reason = result.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise RuntimeError(f"the first call failed: {reason[-1]}")
        found.append(float(result.stdout.split()[-1]))
    return found
