"""Element-wise passes over [.., H, D] tensors in slices of tokens: fp32 intermediates stay small, whatever T is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from nsa_layer.call import accumulation_dtype

SLICE = 1 << 25  # elements of a slice's widest tensor


def token_slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same tokens of each [B, T, H, ...] or [total, H, ...] tensor as views [tokens, H, ...], slice by slice."""
    flat = [t.flatten(0, -3) for t in tensors]
    widest = max(t.shape[1:].numel() for t in flat)
    return zip(*(t.split(max(1, SLICE // widest)) for t in flat))


def sum_rounded(
    parts: Iterable[torch.Tensor | None], dtype: torch.dtype, *, out: torch.Tensor | None = None, kernels: bool = False
) -> torch.Tensor:
    """The sum in the accumulation dtype, rounded once; None counts as 0. `out` may be one of the parts.

    Args:
        kernels: the layer's own may run, and do where they are faster; the bits are the same.
    """
    present = [part for part in parts if part is not None]
    total = torch.empty(present[0].shape, dtype=dtype, device=present[0].device) if out is None else out
    if total.dim() > 3 and total.stride(0) != total.shape[1] * total.stride(1):  # flattened it would be a copy
        for into, *pieces in zip(total, *present):
            sum_rounded(pieces, dtype, out=into, kernels=kernels)
        return total
    if kernels and total.is_cuda:
        from nsa_layer.kernels.rounded_sum import can_sum, rounded_sum

        into, *pieces = [x.flatten(0, -3) for x in (total, *present)]
        if can_sum(pieces, into):
            rounded_sum(pieces, into)
            return total
    if len(present) == 2 and all(part.dtype == dtype for part in present):
        return torch.add(*present, out=total)  # one pass, which rounds once
    for out, *pieces in token_slices(total, *present):
        subtotal = pieces[0].to(accumulation_dtype(dtype))
        for piece in pieces[1:]:
            subtotal = subtotal + piece
        out.copy_(subtotal)
    return total
