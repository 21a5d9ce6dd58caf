"""The tokens that list each block, in CSR, and items of work over its rows: a counting sort of pairs (block, token).

Four launches: pairs of every block in every chunk of tokens; sums over the chunks; starts and items; the tokens. No
atomic decides an order. Counts of chunks take no more memory than one entry of each list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.token_lists.row_plan import ITEM, RowPlan
from nsa_layer.kernels.token_lists.sizes import CHUNKS
from nsa_layer.kernels.token_lists.token_pairs import STEP, ChunkSums, TokenPairs

LEAST_CHUNK = 256  # tokens
ROOMS = 1024, 4096, 16384  # blocks of a CTA's range, as many as are needed if one is enough
MOST_PAIRS = 2**31 - 1


class Pairs(NamedTuple):
    """Rows (b, h, block), numbered ``(b * Hs + h) * N + block``; packed ``h * N + cu_blocks[b] + block``.

    Attributes:
        starts: int32 [rows + 1], of the rows in `tokens`.
        tokens: int32, positions in the sequence, ascending in a row; behind the last row nothing is written.
        items: int32 [room, 4]: (row, begin, end, partial): tokens[begin:end] of a row, in order of rows. A row of more
            than `cap` tokens has several, numbered by `partial` one after the other, -1 elsewhere; each other row,
            also an empty one, has one. Behind the last item nothing is written.
        row_items: int32 [rows + 1], items before each row.
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    items: torch.Tensor
    row_items: torch.Tensor

    @property
    def item_count(self) -> torch.Tensor:
        """Int32 [1], on the device."""
        return self.row_items[-1:]


def pairs_by_block(
    block_indices: torch.Tensor,
    *,
    block_size: int,
    causal: bool,
    cap: int,
    cu_seqlens: torch.Tensor | None = None,
    cu_blocks: torch.Tensor | None = None,
    blocks: int | None = None,
) -> Pairs:
    """The tokens that list each block, by list head.

    Args:
        block_indices: int32 [B, T, Hs, n], packed [total, Hs, n]; see the package.
        block_size: keys of a block.
        cap: tokens of an item at most.
        cu_seqlens, cu_blocks: packed: int32 [sequences + 1] on the device; tokens and blocks before each sequence.
        blocks: packed: of all sequences, or more.

    Raises:
        ValueError: block_indices has 2^31 entries or more.
    """
    if block_indices.numel() > MOST_PAIRS:
        raise ValueError(f"block_indices may have {MOST_PAIRS} entries, got {block_indices.numel()}: pass fewer heads")
    lists = block_indices if cu_seqlens is None else block_indices.unsqueeze(0)
    B, T, H, n = lists.shape
    N = blocks if cu_seqlens is not None else -(-T // block_size)
    chunk = max(LEAST_CHUNK, -(-T // (CHUNKS * STEP)) * STEP)
    counts, totals = lists.new_empty(B * H, -(-T // chunk), N), lists.new_empty(B * H * N)
    starts, row_items = lists.new_empty(B * H * N + 1), lists.new_empty(B * H * N + 1)
    tokens, items = lists.new_empty(lists.numel()), lists.new_empty(lists.numel() // cap + B * H * N, ITEM)
    static = (n, block_size, causal, next((room for room in ROOMS if room >= N), ROOMS[-1]))
    given = (lists, cu_seqlens, cu_blocks, counts)
    launch("token_pairs", TokenPairs, static, *given, None, None, chunk)
    launch("chunk_sums", ChunkSums, (), counts, totals)
    launch("row_plan", RowPlan, (cap,), totals, starts, row_items, items)
    launch("token_pairs", TokenPairs, static, *given, starts, tokens, chunk)
    return Pairs(starts, tokens, items, row_items)
