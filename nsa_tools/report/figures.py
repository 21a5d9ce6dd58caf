"""Figures without a display, and the few colours and settings of axes that they share."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#0b0b0b", "#52514e", "#e4e3df"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches; it touches no global state, so no display is needed."""
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
