"""Block-sparse lists and the bitmap against dense masks made token by token."""

from __future__ import annotations

import pytest
import torch

from nsa_layer.config import NSAConfig
from nsa_layer.cute.torch_block_lists import KV_TILE, BlockLists, block_bitmap, selected_lists


def dense_of(lists: BlockLists, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, H, rows, columns] of mask and of full entries; checks order and padding on the way."""
    tables = []
    for cnt, idx in ((lists.mask_cnt, lists.mask_idx), (lists.full_cnt, lists.full_idx)):
        assert cnt.dtype == idx.dtype == torch.int32
        table = torch.zeros(*idx.shape[:3], columns, dtype=torch.bool)
        for b, h, row in torch.cartesian_prod(*map(torch.arange, idx.shape[:3])).tolist():
            used = idx[b, h, row, : cnt[b, h, row]].tolist()
            assert used == sorted(set(used)), "entries must ascend"
            assert not idx[b, h, row, len(used) :].any(), "what is unused must be a legal tile"
            table[b, h, row, used] = True
        tables.append(table)
    return tables[0], tables[1]


def transposed(lists: BlockLists, columns: int) -> BlockLists:
    """The same tiles by key tile, as the layer hands them to backward."""
    from flash_attn.cute.block_lists import transpose_lists
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    fields = (lists.mask_cnt, lists.mask_idx, lists.full_cnt, lists.full_idx)
    turned = transpose_lists(BlockSparseTensorsTorch(*fields), columns, width=lists.mask_cnt.shape[2])
    return BlockLists(*turned[:4], lists.block_size)


def tiles_of(visible: torch.Tensor, tile_q: int, kv_tile: int = KV_TILE) -> tuple[torch.Tensor, torch.Tensor]:
    """Visibility [..., T, K] as (any visible, all visible) per tile; past the end nothing is visible."""
    T, K = visible.shape[-2:]
    padded = torch.nn.functional.pad(visible, (0, -K % kv_tile, 0, -T % tile_q))
    # Queries past the end do not exist: they neither need a tile nor spoil a full one.
    padded[..., T:, :] = padded[..., T - 1 : T, :]
    blocks = padded.unflatten(-1, (-1, kv_tile)).unflatten(-3, (-1, tile_q))
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


def random_choice(T: int, B: int, H: int, config: NSAConfig, generator: torch.Generator) -> torch.Tensor:
    M, n, N = config.num_tiles(T), config.list_width(T), config.num_blocks(T)
    indices = torch.full((B, H, M, n), -1, dtype=torch.int32)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, M))).tolist():
        most = min(N, ((i + 1) * config.q_tile - 1) // config.block_size + 1)  # causal: no block after the tile
        count = int(torch.randint(0, min(n, most) + 1, (), generator=generator))
        chosen = torch.randperm(most, generator=generator)[:count].sort().values
        indices[b, h, i, :count] = chosen.to(torch.int32)
    return indices


def visible_tokens(indices: torch.Tensor, T: int, config: NSAConfig, causal: bool) -> torch.Tensor:
    B, H, M, _ = indices.shape
    visible = torch.zeros(B, H, T, T, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, M))).tolist():
        for j in indices[b, h, i].tolist():
            if j >= 0:
                rows = slice(i * config.q_tile, (i + 1) * config.q_tile)
                visible[b, h, rows, j * config.block_size : (j + 1) * config.block_size] = True
    return visible.tril() if causal else visible


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile_q,kv_tile", [(128, 128), (128, 64), (256, 128)])
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
@pytest.mark.parametrize("T", [1, 127, 128, 300, 1000])
def test_selected_lists(T: int, block_size: int, tile_q: int, kv_tile: int, causal: bool) -> None:
    config = NSAConfig(block_size=block_size, block_counts=6, q_tile=128)
    indices = random_choice(T, 2, 2, config, torch.Generator().manual_seed(T + block_size))
    visible = visible_tokens(indices, T, config, causal)
    some, everything = tiles_of(visible, tile_q, kv_tile)
    N = -(-T // kv_tile)
    lists = selected_lists(indices, T, config=config, causal=causal, tile_q=tile_q, kv_tile=kv_tile)
    mask, full = dense_of(lists, N)
    assert not (mask & full).any()
    assert torch.equal(full, everything & full), "a tile listed as full hides a pair that is not visible"
    assert (mask | full)[some].all(), "a visible pair is in no listed tile"
    # Of two merged tiles one can list a long block whose last part lies after it.
    if tile_q == config.q_tile or block_size <= kv_tile:
        assert torch.equal(mask | full, some), "a tile without a visible pair is listed"
    if T % tile_q == 0:
        assert torch.equal(full, everything), "a tile that needs no mask is listed for masking"
    mask_t, full_t = dense_of(transposed(lists, N), lists.mask_cnt.shape[2])
    assert torch.equal(mask_t, mask.mT) and torch.equal(full_t, full.mT)


@pytest.mark.parametrize("tile_q", [128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("T", [1, 300, 1000, 4100])
def test_bitmap_holds_the_choice(T: int, block_size: int, tile_q: int) -> None:
    config = NSAConfig(block_size=block_size, block_counts=7, q_tile=128)
    indices = random_choice(T, 1, 3 if T > 1 else 1, config, torch.Generator().manual_seed(T))
    bitmap = block_bitmap(indices, T, config=config, tile_q=tile_q)
    assert bitmap.dtype == torch.int32
    assert bitmap.shape[2] * config.q_tile >= -(-T // tile_q) * tile_q, "the last kernel tile would read past the rows"
    assert bitmap.shape[3] * 32 * block_size >= -(-T // KV_TILE) * KV_TILE, (
        "the last key tile would read past the words"
    )
    contiguous = [size for size, stride in zip(bitmap.shape, bitmap.stride(), strict=True) if stride == 1]
    assert len(contiguous) == 1 or sum(size > 1 for size in contiguous) == 1, "the kernels see no leading dimension"
    bits = (bitmap.unsqueeze(-1) >> torch.arange(32)) & 1
    for b, h, i in torch.cartesian_prod(*map(torch.arange, indices.shape[:3])).tolist():
        chosen = [j for j in indices[b, h, i].tolist() if j >= 0]
        assert bits[b, h, i].flatten().nonzero().flatten().tolist() == chosen
    assert not bits[:, :, indices.shape[2] :].any()


def test_lists_that_are_not_split_hold_the_same_tiles() -> None:
    config = NSAConfig(block_counts=6)
    indices = random_choice(1000, 2, 2, config, torch.Generator().manual_seed(0))
    options = dict(config=config, causal=True, tile_q=128, kv_tile=64)
    mask, full = dense_of(selected_lists(indices, 1000, **options), 16)
    lists = selected_lists(indices, 1000, split=False, **options)
    for one, expected in ((lists, mask | full), (transposed(lists, 16), (mask | full).mT)):
        assert one.full_cnt is None and one.full_idx is None
        none = torch.zeros_like(one.mask_cnt), torch.zeros_like(one.mask_idx)
        assert torch.equal(
            dense_of(BlockLists(one.mask_cnt, one.mask_idx, *none, (128, 64)), 16 if one is lists else 8)[0], expected
        )
