"""`python -m nsa_layer memory`: the peak memory of `nsa` for given shapes, predicted and measured."""

from __future__ import annotations

import argparse
import sys

import torch

from nsa_layer.api import nsa
from nsa_layer.cli.shape import Shape, add_shape_options, backend_of, shapes
from nsa_layer.measure import peak_bytes
from nsa_layer.tables import markdown

FP32 = 4


def predict_forward(shape: Shape) -> dict[str, int]:
    """Bytes of what forward leaves for backward, and of its output; q, k and v themselves are the caller's."""
    s, item = shape, shape.dtype.itemsize
    acc = max(item, FP32)
    tokens = s.B * s.T
    lists = s.B * s.Hkv * s.config.num_tiles(s.T) * s.config.list_width(s.T)
    return {
        "o": tokens * s.Hq * s.Dv * item,
        "o of each branch": 3 * tokens * s.Hq * s.Dv * item,
        "lse of each branch": 3 * tokens * s.Hq * acc,
        "gates": 3 * tokens * s.Hq * acc,
        "block_indices": lists * 4,
    }


def predict_backward(shape: Shape) -> dict[str, int]:
    """Bytes that backward adds where it holds most: the last branch runs, the others' gradients are there."""
    s, item = shape, shape.dtype.itemsize
    acc = max(item, FP32)
    q, kv = s.B * s.T * s.Hq * s.D, s.B * s.T * s.Hkv * (s.D + s.Dv)
    return {
        "do, and do of the branch": 2 * s.B * s.T * s.Hq * s.Dv * item,
        "dq of each branch, and of the gates": 4 * q * item,
        "dq as it is summed": q * acc,
        "dk, dv of each branch": kv * (2 * item + acc),
        "dk, dv as they are summed": kv * acc,
    }


def measure(shape: Shape, backend: str | None) -> tuple[int, int]:
    """Peak bytes of forward and of forward and backward, above the inputs; a first call compiles the kernels."""
    inputs = shape.inputs()
    do = torch.ones(shape.B, shape.T, shape.Hq, shape.Dv, dtype=shape.dtype, device=shape.device)

    def forward() -> torch.Tensor:
        return nsa(**inputs, config=shape.config, backend=backend)

    def both() -> None:
        torch.autograd.grad(forward(), list(inputs.values()), do)

    both()
    return peak_bytes(forward, shape.device), peak_bytes(both, shape.device) + do.nbytes


def table(cases: list[Shape], backend: str | None, *, measured: bool) -> str:
    """Two rows for each shape, in MiB."""
    header = ["T", "what", "predicted (MiB)"] + (["measured (MiB)", "measured / predicted"] if measured else [])
    rows = []
    for shape in cases:
        forward = sum(predict_forward(shape).values())
        predicted = forward, forward + sum(predict_backward(shape).values())
        found = measure(shape, backend) if measured else (0, 0)
        for what, expected, got in zip(("forward", "forward and backward"), predicted, found):
            row = [f"{shape.T:,}", what, f"{expected / 2**20:,.1f}"]
            rows.append(row + [f"{got / 2**20:,.1f}", f"{got / expected:.2f}"] if measured else row)
    return markdown(header, rows, left=2)


def main(argv: list[str]) -> int:
    """Run the command; 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_layer memory",
        description="Peak memory of nsa above its inputs. The prediction counts the tensors that the kernels' plan "
        "holds at once; what is measured has workspace besides, and another plan with --backend eager.",
    )
    add_shape_options(parser, seqlen=[1024, 2048] if not torch.cuda.is_available() else [8192, 65536])
    parser.add_argument("--no-measure", action="store_true", help="predict only; nothing is computed")
    given = parser.parse_args(argv)
    try:
        cases = shapes(given)
        if not given.no_measure:
            backend_of(cases[0], given.backend)
    except (ValueError, NotImplementedError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    print(table(cases, given.backend, measured=not given.no_measure))
    return 0
