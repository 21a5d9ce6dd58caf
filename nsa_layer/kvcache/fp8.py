"""Numbers of caches in FP8: float8_e4m3fn, times an fp32 scale of each head."""

from __future__ import annotations

import torch

from nsa_layer.call import FP8, accumulation_dtype

Tensor = torch.Tensor
MOST = 448.0  # of float8_e4m3fn


def quantise(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [..., H, D] times (1 / scale) of its head [H] in fp32, rounded to the nearest number of FP8, saturating."""
    x = x.float() if scale is None else x.float() * scale.reciprocal()[:, None]
    return x.clamp(-MOST, MOST).to(FP8)


def dequantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [..., H, D] times its head's scale [H], in another dtype; what is not in FP8 is returned as it is."""
    if x.dtype != FP8:
        return x
    x = x.to(accumulation_dtype(dtype))
    return (x if scale is None else x * scale[:, None]).to(dtype)


def in_cache_dtype(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x as a cache of this dtype stores it."""
    return quantise(x, scale) if dtype == FP8 else x.to(dtype)
