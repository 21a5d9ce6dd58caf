"""Peak memory of a call, in all and inside each of its components."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from nsa_layer.profiler_ranges import observed

OTHER = "other"  # outside all components


def peak_bytes(call: Callable[[], object], device: torch.device | str) -> int:
    """The most bytes of tensors alive during ``call``, above what was alive before it.

    On a GPU this is what the caching allocator counts; on a CPU every allocation and release that PyTorch's profiler
    reports, temporaries inside operators included, scratch space of BLAS libraries not.

    Raises:
        NotImplementedError: the device is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"peak memory is measured on cpu and cuda, not on {device.type}")
    if device.type == "cpu":
        return _peak_on_cpu(call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Callable[[], object]) -> int:
    quiet_profiler()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def quiet_profiler() -> None:
    """Keep the profiler's notes about starting and stopping off the terminal, unless the user asked for them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")


@dataclass
class _PeakWatch:
    """The most that is allocated inside each component, above `base`.

    The allocator keeps one peak, which is reset at each border and credited to the component that was open.
    """

    base: int
    most: dict[str, int] = field(default_factory=dict)
    open: list[str] = field(default_factory=lambda: [OTHER])

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.credit()
        self.open.append(name)
        try:
            yield
        finally:
            self.credit()
            self.open.pop()

    def credit(self) -> None:
        peak = torch.cuda.max_memory_allocated() - self.base
        self.most[self.open[-1]] = max(self.most.get(self.open[-1], 0), peak)
        torch.cuda.reset_peak_memory_stats()


def peaks_by_component(call: Callable[[], object]) -> dict[str, int]:
    """Bytes at the peak inside each component of a call on a GPU, above what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    watch = _PeakWatch(torch.cuda.memory_allocated())
    with observed(watch):
        call()
    watch.credit()
    return watch.most


def outside_allocator() -> int:
    """Bytes of the GPU that are neither free nor of PyTorch's allocator: contexts, code, other processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
