"""The parts of a step that `profile` times, and how their time is taken."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module

import torch

SHARED = {"choose_blocks": "choice of blocks", "compress": "compression", "gate_values": "gates"}
BRANCHES = {"compressed": "compressed", "selected": "selected", "window": "sliding window"}
# The functions of each backend that are timed, and what they are called in the table.
PARTS = {
    "cute": {
        "nsa_layer.branches": {f"{b}_forward": f"{name}, forward" for b, name in BRANCHES.items()}
        | {f"{b}_backward": f"{name}, backward" for b, name in BRANCHES.items()}
        | {"selected_sparsity": "block lists"},
        "nsa_layer.autograd": SHARED
        | {"weighted_sum_sliced": "weighted sum", "weighted_sum_backward": "weighted sum"}
        | {"mean_pool_backward": "compression", "gate_values_backward": "gates"},
    },
    "eager": {"nsa_layer.eager": SHARED | {"weighted_sum": "weighted sum"}},
    "reference": {},
}


class Stopwatch:
    """Adds up the time inside labelled calls: on the GPU's own clock where there is one."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.spans: dict[str, list[tuple[object, object]]] = defaultdict(list)

    def _now(self) -> object:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, label: str, call: Callable) -> Callable:
        """The call, with the time it takes added to a label."""

        def run(*args: object, **kwargs: object) -> object:
            begin = self._now()
            try:
                return call(*args, **kwargs)
            finally:
                self.spans[label].append((begin, self._now()))

        return run

    def take(self) -> dict[str, float]:
        """Milliseconds of each label since the last time, which are then forgotten."""
        if self.cuda:
            torch.cuda.synchronize()
            ms = {label: sum(a.elapsed_time(b) for a, b in spans) for label, spans in self.spans.items()}
        else:
            ms = {label: sum(b - a for a, b in spans) * 1e3 for label, spans in self.spans.items()}
        self.spans.clear()
        return ms


@contextmanager
def watch(backend: str, stopwatch: Stopwatch) -> Iterator[None]:
    """While entered, the parts of a backend are timed; nothing is changed for anybody else afterwards."""
    with ExitStack() as stack:
        for module_name, labels in PARTS[backend].items():
            module = import_module(module_name)
            for name, label in labels.items():
                timed = stopwatch.timed(label, getattr(module, name))
                stack.enter_context(_replaced(module, name, timed))
        if backend == "eager":
            _watch_eager_branches(stack, stopwatch)
        yield


def _watch_eager_branches(stack: ExitStack, stopwatch: Stopwatch) -> None:
    """Eager walks all branches with one function: the plan that it is given says which branch it is."""
    eager = import_module("nsa_layer.eager")
    plans: list[tuple[object, str]] = []

    def remembered(label: str, make: Callable) -> Callable:
        def run(*args: object) -> object:
            plans.append((make(*args), label))
            return plans[-1][0]

        return run

    def label_of(plan: object) -> str:
        return next(label for known, label in plans if known is plan)

    walk = eager._SparseAttention
    forward, backward = walk.forward, walk.backward
    for branch, label in BRANCHES.items():
        name = f"_{branch}_plan"
        stack.enter_context(_replaced(eager, name, remembered(label, getattr(eager, name))))
    timed = {
        "forward": lambda ctx, *args: stopwatch.timed(f"{label_of(args[3])}, forward", forward)(ctx, *args),
        "backward": lambda ctx, *grads: stopwatch.timed(f"{label_of(ctx.plan)}, backward", backward)(ctx, *grads),
    }
    for name, call in timed.items():
        stack.enter_context(_replaced(walk, name, staticmethod(call)))


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
