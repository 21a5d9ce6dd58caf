"""Block lists at head dimension 256 on SM100 take the general kernel, which reads them."""

from __future__ import annotations

import torch
from fa_cases import Case, backward, make_inputs
from fa_compile import Worker, built_kernels


def built(case: Case) -> list[str]:
    """The classes of what backward compiles."""
    x = make_inputs(case)
    with built_kernels("") as kernels:
        backward(case, x, x.do, torch.empty(case.B, case.Hq, case.T_q, device="cuda"))
    return [type(kernel).__name__ for kernel in kernels]


def test_dense_calls_keep_the_kernel_for_256(compiler_sm100: Worker) -> None:
    """It reads no lists: calls with lists take the general one."""
    dense = compiler_sm100.trace(built, Case(D=256, T_q=700, T_k=700))
    listed = compiler_sm100.trace(built, Case(D=256, T_q=700, T_k=700, lists="both", block=(128, 128)))
    assert "BlackwellFusedMultiHeadAttentionBackward" in dense
    assert "FlashAttentionBackwardSm100" in listed and "BlackwellFusedMultiHeadAttentionBackward" not in listed
