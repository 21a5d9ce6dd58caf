"""Deterministic backward on SM100 takes lists that tell no full blocks apart."""

from __future__ import annotations

import pytest
from fa_cases import Case
from fa_compile import Worker


def compile_backward(case: Case) -> None:
    """With an order of writes for the blocks that are listed, and none for full ones."""
    import torch

    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v = (torch.empty(case.B, T, H, case.D, dtype=torch.bfloat16, device="cuda") for T, H in (
        (case.T_q, case.Hq), (case.T_k, case.Hkv), (case.T_k, case.Hkv)))  # fmt: skip
    block = case.block
    columns, rows = -(-case.T_k // block[1]), -(-case.T_q // block[0])
    counts = torch.empty(case.B, case.Hq, columns, dtype=torch.int32, device="cuda")
    entries = torch.empty(case.B, case.Hq, columns, rows, dtype=torch.int32, device="cuda")
    lists = BlockSparseTensorsTorch(
        counts, entries, block_size=block, dq_write_order=torch.empty_like(entries), spt=True
    )
    lse = torch.empty(case.B, case.Hq, case.T_q, dtype=torch.float32, device="cuda")
    _flash_attn_bwd(q, k, v, q, q, lse, deterministic=True, block_sparse_tensors=lists)


@pytest.mark.parametrize("D", [64, 128])
def test_compiles(compiler_sm100: Worker, D: int) -> None:
    compiler_sm100.trace(compile_backward, Case(D=D, block=(256, 128)))
