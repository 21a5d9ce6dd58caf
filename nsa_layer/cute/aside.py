"""A second stream for work that the next kernels do not wait for.

Its thread blocks take the multiprocessors that the last tiles of those kernels leave idle, a tenth of the time where
tiles are few. Tensors are allocated on the current stream, so that their memory is free again in its order.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from nsa_layer.kernels.launch import is_fake

MOST_ROWS = 1 << 19  # (token, head) pairs of a call with few tiles: 20 of 192 rows on each multiprocessor of a H200


class Aside:
    """Within, launches go to the second stream; `join` makes the current one wait for them."""

    def __init__(self, device: torch.device) -> None:
        self.current, self.side = torch.cuda.current_stream(device), _second(device)

    def __enter__(self) -> None:
        self.side.wait_stream(self.current)
        self.entered = torch.cuda.stream(self.side)
        self.entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self.entered.__exit__(*error)

    def join(self) -> None:
        self.current.wait_stream(self.side)


def aside(q: torch.Tensor) -> Aside | None:
    """For a call with these queries [..., Hq, D]; None where there is no GPU, or there are many tiles."""
    few = q.shape[:-1].numel() <= MOST_ROWS
    return Aside(q.device) if few and q.device.type == "cuda" and not is_fake(q) else None


@lru_cache(maxsize=None)
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
