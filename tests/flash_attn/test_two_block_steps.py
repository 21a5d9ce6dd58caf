"""SM90 forward takes two blocks of 64 keys at a step: which calls do, and that the numbers are right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fa_cases import Case, forward, make_inputs
from fa_compile import Worker, built_kernels

HALVES = dict(T_q=700, T_k=700, lists="both", block=(128, 64))
CASES = [
    Case(D=128, **HALVES, causal=True, list_heads=2),
    Case(D=64, **HALVES, causal=True, list_heads=2, pack_gqa=False),
    Case(D=96, **HALVES, window=(200, 30), list_heads=2),
    Case(D=128, **HALVES, Hq=6, list_heads=2, window=(100, None), mask_mod="thirds"),
    Case(D=128, **HALVES, Hq=6, list_heads=6, causal=True, mask_mod="thirds"),
    Case(D=128, **(HALVES | dict(lists="no full")), Hq=8, Hkv=1, causal=True),
]
PACK = ((300, 300), (0, 0), (1, 1), (700, 700), (64, 200))
PACKED = [
    Case(D=128, packed=PACK, lists="both", block=(128, 64), form="compact", list_heads=2, mask_mod="thirds"),
    Case(D=64, packed=PACK, lists="both", block=(128, 64), form="stacked", window=(100, 20)),
    Case(D=128, packed=PACK, lists="no full", block=(128, 64), form="ragged", causal=True),
]
# Of key blocks, or head dimensions, that a step of two blocks does not fit.
OWN_TILE = [
    Case(D=128, T_q=300, T_k=300, lists="both"),
    Case(D=256, T_q=300, T_k=300, lists="both", block=(128, 64)),
    Case(D=192, Dv=128, Hkv=4, T_q=300, T_k=300, lists="both", block=(64, 96)),
]


def kernels_of(case: Case, **options: object) -> list[tuple[int, int]]:
    """Blocks of a step and keys of a tile, of every forward kernel that a call compiles."""
    from flash_attn.cute import interface

    attend = partial(interface._flash_attn_fwd, **options)
    attend.compile_cache = interface._flash_attn_fwd.compile_cache
    with pytest.MonkeyPatch.context() as patch, built_kernels("FlashAttentionForwardSm90") as kernels:
        patch.setattr(interface, "_flash_attn_fwd", attend)
        forward(case, make_inputs(case))
    return [(kernel.list_parts, kernel.tile_n) for kernel in kernels]


def softcapped(case: Case) -> list[tuple[int, int]]:
    return kernels_of(case, softcap=20.0)


@pytest.mark.parametrize("case", [*CASES, *PACKED], ids=str)
def test_two_blocks_of_64_are_a_tile(compiler_sm90: Worker, case: Case) -> None:
    assert compiler_sm90.trace(kernels_of, case) == [(2, 128)]


@pytest.mark.parametrize("case", OWN_TILE, ids=str)
def test_other_blocks_are_a_tile_each(compiler_sm90: Worker, case: Case) -> None:
    ((parts, tile_n),) = compiler_sm90.trace(kernels_of, case)
    assert parts == 0 and tile_n == (case.block or (128, 128))[1]


def test_a_score_mod_takes_tiles_of_a_block(compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(softcapped, CASES[0]) == [(0, 64)]


def compressed(case: Case) -> list[tuple[int, int]]:
    return kernels_of(case, compress_factor=2, compress_offset=1)


@pytest.mark.parametrize("case", [CASES[0], replace(CASES[0], block=(64, 64))], ids=str)
def test_a_compressed_mask_takes_tiles_of_a_block(compiler_sm90: Worker, case: Case) -> None:
    """The mask of a step of two blocks does not know it."""
    assert compiler_sm90.trace(compressed, case) == [(0, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_a_compressed_mask_is_the_same_as_a_mask_mod(D: int) -> None:
    """Query t sees key j where 2 * j + 1 <= t."""
    from fa_lists import forward_lists
    from fa_mask_mods import halves

    from flash_attn.cute.interface import _flash_attn_fwd

    case = Case(D=D, T_q=700, T_k=350, lists="both", block=(128, 64), list_heads=2)
    x, lists = make_inputs(case), forward_lists(case)
    of_both = lists._replace(
        mask_block_cnt=lists.mask_block_cnt + lists.full_block_cnt,
        mask_block_idx=_joined(lists),
        full_block_cnt=None,
        full_block_idx=None,
    )
    given = dict(block_sparse_tensors=of_both, return_lse=True)
    o, lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, causal=True, compress_factor=2, compress_offset=1, **given)
    same, same_lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, mask_mod=halves, **given)
    seen = lse.isfinite()
    assert seen.equal(same_lse.isfinite()) and seen.any() and not seen.all()
    assert (lse[seen] - same_lse[seen]).abs().max() < 1e-4
    assert (o.float() - same.float()).abs().max() < 2e-2


def _joined(lists: Any) -> torch.Tensor:
    """A row's mask blocks, then its full ones: no more than there are blocks, which is as wide as rows may be."""
    mask, full = lists.mask_block_idx, lists.full_block_idx
    at = torch.arange(mask.shape[-1] + full.shape[-1], device="cuda").expand(*mask.shape[:-1], -1)
    first = lists.mask_block_cnt[..., None]
    both = torch.cat([mask, full], -1)
    place = torch.where(at < first, at, at - first + mask.shape[-1]).clamp(max=at.shape[-1] - 1)
    most = int((lists.mask_block_cnt + lists.full_block_cnt).max())
    return both.gather(-1, place)[..., :most].contiguous()
