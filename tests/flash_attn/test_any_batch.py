"""A batch is as large as memory allows: only the first dimension of a grid takes more than 65,535."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fa_cases import Case, Inputs, backward, compile_case, forward, make_inputs, swept
from fa_compile import Worker, recorded_grids

MANY = Case(B=70_000, T_q=70, T_k=70, Hq=2, Hkv=1)
BATCHES = [
    MANY,
    replace(MANY, causal=True),
    replace(MANY, causal=True, deterministic=True),
    replace(MANY, window=(20, 0)),
    replace(MANY, D=128, Hkv=2, mask_mod="keyed"),
]
# Lists are made in Python, so these are few sequences.
LISTED = [Case(mask_mod="keyed", lists="partial"), Case(D=128, lists="full", deterministic=True)]
PACKED = [Case(packed=((100, 100), (30, 40)), causal=True), Case(packed=((100, 100), (30, 40)), lists="full")]


def grids_of_case(case: Case) -> list[tuple[int | None, ...]]:
    with recorded_grids() as grids:
        compile_case(case)
    return grids


@pytest.mark.parametrize("case", swept([*BATCHES[1:3], replace(MANY, D=256), LISTED[1], PACKED[1]], 2), ids=str)
def test_only_the_first_dimension_of_a_grid_grows(compiler: Worker, case: Case) -> None:
    grids = compiler.trace(grids_of_case, case)
    assert grids and all(None not in grid[1:] for grid in grids), grids


def grids_of_compressed_causal() -> list[tuple[int | None, ...]]:
    """Grids of forward and backward, deterministic too, and from the last keys to the first where there are few."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q = torch.empty(70_000, 256, 4, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.empty(70_000, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    compress = dict(causal=True, compress_factor=64, compress_offset=63)
    with recorded_grids() as grids:
        o, lse, *_ = _flash_attn_fwd(q, k, k, **compress, return_lse=True)
        for deterministic in (False, True):
            _flash_attn_bwd(q, k, k, o, o, lse, **compress, deterministic=deterministic)
    return grids


def test_compressed_causal(compiler: Worker) -> None:
    grids = compiler.trace(grids_of_compressed_causal)
    assert grids and all(None not in grid[1:] for grid in grids), grids


def grids_of_block_sparsity() -> list[tuple[int | None, ...]]:
    from fa_mask_mods import MASK_MODS

    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity

    with recorded_grids() as grids:
        compute_block_sparsity(128, 128, 70_000, 2, 256, 256, MASK_MODS["thirds"][0], None, device="cuda")
    return grids


def test_block_sparsity_of_a_mask(compiler: Worker) -> None:
    grids = compiler.trace(grids_of_block_sparsity)
    assert [grid[0] for grid in grids] == [None] and grids[0][2] == 1


def some(x: Inputs, sequences: slice) -> Inputs:
    return replace(x, q=x.q[sequences], k=x.k[sequences], v=x.v[sequences], do=x.do[sequences])


@pytest.mark.gpu
@pytest.mark.xdist_group("large batches")
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_sequences_of_a_large_batch_get_what_they_get_alone(case: Case) -> None:
    x = make_inputs(case)
    o, lse = forward(case, x)
    gradients = backward(case, x, o, lse)
    for at in (slice(0, 3), slice(65_530, 65_540), slice(-3, None)):
        part = replace(case, B=len(x.q[at]))
        alone = forward(part, some(x, at))
        alone += backward(part, some(x, at), *alone)
        for got, expected in zip((o, lse, *gradients), alone, strict=True):
            torch.testing.assert_close(got[at], expected, rtol=1e-2, atol=1e-2)
    assert all(bool(t.isfinite().all()) for t in (o, *gradients))


@pytest.mark.gpu
def test_every_sequence_of_a_large_batch_has_the_block_lists_of_its_mask() -> None:
    from fa_mask_mods import MASK_MODS

    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity

    lists = compute_block_sparsity(128, 128, 70_000, 2, 300, 300, MASK_MODS["halves"][0], None, device="cuda")
    alone = compute_block_sparsity(128, 128, 1, 2, 300, 300, MASK_MODS["halves"][0], None, device="cuda")
    for name in ("mask_block_cnt", "full_block_cnt", "mask_block_idx", "full_block_idx"):
        got, expected = getattr(lists, name), getattr(alone, name)
        assert torch.equal(got, expected.expand_as(got)), name
