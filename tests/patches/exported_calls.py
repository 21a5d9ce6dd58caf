"""A look at imports for a worker that sees what an export made, and nothing of this repository."""

from __future__ import annotations

from importlib import import_module


def import_all(names: list[str]) -> list[str]:
    """Import modules, and return the files that they came from."""
    return [import_module(name).__file__ for name in names]
