"""The measurements of `bench`: interleaved variants; a size that does not fit, or fails, is a row."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from nsa_layer.api import nsa
from nsa_layer.support import UNION_ROWS
from nsa_tools.measure.peak_memory import is_out_of_memory, peak_bytes
from nsa_tools.measure.timed_calls import BACKWARD, BOTH, FORWARD, VARIANTS, Step, Timer, timers, variants
from nsa_tools.measure.timing import host_microseconds, sets_past_l2
from nsa_tools.report.results import FAILED, MEASURED, NO_MEMORY, TOO_SLOW, Row
from nsa_tools.shape import Shape
from nsa_tools.testing.sampled_check import Samples, forward_verdicts

SLOW_SECONDS = 2.0  # dense attention that takes longer is timed once, without a warm-up
PROBE_TOKENS = 16384  # where the time of dense attention is guessed from
HOST_CALLS = 100, 3  # calls whose host time is taken, at most and at least
HOST_MS = 200.0  # that they take on the GPU: more than a few, since the first ones find the host's caches cold
UNION_TILES = 1024  # tiles whose unions are counted

ByVariant = dict[str, dict[str, Row]]  # by variant and direction


@dataclass(frozen=True)
class Options:
    """The choices of a run.

    Attributes:
        graph: replayed from CUDA graphs.
        dense_limit: seconds that one timing of dense attention may take; where it would take longer it is skipped.
        error_rows: queries at which o is compared with the oracle; 0 for none.
    """

    backend: str
    variants: tuple[str, ...] = VARIANTS
    graph: bool = False
    repeats: int = 7
    dense_limit: float = 120.0
    error_rows: int = 32

    def directions(self, shape: Shape) -> tuple[str, ...]:
        if not shape.backward:
            return (FORWARD,)
        return (FORWARD, BOTH) if self.graph else (FORWARD, BACKWARD, BOTH)


class Bench:
    """Rows of one run, shape after shape; dense attention's time at one length predicts that of the next."""

    def __init__(self, options: Options, *, make: Callable[..., dict[str, Step]] = variants) -> None:
        self.options, self.make = options, make
        self.rows: list[Row] = []
        self.seconds_a_pair: float | None = None

    def run(self, shape: Shape) -> None:
        """Add the rows of one shape."""
        names, estimate = self.options.variants, 0.0
        if shape.device.startswith("cuda"):
            torch.cuda.empty_cache()  # blocks of another length's sizes are in the way of this one's
        if "dense" in names:
            estimate = self._dense_seconds(shape)
            if estimate > self.options.dense_limit:
                names = tuple(name for name in names if name != "dense")
                skipped = dict(status=TOO_SLOW, detail=f"about {estimate:,.0f} s a timing")
                rows = (self._row(shape, "dense", way) for way in self.options.directions(shape))
                self.rows += [replace(row, **skipped) for row in rows]
        found = self._measured(shape, names, once={"dense"} if estimate > SLOW_SECONDS else set())
        self._learn(shape, [row for row in found if row.variant == "dense"])
        dense = {(row.T, row.direction): row.ms for row in [*self.rows, *found] if row.variant == "dense" and row.ms}
        for row in found:
            base = dense.get((row.T, row.direction))
            compared = row.variant != "dense" and row.ms and base
            self.rows.append(replace(row, over_dense=base / row.ms) if compared else row)

    def _measured(self, shape: Shape, names: tuple[str, ...], once: set[str]) -> list[Row]:
        size = shape.B * shape.T * shape.Hq * shape.D * shape.dtype.itemsize
        sets = sets_past_l2(size) if shape.device.startswith("cuda") else 2
        rows = {name: {way: self._row(shape, name, way) for way in self.options.directions(shape)} for name in names}
        try:
            made = self.make(shape, self.options.backend, sets=sets)
        except Exception as error:
            for ways in rows.values():
                _fail(ways, ways, error)
            return _flat(rows)
        active = self._warm(made, names, once, rows)
        timings, peaks = self._interleave(shape, active, once, rows)
        for (name, way), taken in timings.items():
            peak = peaks[name, way] if shape.device.startswith("cuda") and not self.options.graph else None
            found = dict(status=MEASURED, ms=statistics.median(taken), timings_ms=tuple(taken), peak_bytes=peak)
            rows[name][way] = replace(rows[name][way], detail=None, **found)
        for name, timer in active:
            row = rows[name][timer.ways[-1]]
            if row.ms is not None and name not in once:
                most, least = HOST_CALLS
                count = min(most, max(least, int(HOST_MS / max(row.ms, 1.0))))
                calls = [host_microseconds(timer.call, shape.device) for _ in range(count)]
                rows[name][row.direction] = replace(row, host_us=statistics.median(calls))
        del active
        for name in names:
            if name != "dense" and self.options.error_rows and rows[name][FORWARD].ms is not None:
                rows[name][FORWARD] = self._with_error(shape, made[name], rows[name][FORWARD])
        return _flat(rows)

    def _warm(
        self, made: dict[str, Step], names: tuple[str, ...], once: set[str], rows: ByVariant
    ) -> list[tuple[str, Timer]]:
        """Timers after two runs (kernels compile, graphs are captured); those in `once` did not run."""
        active = []
        for name in names:
            for ways, make in timers(made[name], graph=self.options.graph, once=name in once):
                try:
                    timer = make()
                    if name not in once:
                        timer.call()
                        timer.call()
                    active.append((name, timer))
                except Exception as error:
                    _fail(rows[name], ways, error)
        return active

    def _interleave(self, shape: Shape, active: list, once: set[str], rows: ByVariant) -> tuple[dict, dict]:
        """Timings and peaks by variant and direction; timers that fail are no longer active."""
        timings, peaks = defaultdict(list), defaultdict(int)
        for repeat in tqdm(range(self.options.repeats), desc=shape.describe(), leave=False):
            for name, timer in list(active):
                if repeat and name in once:
                    continue
                try:
                    taken, peak = _taken(timer, shape.device)
                except Exception as error:
                    active.remove((name, timer))
                    _fail(rows[name], timer.ways, error)
                    for way in timer.ways:
                        timings.pop((name, way), None)
                    continue
                for way, ms in taken.items():
                    timings[name, way].append(ms)
                    peaks[name, way] = max(peaks[name, way], peak)
        return timings, peaks

    def _with_error(self, shape: Shape, step: Step, row: Row) -> Row:
        attend = partial(nsa, **replace(shape, index_loss=False).options(), backend=self.options.backend)
        samples = Samples(self.options.error_rows, 1, 4)
        try:
            verdicts, aux = forward_verdicts(shape, attend, step.sets[0], samples)
        except Exception as error:
            return replace(row, detail=f"no error: {_reason(error)}")
        worst = max((v for v in verdicts if v.name.split()[0] == "o"), key=lambda v: v.of_limit)
        wrong = [v.name for v in verdicts if not v.ok]
        found = dict(error=worst.error, eager_error=worst.eager_error, of_limit=worst.of_limit)
        if shape.config.q_tile < UNION_ROWS:
            found |= dict(union=union(aux.block_indices, shape))
        return replace(row, **found, detail=f"WRONG: {', '.join(wrong)}" if wrong else None)

    def _dense_seconds(self, shape: Shape) -> float:
        """A guess at one timing of dense attention, from the longest that was timed, or from a short one."""
        if self.seconds_a_pair is None:
            probe = shape.at(max(min(shape.T, PROBE_TOKENS), len(shape.lengths or ())))
            quiet = Bench(replace(self.options, repeats=1, graph=False), make=self.make)
            self._learn(probe, quiet._measured(probe, ("dense",), set()))
        return (self.seconds_a_pair or 0.0) * shape.dense_pairs()

    def _learn(self, shape: Shape, rows: list[Row]) -> None:
        if timed := [row.ms for row in rows if row.ms is not None]:
            self.seconds_a_pair = max(timed) / 1e3 / shape.dense_pairs()

    def _row(self, shape: Shape, variant: str, direction: str) -> Row:
        what = dict(variant=variant, direction=direction, graph=self.options.graph)
        return Row.of(shape, **what, status=FAILED, detail="not run")


