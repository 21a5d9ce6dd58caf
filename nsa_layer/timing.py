"""Timing of calls: CUDA events (a host clock on a CPU), after a warm-up, variants taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from tqdm import tqdm

L2_BYTES = 60 << 20  # Hopper's: inputs that rotate over twice as much are not found in it

HOST_CYCLES = 2_000_000  # about a millisecond of a GPU's clock: longer than any call takes to launch

Call = Callable[[], object]


def interleaved(
    calls: Mapping[str, Call], *, repeats: int, device: str, label: str = "", hide_host: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of `repeats` timings of each call; a call may have a ``prepare()``, which is not timed.

    With `hide_host` a GPU is kept busy while the host makes a call's launches: what is timed is the GPU alone.
    """
    timings: dict[str, list[float]] = {name: [] for name in calls}
    for call in tqdm(calls.values(), desc=f"{label}: warm-up", leave=False):
        call()
        call()
    for _ in tqdm(range(repeats), desc=label, leave=False):
        for name, call in calls.items():
            timings[name].append(milliseconds(call, device, hide_host=hide_host))
    return timings


def milliseconds(call: Call, device: str, *, hide_host: bool = False) -> float:
    """One timing, with nothing else in flight."""
    prepare = getattr(call, "prepare", None)
    if prepare is not None:
        prepare()
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if hide_host:
        torch.cuda._sleep(HOST_CYCLES)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def sets_past_l2(bytes_a_set: int) -> int:
    """How many sets of inputs to rotate over."""
    return max(2, -(-2 * L2_BYTES // bytes_a_set))
