"""Block lists of chosen blocks, by kernels: forward lists at no cost, backward lists in CSR with a plan.

For lists that need no mask inside of tiles: the key tile divides a block, and a query tile of the lists is one of the
choice. `nsa_layer.cute.torch_block_lists` defines the result, in PyTorch and for every case. Memory is proportional to
nnz, not to key tiles by query tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.lists.backward_plan import LONGEST
from nsa_layer.kernels.k2q_csr.blocks_to_tiles import blocks_to_tiles
from nsa_layer.kernels.k2q_csr.build_k2q_csr import FEW_WORDS, ITEM, MANY_WORDS, MAX_SEMAPHORES, WARPS, build_k2q_csr
from nsa_layer.kernels.k2q_csr.prefix_sums import row_starts, sequence_starts

CTAS = 264  # two for each multiprocessor of an H200: with fewer some idle, with more the lists are read more often


def takes(width: int, block_size: int, kv_tile: int, *, deterministic: bool) -> bool:
    """True if `backward_lists` takes lists of `width` blocks."""
    return not deterministic or width * (block_size // kv_tile) <= MAX_SEMAPHORES


def forward_lists(
    block_indices: torch.Tensor,
    block_counts: torch.Tensor | None,
    T: int,
    *,
    block_size: int,
    q_tile: int,
    kv_tile: int,
    causal: bool,
    cu_seqlens: torch.Tensor | None = None,
) -> BlockSparseTensorsTorch:
    """The key tiles of each query tile's blocks, as attention's forward takes them.

    Without a launch where a block is a key tile and `block_counts` are given; with one otherwise. One more for packed
    sequences.

    Args:
        block_indices: int32 [B, Hkv, M, n], ascending and padded with -1, as `block_topk` returns them. Packed:
            [Hkv, M of all sequences, n], with `cu_seqlens`.
        block_counts: int32 [B, Hkv, M], packed [Hkv, M of all sequences]: entries that are not -1. None: counted here.
        T: tokens of a sequence; not read where they are packed.
        q_tile: queries that share a list.
        kv_tile: the kernel's key tile, which divides `block_size`.
    """
    parts, packed = _parts(block_size, kv_tile), cu_seqlens is not None
    cu_tiles = cu_rows = None
    if packed:
        cu_tiles, cu_rows = sequence_starts(cu_seqlens, q_tile, kv_tile)
    if parts > 1 or block_counts is None:
        lists = block_indices.unsqueeze(0) if packed else block_indices
        tiles = dict(causal=causal, q_tile=q_tile, kv_tile=kv_tile, parts=parts, cu_tiles=cu_tiles, cu_rows=cu_rows)
        block_counts, block_indices = blocks_to_tiles(lists, -(-T // kv_tile), **tiles)
        if packed:
            block_counts, block_indices = block_counts.squeeze(0), block_indices.squeeze(0)
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
    deterministic: bool = False,
    longest: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> BlockSparseTensorsTorch:
    """Query tiles by key tile in CSR, with a plan, as attention's backward on SM90 takes them.

    Rows ascend; with `deterministic` they have semaphore values and are in the order of `build_k2q_csr`. Without GQA
    there is a plan only with `deterministic`. Three launches, four for packed sequences.

    Args:
        block_indices, block_size, q_tile, kv_tile, causal: as in `forward_lists`.
        T: tokens of a sequence; not read where they are packed.
        heads: (Hq, Hkv).
        longest: entries of a plan item at most; None: the default of `plan_backward`.
        cu_seqlens, lengths: where packed sequences start, and how long they are as the host knows it.

    Raises:
        ValueError: `deterministic` with more than 512 key tiles in a list.
    """
    (Hq, Hkv), packed, device = heads, cu_seqlens is not None, block_indices.device
    parts = _parts(block_size, kv_tile)
    lists = block_indices.unsqueeze(0) if packed else block_indices
    B, _, M, width = lists.shape
    width *= parts
    if deterministic and width > MAX_SEMAPHORES:
        raise ValueError(f"block_indices list {width} key tiles of {kv_tile}, expected at most {MAX_SEMAPHORES}")
    if packed:
        cu_tiles, cu_rows = sequence_starts(cu_seqlens, q_tile, kv_tile)
        rows, longest_sequence = _rows_and_longest(tuple(lengths), kv_tile)
        most_tiles = -(-longest_sequence // q_tile)
    else:
        cu_tiles, cu_rows = None, torch.empty(B + 1, dtype=torch.int32, device=device)
        rows, most_tiles = B * -(-T // kv_tile), M
    planned, shares = deterministic or Hq > Hkv, Hq > Hkv
    q_heads_per_list, longest = Hq // Hkv, LONGEST if longest is None else longest
    counts = torch.empty(Hkv, rows, dtype=torch.int32, device=device)
    starts = torch.empty(Hkv, rows, dtype=torch.int64, device=device)
    items_before = torch.empty(Hkv * rows + 1, dtype=torch.int32, device=device)
    max_nnz = B * Hkv * M * width
    entries, semaphores, unsorted = (
        torch.empty(max_nnz, dtype=torch.int32, device=device) if needed else None
        for needed in (True, deterministic, deterministic)
    )
    plan = None
    if planned:
        # Only a row's last item may be shorter, and empty rows have none.
        used = min(Hkv * rows, max_nnz)
        items = (max_nnz + (longest - 1) * used) // longest if shares else Hkv * rows
        plan = torch.empty(max(1, items * q_heads_per_list), ITEM, dtype=torch.int32, device=device)
    words = -(-most_tiles // 32)
    few = -(-rows * Hkv // CTAS)
    rows_a_cta = min(max(WARPS, few), rows, MANY_WORDS // words)
    static = dict(
        words=FEW_WORDS if rows_a_cta * words <= FEW_WORDS else MANY_WORDS,
        packed=packed,
        causal=causal,
        q_tile=q_tile,
        kv_tile=kv_tile,
        parts=parts,
    )
    sizes = (rows_a_cta, words)
    build_k2q_csr(lists, cu_tiles, cu_rows if packed else None, counts, *(None,) * 6, *sizes, **static)
    longest = longest if shares else 0
    rows_a_sequence = 0 if packed else rows // B
    row_starts(
        counts,
        starts,
        items_before,
        cu_rows=None if packed else cu_rows,
        rows_a_sequence=rows_a_sequence,
        longest=longest,
    )
    filled = (starts, items_before, entries, semaphores, unsorted, plan)
    static |= dict(
        fills=True,
        semaphores=-(-width // 32) * 32 if deterministic else 0,
        q_heads_per_list=q_heads_per_list,
        longest=longest,
        planned=planned,
    )
    build_k2q_csr(lists, cu_tiles, cu_rows if packed else None, counts, *filled, *sizes, **static)
    return BlockSparseTensorsTorch(
        counts,
        entries,
        block_size=(q_tile, kv_tile),
        cu_total_n_blocks=cu_rows,
        cu_block_idx_offsets=starts,
        dq_write_order=semaphores,
        spt=False if deterministic else None,
        plan=plan,
    )


@lru_cache(maxsize=64)  # the same packing is seen layer after layer
def _rows_and_longest(lengths: tuple[int, ...], kv_tile: int) -> tuple[int, int]:
    """Key tiles of all sequences, and tokens of the longest."""
    return sum(-(-length // kv_tile) for length in lengths), max(lengths)


def _parts(block_size: int, kv_tile: int) -> int:
    if block_size % kv_tile:
        raise ValueError(f"kv_tile={kv_tile} does not divide block_size={block_size}")
    return block_size // kv_tile