def union(block_indices: torch.Tensor, shape: Shape) -> float:
    """Blocks that the tokens of a tile of 128 rows list together, over those that one of them lists.

    Args:
        block_indices: [B, M, Hkv, n] or packed [tiles, Hkv, n], padded with -1; those of `UNION_TILES` tiles of rows
            are read.
    """
    count = max(1, UNION_ROWS // (shape.Hq // shape.Hkv * shape.config.q_tile))
    lists = block_indices.flatten(0, -3)
    lists = lists[: len(lists) // count * count].unflatten(0, (-1, count))
    lists = lists[:: max(1, len(lists) // UNION_TILES)].transpose(1, 2)  # [tiles of rows, Hkv, count, n]
    together = lists.flatten(2).sort(-1).values
    distinct = (together[..., 1:] != together[..., :-1]).sum(-1) + (together[..., 0] >= 0)
    return (distinct.sum() / ((lists >= 0).sum() / count)).item()


def _taken(timer: Timer, device: str) -> tuple[dict[str, float], int]:
    """Milliseconds by direction, and on a GPU the peak above what was allocated before."""
    found: dict[str, float] = {}
    if not device.startswith("cuda"):
        return timer.take(device), 0
    return found, peak_bytes(lambda: found.update(timer.take(device)), device)


def _fail(rows: dict[str, Row], ways: Iterable[str], error: Exception) -> None:
    no_memory = is_out_of_memory(error)
    found = dict(status=NO_MEMORY, detail=None) if no_memory else dict(status=FAILED, detail=_reason(error))
    rows.update({way: replace(rows[way], **found) for way in ways})
    if torch.cuda.is_available():
        error.__traceback__ = None  # it holds the tensors of the failed call
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _flat(rows: ByVariant) -> list[Row]:
    return [row for ways in rows.values() for row in ways.values()]
