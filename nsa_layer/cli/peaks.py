"""How much memory a call takes at its peak, in each component, and what is held outside PyTorch's allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from nsa_layer.ranges import observed

OTHER = "other"


@dataclass
class PeakWatch:
    """The most that is allocated on a GPU inside each component, above what was allocated at the beginning.

    The allocator keeps one peak, set back at each border: what it was goes to the component that is open.
    """

    base: int
    most: dict[str, int] = field(default_factory=dict)
    open: list[str] = field(default_factory=lambda: [OTHER])

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.fold()
        self.open.append(name)
        try:
            yield
        finally:
            self.fold()
            self.open.pop()

    def fold(self) -> None:
        """Credit the peak since the last border to what is open."""
        peak = torch.cuda.max_memory_allocated() - self.base
        self.most[self.open[-1]] = max(self.most.get(self.open[-1], 0), peak)
        torch.cuda.reset_peak_memory_stats()


def peaks_by_component(call: Callable[[], object]) -> dict[str, int]:
    """Bytes at the peak inside each component of a call on a GPU, other calls' memory left out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    watch = PeakWatch(torch.cuda.memory_allocated())
    with observed(watch):
        call()
    watch.fold()
    return watch.most


def outside_allocator() -> int:
    """Bytes of the GPU that neither are free nor belong to PyTorch's allocator: contexts, code, other processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def longest(fits: Callable[[int], bool], *, guess: int, step: int) -> int:
    """The largest multiple of `step` that fits, from a guess: gaps double until both sides are known, then halve.

    0 where not even `step` does.
    """
    T = max(step, guess // step * step)
    gap, good, bad = step, 0, None
    if fits(T):
        good = T
        while bad is None:
            if fits(good + gap):
                good, gap = good + gap, 2 * gap
            else:
                bad = good + gap
    else:
        bad = T
        while bad > step and good == 0:
            lower = max(step, bad - gap)
            if fits(lower):
                good = lower
            else:
                bad, gap = lower, 2 * gap
    while good and bad - good > step:
        middle = (good + bad) // 2 // step * step
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def in_a_process_of_its_own(argv: list[str], *, allocator: str) -> dict:
    """What `python -m nsa_layer memory ... --raw` says with other allocator settings, which are read once a process."""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator}
    command = [sys.executable, "-m", "nsa_layer", "memory", *argv, "--raw"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        return {"error": (result.stderr.strip().splitlines() or ["it failed"])[-1]}
    return json.loads(result.stdout.strip().splitlines()[-1])
