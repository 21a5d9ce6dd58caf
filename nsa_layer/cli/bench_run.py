"""Measures what `bench` shows: variants take turns, a size that does not fit is a row, and so is one that fails."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from nsa_layer.api import nsa
from nsa_layer.cli import results
from nsa_layer.cli.check import Samples, forward_verdicts
from nsa_layer.cli.results import Row, row_of
from nsa_layer.cli.shape import Shape
from nsa_layer.cli.variants import (
    BACKWARD,
    BOTH,
    FORWARD,
    VARIANTS,
    Timer,
    Variant,
    is_out_of_memory,
    timers,
    variants,
)
from nsa_layer.timing import host_microseconds, sets_past_l2

SLOW_SECONDS = 2.0  # dense attention that takes longer is timed once, without a warm-up
PROBE_TOKENS = 16384  # where the time of dense attention is guessed from
HOST_CALLS = 100, 3  # whose host time is taken at most, and at least
HOST_MS = 200.0  # as many as take so long on the GPU in between: the first ones find the host's own caches cold


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        backward: backward and forward+backward too.
        graph: replayed from CUDA graphs.
        dense_limit: seconds that one timing of dense attention may take.
        error_rows: queries at which o is compared with the oracle; 0 for none.
    """

    backend: str
    variants: tuple[str, ...] = VARIANTS
    backward: bool = True
    graph: bool = False
    repeats: int = 7
    dense_limit: float = 120.0
    error_rows: int = 32


