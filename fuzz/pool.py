"""Workers and what they are given: jobs in turn until the time is over, and a watchdog over every example.

A worker that dies, or stays with one example for too long, is ended and replaced; the example becomes a report.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from fuzz.prop import SM90, SM100, Property
from fuzz.run import Budget, Failure
from fuzz.worker import read_diary
from nsa_layer.compile_ahead import ENVIRONMENT as KERNEL_ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent  # workers import from here, wherever they run
MOST_SKIPPED = 1000  # jobs of failed properties in a row: then there are no others
START = 120.0  # seconds that a worker may take to import what it checks
GRACE = 30.0  # seconds that the last jobs may take beyond the time
COMPILING = {
    "CUDA_VISIBLE_DEVICES": "",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
}  # what is cached, is not compiled
ENVIRONMENTS = {
    SM90: COMPILING | KERNEL_ENVIRONMENT[90],
    SM100: COMPILING | KERNEL_ENVIRONMENT[100],
}


@dataclass(frozen=True)
class Job:
    """A slice of a property."""

    prop: Property
    kind: int
    budget: Budget

    def line(self) -> str:
        return json.dumps({"property": self.prop.name, "kind": self.kind, "budget": vars(self.budget)}) + "\n"


@dataclass
class Tally:
    """Outcomes so far, by property."""

    examples: Counter = field(default_factory=Counter)
    seconds: Counter = field(default_factory=Counter)
    features: dict[str, Counter] = field(default_factory=dict)
    failures: dict[tuple[str, int], Failure] = field(default_factory=dict)  # by property and kind of kernels
    hangs: int = 0
    interrupted: bool = False

    def add(self, job: Job, outcome: dict) -> None:
        name = job.prop.name
        self.examples[name] += outcome["examples"]
        self.seconds[name] += outcome["seconds"]
        self.features.setdefault(name, Counter()).update(outcome["features"])
        if outcome["failure"] is not None:
            self.fail(Failure(**outcome["failure"]), job.kind)

    def fail(self, failure: Failure, kind: int) -> None:
        kept = self.failures.get((failure.property, kind))
        if kept is None or len(failure.case) < len(kept.case):
            self.failures[failure.property, kind] = failure

    def has_failed(self, job: Job) -> bool:
        return (job.prop.name, job.kind) in self.failures


def _one_gpu(number: int) -> dict[str, str]:
    """Workers take turns on the GPUs of a machine."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = list(range(torch.cuda.device_count())) if visible is None else visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": str(gpus[number % len(gpus)])} if len(gpus) > 1 else {}


class _Worker:
    def __init__(self, number: int, folder: Path, need: str, mutation: str | None) -> None:
        self.diary, self.job, self.need, self.ready = folder / f"worker-{number}.json", None, need, False
        self.log = folder / f"worker-{number}.log"
        self.started = time.monotonic()
        kernels = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
        if mutation is None:
            kernels = {
                "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
                "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder.parent / "kernels"),
            }
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
        kernels["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | kernels | _one_gpu(number) | ENVIRONMENTS.get(need, {}) | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._send(json.dumps({"diary": str(self.diary), "mutation": mutation}) + "\n")

    def give(self, job: Job) -> None:
        self.job, self.started = job, time.monotonic()
        self._send(job.line())

    def _send(self, line: str) -> None:
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; reading from it says so

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stuck_for(self) -> float:
        """Seconds with one example, or with none at all."""
        at = read_diary(self.diary)
        return time.monotonic() - (at["since"] if at and at["since"] > self.started else self.started)


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

    def run(self, jobs: dict[str, Iterator[Job]], until: float) -> Tally:
        """Work through the jobs of each need, a worker at least for each, until a time of the monotonic clock.

        Where it is interrupted, the tally says so, and has what came out until then.
        """
        needs = [need for need in jobs]
        most = max(self.count, len(needs))
        roster = [needs[i % len(needs)] if i < len(needs) else needs[0] for i in range(most)]
        self.workers = [_Worker(i, self.folder, need, self.mutation) for i, need in enumerate(roster)]
        self.selector = selectors.DefaultSelector()
        for i, worker in enumerate(self.workers):
            self.selector.register(worker.process.stdout, selectors.EVENT_READ, i)
        try:
            while self.workers and time.monotonic() < until + GRACE and not self.stop(self.tally):
                for key, _ in self.selector.select(timeout=0.2):
                    self._hear(key.data, jobs, until)
                self._watch(jobs, until)
                self.notice(self.tally)
                if all(worker is None for worker in self.workers):
                    break
        except KeyboardInterrupt:
            self.tally.interrupted = True
        finally:
            for worker in self.workers:
                if worker is not None:
                    worker.end()
        return self.tally

    def _hear(self, i: int, jobs: dict[str, Iterator[Job]], until: float) -> None:
        worker = self.workers[i]
        line = worker.process.stdout.readline()
        if not line:
            self._report(worker, f"the worker ended with code {worker.process.wait()}")
            self._replace(i, until)
            return
        message = json.loads(line)
        if "ready" in message:
            worker.ready = True
        else:
            self.tally.add(worker.job, message)
        job = self._next_job(jobs[worker.need]) if time.monotonic() < until else None
        if job is None:
            self._retire(i)
            return
        seconds = max(0.5, min(job.budget.seconds, until - time.monotonic()))
        worker.give(Job(job.prop, job.kind, Budget(**(vars(job.budget) | {"seconds": seconds}))))

    def _next_job(self, jobs: Iterator[Job]) -> Job | None:
        """Jobs that failed once are left alone: making them smaller again would take the time of the others."""
        return next((job for job in islice(jobs, MOST_SKIPPED) if not self.tally.has_failed(job)), None)

    def _watch(self, jobs: dict[str, Iterator[Job]], until: float) -> None:
        for i, worker in enumerate(self.workers):
            if worker is None:
                continue
            if worker.stuck_for() > (self.patience if worker.ready else max(self.patience, START)):
                self.tally.hangs += 1
                self._report(worker, f"hang: no end after {self.patience:.0f} seconds")
                self._replace(i, until)

    def _report(self, worker: _Worker, said: str) -> None:
        log = worker.log.read_text(errors="replace")[-3000:]
        at = read_diary(worker.diary)
        if at is None:
            name = worker.job.prop.name if worker.job else "no property"
            self.tally.fail(Failure(name, "", f"{said}, between examples", log), worker.job.kind if worker.job else 0)
            return
        name = at["property"]
        self.tally.examples[name] += 1
        took = time.monotonic() - at["since"]
        self.tally.fail(Failure(name, at["case"], said, log, took, 0), worker.job.kind if worker.job else 0)

    def _retire(self, i: int) -> None:
        self.selector.unregister(self.workers[i].process.stdout)
        self.workers[i].end()
        self.workers[i] = None

    def _replace(self, i: int, until: float) -> None:
        need, never_ran = self.workers[i].need, not self.workers[i].ready
        self._retire(i)
        if time.monotonic() < until and not never_ran:
            self.workers[i] = _Worker(i, self.folder, need, self.mutation)
            self.selector.register(self.workers[i].process.stdout, selectors.EVENT_READ, i)
