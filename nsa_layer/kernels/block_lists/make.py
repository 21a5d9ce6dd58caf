"""Block lists of selected blocks, by kernels: forward lists at no cost, backward lists in CSR with a plan.

For lists that need no mask inside of tiles: the key tile divides a block, and a query tile of the lists is one of the
selection. Memory is proportional to nnz, not to key tiles by query tiles.
"""

from __future__ import annotations

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.backward_plan import LONGEST_WORK_TILE
from nsa_layer.kernels.block_lists.forward import BlocksToTiles
from nsa_layer.kernels.block_lists.transpose import FEW_WORDS, MANY_WORDS, WARPS, WORK_TILE, BuildK2qCsr
from nsa_layer.kernels.csr import RowStarts
from nsa_layer.kernels.launch import launch

CTAS = 264  # two for each multiprocessor of an H200: with fewer some idle, with more the lists are read more often


def forward_lists(
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    T: int,
    *,
    block_size: int,
    q_tile: int,
    kv_tile: int,
    causal: bool,
    cu_tiles: torch.Tensor | None = None,
    cu_rows: torch.Tensor | None = None,
) -> BlockSparseTensorsTorch:
    """The key tiles of each query tile's blocks, as attention's forward reads them.

    Without a launch where a block is a key tile, with one otherwise.

    Args:
        block_indices: int32 [B, Hkv, M, n], ascending and padded with -1, as `block_topk` returns them. Packed:
            [Hkv, M of all sequences, n].
        block_counts: int32 [B, Hkv, M], packed [Hkv, M of all sequences]: entries that are not -1.
        T: tokens of the longest sequence.
        q_tile: queries that share a list.
        kv_tile: the kernel's key tile, which divides `block_size`.
        cu_tiles, cu_rows: packed: int32 [sequences + 1], query tiles and key tiles before each sequence.
    """
    parts, rows = block_size // kv_tile, -(-T // kv_tile)
    if parts > 1:
        # The last block may reach past the end, and attention refuses lists that are wider than a sequence has tiles.
        # Tiles ascend: those that do not fit are past the end.
        width = block_indices.shape[-1] * parts
        tiles = block_indices.new_empty(*block_indices.shape[:-1], width if cu_tiles is not None else min(width, rows))
        block_counts = torch.empty_like(block_counts)
        lists = [t if cu_tiles is None else t.unsqueeze(0) for t in (block_indices, block_counts, tiles)]
        static = (causal, q_tile, kv_tile, parts)
        launch("blocks_to_tiles", BlocksToTiles, static, lists[0], cu_tiles, cu_rows, *lists[1:], rows)
        block_indices = tiles
    size = (q_tile, kv_tile)
    return BlockSparseTensorsTorch(block_counts, block_indices, block_size=size, cu_total_m_blocks=cu_tiles)


def backward_lists(
    block_indices: torch.Tensor,
    T: int,
    heads: tuple[int, int],
    *,
    block_size: int,
    q_tile: int,
    kv_tile: int,
    causal: bool,
    longest: int = LONGEST_WORK_TILE,
    cu_tiles: torch.Tensor | None = None,
    cu_rows: torch.Tensor | None = None,
    rows: int | None = None,
) -> BlockSparseTensorsTorch:
    """Query tiles by key tile in CSR, rows ascending, as attention's backward on SM90 reads them; with GQA and a plan.

    Three launches.

    Args:
        block_indices, T, block_size, q_tile, kv_tile, causal, cu_tiles, cu_rows: as in `forward_lists`.
        heads: (Hq, Hkv).
        longest: entries of a work tile at most.
        rows: packed: key tiles of all sequences.
    """
    (Hq, Hkv), packed, device = heads, cu_tiles is not None, block_indices.device
    parts, planned, q_heads_per_list = block_size // kv_tile, Hq > Hkv, Hq // Hkv
    lists = block_indices.unsqueeze(0) if packed else block_indices
    B, _, M, width = lists.shape
    if not packed:
        cu_rows, rows = torch.empty(B + 1, dtype=torch.int32, device=device), B * -(-T // kv_tile)
    counts = torch.empty(Hkv, rows, dtype=torch.int32, device=device)
    starts = torch.empty(Hkv, rows, dtype=torch.int64, device=device)
    tiles_before = torch.empty(Hkv * rows + 1, dtype=torch.int32, device=device)
    max_nnz = B * Hkv * M * width * parts
    entries = torch.empty(max_nnz, dtype=torch.int32, device=device)
    plan = None
    if planned:
        # Only a row's last work tile may be shorter, and empty rows have none.
        work_tiles = (max_nnz + (longest - 1) * min(Hkv * rows, max_nnz)) // longest
        plan = torch.empty(max(1, work_tiles * q_heads_per_list), WORK_TILE, dtype=torch.int32, device=device)
    longest = longest if planned else 0
    words = -(-T // (32 * q_tile))
    rows_a_cta = min(max(WARPS, -(-rows * Hkv // CTAS)), rows, MANY_WORDS // words)
    read, sizes = (lists, cu_tiles, cu_rows if packed else None, counts), (rows_a_cta, words)
    capacity = FEW_WORDS if rows_a_cta * words <= FEW_WORDS else MANY_WORDS
    quads = not any(x % 4 for x in (width, lists.storage_offset(), *lists.stride()[:3]))
    static = (capacity, causal, q_tile, kv_tile, parts, quads, q_heads_per_list, longest)
    launch("build_k2q_csr", BuildK2qCsr, static, *read, *(None,) * 4, *sizes)
    filled = None if packed else cu_rows
    flat = counts.view(-1), starts.view(-1)
    launch("row_starts", RowStarts, (longest,), *flat, tiles_before, None, filled, rows // B)
    launch("build_k2q_csr", BuildK2qCsr, static, *read, starts, tiles_before, entries, plan, *sizes)
    return BlockSparseTensorsTorch(
        counts, entries, block_size=(q_tile, kv_tile), cu_total_n_blocks=cu_rows, cu_block_idx_offsets=starts, plan=plan
    )
