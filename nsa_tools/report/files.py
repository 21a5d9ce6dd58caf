"""Files that stay readable whenever the program stops: replaced whole, or written by the line."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Replace a file by indented JSON."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The records of a metrics file, without a last line that a crash cut off."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class MetricsLog:
    """Records appended to a file as JSON lines, each on disk before the next one starts.

    Args:
        path: the file; what it holds beyond ``up_to_step`` is dropped (it came after the checkpoint, and comes again).
        up_to_step: the step that the run goes on from, 0 for a fresh one (the file is then emptied).
    """

    def __init__(self, path: Path, *, up_to_step: int) -> None:
        kept = read_metrics(path) if up_to_step and path.exists() else []
        self.records = [record for record in kept if record["step"] <= up_to_step]
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = open(path, "a", buffering=1)

    def write(self, **record: object) -> None:
        self._file.write(json.dumps(record) + "\n")
        self.records.append(record)

    def select(self, kind: str, model: str | None = None) -> list[dict[str, object]]:
        """The records of a kind ("train", "held_out"), of one model or of all."""
        return [r for r in self.records if r["kind"] == kind and model in (None, r["model"])]

    def close(self) -> None:
        self._file.close()
