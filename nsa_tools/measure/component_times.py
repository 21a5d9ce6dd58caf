"""Time of each component of a call: of its kernels on a GPU, of the host inside it on a CPU."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nsa_layer.profiler_ranges import COMPONENTS, observed
from nsa_tools.measure.kernel_trace import Kernel, record
from nsa_tools.measure.peak_memory import OTHER
from nsa_tools.measure.timed_calls import step_of
from nsa_tools.measure.timing import lap_times
from nsa_tools.shape import Shape

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Part:
    """A component's share of one call: milliseconds, and how many kernels it launched (0 on a CPU)."""

    ms: float
    launches: int = 0


Parts = dict[tuple[str, str], Part]  # by component and direction


@dataclass(frozen=True)
class Profile:
    """Medians over some calls.

    Attributes:
        parts: in the order of `COMPONENTS`, forward first.
        whole_ms: by direction, by a clock without the profiler.
        kernels: of the last call; none on a CPU.
    """

    parts: Parts
    whole_ms: dict[str, float]
    kernels: list[Kernel]


class HostClock:
    """Adds up the host's time inside each component, without that of components inside it."""

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


def profile(shape: Shape, backend: str, *, repeats: int) -> Profile:
    """Profile some calls of one shape."""
    step = step_of(shape, backend)
    phases = {"forward": step.forward} | ({"backward": step.backward} if shape.backward else {})
    for _ in range(2):
        step()
    laps = [lap_times(step, shape.device) for _ in range(repeats)]
    whole = {way: statistics.median(lap[i] for lap in laps) for i, way in enumerate(phases)}
    rounds, kernels = on_gpu(phases, repeats) if shape.device.startswith("cuda") else (on_host(phases, repeats), [])
    return Profile(medians(rounds), whole, kernels)


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
    ordered = {}
    for key in sorted(keys, key=lambda key: order.index(key) if key in order else len(order)):
        own = [parts.get(key, Part(0.0)) for parts in rounds]
        ordered[key] = Part(statistics.median(p.ms for p in own), max(p.launches for p in own))
    return ordered
