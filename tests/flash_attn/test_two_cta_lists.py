"""Block-sparse backward on SM100 uses pairs of CTAs where a block of keys is an even number of tiles, nowhere else.

Pairs of CTAs share the tensor core's work on two key tiles, so both have to loop over one list: upstream could not
(pull request 2433 turned pairs off where there are lists), and does since 2661 where a block of keys is an even number
of tiles; issue 2011, which asks for this backward, is open.
"""

from __future__ import annotations

import pytest
from fa_cases import Case, compile_case
from fa_compile import Worker, WorkerError, built_kernels

LONG = {"T_q": 1500, "T_k": 1500, "lists": "both"}
PAIRED, SINGLE = (256, 256), (256, 128)
CASES = [
    (Case(D=128, **LONG, block=PAIRED), True),
    (Case(D=128, **LONG, block=PAIRED, mask_mod="thirds", Hkv=4, list_heads=4), True),
    (Case(D=128, T_q=300, T_k=129, lists="full", block=PAIRED, Hkv=1), True),
    (Case(D=128, **LONG, block=SINGLE, causal=True), False),
    (Case(D=64, **LONG, block=PAIRED, causal=True), False),
]


def supports(keys: int) -> bool:
    import torch

    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, block_sparse_bwd_supports_2cta

    lists = BlockSparseTensorsTorch(*(torch.empty(1, 1, 1, dtype=torch.int32),) * 2, block_size=(256, keys))
    return block_sparse_bwd_supports_2cta(lists, 128)


def test_an_odd_factor_has_no_pairs(compiler_sm100: Worker) -> None:
    assert [compiler_sm100.trace(supports, 128 * factor) for factor in (1, 2, 3, 4)] == [False, True, False, True]


def kernel_with_pairs_over_an_odd_factor() -> None:
    from flash_attn.cute import interface

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "block_sparse_bwd_supports_2cta", lambda tensors, n_block_size: True)
        compile_case(Case(D=128, T_q=700, T_k=700, lists="both", block=SINGLE))


def test_the_kernel_itself_refuses_pairs_over_an_odd_factor(compiler_sm100: Worker) -> None:
    with pytest.raises(WorkerError, match="kv_subtile_factor % cta_group_size"):
        compiler_sm100.trace(kernel_with_pairs_over_an_odd_factor)


def pairs(case: Case) -> list[bool]:
    """For each backward kernel of the case, whether it uses pairs of CTAs."""
    with built_kernels("FlashAttentionBackwardSm100") as kernels:
        compile_case(case)
    return [kernel.use_2cta_instrs for kernel in kernels]


@pytest.mark.parametrize(("case", "expected"), CASES, ids=str)
def test_pairs_where_they_are_expected(compiler_sm100: Worker, case: Case, expected: bool) -> None:
    assert compiler_sm100.trace(pairs, case) == [expected]
