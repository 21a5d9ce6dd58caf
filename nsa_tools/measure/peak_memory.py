"""Peak memory of a call, on a CPU or a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

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


def is_out_of_memory(error: BaseException) -> bool:
    """True for errors of PyTorch's allocator, and of libraries that allocate on their own."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "out_of_memory" in text


def quiet_profiler() -> None:
    """Keep the profiler's notes about starting and stopping off the terminal, unless the user asked for them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
