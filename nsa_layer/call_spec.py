"""What a backend is handed after validation, and what it hands back beside the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_layer.config import NSAConfig


@dataclass(frozen=True)
class CallSpec:
    """The static side of one call.

    Attributes:
        config: the operator's options.
        causal: whether queries see only what is not after them.
        softmax_scale: the factor of q . k, in all branches and in the choice of blocks.
        lengths: the packed sequences' lengths, or None for a batch of equal length.
    """

    config: NSAConfig
    causal: bool
    softmax_scale: float
    lengths: tuple[int, ...] | None = None


@dataclass
class Aux:
    """What `nsa` computes on the way; nothing here carries a gradient.

    Attributes:
        block_indices: int32 [B, Hs, M, n], Hs = Hkv (Hq with ``rule="seed"``): the chosen blocks of each query
            tile, ascending, padded with -1. Packed: [Hs, tiles of all sequences in order, n], blocks counted from each
            sequence's start.
        gates: [B, T, Hq, 3], packed [total, Hq, 3]: compressed, selected, sliding window.
        lse_cmp, lse_slc, lse_swa: [B, Hq, T], packed [Hq, total]: each branch's log-sum-exp (natural), -inf where a row
            sees no key.
    """

    block_indices: torch.Tensor
    gates: torch.Tensor
    lse_cmp: torch.Tensor
    lse_slc: torch.Tensor
    lse_swa: torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 where the input is fp64."""
    return torch.promote_types(dtype, torch.float32)


def mean_scale(n: int) -> int:
    """The power of two that n numbers are divided by before they are summed: their mean cannot overflow on the way.

    Such a division is exact, so dividing the sum by ``n / mean_scale(n)`` gives the bits of ``sum / n``.
    """
    return 1 << (n - 1).bit_length()
