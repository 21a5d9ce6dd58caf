"""The rows of `bench` as tables: times beside dense attention's, what stands beside the times, and decode steps."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_tools.measure.decode_steps import DecodeRow
from nsa_tools.report.results import MEASURED, Row
from nsa_tools.report.tables import gib, markdown

TITLES = {"dense": "dense (ms)", "nsa": "NSA (ms)", "gated": "NSA, gated (ms)"}


def times(rows: Sequence[Row]) -> str:
    """Median milliseconds, with dense over sparse in brackets; cells that were not measured say so."""
    names = [name for name in TITLES if any(row.variant == name for row in rows)]
    by_line: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        by_line.setdefault((row.T, shape_key(row), row.direction), {})[row.variant] = row
    table = []
    for line in by_line.values():
        cells = [_time(line[name]) if name in line else "-" for name in names]
        table.append([*_label(next(iter(line.values()))), *cells])
    return markdown(["T", "shape", "direction", *(TITLES[name] for name in names)], table, left=3)


def notes(rows: Sequence[Row]) -> str:
    """Host time, peak memory, error and union of each row that has one of them."""
    table = []
    for row in rows:
        if row.host_us is not None or row.peak_bytes is not None or row.detail:
            cells = [row.variant, _number(row.host_us, ".0f"), gib(row.peak_bytes, ".2f")]
            errors = [_number(x, ".2g") for x in (row.error, row.eager_error)] + [_number(row.of_limit, ".2f")]
            table.append([*_label(row), *cells, *errors, _number(row.union, ".2f"), row.detail or ""])
    errors = ["max error of o", "eager's", "of its limit"]
    header = ["T", "shape", "direction", "variant", "host, one call (us)", "peak (GiB)", *errors, "union", ""]
    return markdown(header, table, left=4) if table else ""


def decode_steps(rows: Sequence[DecodeRow]) -> str:
    """Markdown of rows: microseconds, and how many times dense attention's time is the layer's."""
    names = list(rows[0].us)
    shown = []
    for row in rows:
        times = ["failed" if row.us[name] is None else f"{row.us[name]:,.1f}" for name in names]
        rival = [us for name, us in row.us.items() if not name.startswith("nsa") and us is not None]
        over = f"{min(rival) / row.us['nsa']:.1f}" if rival and row.us["nsa"] else ""
        rate = f"{row.bytes / row.us['nsa'] / 1e6:.2f}" if row.us["nsa"] else ""
        shown.append([f"{row.Hq}/{row.Hkv}", f"{row.T:,}", str(row.B), *times, over, f"{row.bytes / 1e6:,.1f}", rate])
    header = ["heads", "context", "batch", *(f"{name}, us" for name in names), "best dense over nsa", "MB read", "TB/s"]
    notes = [f"{name}: {reason}" for row in rows for name, reason in row.failed.items()]
    return "\n".join([markdown(header, shown, left=1), *dict.fromkeys(notes)])


def shape_key(row: Row) -> tuple:
    """Everything but length, variant and direction that rows of one line share."""
    return row.B, row.Hq, row.Hkv, row.D, row.Dv, row.dtype, row.sequences, row.graph


def _label(row: Row) -> list[str]:
    packed = f", {row.sequences} packed" if row.sequences else ""
    batch = f", B {row.B}" if row.B > 1 else ""
    graph, D = ", graph" if row.graph else "", f"{row.D}" if row.D == row.Dv else f"{row.D}, {row.Dv}"
    return [f"{row.T:,}", f"{row.Hq}/{row.Hkv} x {D} {row.dtype}{batch}{packed}{graph}", row.direction]


def _time(row: Row) -> str:
    if row.status != MEASURED:
        return row.status
    return f"{row.ms:,.2f}" + ("" if row.over_dense is None else f" ({row.over_dense:.2f}x)")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
