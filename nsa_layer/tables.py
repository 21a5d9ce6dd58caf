"""Tables for the terminal that are Markdown too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table padded to even columns; the first ``left`` columns are flush left, the others right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    if any(len(row) != len(header) for row in cells):
        raise ValueError(f"every row must have {len(header)} cells, got {sorted({len(row) for row in cells})}")
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    rule = ["-" * (w - 1) + "-" if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    padded = [[c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))
