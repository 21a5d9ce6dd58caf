"""Workers and what they are given: slices of properties in turn until the time is over.

A worker that dies, or stays with one example for too long, is replaced; the example becomes a report.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fuzz.mutations import Mutation, planted
from fuzz.prop import SM90, SM100, Property, properties
from fuzz.run import Budget, Failure, Outcome, run_property
from nsa_layer.warm_up.jobs import ENVIRONMENT as KERNEL_ENVIRONMENT

PATIENCE = 180.0  # seconds that one example may take before it counts as a hang, and a worker to import what it checks
GRACE = 30.0  # seconds that the last slices may take beyond the time
SLICE = Budget(examples=2000, seconds=3.0)  # with a property, before another one's turn
LONGEST = 1 << 16  # bytes of a case
NO_CACHE = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}  # what is cached, is not compiled
ENVIRONMENTS = {
    SM90: {"CUDA_VISIBLE_DEVICES": ""} | NO_CACHE | KERNEL_ENVIRONMENT[90],
    SM100: {"CUDA_VISIBLE_DEVICES": ""} | NO_CACHE | KERNEL_ENVIRONMENT[100],
}
SPAWN = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
Unit = tuple[str, int]  # a property, and the number of its kind of kernels
NOTHING: Unit = ("no property", 0)


@dataclass
class Tally:
    """Outcomes so far, by property; failures by property and kind of kernels."""

    outcomes: dict[str, Outcome] = field(default_factory=lambda: defaultdict(Outcome))
    failures: dict[Unit, Failure] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def total(self) -> int:
        return sum(outcome.examples for outcome in self.outcomes.values())

    def add(self, unit: Unit, new: Outcome) -> None:
        outcome = self.outcomes[unit[0]]
        outcome.examples, outcome.seconds = outcome.examples + new.examples, outcome.seconds + new.seconds
        if new.failure is not None:
            self.failures[unit] = new.failure


def _one_gpu(number: int) -> dict[str, str]:
    """Workers are dealt out over the GPUs of a machine."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(range(torch.cuda.device_count())) if visible is None else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": str(gpus[number % len(gpus)])} if len(gpus) > 1 else {}


def _work(pipe: Connection, at: Any, log: Path, patience: float, fault: str | None) -> None:
    """In a process of its own: check properties; `at` holds the case that is being checked, the log what is printed."""
    os.setsid()  # an interrupt is for whoever watches
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def note(case: object) -> None:
        at.value = repr(case).encode()[: LONGEST - 1]
        faulthandler.dump_traceback_later(patience, exit=True, file=2)

    faulthandler.dump_traceback_later(max(patience, PATIENCE), exit=True, file=2)
    known = properties()
    with planted(fault) if fault else nullcontext():
        pipe.send(None)
        while True:
            (name, kind), budget = pipe.recv()
            outcome = run_property(known[name], budget, kind=kind, before=note)
            faulthandler.cancel_dump_traceback_later()
            at.value = b""
            pipe.send(outcome)


class _Worker:
    def __init__(self, number: int, folder: Path, need: str, patience: float, fault: str | None) -> None:
        self.number, self.need, self.unit, self.started = number, need, NOTHING, time.monotonic()
        self.log = folder / "workers" / f"worker-{number}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        cache = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
        cache["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(folder / "kernels")
        self.at = SPAWN.RawArray("c", LONGEST)
        self.pipe, theirs = SPAWN.Pipe()
        # Not a daemon, which may have no processes of its own: `end` is always called.
        self.process = SPAWN.Process(target=_work, args=(theirs, self.at, self.log, patience, fault))
        variables = (NO_CACHE if fault else cache) | _one_gpu(number) | ENVIRONMENTS.get(need, {})
        with patch.dict(os.environ, variables | {"OMP_NUM_THREADS": "1"}):
            self.process.start()
        theirs.close()

    def give(self, unit: Unit, budget: Budget) -> None:
        self.unit, self.started = unit, time.monotonic()
        self.pipe.send((unit, budget))

    def lost(self) -> Outcome:
        """The example that it was at when it ended, with what it has printed."""
        self.process.join()
        case, log = self.at.value.decode(errors="replace"), self.log.read_text(errors="replace")
        said = "hang" if "Timeout (" in log else f"the worker ended with code {self.process.exitcode}"
        failure = Failure(self.unit[0], case, said if case else f"{said}, between examples", log[-5000:])
        return Outcome(bool(case), time.monotonic() - self.started, failure=failure)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _in_turn(units: list[Unit], tally: Tally) -> Iterator[Unit]:
    """Another order each time round. What failed is left alone: making it smaller again would take others' time."""
    while units := [unit for unit in units if unit not in tally.failures]:
        random.shuffle(units)
        yield from units


def run_jobs(
    chosen: Sequence[Property],
    count: int,
    folder: Path,
    until: float,
    *,
    patience: float = PATIENCE,
    fault: Mutation | None = None,
    notice: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Check properties in at least so many workers, one for each need, until a time of the monotonic clock.

    With a fault planted, until it is found; examples are not kept then. Where it is interrupted, the tally says so, and
    has what came out until then.
    """
    tally, workers = Tally(), {}
    groups: dict[str, list[Unit]] = {}  # GPU work and CPU work share a process
    for prop in chosen:
        need = prop.needs if prop.needs in ENVIRONMENTS else ""
        suiting = [(prop.name, i) for i, kind in enumerate(prop.kinds) if fault is None or fault.suits(kind)]
        groups.setdefault(need, []).extend(suiting)
    units = {need: _in_turn(group, tally) for need, group in groups.items()}
    budget = replace(SLICE, database=None if fault else str(folder / "examples"))

    def start(number: int, need: str) -> None:
        worker = _Worker(number, folder, need, patience, fault and fault.name)
        workers[worker.pipe] = worker

    for number, need in enumerate([*groups, *list(groups)[:1] * (count - len(groups))]):
        start(number, need)
    try:
        while workers and time.monotonic() < until + GRACE and not (fault and tally.failures):
            for pipe in wait(list(workers), timeout=0.2):
                worker = workers[pipe]
                try:
                    if (outcome := pipe.recv()) is not None:
                        tally.add(worker.unit, outcome)
                    left = until - time.monotonic()
                    if left > 0 and (unit := next(units[worker.need], None)):
                        seconds = max(0.5, min(budget.seconds, left))
                        worker.give(unit, replace(budget, seconds=seconds, seed=random.randrange(1 << 30)))
                    else:
                        workers.pop(pipe).end()
                except (EOFError, ConnectionError):
                    tally.add(worker.unit, worker.lost())
                    workers.pop(pipe).end()
                    if worker.unit != NOTHING and time.monotonic() < until:
                        start(worker.number, worker.need)
            notice(tally)
    except KeyboardInterrupt:
        tally.interrupted = True
    finally:
        for worker in workers.values():
            worker.end()
    return tally
