"""Rows of `bench`, and the JSON files of all commands, which say how and where they were made.

benchmarks/results/README.md documents the file of `bench`. Every row has every key; what was not measured is null.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from nsa_layer.fork import fork_status
from nsa_tools.report.files import write_json
from nsa_tools.shape import Shape

SCHEMA = 1
MEASURED, TOO_SLOW, NO_MEMORY, FAILED = "measured", "too slow", "out of memory", "failed"
CHART_SUFFIXES = (".png", ".svg")  # of the files of a chart
PATHS = ("--json", "--chart", "--from")  # of the caller's machine: not kept in what is written
PACKAGES = {"cutlass-dsl": "nvidia-cutlass-dsl", "quack": "quack-kernels", "tvm-ffi": "apache-tvm-ffi"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of attention in one direction at one length; benchmarks/results/README.md explains the fields."""

    T: int
    B: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: str
    sequences: int | None
    longest: int
    variant: str
    direction: str
    graph: bool
    status: str
    ms: float | None = None
    timings_ms: tuple[float, ...] = ()
    over_dense: float | None = None
    host_us: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    eager_error: float | None = None
    of_limit: float | None = None
    detail: str | None = None
    union: float | None = None

    @classmethod
    def of(cls, shape: Shape, **values: object) -> Row:
        """A row of a shape."""
        same = {name: getattr(shape, name) for name in ("T", "B", "Hq", "Hkv", "D", "Dv")}
        lengths = shape.lengths or (shape.T,)
        packed = dict(sequences=shape.lengths and len(lengths), longest=max(lengths))
        return cls(**same, **packed, dtype=shape.dtype_name(), **values)


def provenance(command: str, argv: list[str], device: str) -> dict[str, object]:
    """The first keys of every file: its schema, the command that made it, and where it ran."""
    line = f"python -m nsa_layer {command} {shlex.join(without_paths(argv))}".strip()
    return dict(schema=SCHEMA, command=line, environment=environment(device))


def without_paths(argv: list[str]) -> list[str]:
    """The arguments without names of files."""
    kept, skip = [], False
    for argument in argv:
        if skip and not argument.startswith("--"):
            continue
        skip = argument in PATHS
        if not skip and not argument.startswith(tuple(f"{name}=" for name in PATHS)):
            kept.append(argument)
    return kept


def environment(device: str) -> dict[str, object]:
    """The GPU, versions and the date, and nothing else about the machine."""
    properties = torch.cuda.get_device_properties(device) if device.startswith("cuda") else None
    fork = fork_status()
    return {
        "gpu": properties and properties.name,
        "gpu_bytes": properties and properties.total_memory,
        "multiprocessors": properties and properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version_of(distribution) for name, distribution in PACKAGES.items()},
        "flash_attn.cute": fork.version,
        "patches": len(fork.patches),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def version_of(distribution: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write_bench(path: Path, document: dict, rows: list[Row], decode: list | None = None) -> None:
    """Write what `bench` found: `provenance`, backend and config, rows, and steps of decoding where they were timed."""
    steps = {} if decode is None else dict(decode=list(map(asdict, decode)))
    write_json(path, document | dict(rows=list(map(asdict, rows))) | steps)


def read_bench(path: Path) -> tuple[dict, list[Row]]:
    """A file of `bench`: the document and its rows.

    Raises:
        ValueError: it is not such a file; the message says what is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} has no schema {SCHEMA}: it is not a result of `python -m nsa_layer bench`")
    names = {field.name for field in fields(Row)}
    for values in document["rows"]:
        if missing := names - {"union"} - set(values):  # files of earlier versions have no union, and keys that went
            raise ValueError(f"{path}: a row has no {', '.join(map(repr, sorted(missing)))}")
    rows = [{name: value for name, value in values.items() if name in names} for values in document["rows"]]
    return document, [Row(**row | dict(timings_ms=tuple(row["timings_ms"]))) for row in rows]
