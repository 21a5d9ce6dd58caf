"""Every kernel compiles where there is no device to ask; static persistent forward is one of test_cases."""

import pytest
from fa_cases import Case, compile_case
from fa_compile import Worker
from fa_reference import assert_bits_repeat


def test_deterministic_backward(compiler: Worker) -> None:
    compiler.trace(compile_case, Case(T_q=512, T_k=512, causal=True, deterministic=True))


def varlen_split_kv() -> None:
    """The dynamic varlen scheduler, and the kernel that prepares its work."""
    import torch

    from flash_attn.cute.interface import _flash_attn_fwd

    q = torch.empty(4, 8, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.empty(4096, 2, 64, dtype=torch.bfloat16, device="cuda")
    cu_q = torch.empty(3, dtype=torch.int32, device="cuda")
    _flash_attn_fwd(
        q, k, k.clone(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_q.clone(), max_seqlen_q=2, max_seqlen_k=4096, num_splits=4
    )


def test_varlen_split_kv_forward(compiler_sm100: Worker) -> None:
    compiler_sm100.trace(varlen_split_kv)


@pytest.mark.gpu
def test_deterministic_repeats_its_bits() -> None:
    assert_bits_repeat(Case(T_q=1000, T_k=1000, causal=True, deterministic=True), 3)
