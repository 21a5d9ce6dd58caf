"""Times of calls: CUDA events (a host clock on a CPU), after a warm-up, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from tqdm import tqdm

L2_BYTES = 60 << 20  # Hopper's: inputs that rotate over twice as much are not found in it
HOST_CYCLES = 8_000_000  # some 4 milliseconds of a GPU's clock: longer than a call takes to launch on a slow host

Call = Callable[[], object]


def interleaved(
    calls: Mapping[str, Call], *, repeats: int, device: str, label: str = "", hide_host: bool = False, warm_ups: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of `repeats` timings of each call, after so many `warm_ups`; its ``prepare()`` is not timed.

    With `hide_host` a GPU is kept busy while the host makes a call's launches: what is timed is the GPU alone.
    """
    timings: dict[str, list[float]] = {name: [] for name in calls}
    for call in tqdm(calls.values(), desc=f"{label}: warm-up", leave=False):
        for _ in range(warm_ups):
            call()
    for _ in tqdm(range(repeats), desc=label, leave=False):
        for name, call in calls.items():
            timings[name].append(milliseconds(call, device, hide_host=hide_host))
    return timings


def milliseconds(call: Call, device: str, *, hide_host: bool = False) -> float:
    """One timing with nothing else in flight."""
    prepare = getattr(call, "prepare", None)
    if prepare is not None:
        prepare()
    if hide_host and device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda._sleep(HOST_CYCLES)
    return sum(lap_times(lambda lap: call(), device, synchronize=not hide_host))


def lap_times(call: Callable[[Callable[[], None]], object], device: str, *, synchronize: bool = True) -> list[float]:
    """Milliseconds between the laps of one ``call(lap)``, its begin and its end."""
    cuda, marks = device.startswith("cuda"), []

    def lap() -> None:
        if cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    if cuda and synchronize:
        torch.cuda.synchronize()
    lap()
    call(lap)
    lap()
    if not cuda:
        return [(end - begin) * 1e3 for begin, end in zip(marks, marks[1:])]
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]


def host_microseconds(call: Call, device: str) -> float:
    """Time in which the host makes one call's launches while the GPU has nothing else to do."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def capture(call: Callable[[], Any], *, warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the call, and what the call returned; warm-ups run on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def captured(call: Call, *, warm_ups: int = 1) -> Call:
    """Replays of a CUDA graph of the call, whose output lives as long."""
    graph, output = capture(call, warm_ups=warm_ups)
    return lambda _output=output: graph.replay()


def rotating(calls: Sequence[Call]) -> Call:
    """A call that makes each of some calls in turn, so that their inputs are not found in the L2."""
    rotation = cycle(calls)
    return lambda *_: next(rotation)()


def sets_past_l2(bytes_a_set: int) -> int:
    """Number of sets of inputs to rotate over: a set that is many times the L2 pushes itself out of it."""
    return 1 if bytes_a_set >= 8 * L2_BYTES else max(2, -(-2 * L2_BYTES // bytes_a_set))
