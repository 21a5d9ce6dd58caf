"""Rotary position embedding, the usual callable for `NSAttention(rope=...)`."""

from __future__ import annotations

import math
import sys

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Turns the pairs (x[i], x[i + D/2]) of q and k by ``position * base ** (-2 i / D)`` radians.

    It has no parameters and no buffers, so that moving a model to bf16 does not round the frequencies. Angles are
    computed anew in fp64 and brought below pi before they are rounded to fp32 (fp64 input: not at all): up to position
    2 ** 24 they err by 1e-8 radians and that rounding.

    Args:
        head_dim: D, even.
        base: the slowest pair turns once in about ``2 pi base`` tokens.
        slowest_of: the D / 2 slowest pairs of an embedding of this many dimensions, by default ``head_dim``.

    Raises:
        ValueError: head_dim is odd or below 2, slowest_of odd or smaller, or base is not above 1 and finite.

    Source: arXiv:2104.09864.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, *, slowest_of: int | None = None) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
        if not 1 < base <= sys.float_info.max:
            raise ValueError(f"base must be above 1 and finite, got {base}")
        self.head_dim, self.base = head_dim, float(base)
        self.slowest_of = head_dim if slowest_of is None else slowest_of
        if self.slowest_of < head_dim or self.slowest_of % 2:
            raise ValueError(f"slowest_of must be even and at least head_dim={head_dim}, got {slowest_of}")

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [..., T, Hq, D] and k [..., T, Hkv, D], turned, in their own dtypes; ValueError for another D.

        Args:
            positions: [T] or [..., T], integers.
        """
        for name, x in (("q", q), ("k", k)):
            if x.shape[-1] != self.head_dim:
                raise ValueError(f"{name} must have head dimension {self.head_dim}, got {x.shape[-1]}")
        dtype = torch.promote_types(q.dtype, torch.float32)
        angle = self._angles(positions, dtype).unsqueeze(-2)
        cos, sin = angle.cos(), angle.sin()
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Positions [..., T] -> angles [..., T, D / 2] from -pi to pi, rounded once. By the CPU for mps: no fp64."""
        wide = positions.cpu() if positions.device.type == "mps" else positions
        D = self.slowest_of
        pair = torch.arange(D - self.head_dim, D, 2, device=wide.device, dtype=torch.float64)
        cycles = wide.to(torch.float64).unsqueeze(-1) * (self.base ** (-pair / D) / (2 * math.pi))
        return cycles.sub_(cycles.round()).mul_(2 * math.pi).to(positions.device, dtype)

    def extra_repr(self) -> str:
        of = f", slowest_of={self.slowest_of}" if self.slowest_of > self.head_dim else ""
        return f"{self.head_dim}, base={self.base:g}{of}"


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
