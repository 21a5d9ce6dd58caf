"""Planted faults: switches that break the code under test in one place, to see that the properties notice.

Each replaces a function, wherever it has been imported to, with one that is wrong in the way that such code tends to be
wrong. Nothing outside of fuzzing imports this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce, wraps
from importlib import import_module
from inspect import signature
from typing import Any
from unittest.mock import patch

from fuzz.case import Attention

PACKAGES = ("fuzz", "nsa_layer", "nsa_tools", "flash_attn", "patches")
Change = Callable[[Callable], Callable]


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        target: "module:function" or "module:Class.method".
        change: the function as it is -> the function as it is wrong.
        seconds: within which it has to be found, on two slow cores; on a GPU for those that need one.
        properties: those that are drawn from when looking for it; their names begin so.
        shows: kinds of kernels in which it can show.
        waits: whether kernels with it wait for a semaphore value that never comes: what the watchdog is for.
    """

    name: str
    what: str
    target: str
    change: Change
    properties: tuple[str, ...]
    seconds: float = 60.0
    needs: str = ""
    shows: Callable[[Attention], bool] = lambda kind: True
    waits: bool = False

    def suits(self, kind: Attention | None) -> bool:
        """True if kernels may run with it: a wrong one that waits at a semaphore waits forever, and a plan reads on."""
        if kind is None:
            return True
        return self.shows(kind) and (self.waits or not (kind.deterministic or kind.plan))


MUTATIONS: dict[str, Mutation] = {}
PLANTED: list[str] = []  # names of those that are there, for other processes to plant them too


def fault(name: str, target: str, *properties: str, **options: Any) -> Callable[[Change], Change]:
    """Register a change, described by its docstring."""

    def register(change: Change) -> Change:
        what = " ".join((change.__doc__ or "").split())
        MUTATIONS[name] = Mutation(name, what, target, change, properties, **options)
        return change

    return register


def faults(*rows: tuple[Any, ...]) -> None:
    """Register rows of name, target, property or properties, description, change and, if there are any, options."""
    for name, target, properties, what, change, *options in rows:
        names = (properties,) if isinstance(properties, str) else properties
        MUTATIONS[name] = Mutation(name, what, target, change, names, **dict(*options))


def instead(wrong: Callable) -> Change:
    """Call a function instead of the original, which is its first argument."""
    return wraps(wrong)(lambda original: lambda *args, **more: wrong(original, *args, **more))


def result(change: Callable) -> Change:
    """Change the result."""
    return wraps(change)(lambda original: lambda *args, **more: change(original(*args, **more)))


def given(**changes: Any) -> Change:
    """Change arguments, by functions of their values or to other values."""

    def of_function(original: Callable) -> Callable:
        takes = signature(original)

        def wrong(*args: Any, **more: Any) -> Any:
            bound = takes.bind(*args, **more)
            bound.apply_defaults()
            for name, change in changes.items():
                bound.arguments[name] = change(bound.arguments[name]) if callable(change) else change
            return original(*bound.args, **bound.kwargs)

        return wrong

    return of_function


def always(value: Any) -> Change:
    """Return a value, and do nothing."""
    return lambda original: lambda *args, **more: value


def all_mutations() -> dict[str, Mutation]:
    for name in ("layer", "kernels", "models"):
        import_module(f"fuzz.faults_in_{name}")
    return MUTATIONS


@contextmanager
def planted(name: str, *, load: bool = True) -> Iterator[Mutation]:
    """Within, the fault is there, in every module that has the function.

    Args:
        load: import all modules that may have it, which takes seconds; else those that are loaded have to be all.
    """
    from fuzz.prop import properties

    if load:
        properties()  # they import what they check by name
    mutation = all_mutations()[name]
    path, _, attribute = mutation.target.partition(":")
    *outer, last = attribute.split(".")
    owner: Any = reduce(getattr, outer, import_module(path))
    original = vars(owner)[last]
    wrong: Any = mutation.change(getattr(original, "__func__", original))
    if isinstance(original, (staticmethod, classmethod)):
        wrong = type(original)(wrong)

    def modules_with(value: Any) -> list[tuple[Any, str]]:
        """Names under which modules have it: a function is imported, a method is not."""
        return [] if outer else [(m, n) for m in _modules() for n, own in vars(m).items() if own is value]

    elsewhere, owners = modules_with(wrong), [(owner, last), *modules_with(original)]
    _forget_tapes()
    for place, attribute in owners:
        setattr(place, attribute, wrong)
    PLANTED.append(name)
    try:
        with _nothing_on_disk():
            yield mutation
    finally:
        PLANTED.remove(name)
        loaded_within = [entry for entry in modules_with(wrong) if entry not in elsewhere]
        for place, attribute in (*owners, *loaded_within):
            setattr(place, attribute, original)
        _forget_tapes()


def _forget_tapes() -> None:
    """Calls that came before leave none, which would not see the fault, nor would those within be right later."""
    if (tape := sys.modules.get("nsa_layer.operators.tape")) is not None:
        tape.forget()


@contextmanager
def _nothing_on_disk() -> Iterator[None]:
    """Keep kernels compiled within out of the cache on disk, where others would find them; take none from there."""
    cache = sys.modules.get("flash_attn.cute.cache_utils")
    if cache is None:
        yield
        return
    skipped = dict(_try_load_from_storage=lambda *_: False, _try_export_to_storage=lambda *_: None)
    with patch.multiple(cache.JITPersistentCache, **skipped):
        yield


def _modules() -> list[Any]:
    loaded = [m for n, m in sys.modules.items() if n.split(".")[0] in PACKAGES and m is not None]
    return [module for module in loaded if hasattr(module, "__dict__")]
