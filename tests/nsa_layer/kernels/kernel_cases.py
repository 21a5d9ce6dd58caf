"""Tensors for tests of the layer's kernels: starts of sequences, fake ones, and memory that is used before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch


def starts(counts: Iterable[int], device: torch.device | str = "cuda") -> torch.Tensor:
    """int32 [counts + 1]: where sequences of so many rows start, and the end."""
    return torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device="cpu").to(device)


def faked(record: Any) -> Any:
    """A dataclass in a worker, where tensors are fake, with empty ones on a GPU in place of its own."""
    tensors = {name: x for name, x in vars(record).items() if isinstance(x, torch.Tensor)}
    return replace(record, **{n: torch.empty(x.shape, dtype=x.dtype, device="cuda") for n, x in tensors.items()})


def poison(device: torch.device) -> None:
    """Fill memory that is free afterwards with numbers that no list holds."""
    for size in (1 << 10, 1 << 16, 1 << 21):
        torch.full((size,), -7, dtype=torch.int32, device=device)
