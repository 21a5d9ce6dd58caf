"""The rows of `bench` as a chart: times over length, and how many times faster than dense attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from nsa_tools.report.bench_tables import shape_key
from nsa_tools.report.figures import GRID, INK, MUTED, clean_axes, new_figure
from nsa_tools.report.results import CHART_SUFFIXES, Row

COLOURS = {"dense": "#eb6834", "nsa": "#2a78d6", "gated": "#12a594"}
NAMES = {"dense": "dense", "nsa": "NSA", "gated": "NSA, gated"}
MARKERS = "osD^vP*X"  # one for each shape, and way of running it
LABEL_POINTS = 7  # from one label to the next

Lines = dict[tuple, list[Row]]  # by variant and `shape_key`


def draw(rows: Sequence[Row], environment: dict, path: Path) -> tuple[Path, Path]:
    """Write `path` as PNG and as SVG (whatever its suffix); returns both paths."""
    directions = list(dict.fromkeys(row.direction for row in rows))
    shapes = list(dict.fromkeys(map(shape_key, rows)))
    figure = new_figure(4.6 * len(directions), 7.6)
    axes = figure.subplots(2, len(directions), squeeze=False, sharex="col")
    for column, direction in enumerate(directions):
        shown = [row for row in rows if row.direction == direction and row.ms is not None]
        _draw_lines(axes[0][column], _lines(shown), shapes, "ms")
        axes[0][column].set_yscale("log")
        _draw_factors(axes[1][column], _lines([row for row in shown if row.over_dense]), shapes)
        for part in (0, 1):
            lengths = sorted({row.T for row in shown})
            axes[part][column].set_xticks(lengths, [_short(T) for T in lengths], fontsize=7)
            axes[part][column].minorticks_off()
        axes[0][column].set_title(direction, color=INK, fontsize=11, loc="left")
        axes[1][column].set_xlabel("tokens", color=MUTED)
    axes[0][0].set_ylabel("milliseconds", color=MUTED)
    axes[1][0].set_ylabel("times faster than dense", color=MUTED)
    axes[0][0].legend(frameon=False, labelcolor=INK, fontsize=8)
    figure.supxlabel(footer(rows, environment), color=MUTED, fontsize=7)
    files = tuple(map(path.with_suffix, CHART_SUFFIXES))
    # The same rows give the same file: an SVG's names are random otherwise, and it holds the time of day.
    with matplotlib.rc_context({"svg.hashsalt": "nsa_layer", "svg.fonttype": "none"}):
        figure.savefig(files[0], format="png")
        figure.savefig(files[1], format="svg", metadata={"Date": None})
    return files


def footer(rows: Sequence[Row], environment: dict) -> str:
    """The GPU, the shapes, versions and the date."""
    where = environment.get("gpu") or "CPU"
    shapes = "; ".join(dict.fromkeys(f"Hq {row.Hq}, Hkv {row.Hkv}, D {row.D}, {row.dtype}" for row in rows))
    kernels = f"flash_attn.cute {environment.get('flash_attn.cute')} with {environment.get('patches')} patches"
    versions = f"PyTorch {environment.get('torch')}, {kernels}"
    return f"{where}; {shapes}; {versions}; {environment.get('date')}"


def _lines(rows: Sequence[Row]) -> Lines:
    """A line for each variant and shape, by length."""
    found: Lines = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.T):
        found[row.variant, shape_key(row)].append(row)
    return found


def _suffix(row: Row, shapes: Sequence[tuple]) -> str:
    """The ways in which a row's shape is not the first one."""
    first, own = (dict(zip(("B", "Hq", "Hkv", "D", "Dv"), key)) for key in (shapes[0], shape_key(row)))
    heads = f", {row.Hq}/{row.Hkv} heads" if own != first else ""
    return heads + (", graph" if row.graph else "") + (f", {row.sequences} packed" if row.sequences else "")


def _draw_lines(axes: Axes, lines: Lines, shapes: Sequence[tuple], value: str) -> None:
    """A field of the rows over length, with a label for each line."""
    clean_axes(axes)
    axes.set_xscale("log", base=2)
    for (variant, shape), line in lines.items():
        style = dict(color=COLOURS[variant], linewidth=1.6, linestyle="--" if line[0].graph else "-", markersize=4)
        marker, label = MARKERS[shapes.index(shape) % len(MARKERS)], NAMES[variant] + _suffix(line[0], shapes)
        axes.plot([row.T for row in line], [getattr(row, value) for row in line], marker=marker, label=label, **style)


def _draw_factors(axes: Axes, lines: Lines, shapes: Sequence[tuple]) -> None:
    _draw_lines(axes, lines, shapes, "over_dense")
    axes.set_yscale("log", base=2)
    axes.margins(y=0.12)
    axes.axhline(1, color=GRID, linewidth=1.5)
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in (row for line in lines.values() for row in line):
        by_length[row.T].append(row)
    for T, rows in by_length.items():
        # One below the other, right of and below the lowest point: lines rise to the right.
        lowest = min(row.over_dense for row in rows)
        for rank, row in enumerate(sorted(rows, key=lambda row: -row.over_dense)):
            text = f"{row.over_dense:.3g}{_suffix(row, shapes)}"
            where = dict(xytext=(4, -LABEL_POINTS * (rank + 1)), textcoords="offset points")
            axes.annotate(text, (T, lowest), **where, fontsize=6, color=COLOURS[row.variant])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}x")


def _short(T: int) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if T >= size and T % size == 0:
            return f"{T // size}{unit}"
    return f"{T:,}"
