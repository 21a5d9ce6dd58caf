"""`torch.autocast` as `scaled_dot_product_attention` takes it: inputs are cast, and nothing inside is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def dtype_in_force(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on such a device; None where it is off, or where there is no autocast."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def cast(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """An argument as autocast hands it on: floating point but for fp64 in ``dtype``, anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.is_nested or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)


def off(device: torch.device) -> AbstractContextManager:
    """Without autocast on such a device."""
    return nullcontext() if dtype_in_force(device) is None else torch.autocast(device.type, enabled=False)
