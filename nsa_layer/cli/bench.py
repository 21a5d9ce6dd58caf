"""`python -m nsa_layer bench`: the layer and dense causal attention in the same run, forward and backward.

CUDA events (a host clock on a CPU), after a warm-up; inputs rotate past the L2; the variants
take turns; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import torch

from nsa_layer.api import nsa
from nsa_layer.cli.shape import Shape, add_shape_options, backend_of, shapes
from nsa_layer.tables import markdown
from nsa_layer.timing import Call, interleaved, sets_past_l2


def main(argv: list[str]) -> int:
    """Run the command; 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m nsa_layer bench", description=__doc__)
    gpu = torch.cuda.is_available()
    add_shape_options(parser, seqlen=[8192, 65536, 262144] if gpu else [2048])
    parser.add_argument("--repeats", type=int, default=7, help="timings whose median is shown (default: 7)")
    parser.add_argument("--no-dense", action="store_true", help="leave dense attention out")
    parser.add_argument("--json", type=Path, help="also write every timing, in milliseconds, to this file")
    given = parser.parse_args(argv)
    try:
        cases = shapes(given)
        backends = [backend_of(shape, given.backend) for shape in cases]
        if given.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {given.repeats}")
    except (ValueError, NotImplementedError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    results = []
    for shape, backend in zip(cases, backends):
        timings = bench(shape, backend, repeats=given.repeats, dense=not given.no_dense)
        results.append(dict(shape=shape.describe(), config=asdict(shape.config), backend=backend, ms=timings))
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    device = torch.cuda.get_device_name() if cases[0].device.startswith("cuda") else "CPU"
    print(f"{backends[0]} on {device}, {cases[0].config}")
    print(table(cases, results))
    return 0


def table(cases: list[Shape], results: list[dict]) -> str:
    """Median milliseconds; dense over sparse in brackets."""
    header = ["shape", "direction", "dense", "NSA", "NSA, gated"]
    rows = []
    for shape, result in zip(cases, results):
        medians = {name: statistics.median(times) for name, times in result["ms"].items()}
        for direction in ("forward", "backward"):
            dense = medians.get(f"dense {direction}")
            cells = [f"{dense:.2f}" if dense else "-"]
            for variant in ("nsa", "gated"):
                ms = medians[f"{variant} {direction}"]
                cells.append(f"{ms:.2f}" + (f" ({dense / ms:.2f}x)" if dense else ""))
            rows.append([shape.describe(), direction, *cells])
    return markdown(header, rows, left=2)


def bench(shape: Shape, backend: str, *, repeats: int, dense: bool) -> dict[str, list[float]]:
    """Milliseconds of every timing, by variant."""
    calls = dict(variants(shape, backend, dense=dense))
    return interleaved(calls, repeats=repeats, device=shape.device, label=shape.describe())


def variants(shape: Shape, backend: str, *, dense: bool) -> Iterator[tuple[str, Call]]:
    """(name, call) pairs; each call works on the next of the rotating inputs."""
    size = shape.B * shape.T * shape.Hq * shape.D * shape.dtype.itemsize
    sets = [shape.inputs() for _ in range(sets_past_l2(size))]
    do = torch.randn(shape.B, shape.T, shape.Hq, shape.Dv, device=shape.device).to(shape.dtype)
    names = ("q", "k", "v")
    plain = [{name: inputs[name] for name in names} for inputs in sets]
    sparse = lambda **inputs: nsa(**inputs, config=shape.config, backend=backend)  # noqa: E731
    for label, attend, groups in (("nsa", sparse, plain), ("gated", sparse, sets)):
        yield f"{label} forward", _forward(attend, groups)
        yield f"{label} backward", _Backward(attend, groups, do)
    if dense:
        yield "dense forward", _forward(_dense(shape.device), plain)
        yield "dense backward", _Backward(_dense(shape.device), plain, do)


def _forward(attend: Callable, groups: list[dict]) -> Call:
    turns = cycle(groups)

    def call() -> None:
        with torch.no_grad():
            attend(**next(turns))

    return call


class _Backward:
    """Backward alone: the graph is made once for each set of inputs, outside what is timed."""

    def __init__(self, attend: Callable, groups: list[dict], do: torch.Tensor) -> None:
        self.attend, self.turns, self.do, self.graph = attend, cycle(groups), do, None

    def prepare(self) -> None:
        inputs = next(self.turns)
        self.graph = (self.attend(**inputs), list(inputs.values()))

    def __call__(self) -> None:
        if self.graph is None:
            self.prepare()
        o, leaves = self.graph
        self.graph = None
        torch.autograd.grad(o, leaves, self.do)


def _dense(device: str) -> Callable:
    if not device.startswith("cuda"):

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o.transpose(1, 2)

        return attend
    from nsa_layer.branches import dense_causal

    return dense_causal
