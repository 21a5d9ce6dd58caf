"""Tables for the terminal that are Markdown too."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table padded to even columns; the first ``left`` columns are flush left, the others right."""
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"every row must have {len(header)} cells, got {sorted({len(row) for row in rows})}")
    sides = ["left"] * left + ["right"] * (len(header) - left)
    # Cells are text as the caller formatted them.
    return tabulate([list(map(str, row)) for row in rows], header, "pipe", disable_numparse=True, colalign=sides)


def gib(size: int | None, form: str = ".3f") -> str:
    """Bytes in GiB; nothing for None."""
    return "" if size is None else format(size / 2**30, form)
