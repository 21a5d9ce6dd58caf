"""The length from which on the layer is no slower than dense attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nsa_tools.measure.bench_run import Bench, Options
from nsa_tools.measure.timed_calls import BOTH, FORWARD
from nsa_tools.report.results import Crossover
from nsa_tools.shape import Shape

STEP = 256  # tokens to which a length is found
LOW = 1024


def find(times: Callable[[int], tuple[float, float] | None], *, low: int, high: int, step: int) -> tuple:
    """The shortest multiple of `step` that is no slower, and the longest known to be slower below it.

    Lengths double from `low` until one is no slower, then the gap is halved. Timings scatter, so a second crossing
    within their scatter is not looked for.

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
    while (fine := no_slower(T)) is False and T < high:
        below, T = T, min(2 * T, high)
    while fine and below is not None and T - below > step:
        middle = (below + T) // 2 // step * step
        middle += step if middle <= below else 0
        if middle >= T:
            break
        below, T = (below, middle) if no_slower(middle) else (middle, T)
    ordered = tuple((at, *points[at]) for at in sorted(points))
    return (T, below, ordered) if fine else (None, None, ordered)


def crossovers(
    shape: Shape, options: Options, *, high: int, low: int = LOW, step: int = STEP, bench: type[Bench] = Bench
) -> list[Crossover]:
    """Crossovers of the layer, gated and not, forward and forward+backward; each length is measured once for all."""
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
    for direction in (FORWARD, BOTH) if shape.backward else (FORWARD,):
        for variant in (name for name in options.variants if name != "dense"):

            def times(T: int) -> tuple[float, float] | None:
                pair = [at(T).get((name, direction)) for name in (variant, "dense")]
                return None if None in pair else tuple(pair)

            T, below, points = find(times, low=low, high=high, step=step)
            static = dict(variant=variant, direction=direction, graph=options.graph, high=high)
            found.append(Crossover(T=T, below=below, points=points, **static))
    return found
