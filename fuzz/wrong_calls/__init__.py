"""A catalogue of wrong calls: for every public function, good arguments with one of them replaced by something wrong.

`python -m fuzz wrong-calls` runs it. Each has to raise ValueError, TypeError or NotImplementedError with the argument's
name in the message, before any kernel is launched, and to leave its inputs as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

Arguments = dict[str, Any]
PARTS = ("layer", "lists", "attention", "two_passes")


class Changed:
    """A wrong value that is made from the good one."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change


@dataclass(frozen=True)
class Spec:
    """A function, good arguments for it, and what may be put in their place.

    Attributes:
        good: makes the arguments, all by name, on a device.
        wrong: by argument, label -> value, or `Changed`.
        also: for each argument, other words that a message may name it by.
        together: label -> (the argument that has to be named, several arguments).
        device: "cpu", or "cuda": real where there is a GPU, else fake tensors.
    """

    function: str
    call: Callable[..., Any]
    good: Callable[[str], Arguments]
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    also: dict[str, tuple[str, ...]] = field(default_factory=dict)
    together: dict[str, tuple[str, Arguments]] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True)
class WrongCall:
    """One entry of the catalogue."""

    spec: Spec
    argument: str
    label: str
    change: Arguments

    @property
    def name(self) -> str:
        return f"{self.spec.function}, {self.argument}: {self.label}"

    @property
    def words(self) -> tuple[str, ...]:
        """What the message has to hold one of."""
        return (self.argument, *self.spec.also.get(self.argument, ()))

    def arguments(self, device: str) -> Arguments:
        given = self.spec.good(device)
        for name, value in self.change.items():
            given[name] = value.change(given.get(name)) if isinstance(value, Changed) else value
        return given


def specs() -> Iterator[Spec]:
    for part in PARTS:
        yield from import_module(f"fuzz.wrong_calls.{part}").SPECS


def catalogue() -> list[WrongCall]:
    """All of them."""
    found = []
    for spec in specs():
        for argument, values in spec.wrong.items():
            found += [WrongCall(spec, argument, label, {argument: value}) for label, value in values.items()]
        for label, (argument, change) in spec.together.items():
            found.append(WrongCall(spec, argument, label, change))
    return found


NOT_A_TENSOR = {"a list": [1.0], "a number": 3, "a string": "x"}
NOT_AN_INT = {"a float": 4.0, "a string": "4", "None": None, "True": True}
NOT_A_SIZE = NOT_AN_INT | {"zero": 0, "negative": -1}
NOT_A_SCALE = {"a string": "1", "zero": 0.0, "negative": -0.125, "nan": float("nan"), "infinite": float("inf")}
NOT_A_SCALE |= {"beyond fp32": 1e39, "beyond fp64": 10**400, "nothing in fp32": 1e-50}
NOT_A_BOOL = {"an int": 1, "a string": "yes", "None": None}
