"""Calls of flash_attn.cute for a worker that sees what an export made, and nothing of this repository."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def import_all(names: list[str]) -> list[str]:
    """Import modules, and return the files that they came from."""
    return [import_module(name).__file__ for name in names]


def attend(options: dict[str, Any], T: int = 512, block: tuple[int, int] | None = None, passes: int = 1) -> None:
    """Attention of 512 queries to T keys and its gradients; by block lists where a block size is given."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def lists(*shape: int) -> BlockSparseTensorsTorch:
        tensors = (torch.empty(1, 1, *shape[:dims], dtype=torch.int32, device="cuda") for dims in (1, 2))
        return BlockSparseTensorsTorch(*tensors, block_size=block)

    q, k = (torch.empty(1, length, 4, 128, dtype=torch.bfloat16, device="cuda") for length in (512, T))
    out, lse, *_ = _flash_attn_fwd(q, k, k, return_lse=True, **options, block_sparse_tensors=block and lists(4, 4))
    given = options | (dict(block_sparse_tensors=lists(4, 4), block_sparse_tensors_fwd=lists(4, 4)) if block else {})
    _flash_attn_bwd(q, k, k, out, q, lse, passes=passes, **given)
