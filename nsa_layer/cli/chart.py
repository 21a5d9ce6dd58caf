"""The rows of `bench` as a chart: times over length, and how many times faster than dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nsa_layer.cli.results import FROM_SHORTER, MEASURED, Row
from nsa_layer.demo.plots import GRID, INK, MUTED, clean_axes, new_figure

COLOURS = {"dense": "#eb6834", "nsa": "#2a78d6", "gated": "#12a594"}
NAMES = {"dense": "dense", "nsa": "NSA", "gated": "NSA, gated"}
MARKERS = {None: "o", True: "s"}


def draw(rows: Sequence[Row], environment: dict, path: Path) -> tuple[Path, Path]:
    """Write `path` as PNG and as SVG (whatever its suffix); returns both paths."""
    import matplotlib

    directions = list(dict.fromkeys(row.direction for row in rows))
    figure = new_figure(4.6 * len(directions), 7.6)
    axes = figure.subplots(2, len(directions), squeeze=False, sharex="col")
    for column, direction in enumerate(directions):
        shown = [row for row in rows if row.direction == direction and row.ms is not None]
        _times(axes[0][column], shown)
        _factors(axes[1][column], shown)
        axes[0][column].set_title(direction, color=INK, fontsize=11, loc="left")
        axes[1][column].set_xlabel("tokens", color=MUTED)
    axes[0][0].set_ylabel("milliseconds", color=MUTED)
    axes[1][0].set_ylabel("times faster than dense", color=MUTED)
    axes[0][0].legend(frameon=False, labelcolor=INK, fontsize=8)
    figure.supxlabel(footer(rows, environment), color=MUTED, fontsize=7)
    files = path.with_suffix(".png"), path.with_suffix(".svg")
    # The same rows give the same file: an SVG's names are random otherwise, and it holds the time of day.
    with matplotlib.rc_context({"svg.hashsalt": "nsa_layer", "svg.fonttype": "none"}):
        figure.savefig(files[0], format="png")
        figure.savefig(files[1], format="svg", metadata={"Date": None})
    return files


def footer(rows: Sequence[Row], environment: dict) -> str:
    """The GPU, the shape, versions and the date."""
    first = rows[0]
    where = environment.get("gpu") or "CPU"
    shape = f"Hq {first.Hq}, Hkv {first.Hkv}, D {first.D}, {first.dtype}"
    kernels = f"flash_attn.cute {environment.get('flash_attn.cute')} with {environment.get('patches')} patches"
    versions = f"PyTorch {environment.get('torch')}, {kernels}"
    hollow = "; hollow: dense from a shorter length" if any(row.status == FROM_SHORTER for row in rows) else ""
    return f"{where}; {shape}; {versions}; {environment.get('date')}{hollow}"


def _series(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    found: dict[tuple, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.T):
        found.setdefault((row.variant, row.graph, row.sequences), []).append(row)
    return found


def _label(variant: str, graph: bool, sequences: int | None) -> str:
    return NAMES[variant] + (", graph" if graph else "") + (f", {sequences} packed" if sequences else "")


def _times(axes, rows: Sequence[Row]) -> None:
    clean_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for (variant, graph, sequences), line in _series(rows).items():
        style = dict(color=COLOURS[variant], linewidth=1.6, linestyle="--" if graph else "-")
        axes.plot([row.T for row in line], [row.ms for row in line], **style)
        for status, fill in ((MEASURED, COLOURS[variant]), (FROM_SHORTER, "white")):
            points = [row for row in line if row.status == status]
            marker = dict(marker=MARKERS[True if sequences else None], markersize=4, linestyle="none")
            label = _label(variant, graph, sequences) if status == MEASURED else None
            xy = [row.T for row in points], [row.ms for row in points]
            axes.plot(*xy, **marker, color=COLOURS[variant], markerfacecolor=fill, label=label)
    _token_ticks(axes, rows)


def _factors(axes, rows: Sequence[Row]) -> None:
    clean_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.axhline(1, color=GRID, linewidth=1.5)
    hollow = {(row.T, row.graph, row.sequences) for row in rows if row.status == FROM_SHORTER}
    for (variant, graph, sequences), line in _series([row for row in rows if row.over_dense]).items():
        colour, marker = COLOURS[variant], MARKERS[True if sequences else None]
        xy = [row.T for row in line], [row.over_dense for row in line]
        axes.plot(*xy, color=colour, linewidth=1.6, linestyle="--" if graph else "-")
        for row in line:
            fill = "white" if (row.T, row.graph, row.sequences) in hollow else colour
            axes.plot(row.T, row.over_dense, marker=marker, markersize=4, color=colour, markerfacecolor=fill)
            axes.annotate(
                f"{row.over_dense:.3g}",
                (row.T, row.over_dense),
                fontsize=6,
                color=MUTED,
                xytext=(3, -8 if variant == "gated" else 4),
                textcoords="offset points",
            )
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}x")
    _token_ticks(axes, rows)


def _token_ticks(axes, rows: Sequence[Row]) -> None:
    lengths = sorted({row.T for row in rows})
    axes.set_xticks(lengths, [_short(T) for T in lengths], fontsize=7)
    axes.minorticks_off()


def _short(T: int) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if T >= size and T % size == 0:
            return f"{T // size}{unit}"
    return f"{T:,}"
