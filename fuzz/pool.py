"""Workers and what they are given: jobs in turn until the time is over, and a watchdog over every example.

A worker that dies, or stays with one example for too long, is ended and replaced; the example becomes a report.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fuzz.prop import SM90, SM100, Property, properties
from fuzz.run import Budget, Failure, Outcome, run_property
from nsa_layer.warm_up.lookup import ENVIRONMENT as KERNEL_ENVIRONMENT

MOST_SKIPPED = 1000  # jobs of failed properties in a row: then there are no others
START = 120.0  # seconds that a worker may take to import what it checks
GRACE = 30.0  # seconds that the last jobs may take beyond the time
LONGEST = 1 << 16  # bytes of a case
NO_CACHE = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}  # what is cached, is not compiled
ENVIRONMENTS = {
    SM90: {"CUDA_VISIBLE_DEVICES": ""} | NO_CACHE | KERNEL_ENVIRONMENT[90],
    SM100: {"CUDA_VISIBLE_DEVICES": ""} | NO_CACHE | KERNEL_ENVIRONMENT[100],
}
SPAWN = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork


@dataclass(frozen=True)
class Job:
    """A slice of a property."""

    prop: Property
    kind: int
    budget: Budget


@dataclass
class Tally:
    """Outcomes so far, by property."""

    examples: Counter = field(default_factory=Counter)
    seconds: Counter = field(default_factory=Counter)
    features: dict[str, Counter] = field(default_factory=dict)
    failures: dict[tuple[str, int], Failure] = field(default_factory=dict)  # by property and kind of kernels
    hangs: int = 0
    interrupted: bool = False

    def add(self, job: Job, outcome: Outcome) -> None:
        name = job.prop.name
        self.examples[name] += outcome.examples
        self.seconds[name] += outcome.seconds
        self.features.setdefault(name, Counter()).update(outcome.features)
        if outcome.failure is not None:
            self.fail(outcome.failure, job.kind)

    def fail(self, failure: Failure, kind: int) -> None:
        kept = self.failures.get((failure.property, kind))
        if kept is None or len(failure.case) < len(kept.case):
            self.failures[failure.property, kind] = failure

    def has_failed(self, job: Job) -> bool:
        return (job.prop.name, job.kind) in self.failures


def _one_gpu(number: int) -> dict[str, str]:
    """Workers are dealt out over the GPUs of a machine."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(range(torch.cuda.device_count())) if visible is None else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": str(gpus[number % len(gpus)])} if len(gpus) > 1 else {}


def _work(pipe: Connection, at: Any, since: Any, log: Path, mutation: str | None) -> None:
    """In a process of its own: check the properties of jobs; `at` holds the case that is being checked."""
    from fuzz.mutations import planted

    os.setsid()  # an interrupt is for whoever watches
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def note(case: object) -> None:
        at.value, since.value = repr(case).encode()[: LONGEST - 1], time.monotonic()

    known = properties()
    with planted(mutation) if mutation else nullcontext():
        pipe.send(None)
        while True:
            name, kind, budget = pipe.recv()
            outcome = run_property(known[name], budget, kind=kind, before=note)
            at.value = b""
            pipe.send(outcome)


