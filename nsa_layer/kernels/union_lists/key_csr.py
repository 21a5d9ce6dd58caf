"""The tokens that list each block, in CSR, and items of work over its rows: a counting sort of pairs (block, token).

Four launches: pairs of every block in every chunk of tokens; sums over the chunks; starts and items; the tokens. No
atomic decides an order. Counts of chunks take no more memory than one entry of each list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.union_lists.row_plan import ITEM, RowPlan
from nsa_layer.kernels.union_lists.sizes import CHUNKS
from nsa_layer.kernels.union_lists.token_pairs import STEP, ChunkSums, TokenPairs

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
    q_tile: int = 1,
    heads: int | None = None,
    queries: int | None = None,
    keys: int | None = None,
    q_offset: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_lists: torch.Tensor | None = None,
    cu_blocks: torch.Tensor | None = None,
    blocks: int | None = None,
) -> Pairs:
    """The tokens that list each block, by list head.

    Args:
        block_indices: int32 [B, L, Hs, n], packed [lists of all sequences, Hs, n]; see the package.
        block_size: keys of a block.
        cap: tokens of an item at most.
        q_tile: tokens that share a list: token t of a sequence has list ``t // q_tile``.
        heads: rows are of so many heads, each of the lists of Hs / heads neighbours; "token" then stands for a token's
            list, and a position for ``position * (Hs / heads) + number of the list``. None: of Hs heads.
        queries, keys: tokens of a sequence, packed of all queries; None: as many as lists, and as many as queries.
        q_offset: int32 [B], packed [sequences]: position of the first token among its sequence's keys; None: 0.
        cu_seqlens, cu_lists, cu_blocks: packed: int32 [sequences + 1] on the device; queries, lists and blocks before
            each sequence. Lists like queries unless given.
        blocks: packed: of all sequences, or more.

    Raises:
        ValueError: the tokens' lists have 2^31 entries or more.
    """
    packed = cu_seqlens is not None
    lists = block_indices.unsqueeze(0) if packed else block_indices
    B, L, Hs, n = lists.shape
    H, T = Hs if heads is None else heads, L if queries is None else queries
    entries = B * T * Hs * n
    if entries > MOST_PAIRS:
        raise ValueError(f"block_indices may have {MOST_PAIRS} entries, got {entries}: pass fewer heads")
    N = blocks if packed else -(-(T if keys is None else keys) // block_size)
    parts = Hs // H
    chunk = max(LEAST_CHUNK, -(-T * parts // (CHUNKS * STEP)) * STEP)
    counts, totals = lists.new_empty(B * H, -(-T * parts // chunk), N), lists.new_empty(B * H * N)
    starts, row_items = lists.new_empty(B * H * N + 1), lists.new_empty(B * H * N + 1)
    tokens, items = lists.new_empty(entries), lists.new_empty(entries // cap + B * H * N, ITEM)
    static = (n, block_size, q_tile, parts, causal, next((room for room in ROOMS if room >= N), ROOMS[-1]))
    of_lists = cu_seqlens if cu_lists is None else cu_lists
    given = (lists, cu_seqlens, of_lists, cu_blocks, q_offset if causal else None, counts)
    launch("token_pairs", TokenPairs, static, *given, None, None, T, chunk)
    launch("chunk_sums", ChunkSums, (), counts, totals)
    launch("row_plan", RowPlan, (cap,), totals, starts, row_items, items)
    launch("token_pairs", TokenPairs, static, *given, starts, tokens, T, chunk)
    return Pairs(starts, tokens, items, row_items)
