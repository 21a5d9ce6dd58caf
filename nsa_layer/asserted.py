"""Checks of numbers that are on a GPU, in a graph: the GPU makes them, and a wrong one is a device-side assertion."""

from __future__ import annotations

import torch

from nsa_layer.call import Call


def assert_numbers(call: Call, *, max_seqlen: int | None = None) -> None:
    """Assert that starts on q's device are starts, and that there is a list for each tile; `max_seqlen` as in `nsa`.

    Starts on the CPU are left to the operators, which read them.
    """
    (q, k), cu_seqlens, cu_seqlens_k = call[:2], call.cu_seqlens, call.cu_seqlens_k
    block_indices, q_tile = call.block_indices, call.config.q_tile
    for name, starts, x in (("cu_seqlens", cu_seqlens, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        if starts is not None and starts.device == q.device:
            lengths = starts.diff()
            right = (starts[0] == 0) & (starts[-1] == x.shape[0]) & (lengths >= 0).all()
            torch._assert_async(right, f"{name} must start at 0, not fall, and end at the tokens that are packed")
            if max_seqlen is not None:
                torch._assert_async((lengths <= max_seqlen).all(), "max_seqlen must be at least the longest sequence")
    if block_indices is not None and cu_seqlens is not None:
        tiles = ((cu_seqlens.diff() + q_tile - 1) // q_tile).sum().to(q.device, non_blocking=True)
        torch._assert_async(tiles <= block_indices.shape[0], "block_indices must have a list for each tile")
