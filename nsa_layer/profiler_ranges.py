"""Profiler ranges for the parts of a call; free unless a profiler observes them.

    with component("choose"):
        block_indices = select_blocks(...)

Within `observed`, its opener makes the ranges; otherwise PyTorch's profiler sees them, as "nsa_layer::choose", and
without one nothing is traced, allocated or launched. The innermost range counts; forward and backward use the same
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# compress: pooling, projections and their backward; choose: pooled queries, scores, top-k; lists: unions, block lists;
# pairs: token-block CSR; cmp, slc, swa: attention of each branch; slc_dq, slc_dkdv: the selected branch's passes by
# token; gate: gates and weighted sum; index: the loss of an index and its gradients; convert: sums and roundings of
# gradients; cache: slots, appends and copies.
COMPONENTS = ("compress", "choose", "lists", "pairs", "cmp", "slc", "slc_dq", "slc_dkdv", "swa", "gate", "convert")
COMPONENTS += ("index", "cache")
Opener = Callable[[str], AbstractContextManager]

_NOTHING = nullcontext()
_is_profiled = torch._C._autograd._profiler_enabled
# Of the process, not of a thread: autograd runs backward in a thread of its own.
_opener: Opener | None = None


def component(name: str) -> AbstractContextManager:
    """The range of one of `COMPONENTS`."""
    if _opener is not None:
        return _opener(name)
    if torch.compiler.is_compiling():  # the compiler has ranges of its own
        return _NOTHING
    return torch.profiler.record_function(f"nsa_layer::{name}") if _is_profiled() else _NOTHING


def is_observed() -> bool:
    """True if ranges are seen."""
    return _opener is not None or _is_profiled()


@contextmanager
def observed(opener: Opener) -> Iterator[None]:
    """While entered, every `component(name)` of this process is ``opener(name)``."""
    global _opener
    if _opener is not None:
        raise RuntimeError("profiler ranges are observed already; one observer at a time")
    _opener = opener
    try:
        yield
    finally:
        _opener = None