class _Worker:
    def __init__(self, number: int, folder: Path, need: str, mutation: str | None) -> None:
        self.number, self.need, self.job, self.ready = number, need, None, False
        self.log = folder / f"worker-{number}.log"
        self.log.write_text("")
        cache = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
        cache["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(folder.parent / "kernels")
        own = NO_CACHE if mutation else cache
        self.at, self._since = SPAWN.RawArray("c", LONGEST), SPAWN.RawValue("d")
        self.pipe, theirs = SPAWN.Pipe()
        given = (theirs, self.at, self._since, self.log, mutation)
        # Not a daemon, which may have no processes of its own: `end` is always called.
        self.process, self.started = SPAWN.Process(target=_work, args=given), time.monotonic()
        with patch.dict(os.environ, own | _one_gpu(number) | ENVIRONMENTS.get(need, {}) | {"OMP_NUM_THREADS": "1"}):
            self.process.start()
        theirs.close()

    def give(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        self.pipe.send((job.prop.name, job.kind, job.budget))

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def since(self) -> float:
        """The start of an example, or of its job, or the worker's own."""
        return max(self._since.value, self.started)

    def failure(self, said: str) -> Failure:
        """The example that it is at, with what it has printed."""
        case = self.at.value.decode(errors="replace")
        name, said = self.job.prop.name if self.job else "no property", said if case else f"{said}, between examples"
        log = self.log.read_text(errors="replace")[-3000:]
        return Failure(name, case, said, log, time.monotonic() - self.since())


class Pool:
    """So many workers over the jobs of an iterator, which may never end; `stop` says when enough is enough."""

    def __init__(
        self,
        workers: int,
        folder: Path,
        *,
        patience: float,
        mutation: str | None = None,
        notice: Callable[[Tally], None] = lambda tally: None,
        stop: Callable[[Tally], bool] = lambda tally: False,
    ) -> None:
        self.folder, self.patience, self.mutation = folder / "workers", patience, mutation
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count, self.notice, self.stop, self.tally = workers, notice, stop, Tally()
        self.workers: dict[Connection, _Worker] = {}

    def run(self, jobs: dict[str, Iterator[Job]], until: float) -> Tally:
        """Work through the jobs of each need, a worker at least for each, until a time of the monotonic clock.

        Where it is interrupted, the tally says so, and has what came out until then.
        """
        needs = [*jobs, *list(jobs)[:1] * (self.count - len(jobs))]
        for number, need in enumerate(needs):
            self._start(number, need)
        try:
            while self.workers and time.monotonic() < until + GRACE and not self.stop(self.tally):
                for pipe in wait(list(self.workers), timeout=0.2):
                    self._hear(self.workers[pipe], jobs, until)
                self._watch(until)
                self.notice(self.tally)
        except KeyboardInterrupt:
            self.tally.interrupted = True
        finally:
            for worker in self.workers.values():
                worker.end()
        return self.tally

    def _start(self, number: int, need: str) -> None:
        worker = _Worker(number, self.folder, need, self.mutation)
        self.workers[worker.pipe] = worker

    def _hear(self, worker: _Worker, jobs: dict[str, Iterator[Job]], until: float) -> None:
        try:
            outcome = worker.pipe.recv()
            if outcome is None:
                worker.ready = True
            else:
                self.tally.add(worker.job, outcome)
            # Jobs that failed once are left alone: making them smaller again would take the time of the others.
            others = (job for job in islice(jobs[worker.need], MOST_SKIPPED) if not self.tally.has_failed(job))
            job = next(others, None) if time.monotonic() < until else None
            if job is None:
                self.workers.pop(worker.pipe).end()
                return
            seconds = max(0.5, min(job.budget.seconds, until - time.monotonic()))
            worker.give(replace(job, budget=replace(job.budget, seconds=seconds)))
        except (EOFError, ConnectionError):
            worker.process.join()
            self._replace(worker, f"the worker ended with code {worker.process.exitcode}", until)

    def _watch(self, until: float) -> None:
        for worker in list(self.workers.values()):
            patience = self.patience if worker.ready else max(self.patience, START)
            if time.monotonic() - worker.since() > patience:
                self.tally.hangs += 1
                self._replace(worker, f"hang: no end after {self.patience:.0f} seconds", until)

    def _replace(self, worker: _Worker, said: str, until: float) -> None:
        """Report a worker that is lost, and start another if this one ever ran."""
        failure = worker.failure(said)
        self.tally.examples[failure.property] += bool(failure.case)
        self.tally.fail(failure, worker.job.kind if worker.job else 0)
        self.workers.pop(worker.pipe).end()
        if worker.ready and time.monotonic() < until:
            self._start(worker.number, worker.need)
