"""Checks of numbers that are on a GPU, in a graph: the GPU makes them, and a wrong one is a device-side assertion."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def assert_numbers(
    q: Tensor,
    k: Tensor,
    block_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    *,
    q_tile: int,
    block_size: int,
    max_seqlen: int | None = None,
) -> None:
    """Assert that starts are starts, and that lists are of blocks that exist; arguments as in `nsa`.

    Starts on the CPU are left to the operators, which read them.

    Args:
        cu_seqlens_k: starts of k, where they are not those of q.
    """
    for name, starts, x in (("cu_seqlens", cu_seqlens, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if starts is not None and starts.device == q.device:
            lengths = starts.diff()
            right = (starts[0] == 0) & (starts[-1] == x.shape[0]) & (lengths >= 0).all()
            torch._assert_async(right, f"{name} must start at 0, not fall, and end at the tokens that are packed")
            if max_seqlen is not None:
                torch._assert_async((lengths <= max_seqlen).all(), "max_seqlen must be at least the longest sequence")
    if block_indices is None:
        return
    most = -(-k.shape[-3] // block_size)
    if cu_seqlens is not None:
        of_keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        lists, blocks = (_parts(x, size, q.device) for x, size in ((cu_seqlens, q_tile), (of_keys, block_size)))
        ends, rows = lists.cumsum(0), torch.arange(block_indices.shape[0], device=q.device)
        torch._assert_async(ends[-1] <= block_indices.shape[0], "block_indices must have a list for each tile")
        sequence = torch.searchsorted(ends, rows, right=True).clamp(max=blocks.shape[0] - 1)
        most = blocks[sequence][:, None, None]
    right = ((block_indices >= -1) & (block_indices < most)).all()
    torch._assert_async(right, "block_indices must be -1 or a block of the sequence")


def _parts(starts: Tensor, size: int, device: torch.device) -> Tensor:
    """[sequences], tiles or blocks of ``size`` tokens in each."""
    return ((starts.diff() + size - 1) // size).to(device, non_blocking=True)
