"""Observation of kernel launches, so that a caller can replay them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

_thread = local()


@contextmanager
def observed(observer: Callable[[Callable, tuple], None]) -> Iterator[None]:
    """Context in which ``observer(kernel, arguments)`` is called before each launch by this thread."""
    _thread.observer = observer
    try:
        yield
    finally:
        del _thread.observer


def of(compiled: Callable) -> Callable:
    """The compiled kernel; while a launch observer is active, wrapped to call it."""
    return partial(_launch, compiled) if hasattr(_thread, "observer") else compiled


def _launch(compiled: Callable, *args: Any) -> Any:
    _thread.observer(compiled, args)
    return compiled(*args)
