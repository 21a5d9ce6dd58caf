"""`python -m nsa_layer profile`: where the time of a shape goes, branch by branch and operator by operator."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch

from nsa_layer.api import nsa
from nsa_layer.cli.parts import Stopwatch, watch
from nsa_layer.cli.shape import Shape, add_shape_options, backend_of, shapes
from nsa_layer.measure import quiet_profiler
from nsa_layer.tables import markdown


def branch_table(step: Callable[[], object], backend: str, device: str, *, repeats: int) -> str:
    """Median milliseconds of each part of a step."""
    stopwatch, rounds = Stopwatch(device), []
    with watch(backend, stopwatch):
        whole = stopwatch.timed("whole step", step)
        for _ in range(repeats + 1):
            whole()
            rounds.append(stopwatch.take())
    # The first round compiles and warms up.
    medians = {label: statistics.median(r.get(label, 0.0) for r in rounds[1:]) for label in rounds[-1]}
    total = medians.pop("whole step")
    medians["the rest"] = total - sum(medians.values())
    rows = [[label, f"{ms:.3f}", f"{ms / total:.1%}"] for label, ms in medians.items()]
    return markdown(["part", "median (ms)", "share"], [*rows, ["whole step", f"{total:.3f}", "100.0%"]])


def operator_table(step: Callable[[], object], device: str, *, rows: int) -> str:
    """PyTorch's profiler over one step, most expensive operators first."""
    quiet_profiler()
    activities, order = [torch.profiler.ProfilerActivity.CPU], "self_cpu_time_total"
    if torch.device(device).type == "cuda":
        activities, order = [*activities, torch.profiler.ProfilerActivity.CUDA], "self_cuda_time_total"
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    return profiler.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60)


def profile(shape: Shape, backend: str | None, *, repeats: int, rows: int) -> str:
    """Both tables for forward and backward of one shape."""
    chosen = backend_of(shape, backend)
    inputs = shape.inputs()
    do = torch.ones(shape.B, shape.T, shape.Hq, shape.Dv, dtype=shape.dtype, device=shape.device)

    def step() -> None:
        o = nsa(**inputs, config=shape.config, backend=chosen)
        torch.autograd.grad(o, list(inputs.values()), do)

    title = f"{chosen} on {shape.device}, {shape.describe()}, forward and backward"
    parts = branch_table(step, chosen, shape.device, repeats=repeats)
    return f"{title}\n\n{parts}\n\n{operator_table(step, shape.device, rows=rows)}"


def main(argv: list[str]) -> int:
    """Run the command; 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_layer profile",
        description="Time of forward and backward of nsa: per branch (medians), then per operator (one step under "
        "PyTorch's profiler).",
    )
    add_shape_options(parser, seqlen=[8192 if torch.cuda.is_available() else 1024])
    parser.add_argument("--repeats", type=int, default=5, help="steps whose median is shown (default: 5)")
    parser.add_argument("--rows", type=int, default=15, help="operators shown (default: 15)")
    given = parser.parse_args(argv)
    try:
        cases = shapes(given)
        backend_of(cases[0], given.backend)
    except (ValueError, NotImplementedError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    for shape in cases:
        print(profile(shape, given.backend, repeats=max(1, given.repeats), rows=given.rows))
    return 0
