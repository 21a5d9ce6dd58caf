"""The catalogue of refused calls: tables of (arguments, exception, words of the message, wrong values) by function.

`tests/fuzz/test_wrong_calls.py` runs it. Each call is a right one with one argument
replaced. It has to raise that exception with those words before any kernel is launched, and to leave its inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

Arguments = dict[str, Any]
Row = tuple[Any, ...]  # (names of arguments, exception, regular expression in which {} is the name, *values)
PARTS = ("layer", "lists", "attention")


class Together(dict):
    """A value of a row that replaces several arguments."""


@dataclass(frozen=True)
class Table:
    """The refused calls of a function.

    Attributes:
        good: makes right arguments, all by name, on a device.
        rows: a value that is a lambda is called with the argument's right value.
        device: "cpu", or "cuda": real where there is a GPU of the architecture, else fake tensors.
        first: whether nothing may be computed before the refusal.
    """

    function: str
    call: Callable[..., Any]
    good: Callable[[str], Arguments]
    rows: tuple[Row, ...]
    device: str = "cpu"
    first: bool = True
    arch: int = 90

    def calls(self) -> Iterator[tuple[str, type[Exception], str, Any]]:
        """Each refused call: its argument, the exception, a regular expression of the message, the wrong value."""
        for names, error, words, *values in self.rows:
            for name in names.split():
                yield from ((name, error, words.replace("{}", name), value) for value in values)

    def arguments(self, name: str, value: Any) -> Arguments:
        """The right ones with a wrong value."""
        right = self.good(self.device)
        if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
            value = value(right.get(name))
        return right | (value if isinstance(value, Together) else {name: value})


def tables() -> Iterator[Table]:
    for part in PARTS:
        yield from import_module(f"fuzz.wrong_calls.{part}").TABLES


NO_TENSORS = ([1.0], 3, "x")
NOT_A_TENSOR = (TypeError, r"{} (must|has to) be a torch.Tensor|{} is a \w+, expected a tensor", *NO_TENSORS)
NOT_A_BOOL = (TypeError, "{} (must|has to) be a bool|{} is .*, expected a bool", 1, "yes", None)
NO_SCALES = (0.0, -0.125, math.nan, math.inf, 1e39, 10**400, 1e-50)


def not_a_size(names: str, *, least: int = 1, optional: bool = False) -> tuple[Row, Row]:
    """Rows for arguments that are ints from `least` on."""
    no_ints = (4.0, "4", True) if optional else (4.0, "4", True, None)
    said = f"{{}} (must|has to) be at least {least}, got"
    return (names, TypeError, "{} (must|has to) be an int", *no_ints), (names, ValueError, said, least - 1, -7)


def changed(**more: Any) -> Callable[[Any], Any]:
    """Fields of a named tuple replaced, by what a function makes of them or by what is given."""
    return lambda x: x._replace(**{n: f(getattr(x, n)) if callable(f) else f for n, f in more.items()})
