"""Block lists for forward and backward from block_indices, and the bitmap of their mask; in PyTorch, for every case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from nsa_layer.config import NSAConfig
from nsa_layer.support import KV_TILE

WORD = 32  # bits in a word of the bitmap


def selected_lists(
    block_indices: torch.Tensor,
    T: int,
    *,
    config: NSAConfig,
    causal: bool,
    tile_q: int,
    kv_tile: int = KV_TILE,
    split: bool = True,
) -> BlockSparseTensorsTorch:
    """Tiles of `kv_tile` keys that hold a listed block, for query tiles of `tile_q`, a multiple of ``config.q_tile``.

    A tile needs no mask if all its blocks are listed for all its queries, none of its tokens comes after one of them,
    and none lies past the end.

    Args:
        block_indices: int32 [B, Hkv, M, n] as `choose_blocks` gives them.
        split: tell the tiles that need the mask from those that need none; else all count as the former.

    Returns:
        int32 counts [B, Hkv, rows], and lists [B, Hkv, rows, width], ascending and filled up with 0.
    """
    l, merged = config.block_size, tile_q // config.q_tile
    indices = _pad_rows(block_indices, merged).unflatten(2, (-1, merged)).flatten(3)
    if l <= kv_tile:
        tiles = torch.div(indices, kv_tile // l, rounding_mode="floor")
        blocks_per_tile = merged * (kv_tile // l)
    else:
        parts = torch.arange(l // kv_tile, dtype=torch.int32, device=indices.device)
        tiles = (indices.unsqueeze(-1) * (l // kv_tile) + parts).flatten(3)
        tiles = torch.where((indices < 0).repeat_interleave(l // kv_tile, dim=-1), -1, tiles)
        blocks_per_tile = merged
    N = -(-T // kv_tile)
    first_query = torch.arange(tiles.shape[2], device=tiles.device).view(-1, 1) * tile_q
    # Part of a long block can lie past the end, or wholly after the tile's queries.
    absent = (tiles < 0) | (tiles >= N)
    if causal:
        absent |= tiles * kv_tile >= first_query + tile_q
    ids, blocks = (x[..., :N] for x in _count_runs(torch.where(absent, N, tiles).sort(-1).values))
    listed = ids < N
    if not split:
        return BlockSparseTensorsTorch(*_compact(ids, listed), block_size=(tile_q, kv_tile))
    last_token = (ids + 1) * kv_tile - 1
    in_sight = last_token <= first_query if causal else last_token < T
    full = listed & (blocks == blocks_per_tile) & in_sight
    mask, full = _compact(ids, listed & ~full), _compact(ids, full)
    return BlockSparseTensorsTorch(*mask, *full, block_size=(tile_q, kv_tile))


def choices_of_sequences(
    block_indices: torch.Tensor, lengths: Sequence[int], *, config: NSAConfig
) -> Iterator[tuple[torch.Tensor, int]]:
    """A packed choice [Hkv, tiles, n] as [1, Hkv, M, n] and its tokens, for each sequence that is not empty."""
    start = 0
    for length in lengths:
        end = start + config.num_tiles(length)
        if length:
            yield block_indices[None, :, start:end, : config.list_width(length)], length
        start = end


def joined_rows(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """[1, H, rows, ...] of several sequences, one after the other: [H, all rows, ...], as wide as the widest."""
    if parts[0] is None:
        return None
    if parts[0].ndim == 4:
        width = max(part.shape[-1] for part in parts)
        parts = [pad(part, (0, width - part.shape[-1])) for part in parts]
    return torch.cat(parts, dim=2).squeeze(0)


def block_bitmap(block_indices: torch.Tensor, T: int, *, config: NSAConfig, tile_q: int = 0) -> torch.Tensor:
    """int32 [B, Hkv, M, words]: bit ``j % 32`` of word ``j // 32`` says whether block j is listed for the tile.

    Rows and words reach to the end of the last kernel tile (of `tile_q` queries), so that no kernel reads past them.
    """
    padded = _pad_rows(block_indices, max(1, tile_q // config.q_tile))
    words = -(-(-(-T // KV_TILE) * KV_TILE) // (config.block_size * WORD))
    if padded.shape[:3].numel() * words == 1:
        words = 2  # a single number has no contiguous dimension, and the kernels ask for one
    bitmap = torch.zeros(*padded.shape[:3], words, dtype=torch.int64, device=padded.device)
    bits = torch.where(padded < 0, 0, 1 << (padded.clamp(min=0).long() % WORD))
    bitmap.scatter_add_(-1, padded.clamp(min=0).long() // WORD, bits)  # blocks are listed once: the sum is the union
    return torch.where(bitmap >= 1 << 31, bitmap - (1 << 32), bitmap).to(torch.int32)


def _pad_rows(indices: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -indices.shape[2] % multiple
    return pad(indices, (0, 0, 0, missing), value=-1) if missing else indices


def _count_runs(ordered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct values of ascending rows, and how often each occurs; unused places hold the dtype's largest value."""
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    place = starts.cumsum(-1) - 1
    ids = torch.full_like(ordered, torch.iinfo(ordered.dtype).max).scatter_(-1, place, ordered)
    counts = torch.zeros_like(ordered).scatter_add_(-1, place, torch.ones_like(ordered))
    return ids, counts


def _compact(values: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [...] and the kept values of each row moved to its front, int32; the rest is 0."""
    width = values.shape[-1]
    place = torch.where(keep, keep.cumsum(-1) - 1, width)
    front = torch.zeros(*values.shape[:-1], width + 1, dtype=torch.int32, device=values.device)
    front.scatter_(-1, place, values.to(torch.int32))
    return keep.sum(-1, dtype=torch.int32), front[..., :width].contiguous()
