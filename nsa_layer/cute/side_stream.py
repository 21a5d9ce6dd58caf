"""A second stream for work that the next kernels do not wait for.

Its CTAs take the multiprocessors that the last tiles of other kernels leave idle, a tenth of the time where
tiles are few. Tensors are allocated on the current stream, so that their memory is free again in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from nsa_layer.kernels.launch import is_fake

MOST_ROWS = 1 << 19  # (token, head) pairs of a call with few tiles: 20 of 192 rows on each multiprocessor of a H200


class SideStream:
    """Context at whose end, also by an error, the current stream waits for launches on the second one."""

    def __init__(self, device: torch.device) -> None:
        self.current, self.side, self.joined = torch.cuda.current_stream(device), _second(device), True

    def __enter__(self) -> SideStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.join()

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Context whose launches go to the second stream."""
        self.side.wait_stream(self.current)
        self.joined = False
        with torch.cuda.stream(self.side):
            yield

    def join(self) -> None:
        """Let the current stream wait for all launches; without any, there is nothing to wait for."""
        if not self.joined:
            self.current.wait_stream(self.side)
            self.joined = True


def side_stream_for(q: torch.Tensor) -> SideStream | None:
    """The second stream of a call with these queries [..., Hq, D]; None without a GPU, or if there are many tiles."""
    few = q.shape[:-1].numel() <= MOST_ROWS
    return SideStream(q.device) if few and q.device.type == "cuda" and not is_fake(q) else None


@lru_cache(maxsize=None)
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
