"""Element-wise passes over [.., H, D] tensors in slices of tokens: fp32 intermediates stay small, whatever T is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nsa_layer.call import accumulation_dtype

SLICE = 1 << 25  # elements of a slice's widest tensor


def token_slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same tokens of each [B, T, H, ...] or [total, H, ...] tensor as views [tokens, H, ...], slice by slice."""
    flat = [t.flatten(0, -3) for t in tensors]
    widest = max(t.shape[1:].numel() for t in flat)
    return zip(*(t.split(max(1, SLICE // widest)) for t in flat))


def sum_rounded(parts: Sequence[torch.Tensor], out: torch.Tensor, *, kernels: bool = False) -> None:
    """Write the parts' sum, which is made in the accumulation dtype and rounded once, to `out`, which may be a part.

    Args:
        kernels: the layer's own may run, and do where they are faster; the bits are the same.
    """
    if out.dim() > 3 and out.stride(0) != out.shape[1] * out.stride(1):  # flattened it would be a copy
        for into, *pieces in zip(out, *parts):
            sum_rounded(pieces, into, kernels=kernels)
        return
    if kernels and out.is_cuda:
        from nsa_layer.kernels.rounded_sum import can_sum, rounded_sum

        into, *pieces = [x.flatten(0, -3) for x in (out, *parts)]
        if can_sum(pieces, into):
            return rounded_sum(pieces, into)
    if len(parts) == 2 and all(part.dtype == out.dtype for part in parts):
        torch.add(*parts, out=out)  # one pass, which rounds once
        return
    for into, *pieces in token_slices(out, *parts):
        subtotal = pieces[0].to(accumulation_dtype(out.dtype))
        for piece in pieces[1:]:
            subtotal = subtotal + piece
        into.copy_(subtotal)
