"""Element-wise passes over [.., H, D] tensors in slices of tokens: fp32 intermediates stay small, whatever T is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from nsa_layer.call_spec import accumulation_dtype

SLICE = 1 << 22  # elements of a slice's widest tensor: fp32 sums of so many stay in a GPU's L2


def token_slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same tokens of each [B, T, H, ...] or [total, H, ...] tensor as views [tokens, H, ...], slice by slice."""
    flat = [t.flatten(0, -3) for t in tensors]
    widest = max(t.shape[1:].numel() for t in flat)
    return zip(*(t.split(max(1, SLICE // widest)) for t in flat))


def sum_rounded(
    parts: Iterable[torch.Tensor | None], dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum in the accumulation dtype, rounded once; None counts as 0. `out` may be one of the parts."""
    present = [part for part in parts if part is not None]
    total = torch.empty(present[0].shape, dtype=dtype, device=present[0].device) if out is None else out
    if len(present) == 2 and all(part.dtype == dtype for part in present):
        return torch.add(*present, out=total)  # one pass, which rounds once
    for out, *pieces in token_slices(total, *present):
        subtotal = pieces[0].to(accumulation_dtype(dtype), copy=True)
        for piece in pieces[1:-1]:
            subtotal += piece
        if len(pieces) > 1:
            torch.add(subtotal, pieces[-1], out=out)
        else:
            out.copy_(subtotal)
    return total
