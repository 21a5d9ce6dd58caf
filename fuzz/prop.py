"""A property: which cases it is drawn from, and what has to hold for every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

from fuzz.case import Attention

GPU, SM90, SM100 = "gpu", "sm_90", "sm_100"  # what a property may need; the latter two compile without a GPU


class Skip(Exception):
    """The case says nothing about the property; it does not count as an example."""


@dataclass(frozen=True)
class Property:
    """One of them.

    Attributes:
        cases: the strategy; of a kind of kernels, where there are `kinds`.
        check: raises if the property does not hold.
        kinds: what kernels are compiled for; each is drawn from on its own.
        needs: GPU, SM90, SM100 or nothing.
        pr: examples that `tests/fuzz` draws; `python -m fuzz` goes on until its time is over.
    """

    name: str
    cases: Callable[..., SearchStrategy]
    check: Callable[[Any], None]
    kinds: tuple[Attention | None, ...] = (None,)
    needs: str = ""
    pr: int = 12

    def strategy(self, kind: int = 0) -> SearchStrategy:
        chosen = self.kinds[kind]
        return self.cases() if chosen is None else self.cases(chosen)


_all: dict[str, Property] = {}


def holds(name: str, cases: Callable[..., SearchStrategy], **options: Any) -> Callable:
    """Register a function of a case as a property."""

    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        if name in _all:
            raise ValueError(f"name={name!r} is registered twice")
        _all[name] = Property(name, cases, check, **options)
        return check

    return register


def properties() -> dict[str, Property]:
    """All of them, by name."""
    for file in sorted(Path(__file__).with_name("properties").glob("[!_]*.py")):
        import_module(f"fuzz.properties.{file.stem}")
    return _all


@contextmanager
def refused(words: str, *errors: type[Exception]) -> Iterator[None]:
    """Within, one of the errors is raised, and its message has the words."""
    try:
        yield
    except errors as error:
        assert words in str(error), f"says nothing of {words!r}: {error}"
        return
    raise AssertionError(f"it was taken: expected an error about {words!r}")


def on_this_machine() -> Iterator[Property]:
    """Those that can run here."""
    import torch

    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    for each in properties().values():
        if gpu or each.needs != GPU:
            yield each
