"""Tensors for tests of the layer's kernels: fake ones, and memory that is used before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only


def faked(make: Callable[[], Any]) -> Any:
    """In a worker, where tensors are fake: the dataclass or tuple that is made, with empty tensors on a GPU."""
    with unset_fake_temporarily():
        record = make()

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")

    if isinstance(record, tuple):
        return tree_map_only(torch.Tensor, fake, record)
    return replace(record, **{name: tree_map_only(torch.Tensor, fake, x) for name, x in vars(record).items()})


def poison(device: torch.device) -> None:
    """Fill memory that is free afterwards with numbers that no list holds."""
    _ = [torch.full((size,), -7, dtype=torch.int32, device=device) for size in (1 << 10, 1 << 16, 1 << 21)]
