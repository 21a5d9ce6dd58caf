"""How long the first call of a process takes: imports of the layer, kernels from the cache, forward and backward."""

from __future__ import annotations

import subprocess
import sys

from nsa_layer.cli.shape import Shape

# PyTorch's import and the GPU's context are not the layer's.
PROGRAM = """
import sys, time
import torch
device = sys.argv[1]
torch.ones(1, device=device) + 1
begin = time.perf_counter()
from nsa_layer.cli.first_call import call
call(sys.argv[2:], device)
print(time.perf_counter() - begin)
"""


def call(argv: list[str], device: str) -> None:
    """One step of the shape that the arguments say, to its end."""
    import argparse

    import torch

    from nsa_layer.api import nsa
    from nsa_layer.cli.shape import add_shape_options, backend_of, shapes

    parser = argparse.ArgumentParser()
    add_shape_options(parser, seqlen=[4096])
    given = parser.parse_args(argv)
    shape = shapes(given)[0]
    inputs = shape.inputs()
    o = nsa(**inputs, **shape.options(), backend=backend_of(shape, given.backend))
    # A loss, as in training: where it is given a gradient instead, PyTorch first imports sympy.
    torch.autograd.grad(o.square().sum(), list(inputs.values()))
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def arguments(shape: Shape, backend: str) -> list[str]:
    """The options that say a shape."""
    sizes = {"seqlen": shape.T, "batch": shape.B, "heads": shape.Hq, "kv-heads": shape.Hkv}
    sizes |= {"head-dim": shape.D, "head-dim-v": shape.Dv, "dtype": shape.dtype_name(), "backend": backend}
    if shape.lengths is not None:
        sizes["packed"] = len(shape.lengths)
    sizes["recompute"] = shape.policy.recompute
    if shape.policy.budget is not None:
        sizes["budget"] = shape.policy.budget / (1 << 30)
    names = ("block_size", "block_counts", "q_tile", "window_size")
    sizes |= {name.replace("_", "-"): getattr(shape.config, name) for name in names}
    if shape.config.block_stride is not None:
        sizes["block-stride"] = shape.config.block_stride
    options = [f"--{name}={value}" for name, value in sizes.items()]
    return [*options, f"--device={shape.device}", *(["--deterministic"] if shape.config.deterministic else [])]


def seconds(shape: Shape, backend: str, *, processes: int = 3) -> list[float]:
    """The first call's seconds in one process after the other; a RuntimeError says why one failed."""
    found = []
    for _ in range(processes):
        command = [sys.executable, "-c", PROGRAM, shape.device, *arguments(shape, backend)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(
                f"the first call failed: {(result.stderr.strip().splitlines() or ['no reason given'])[-1]}"
            )
        found.append(float(result.stdout.split()[-1]))
    return found
