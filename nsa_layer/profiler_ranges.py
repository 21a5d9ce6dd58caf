"""Names for the parts of a call, which cost next to nothing unless somebody watches.

    with component("choose"):
        block_indices = choose_blocks(...)

Nothing is recorded, allocated or sent to the GPU unless `observed` is entered: then its opener says what a range is,
such as `torch.profiler.record_function`. The innermost range counts. Whether a range belongs to forward or backward is
not said here: it is where the call was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

# compress: pooling, projections and the way back; choose: tile means, scores, top-n; lists: forward, backward, plan;
# cmp, slc, swa: attention of each branch; gate: gates and weighted sum; convert: sums and roundings of gradients.
COMPONENTS = ("compress", "choose", "lists", "cmp", "slc", "swa", "gate", "convert")

Opener = Callable[[str], AbstractContextManager]


class _Nothing:
    """A range that nobody watches."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()
# Of the process, not of a thread: autograd runs backward in a thread of its own.
_opener: Opener | None = None


def component(name: str) -> AbstractContextManager:
    """The range of one of `COMPONENTS`."""
    return _NOTHING if _opener is None else _opener(name)


@contextmanager
def observed(opener: Opener) -> Iterator[None]:
    """While entered, every `component(name)` of this process is ``opener(name)``."""
    global _opener
    if _opener is not None:
        raise RuntimeError("the parts of a call are watched already; one observer at a time")
    _opener = opener
    try:
        yield
    finally:
        _opener = None
