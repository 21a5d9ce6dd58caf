"""GPU time by component: the kernels of a trace of PyTorch's profiler, each with the range that launched it.

A kernel carries the number of the runtime call that launched it; the call has a thread and a time; the innermost range
of `nsa_layer.profiler_ranges` that was open there and then is its component. The GPU's own clock says how long it took:
a host that is slow, or slowed by being watched, changes nothing. Where a trace has no such call, the range's own mark
on the GPU's timeline says as much, but for kernels of other streams.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_layer.profiler_ranges import COMPONENTS, observed
from nsa_tools.measure.peak_memory import OTHER, quiet_profiler

ON_GPU, LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
RANGES, RANGES_ON_GPU = "user_annotation", "gpu_user_annotation"
PREFIX, PHASE = "nsa::", "nsa-phase::"


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, a copy or a fill; `begin` is on the trace's clock, in milliseconds."""

    name: str
    component: str
    phase: str
    begin: float
    ms: float


def record(phases: dict[str, Callable[[], object]]) -> list[Kernel]:
    """Run some calls under the profiler, each a phase by its name, and return their kernels."""
    quiet_profiler()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler, observed(_range):
        for name, call in phases.items():
            with torch.profiler.record_function(f"{PHASE}{name}"):
                call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return kernels(events)


def _range(name: str) -> torch.profiler.record_function:
    return torch.profiler.record_function(f"{PREFIX}{name}")


def kernels(events: Iterable[dict]) -> list[Kernel]:
    """The kernels of a Chrome trace in the order in which they ran."""
    launched, ran = {}, []
    ranges, phases = defaultdict(list), defaultdict(list)  # by thread or stream
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category in LAUNCHES and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = (event["tid"], event["ts"])
        elif category in ON_GPU:
            ran.append(event)
        elif category in (RANGES, RANGES_ON_GPU):
            where = event["tid"] if category == RANGES else (RANGES_ON_GPU, event["tid"])
            span = (event["ts"], event["ts"] + event["dur"])
            if name.startswith(PHASE):
                # A phase is all threads': backward launches from another one.
                phases[where if category == RANGES_ON_GPU else RANGES].append((*span, name.removeprefix(PHASE)))
            elif name.startswith(PREFIX) and name.removeprefix(PREFIX) in COMPONENTS:
                ranges[where].append((*span, name.removeprefix(PREFIX)))
    for spans in (*phases.values(), *ranges.values()):
        spans.sort()
    attributed = []
    for event in sorted(ran, key=lambda event: event["ts"]):
        on_gpu = (RANGES_ON_GPU, event["tid"])
        thread, at = launched.get(event.get("args", {}).get("correlation"), (on_gpu, event["ts"]))
        phase = _innermost(phases[on_gpu if thread == on_gpu else RANGES], at)
        component = _innermost(ranges[thread], at)
        attributed.append(Kernel(event["name"], component, phase, event["ts"] / 1e3, event["dur"] / 1e3))
    return attributed


def _innermost(spans: list[tuple[float, float, str]], at: float) -> str:
    """The name of the span that opened last of those open at a time; spans nest, and are sorted by their begin."""
    for begin, end, name in reversed(spans[: bisect_right(spans, at, key=lambda span: span[0])]):
        if at <= end:
            return name
    return OTHER
