"""`torch.autocast` as for `scaled_dot_product_attention`: inputs are cast, and nothing inside is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def dtype_in_force(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on such a device; None where it is off, or where there is no autocast."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = device.type
    return torch.get_autocast_dtype(kind) if _is_known(kind) and torch.is_autocast_enabled(kind) else None


def _is_known(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


_is_known._dynamo_marked_constant = True  # PyTorch 2.11 cannot trace the question


def cast(q: Any, *others: Any) -> tuple[Any, ...]:
    """Arguments cast as by autocast on q's device: floating point but fp64 to its dtype, the rest unchanged."""
    dtype = dtype_in_force(q.device) if isinstance(q, torch.Tensor) else None
    return (q, *others) if dtype is None else tuple(x.to(dtype) if _is_cast(x) else x for x in (q, *others))


def _is_cast(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.is_nested and x.is_floating_point() and x.dtype != torch.float64


def off(device: torch.device) -> AbstractContextManager:
    """Context without autocast on such a device."""
    return nullcontext() if dtype_in_force(device) is None else torch.autocast(device.type, enabled=False)
