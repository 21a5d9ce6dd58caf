"""A failure as a file: the case to paste, what was said, and the command that replays it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from fuzz import case as cases
from fuzz.run import Failure
from nsa_layer import NSAConfig
from nsa_tools.testing.cases import Case

NAMES = {name: value for name, value in vars(cases).items() if isinstance(value, type)}
NAMES |= {"Case": Case, "NSAConfig": NSAConfig, "torch": torch, "nan": float("nan"), "inf": float("inf")}


def parse_case(text: str) -> object:
    """The case that a repr stands for."""
    return eval(text, {"__builtins__": {}}, dict(NAMES))  # a file of one's own, which a replay runs anyway


def write_failure(failure: Failure, folder: Path, mutation: str | None = None) -> Path:
    """Write it, under a name that depends on the property and the case alone."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{failure.property}{failure.case}".encode()).hexdigest()[:10]
    slug = "".join(c if c.isalnum() else "-" for c in failure.property)
    path = folder / f"{slug}-{digest}.txt"
    planted = "" if mutation is None else f" --mutate {mutation}"
    path.write_text(
        f"property: {failure.property}\n"
        f"case: {failure.case}\n"
        f"replay: python -m fuzz --replay {path}{planted}\n\n"
        f"{failure.error}\n\n{failure.trace}",
        encoding="utf-8",
    )
    return path


def read_failure(path: Path) -> tuple[str, str]:
    """The property's name and the case's text."""
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        name, _, value = line.partition(": ")
        if name in ("property", "case") and name not in found:
            found[name] = value
    if set(found) != {"property", "case"}:
        raise ValueError(f"{path} is no failure file: expected lines 'property: ...' and 'case: ...'")
    return found["property"], found["case"]
