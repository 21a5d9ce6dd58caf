"""The repr of test cases: an expression that makes them again, as short as can be."""

from __future__ import annotations

from dataclasses import fields


class Pasteable:
    """A dataclass, made with ``repr=False``, whose repr leaves out what has its default."""

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"
