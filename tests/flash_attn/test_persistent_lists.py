"""SM90 forward with short block lists, whose CTAs loop over many tiles: when they do, and that no bit depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fa_cases import Case, forward, in_order, make_inputs
from fa_compile import Worker
from fa_lists import forward_lists
from fa_persistent import assert_same_bits, stages

LISTS = dict(T_q=700, T_k=700, lists="both")
# A case and how many stages of keys and values its forward has beside two tiles of queries; 0: a CTA to a tile.
CASES: list[tuple[Case, int]] = [
    (Case(D=128, T_q=700, T_k=700, lists="full"), 2),
    (Case(D=128, T_q=700, T_k=700, lists="no full", mask_mod="thirds"), 2),
    (Case(D=128, causal=True, Hq=8, list_heads=2, **LISTS), 2),
    (Case(D=128, causal=True, Hq=8, list_heads=2, pack_gqa=False, **LISTS), 2),
    (Case(D=128, Hq=8, list_heads=8, **LISTS), 2),
    (Case(D=128, mask_mod="keyed", causal=True, **LISTS), 2),
    (Case(D=128, window=(100, 0), **LISTS), 2),
    (Case(D=128, overlap=False, **LISTS), 2),
    (Case(D=128, block=(128, 64), causal=True, **LISTS), 2),
    (Case(D=128, block=(256, 64), mask_mod="thirds", **LISTS), 2),
    (Case(D=128, block=(64, 64), list_heads=2, **LISTS), 3),
    (Case(D=128, block=(64, 128), **LISTS), 3),
    (Case(D=128, q_tiles=2, causal=True, pack_gqa=False, **LISTS), 2),
    (Case(D=64, Hq=6, list_heads=2, pack_gqa=False, **LISTS), 3),
    (Case(D=64, causal=True, **LISTS), 3),
    (Case(D=64, block=(128, 64), mask_mod="thirds", **LISTS), 3),
    (Case(D=96, causal=True, **LISTS), 3),
    # Heads of a group that do not divide a tile, other values than keys, no room, no registers, packed sequences,
    # wide rows.
    (Case(D=128, Hq=6, **LISTS), 0),
    (Case(D=192, Dv=128, block=(64, 96), Hkv=4, **LISTS), 0),
    (Case(D=256, block=(128, 64), **LISTS), 0),
    (Case(D=256, block=(64, 64), **LISTS), 0),
    (Case(D=128, packed=((100, 130), (600, 200)), lists="both"), 0),
    (Case(D=128, T_q=300, T_k=128 * 33, lists="both"), 0),
    (Case(D=128, T_q=300, T_k=128 * 32, lists="both"), 2),
]


@pytest.mark.parametrize("case,expected", CASES, ids=str)
def test_who_overlaps(case: Case, expected: int, compiler_sm90: Worker) -> None:
    assert compiler_sm90.trace(stages, case) == expected


@pytest.mark.parametrize("shape", [(1, 2, 3, 33), (1, 2, 3, 32)])
def test_wide_rows_do_not(shape: tuple[int, ...]) -> None:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.fwd_sm90.persistence import ForwardTile, overlapped_stages

    counts, entries = torch.zeros(shape[:3], dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    tile = ForwardTile(128, 128, 128, 128, packed_heads=1, p_in_smem=False)
    both = BlockSparseTensorsTorch(counts, entries, counts, entries)
    assert overlapped_stages(tile, lists=both) == (2 if shape[-1] == 32 else 0)
    assert overlapped_stages(tile, lists=BlockSparseTensorsTorch(counts, entries)) == 2


@dataclass(frozen=True)
class Walk:
    """Random lists of very different lengths."""

    T: int
    B: int = 1
    Hq: int = 8
    Hkv: int = 2
    D: int = 128
    width: int = 20
    causal: bool = False
    empty: float = 0.3  # of the rows, about how many


WALKS = [
    Walk(T=1),
    Walk(T=128, Hq=1, Hkv=1),
    Walk(T=200, B=2, empty=1.0),
    Walk(T=2100, B=3),
    Walk(T=20000, B=2),
    Walk(T=20000, D=64, causal=True),
    Walk(T=70000, Hq=16, Hkv=4, empty=0.9),
]


def random_call(loop: Walk, pack_gqa: bool) -> tuple[Case, Any, torch.Tensor]:
    """A case, lists for each key/value head, and which query blocks have none: [B, Hkv, M]."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    torch.manual_seed(loop.T)
    sizes = dict(D=loop.D, T_q=loop.T, T_k=loop.T, B=loop.B, Hq=loop.Hq, Hkv=loop.Hkv)
    M = -(-loop.T // 128)
    shape = (loop.B, loop.Hkv, M)
    empty = torch.rand(shape, device="cuda") < loop.empty

    def lists() -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.randint(0, min(loop.width, M) + 1, shape, device="cuda").masked_fill(empty, 0)
        blocks = torch.rand((*shape, M), device="cuda").topk(min(loop.width, M)).indices
        return counts.int(), blocks.int()

    lists_ = BlockSparseTensorsTorch(*lists(), *lists(), block_size=(128, 128))
    case = Case(**sizes, causal=loop.causal, pack_gqa=pack_gqa)
    return case, lists_, (lists_.mask_block_cnt + lists_.full_block_cnt) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("walk", "pack_gqa"), in_order(WALKS, True, False), ids=str)
def test_not_a_bit_depends_on_it(loop: Walk, pack_gqa: bool) -> None:
    """Fewer tiles than multiprocessors and many rounds of them, rows without blocks, every place written."""
    case, lists, empty = random_call(loop, pack_gqa)
    x = make_inputs(case)
    o, lse = assert_same_bits(lambda: forward(case, x, lists))
    group = loop.Hq // loop.Hkv
    unseen = empty.repeat_interleave(group, 1).repeat_interleave(128, 2)[..., : loop.T]
    assert not o[unseen.transpose(1, 2)].any() and lse[unseen].isneginf().all()


@pytest.mark.gpu
def test_lists_with_nothing_in_them() -> None:
    case = Case(D=128, Hq=8, list_heads=2, **LISTS)
    x, lists = make_inputs(case), forward_lists(case)
    nothing = {name: torch.zeros_like(getattr(lists, name)) for name in ("mask_block_cnt", "full_block_cnt")}
    o, lse = forward(case, x, lists._replace(**nothing))
    assert not o.any()
    assert lse.eq(float("-inf")).all()
