"""Pages of a pool for sequences; a page that several sequences have is copied before one of them writes to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch

Tensor = torch.Tensor
Spans = Sequence[tuple[int, int]]  # (first, end) of the slots that each sequence will write


class PageAllocator:
    """The pages of each sequence, and the free ones.

    Attributes:
        caches: [pages, page, H, D] each, of the same pages.
        table: int32 [batch, n], -1 where a sequence has no page.
        of: each sequence's pages in order.
        users: sequences that have a page.
        free: pages that none has.
        changed: the table does not show what sequences have.
    """

    def __init__(self, caches: list[Tensor], batch: int, width: int) -> None:
        self.caches, (pages, self.size) = caches, caches[0].shape[:2]
        self.table = torch.full((batch, width), -1, dtype=torch.int32, device=caches[0].device)
        self.of: list[list[int]] = [[] for _ in range(batch)]
        self.users, self.free, self.changed = [0] * pages, list(range(pages))[::-1], False

    def lacking(self, spans: Spans) -> int:
        """Pages that `reserve` would need beyond the free ones."""
        writers = Counter(page for own, span in zip(self.of, spans) for page in own[self._written(*span)])
        copies = sum(min(n, self.users[page] - 1) for page, n in writers.items())
        new = sum(max(0, self._count(end) - len(own)) for own, (_, end) in zip(self.of, spans))
        return copies + new - len(self.free)

    def reserve(self, spans: Spans) -> None:
        """Give each sequence pages of its own for the slots that it will write."""
        for own, (first, end) in zip(self.of, spans):
            for at in range(len(own))[self._written(first, end)]:
                if self.users[own[at]] > 1:
                    page, shared = self._take(), own[at]
                    for cache in self.caches:
                        cache[page] = cache[shared]
                    self._drop(shared)
                    own[at] = page
            own += [self._take() for _ in range(self._count(end) - len(own))]
        self._show()

    def crop(self, ends: Sequence[int]) -> None:
        """Free the pages behind each sequence's first ``end`` slots."""
        for own, end in zip(self.of, ends):
            while len(own) > self._count(end):
                self._drop(own.pop())
        self._show()

    def reorder(self, index: Sequence[int]) -> None:
        """Sequence b gets the pages that sequence ``index[b]`` had."""
        before, self.of = self.of, [list(self.of[i]) for i in index]
        for page in chain(*self.of):
            self.users[page] += 1
        for page in chain(*before):
            self._drop(page)
        self._show()

    def _count(self, end: int) -> int:
        """Pages of this many slots."""
        return -(-end // self.size)

    def _written(self, first: int, end: int) -> slice:
        return slice(first // self.size, self._count(end) if end > first else 0)

    def _take(self) -> int:
        page, self.changed = self.free.pop(), True
        self.users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.users[page], self.changed = self.users[page] - 1, True
        if not self.users[page]:
            self.free.append(page)

    def _show(self) -> None:
        if self.changed:
            width, self.changed = self.table.shape[1], False
            rows = [own + [-1] * (width - len(own)) for own in self.of]
            self.table.copy_(sent(rows, self.table.device, torch.int32))


def sent(numbers: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers on a device, which the host does not wait for."""
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
