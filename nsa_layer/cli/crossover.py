"""Finds the length from which on the layer is no slower than dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nsa_layer.cli.bench_run import Bench, Options
from nsa_layer.cli.results import Crossover
from nsa_layer.cli.shape import Shape
from nsa_layer.cli.variants import BOTH, FORWARD

STEP = 256  # tokens to which a length is found
LOW = 1024


def find(times: Callable[[int], tuple[float, float] | None], *, low: int, high: int, step: int) -> tuple:
    """The shortest multiple of `step` that is no slower, and the longest known to be slower below it.

    Lengths double from `low` until one is no slower, then the gap is halved: below the answer one slower length is
    known, above it one that is not. Timings scatter, so a second crossing within their scatter is not looked for.

    Args:
        times: (the layer's ms, dense ms) at a length, or None where it does not run.

    Returns:
        (T, below, points), T None where no length up to `high` is no slower, below None where T is the first tried.
    """
    points: dict[int, tuple[float, float]] = {}

    def no_slower(T: int) -> bool | None:
        found = times(T)
        if found is None:
            return None
        points[T] = found
        return found[0] <= found[1]

    below, T = None, low
    while (fine := no_slower(T)) is False:
        if T >= high:
            break
        below, T = T, min(2 * T, high)
    if fine and below is not None:
        while T - below > step:
            middle = (below + T) // 2 // step * step
            if middle <= below:
                middle += step
            if middle >= T:
                break
            if no_slower(middle):
                T = middle
            else:
                below = middle
    ordered = tuple((at, *points[at]) for at in sorted(points))
    return (T if fine else None), below if fine else None, ordered


def crossovers(
    shape: Shape, options: Options, *, high: int, low: int = LOW, step: int = STEP, bench: type[Bench] = Bench
) -> list[Crossover]:
    """Of the layer, gated and not, forward and forward+backward; every length is measured once for all of them."""
    measured: dict[int, dict[tuple[str, str], float]] = {}
    options = replace(options, error_rows=0)

    def at(T: int) -> dict[tuple[str, str], float]:
        if T not in measured:
            run = bench(options)
            run.seconds_a_pair = 0.0  # short enough to be timed as often as the rest
            run.run(shape.at(T))
            measured[T] = {(row.variant, row.direction): row.ms for row in run.rows if row.ms is not None}
        return measured[T]

    found = []
    for direction in (FORWARD, BOTH) if options.backward else (FORWARD,):
        for variant in (name for name in options.variants if name != "dense"):

            def times(T: int) -> tuple[float, float] | None:
                pair = [at(T).get((name, direction)) for name in (variant, "dense")]
                return None if None in pair else tuple(pair)

            T, below, points = find(times, low=low, high=high, step=step)
            static = dict(variant=variant, direction=direction, graph=options.graph, high=high)
            found.append(Crossover(T=T, below=below, points=points, **static))
    return found
