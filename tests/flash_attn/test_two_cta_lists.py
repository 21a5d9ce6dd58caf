"""Block-sparse backward on SM100 uses pairs of CTAs where a block of keys is an even number of tiles, nowhere else."""

import subprocess
import sys
from pathlib import Path

import pytest
import two_cta_lists
from fa_cases import Case
from fa_compile import Worker, WorkerError

CASES = two_cta_lists.cases()


def supports(keys: int) -> bool:
    import torch

    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, block_sparse_bwd_supports_2cta

    lists = BlockSparseTensorsTorch(*(torch.empty(1, 1, 1, dtype=torch.int32),) * 2, block_size=(256, keys))
    return block_sparse_bwd_supports_2cta(lists, 128)


@pytest.mark.xdist_group("sm_100")
def test_an_odd_factor_has_no_pairs(compiler_sm100: Worker) -> None:
    assert [compiler_sm100.run(supports, 128 * factor) for factor in (1, 2, 3, 4)] == [False, True, False, True]


def kernel_with_pairs_over_an_odd_factor() -> None:
    from flash_attn.cute import interface

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "block_sparse_bwd_supports_2cta", lambda tensors, n_block_size: True)
        two_cta_lists.compile_anew(Case(D=128, T_q=700, T_k=700, lists="both", block=two_cta_lists.SINGLE))


@pytest.mark.xdist_group("sm_100")
def test_the_kernel_itself_refuses_pairs_over_an_odd_factor(compiler_sm100: Worker) -> None:
    with pytest.raises(WorkerError, match="kv_subtile_factor % cta_group_size"):
        compiler_sm100.trace(kernel_with_pairs_over_an_odd_factor)


@pytest.mark.skipif(two_cta_lists.is_blackwell(), reason="runs on this GPU instead of compiling")
def test_every_case_compiles_with_pairs_where_they_are_expected() -> None:
    """An even number of tiles to a block of keys; the script judges by what the kernels were built with."""
    script = Path(two_cta_lists.__file__)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled for sm_100a, not run" in done.stdout
    assert [line.rsplit(": ")[-1] for line in done.stdout.splitlines()[1:]] == ["compiled"] * len(CASES)


def wrongly_expected(case: Case, expected: bool) -> str:
    return two_cta_lists.judge(case, not expected, False).said


@pytest.mark.xdist_group("sm_100")
def test_other_pairs_than_expected_fail(compiler_sm100: Worker) -> None:
    case, expected = CASES[3]
    said = compiler_sm100.trace(wrongly_expected, case, expected)
    assert said.startswith("FAIL") and f"pairs of CTAs: [{expected}], expected {not expected}" in said
