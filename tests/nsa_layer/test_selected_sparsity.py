"""The lists of the selected branch's kernels: every query sees the listed blocks, in a batch and in a pack."""

from __future__ import annotations

import pytest
import torch

from fuzz.choices import random_choice, visible_tokens
from nsa_layer.call_spec import CallSpec
from nsa_layer.config import NSAConfig
from nsa_layer.cute.packing import Packing

LENGTHS = (300, 0, 1, 128, 700)
HEADS = (6, 2)


@pytest.fixture(params=[True, False], ids=["hopper", "blackwell"])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    from nsa_layer.cute import selected_branch

    monkeypatch.setattr(selected_branch, "_on_hopper", lambda device: request.param)
    return request.param


def packed_choice(config: NSAConfig, heads: int, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    generator, width = torch.Generator().manual_seed(0), config.list_width(max(lengths))
    parts = [random_choice(length, 1, heads, config, generator)[0] for length in lengths if length]
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[-1]), value=-1) for p in parts], dim=1)


def make(config: NSAConfig, choice: torch.Tensor, *, causal: bool, backward: bool, lengths=LENGTHS, heads=HEADS):
    from nsa_layer.cute import selected_branch

    spec = CallSpec(config, causal, 1.0, lengths)
    T = 700 if lengths is None else sum(lengths)
    packing = Packing.of(spec, choice.device)
    return selected_branch.selected_sparsity(choice, T, heads, spec=spec, packing=packing, backward=backward)


def shown(sparsity, config: NSAConfig, number: int, T: int, backward: bool, causal: bool) -> torch.Tensor:
    """bool [H, T, T]: what the kernels show of a packed sequence, by their own rules for lists, causal and mask_mod."""
    tensors, (tile_q, tile_k) = sparsity.tensors, sparsity.tensors.block_size
    starts = tensors.cu_total_n_blocks if backward else tensors.cu_total_m_blocks
    seen = torch.zeros(tensors.mask_block_cnt.shape[0], -(-T // tile_q) * tile_q, -(-T // tile_k) * tile_k, dtype=bool)
    allowed = torch.ones_like(seen)
    if sparsity.aux_tensors:
        bitmap, first = sparsity.aux_tensors
        tiles = first[number] + torch.arange(seen.shape[1]) // config.q_tile
        block = torch.arange(seen.shape[2]) // config.block_size
        allowed = (bitmap[0, :, tiles][:, :, block // 32] >> (block % 32)) & 1 == 1
    if sparsity.mask_mod is not None and causal:
        allowed = allowed.tril()
    for cnt, idx, rule in (
        (tensors.mask_block_cnt, tensors.mask_block_idx, allowed),
        (tensors.full_block_cnt, tensors.full_block_idx, torch.ones_like(seen)),
    ):
        if cnt is None:
            continue
        for h in range(len(seen)):
            for row in range(int(starts[number + 1] - starts[number])):
                at = int(starts[number]) + row
                for entry in idx[h, at, : cnt[h, at]].tolist():
                    m, n = (entry, row) if backward else (row, entry)
                    place = h, slice(m * tile_q, (m + 1) * tile_q), slice(n * tile_k, (n + 1) * tile_k)
                    assert not seen[place].any(), "a tile is listed twice"
                    seen[place] = rule[place]
    seen = seen[:, :T, :T]
    return seen.tril() if sparsity.causal else seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [{}, dict(block_size=16), dict(block_size=256)], ids=str)
def test_a_pack_shows_exactly_the_choice(options: dict, backward: bool, causal: bool, hopper: bool) -> None:
    config = NSAConfig(**(dict(block_counts=5, q_tile=128) | options))
    choice = packed_choice(config, HEADS[1])
    sparsity = make(config, choice, causal=causal, backward=backward)
    assert sparsity.tensors.mask_block_cnt.shape[0] == HEADS[1], "lists are not repeated over heads"
    assert sparsity.tensors.plan is None
    parts = choice.split([config.num_tiles(T) for T in LENGTHS], dim=1)
    for number, (own, T) in enumerate(zip(parts, LENGTHS, strict=True)):
        expected = visible_tokens(own[None], T, config, causal)[0]
        assert torch.equal(shown(sparsity, config, number, T, backward, causal), expected), f"sequence {number}"


def test_whose_mask_it_is(hopper: bool) -> None:
    """No mask_mod is asked in tiles that hold nothing but listed blocks, but for Blackwell's causal edge."""
    config = NSAConfig(block_size=128, block_counts=3, q_tile=256)
    choice = packed_choice(config, 2, (700,))[None]
    for causal in (True, False):
        for backward in (False, True):
            made = make(config, choice, causal=causal, backward=backward, lengths=None)
            assert not made.aux_tensors
            assert (made.mask_mod is None) == (hopper or not causal)
            assert made.causal == (hopper and causal)
            assert (made.tensors.full_block_cnt is None) == hopper


def test_a_batch_has_a_plan_where_work_can_be_shared(hopper: bool) -> None:
    config = NSAConfig(block_counts=5, q_tile=128)
    choice = packed_choice(config, 2, (700,))[None]
    options = dict(causal=True, lengths=None)
    assert (make(config, choice, backward=True, **options).tensors.plan is not None) == hopper
    assert make(config, choice, backward=False, **options).tensors.plan is None
    assert make(config, choice, backward=True, heads=(2, 2), **options).tensors.plan is None


@pytest.mark.parametrize("Hq", [2, 8])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("q_tile", [128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_passes_are_known_before_lists_are(
    hopper: bool, Hq: int, block_size: int, q_tile: int, deterministic: bool
) -> None:
    """By the block size and the mode alone: deterministic backward takes two, so that its lists need no order."""
    from nsa_layer.cute import selected_branch

    q, v = (torch.empty(1, 300, heads, 64, dtype=torch.bfloat16) for heads in (Hq, 2))
    config = NSAConfig(block_size=block_size, q_tile=q_tile, deterministic=deterministic)
    two = selected_branch.use_split_dq(q, v, CallSpec(config, True, 1.0, None))
    assert two == (hopper and (block_size == 64 or deterministic))


@pytest.mark.parametrize("q_tile,rows", [(128, 256), (256, 256)])
def test_a_list_entry_is_whole_kernel_tiles_and_whole_query_tiles(q_tile: int, rows: int) -> None:
    from nsa_layer.cute import selected_branch

    spec = CallSpec(NSAConfig(block_size=128, q_tile=q_tile), True, 1.0)
    indices = torch.zeros(1, 1, spec.config.num_tiles(1000), 1, dtype=torch.int32)
    sparsity = selected_branch.selected_sparsity(indices, 1000, (4, 1), spec=spec, backward=False)
    assert sparsity.tensors.block_size == (rows, 128)
    assert sparsity.tensors.mask_block_cnt.shape[2] == -(-1000 // rows)