class Bench:
    """Rows of one run, shape after shape; dense attention's time at one length says what to expect at the next."""

    def __init__(self, options: Options, *, make: Callable[..., dict[str, Variant]] = variants) -> None:
        self.options, self.make = options, make
        self.rows: list[Row] = []
        self.seconds_a_pair: float | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        if not self.options.backward:
            return (FORWARD,)
        return (FORWARD, BOTH) if self.options.graph else (FORWARD, BACKWARD, BOTH)

    def run(self, shape: Shape) -> None:
        """Add the rows of one shape."""
        names, estimate = self.options.variants, 0.0
        if shape.device.startswith("cuda"):
            torch.cuda.empty_cache()  # blocks of another length's sizes are in the way of this one's
        if "dense" in names:
            estimate = self._dense_seconds(shape)
            if estimate > self.options.dense_limit:
                self._run_dense_at_a_shorter_length(shape)
                names = tuple(name for name in names if name != "dense")
        found = self._measured(shape, names, once={"dense"} if estimate > SLOW_SECONDS else set())
        self._learn(shape, [row for row in found if row.variant == "dense"])
        self._add(found)

    def _add(self, found: list[Row]) -> None:
        """Rows, compared with the dense ones of the same length and direction."""
        dense = {(row.T, row.direction): row.ms for row in [*self.rows, *found] if row.variant == "dense" and row.ms}
        for row in found:
            base = dense.get((row.T, row.direction))
            compared = row.variant != "dense" and row.ms and base
            self.rows.append(replace(row, over_dense=base / row.ms) if compared else row)

    def _measured(self, shape: Shape, names: tuple[str, ...], once: set[str]) -> list[Row]:
        size = shape.B * shape.T * shape.Hq * shape.D * shape.dtype.itemsize
        rows = {name: {way: self._row(shape, name, way) for way in self.directions} for name in names}
        try:
            made = self.make(shape, self.options.backend, backward=self.options.backward, sets=sets_past_l2(size))
        except Exception as error:
            _fail([(name, way) for name in rows for way in rows[name]], rows, error)
            return _flat(rows)
        active = self._warm(made, names, once, rows)
        timings, peaks = self._take_turns(shape, active, once, rows)
        for (name, way), taken in timings.items():
            peak = peaks[name, way] if shape.device.startswith("cuda") and not self.options.graph else None
            rows[name][way] = replace(
                rows[name][way],
                status=results.MEASURED,
                ms=statistics.median(taken),
                timings_ms=tuple(taken),
                detail=None,
                peak_bytes=peak,
            )
        for name, key, timer in active:
            ms = rows[name][key].ms
            if ms is not None and name not in once:
                most, least = HOST_CALLS
                count = min(most, max(least, int(HOST_MS / max(ms, 1.0))))
                calls = [host_microseconds(timer, shape.device) for _ in range(count)]
                rows[name][key] = replace(rows[name][key], host_us=statistics.median(calls))
        del active
        for name in names:
            if name != "dense" and self.options.error_rows and rows[name][FORWARD].ms is not None:
                rows[name][FORWARD] = self._with_error(shape, made[name], rows[name][FORWARD])
        return _flat(rows)

    def _warm(self, made: dict, names: tuple[str, ...], once: set[str], rows: dict) -> list[tuple[str, str, Timer]]:
        """Timers that ran twice (kernels compile, graphs are captured), but for those of which one run is dear."""
        active = []
        for name in names:
            for key, make in timers(
                made[name], backward=self.options.backward, graph=self.options.graph, once=name in once
            ):
                try:
                    timer = make()
                    if name not in once:
                        timer()
                        timer()
                    active.append((name, key, timer))
                except Exception as error:
                    _fail([(name, way) for way in self._ways(key, name in once)], rows, error)
        return active

    def _take_turns(self, shape: Shape, active: list, once: set[str], rows: dict) -> tuple[dict, dict]:
        timings, peaks, failed = defaultdict(list), defaultdict(int), set()
        for repeat in tqdm(range(self.options.repeats), desc=shape.describe(), leave=False):
            for name, key, timer in active:
                if (repeat and name in once) or (name, key) in failed:
                    continue
                before = _reset_peak(shape.device)
                try:
                    taken = timer.take(shape.device)
                except Exception as error:
                    ways = self._ways(key, name in once)
                    failed.add((name, key))
                    _fail([(name, way) for way in ways], rows, error)
                    for way in ways:
                        timings.pop((name, way), None)
                    continue
                for way, ms in taken.items():
                    timings[name, way].append(ms)
                    peaks[name, way] = max(peaks[name, way], _peak(shape.device) - before)
        active[:] = [entry for entry in active if entry[:2] not in failed]
        return timings, peaks

    def _ways(self, key: str, once: bool) -> tuple[str, ...]:
        """The directions that a timer gives."""
        if key == FORWARD:
            return (FORWARD,)
        return tuple(way for way in self.directions if once or way != FORWARD)

    def _with_error(self, shape: Shape, variant: Variant, row: Row) -> Row:
        attend = partial(nsa, **shape.options(), backend=self.options.backend)
        try:
            samples = Samples(self.options.error_rows, 1, 4)
            verdicts = forward_verdicts(shape, attend, variant.sets[0], samples)
        except Exception as error:
            return replace(row, detail=f"no error: {_reason(error)}")
        worst = max((v for v in verdicts if v.name.split()[0] == "o"), key=lambda v: v.of_limit)
        wrong = [v.name for v in verdicts if not v.ok]
        found = dict(error=worst.error, eager_error=worst.eager_error, of_limit=worst.of_limit)
        return replace(row, **found, detail=f"WRONG: {', '.join(wrong)}" if wrong else None)

    def _dense_seconds(self, shape: Shape) -> float:
        """A guess at one timing of dense attention, from the longest that was timed, or from a short one."""
        if self.seconds_a_pair is None:
            probe = shape.at(max(min(shape.T, PROBE_TOKENS), len(shape.lengths or ())))
            rows = self._dense_rows(probe)
            self._learn(probe, rows)
        return (self.seconds_a_pair or 0.0) * shape.dense_pairs()

    def _dense_rows(self, shape: Shape) -> list[Row]:
        quiet = Bench(replace(self.options, repeats=1, graph=False), make=self.make)
        return quiet._measured(shape, ("dense",), set())

    def _learn(self, shape: Shape, rows: list[Row]) -> None:
        longest = max((row.ms for row in rows if row.ms is not None), default=None)
        if longest is not None:
            self.seconds_a_pair = longest / 1e3 / shape.dense_pairs()

    def _run_dense_at_a_shorter_length(self, shape: Shape) -> None:
        """Rows that say of dense attention what a shorter length lets expect, and of which length."""
        base = shape
        while self._dense_seconds(base) > self.options.dense_limit and base.T > 1:
            base = base.at(base.T // 2)
        if not any(row.T == base.T and row.variant == "dense" for row in self.rows):
            once = {"dense"} if self._dense_seconds(base) > SLOW_SECONDS else set()
            found = self._measured(base, ("dense",), once)
            self._learn(base, found)
            self._add(found)
        factor = shape.dense_pairs() / base.dense_pairs()
        known = {row.direction: row for row in self.rows if row.T == base.T and row.variant == "dense"}
        for way in self.directions:
            row = self._row(shape, "dense", way)
            if way in known and known[way].ms is not None:
                scaled = dict(
                    status=results.FROM_SHORTER, detail=None, ms=known[way].ms * factor, from_T=base.T, factor=factor
                )
                row = replace(row, **scaled)
            self.rows.append(row)

    def _row(self, shape: Shape, variant: str, direction: str) -> Row:
        return row_of(
            shape,
            variant=variant,
            direction=direction,
            graph=self.options.graph,
            status=results.FAILED,
            detail="not run",
        )


def _fail(which: list[tuple[str, str]], rows: dict, error: Exception) -> None:
    status = results.NO_MEMORY if is_out_of_memory(error) else results.FAILED
    for name, way in which:
        detail = None if status == results.NO_MEMORY else _reason(error)
        rows[name][way] = replace(rows[name][way], status=status, detail=detail)
    if torch.cuda.is_available():
        # What the failed call held hangs on its traceback.
        error.__traceback__ = None
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _flat(rows: dict) -> list[Row]:
    return [row for ways in rows.values() for row in ways.values()]


def _reset_peak(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
