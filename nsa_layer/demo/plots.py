"""Figures drawn to PNG bytes, and the few colours and axes settings that they share."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from nsa_layer.demo.files import MetricsLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"nsa": "#2a78d6", "dense": "#eb6834"}
NAMES = {"nsa": "sparse (NSA)", "dense": "dense"}
# A training step sees one sequence, and sequences differ more than steps do.
SMOOTHED = 10
INK, MUTED, GRID = "#0b0b0b", "#52514e", "#e4e3df"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches; it touches no global state, so no display is needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def clean_axes(axes: Axes) -> None:
    """Recessive axes: no box, thin grid, muted labels."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def loss_figure(log: MetricsLog, *, title: str) -> bytes:
    """Held-out loss of both models over the steps; thin lines behind are the training losses, smoothed."""
    figure = new_figure(7.5, 4.6)
    axes = figure.add_subplot()
    clean_axes(axes)
    for model, colour in COLOURS.items():
        train, held_out = log.select("train", model), log.select("held_out", model)
        axes.plot(_column(train, "step"), _trailing_mean(train), color=colour, linewidth=0.8, alpha=0.45)
        label = f"{NAMES[model]}: {held_out[-1]['loss']:.3f}" if held_out else NAMES[model]
        axes.plot(
            _column(held_out, "step"),
            _column(held_out, "loss"),
            color=colour,
            linewidth=2,
            marker="o",
            markersize=4,
            label=label,
        )
    axes.set_xlabel("optimizer steps", color=MUTED)
    axes.set_ylabel("loss, nats per byte", color=MUTED)
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.legend(title=f"held-out text (thin: training, mean of {SMOOTHED} steps)", frameon=False, labelcolor=INK)
    return to_png(figure)


def _column(records: list[dict[str, object]], name: str) -> list[object]:
    return [record[name] for record in records]


def _trailing_mean(records: list[dict[str, object]]) -> list[float]:
    losses = _column(records, "loss")
    windows = (losses[max(0, end - SMOOTHED) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]
