"""A map over both models, on a CPU each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item, Result = TypeVar("Item"), TypeVar("Result")
Map = Callable[[Callable[[Item], Result], Iterable[Item]], list[Result]]


@contextmanager
def side_by_side(device: str, *, models: int, threads: int) -> Iterator[Map]:
    """Yields a ``map``: on a CPU its calls run at once, each with so many threads; on a GPU one after the other.

    One model's operators are too small to be worth sharing among cores: PyTorch's threads wait for each other by
    spinning, and on a machine with other work to do a step then takes a hundred times as long. Two models on two cores
    need not wait.
    """
    if torch.device(device).type != "cpu":
        yield lambda function, items: [function(item) for item in items]
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(models, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            yield lambda function, items: list(pool.map(function, items))
    finally:
        torch.set_num_threads(before)
