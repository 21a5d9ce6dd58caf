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
MEASURED, FROM_SHORTER, NO_MEMORY, FAILED = "measured", "from shorter", "out of memory", "failed"
CHART_SUFFIXES = (".png", ".svg")  # of the files of a chart
PATHS = ("--json", "--chart", "--from")  # of the caller's machine: not kept in what is written
PACKAGES = {"cutlass-dsl": "nvidia-cutlass-dsl", "quack": "quack-kernels", "tvm-ffi": "apache-tvm-ffi"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of attention in one direction at one length.

    Attributes:
        T, B, Hq, Hkv, D, Dv, dtype: the shape; T counts all tokens of a pack.
        sequences: packed ones, None for a batch; `longest` is the longest of them, or T.
        variant: "dense", "nsa" (1/3 for each branch) or "gated".
        direction: "forward", "backward" or "forward+backward".
        graph: replayed from a CUDA graph.
        status: "measured"; "from shorter", no measurement: that of `from_T` tokens times `factor`; "out of memory";
            "failed", with the reason in `detail`.
        ms: the median of `timings_ms`.
        over_dense: the time of dense attention over this one's.
        host_us: median time in which the host makes the launches of one forward call, or of one step of training.
        peak_bytes: the most that was allocated beyond the inputs.
        error, eager_error: largest error of o at sampled rows against fp64, the layer's and that of a straight
            implementation in the same dtype; `of_limit`: the worst row's error over what the tests allow.
        union: blocks that the tokens of a kernel's tile list together over those that one of them lists; with lists by
            token.
    """

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
    from_T: int | None = None
    factor: float | None = None
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


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """The length from which on the layer takes no longer than dense attention.

    Attributes:
        T: the shortest length that was found to be no slower; None where none up to `high` is.
        below: the longest that was found to be slower; None where T is the shortest that was tried.
        points: (T, the layer's ms, dense ms) of all that was measured, by T.
    """

    variant: str
    direction: str
    graph: bool
    T: int | None
    below: int | None
    high: int
    points: tuple[tuple[int, float, float], ...]


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
    cuda = device.startswith("cuda")
    properties = torch.cuda.get_device_properties(device) if cuda else None
    fork = fork_status()
    return {
        "gpu": properties.name if cuda else None,
        "gpu_bytes": properties.total_memory if cuda else None,
        "multiprocessors": properties.multi_processor_count if cuda else None,
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


def write_bench(path: Path, found: dict, rows: list[Row], **more: list) -> None:
    """Write what `bench` found: `provenance`, backend and config, rows, and "crossovers", "first_call" or "decode"."""
    parts = dict(rows=list(map(asdict, rows)), crossovers=list(map(asdict, more.get("crossovers", ()))))
    if "decode" in more:
        parts["decode"] = list(map(asdict, more["decode"]))
    write_json(path, found | parts | dict(first_call=more.get("first_call", [])))


def read_bench(path: Path) -> tuple[dict, list[Row], list[Crossover]]:
    """A file of `bench`: the document, its rows and its crossovers.

    Raises:
        ValueError: it is not such a file; the message says what is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path} has no schema {SCHEMA}: it is not a result of `python -m nsa_layer bench`")
    rows = [_made(Row, values, path) for values in found["rows"]]
    return found, rows, [_made(Crossover, values, path) for values in found["crossovers"]]


def _made(kind: type, values: dict, path: Path):
    names = {field.name for field in fields(kind)}
    needed = names - {"union"}  # files of earlier versions have none
    if not needed <= set(values) <= names:
        raise ValueError(f"{path}: a {kind.__name__} has other keys: {sorted(names ^ set(values))}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if kind is Crossover:
        values["points"] = tuple(map(tuple, values["points"]))
    return kind(**values)
