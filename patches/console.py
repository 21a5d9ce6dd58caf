"""What the commands print: results on standard output, progress on standard error where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def say(message: str) -> None:
    print(message, flush=True)


def steps(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """The items one by one, with a line that says how far they have come."""
    show = sys.stderr.isatty()
    for number, item in enumerate(items, 1):
        if show:
            name = getattr(item, "slug", item)
            print(f"\r\x1b[K{doing} {number}/{len(items)} {name}", end="", file=sys.stderr, flush=True)
        yield item
    if show and items:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
