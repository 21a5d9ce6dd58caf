"""`python -m nsa_layer profile`: where the time of a call goes, component by component, and what its floor is.

On a GPU, time is that of the kernels which a component launches, by the GPU's clock; on a CPU, that of the host inside
the component. A floor is the time that the bytes or the arithmetic that the component cannot do without take.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from nsa_layer.api import nsa
from nsa_layer.cli import results
from nsa_layer.cli.arguments import output_file
from nsa_layer.cli.floors import Ceilings, Work, ceilings, work
from nsa_layer.cli.shape import Shape, add_shape_options, backend_of, shapes
from nsa_layer.cli.trace import OTHER, Kernel, record
from nsa_layer.measure import quiet_profiler
from nsa_layer.ranges import COMPONENTS, observed
from nsa_layer.tables import markdown
from nsa_layer.timing import lap_times

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Part:
    """A component's share of one call: milliseconds, and how many kernels it launched (0 on a CPU)."""

    ms: float
    launches: int = 0


Parts = dict[tuple[str, str], Part]


class HostClock:
    """Adds up the time of a host inside each component, without that of components inside it."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self.open: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        self.open.append(0.0)
        try:
            yield
        finally:
            spent = (time.perf_counter() - begin) * 1e3
            self.ms[name] += spent - self.open.pop()
            if self.open:
                self.open[-1] += spent


def on_host(phases: dict[str, Callable[[], object]], repeats: int) -> list[Parts]:
    """The parts of each of some calls on a CPU."""
    rounds = []
    for _ in range(repeats):
        parts: Parts = {}
        for direction, call in phases.items():
            clock, begin = HostClock(), time.perf_counter()
            with observed(clock):
                call()
            whole = (time.perf_counter() - begin) * 1e3
            parts |= {(name, direction): Part(ms) for name, ms in clock.ms.items()}
            parts[OTHER, direction] = Part(whole - sum(clock.ms.values()))
        rounds.append(parts)
    return rounds


def on_gpu(phases: dict[str, Callable[[], object]], repeats: int) -> tuple[list[Parts], list[Kernel]]:
    """The parts of each of some calls on a GPU, and the kernels of the last."""
    named = {f"{direction} {i}": call for i in range(repeats + 1) for direction, call in phases.items()}
    kernels = record(named)
    rounds = []
    for i in range(1, repeats + 1):  # the first is slow: the profiler starts with it
        ms, launches = Counter(), Counter()
        for kernel in kernels:
            direction, _, number = kernel.phase.partition(" ")
            if number == str(i):
                ms[kernel.component, direction] += kernel.ms
                launches[kernel.component, direction] += 1
        rounds.append({key: Part(ms[key], launches[key]) for key in ms})
    last = [replace(k, phase=k.phase.split()[0]) for k in kernels if k.phase.endswith(f" {repeats}")]
    return rounds, last


def medians(rounds: list[Parts]) -> Parts:
    """The median of each part, in the order of `COMPONENTS`, forward first."""
    keys = {key for parts in rounds for key in parts}
    order = [(name, way) for way in DIRECTIONS for name in (*COMPONENTS, OTHER)]
    found = {}
    for key in sorted(keys, key=lambda key: order.index(key) if key in order else len(order)):
        own = [parts.get(key, Part(0.0)) for parts in rounds]
        found[key] = Part(statistics.median(p.ms for p in own), max(p.launches for p in own))
    return found


def component_table(parts: Parts, floors: dict[tuple[str, str], Work], at: Ceilings, whole: dict[str, float]) -> str:
    """A row a component and direction; then each direction as a whole, by a clock without the profiler."""
    total = sum(part.ms for part in parts.values())
    table = []
    for way in DIRECTIONS:
        own = {name: part for (name, direction), part in parts.items() if direction == way}
        if not own:
            continue
        for name, part in own.items():
            table.append([name, way, *_cells(part, total, floors.get((name, way)), at, way)])
        # Work of components that did not run on their own (folded into another) still has to be done by somebody.
        least = sum(w.seconds(at, backward=way == "backward") for (_, d), w in floors.items() if d == way) * 1e3
        busy = Part(sum(part.ms for part in own.values()), sum(part.launches for part in own.values()))
        table.append(["all components", way, *_cells(busy, total, None, at, way)[:3], "", "", *_floor(busy.ms, least)])
        if way in whole:
            table.append(
                ["whole call, by the clock", way, f"{whole[way]:.3f}", "", "", "", "", *_floor(whole[way], least)]
            )
    header = ["component", "direction", "ms", "share", "launches", "work", "reached", "floor (ms)", "over floor"]
    return markdown(header, table, left=2)


def _cells(part: Part, total: float, least: Work | None, at: Ceilings, way: str) -> list[str]:
    start = [f"{part.ms:.3f}", f"{part.ms / total:.1%}" if total else "", str(part.launches or "")]
    if least is None:
        return [*start, "", "", "", ""]
    floor = least.seconds(at, backward=way == "backward") * 1e3
    seconds = part.ms / 1e3
    rate = at.backward_flops if way == "backward" else at.forward_flops
    if least.flops / rate > least.bytes / at.bytes_a_second:
        amount, reached = (
            f"{least.flops / 1e12:.3g} TFLOP",
            f"{least.flops / seconds / 1e12:.3g} TFLOP/s" if seconds else "",
        )
    else:
        amount, reached = f"{least.bytes / 1e9:.3g} GB", f"{least.bytes / seconds / 1e12:.3g} TB/s" if seconds else ""
    return [*start, amount, reached, *_floor(part.ms, floor)]


def _floor(ms: float, floor: float) -> list[str]:
    return [f"{floor:.3f}", f"{ms / floor:.2f}x" if floor else ""]


def kernel_table(kernels: list[Kernel], *, rows: int) -> str:
    """The kernels of one call, those that took longest first."""
    ms, count = Counter(), Counter()
    for kernel in kernels:
        key = kernel.component, kernel.phase, _short(kernel.name)
        ms[key] += kernel.ms
        count[key] += 1
    table = [[*key, count[key], f"{spent:.3f}"] for key, spent in ms.most_common(rows)]
    return markdown(["component", "direction", "kernel", "launches", "ms"], table, left=3)


def _short(name: str, width: int = 70) -> str:
    name = name.replace("|", "/")
    return name if len(name) <= width else name[: width - 3] + "..."


def operator_table(step: Callable[[], object], *, rows: int) -> str:
    """PyTorch's profiler over one step on a CPU, most expensive operators first."""
    quiet_profiler()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=60)


def profile(
    shape: Shape, backend: str, *, gated: bool, backward: bool, at: Ceilings, repeats: int, rows: int
) -> tuple[str, dict]:
    """All tables of one shape, and what the first of them shows as data."""
    inputs = shape.inputs()
    if not gated:
        del inputs["gate_weight"]
    do = shape.output_gradient() if backward else None
    options = shape.options()
    kept: list[torch.Tensor] = []

    def forward() -> None:
        with torch.set_grad_enabled(backward):
            kept[:] = [nsa(**inputs, **options, backend=backend)]

    phases = {"forward": forward}
    if backward:
        phases["backward"] = lambda: torch.autograd.grad(kept.pop(), list(inputs.values()), do)

    def step(lap: Callable[[], None] = lambda: None) -> None:
        for number, call in enumerate(phases.values()):
            if number:
                lap()
            call()

    for _ in range(2):
        step()
    laps = [lap_times(step, shape.device) for _ in range(repeats)]
    whole = {way: statistics.median(lap[i] for lap in laps) for i, way in enumerate(phases)}
    gpu = shape.device.startswith("cuda")
    rounds, kernels = on_gpu(phases, repeats) if gpu else (on_host(phases, repeats), [])
    floors = {key: least for key, least in work(shape, gated=gated).items() if key[1] in phases}
    title = f"{backend} on {shape.device}, {shape.describe()}, {'gated' if gated else 'ungated'}"
    found = medians(rounds)
    parts = component_table(found, floors, at, whole)
    second = kernel_table(kernels, rows=rows) if gpu else operator_table(step, rows=rows)
    return f"{title}\n\n{parts}\n\n{second}\n", as_data(title, found, floors, at, whole)


def as_data(
    title: str, parts: Parts, floors: dict[tuple[str, str], Work], at: Ceilings, whole: dict[str, float]
) -> dict:
    """A row a component and direction; what has no floor has None; ``whole_ms`` by the clock, without the profiler."""
    rows = []
    for name, way in dict.fromkeys((*parts, *floors)):
        part, least = parts.get((name, way)), floors.get((name, way))
        row = dict(component=name, direction=way, ms=None, launches=None, bytes=None, flops=None, floor_ms=None)
        if part is not None:
            row |= dict(ms=part.ms, launches=part.launches)
        if least is not None:
            floor = least.seconds(at, backward=way == "backward") * 1e3
            row |= dict(bytes=least.bytes, flops=least.flops, floor_ms=floor)
        rows.append(row)
    return dict(title=title, whole_ms=whole, rows=rows)


def main(argv: list[str]) -> int:
    """Run the command; 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m nsa_layer profile", description=__doc__, allow_abbrev=False)
    add_shape_options(parser, seqlen=[8192 if torch.cuda.is_available() else 1024])
    parser.add_argument("--mode", choices=("forward", "both"), default="both", help="both: backward too (default)")
    parser.add_argument("--ungated", action="store_true", help="without gate_weight: 1/3 of each branch")
    parser.add_argument("--repeats", type=int, default=5, help="calls whose median is shown (default: 5)")
    parser.add_argument("--rows", type=int, default=15, help="kernels (operators, on a CPU) shown (default: 15)")
    parser.add_argument("--terabytes", type=float, help="TB/s that a floor counts with (default: 4.2 on an H200)")
    parser.add_argument("--tflops", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"), help="on an H200: 660 614")
    parser.add_argument("--json", type=output_file, help="also write the components to this file")
    given = parser.parse_args(argv)
    try:
        cases = shapes(given)
        backends = [backend_of(shape, given.backend) for shape in cases]
        if given.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {given.repeats}")
    except (ValueError, NotImplementedError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    at = ceilings(cases[0].device, cases[0].dtype)
    if given.terabytes:
        at = replace(at, bytes_a_second=given.terabytes * 1e12)
    if given.tflops:
        at = replace(at, forward_flops=given.tflops[0] * 1e12, backward_flops=given.tflops[1] * 1e12)
    rates = (at.bytes_a_second, at.forward_flops, at.backward_flops)
    print("floors: {:.3g} TB/s, {:.3g} and {:.3g} TFLOP/s forward and backward\n".format(*(r / 1e12 for r in rates)))
    document = dict(
        schema=results.SCHEMA,
        command=results.command_line("profile", argv),
        environment=results.environment(cases[0].device),
        ceilings=asdict(at),
        calls=[],
    )
    static = dict(gated=not given.ungated, backward=given.mode == "both", at=at, repeats=given.repeats, rows=given.rows)
    for shape, backend in zip(cases, backends):
        text, data = profile(shape, backend, **static)
        print(text, flush=True)
        document["calls"].append(data)
        if given.json:
            results.write(given.json, document)
    return 0
