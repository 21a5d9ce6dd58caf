"""Which tiles a mask makes the kernels visit, and which of them need no mask: arithmetic against definitions."""

from __future__ import annotations

import torch

from flash_attn.cute.block_lists import lists_from_dense, lists_from_window
from flash_attn.cute.compressed_causal.mask import (
    CompressArgs,
    compressed_query_tile_range,
    compressed_tile_range,
    first_row_seeing,
    keys_seen_by,
)
from flash_attn.cute.compressed_causal.schedule import LEAST_TILES, MOST_QUERIES, query_shares, unseen_query_tiles
from fuzz import strategies
from fuzz.blocks import pattern_table, table_of
from fuzz.case import PATTERNS, Edge, Window
from fuzz.prop import holds


def near(numbers: list[int], limit: int) -> list[int]:
    """Each number and what is next to it, within 0 .. limit - 1."""
    return sorted({n + d for n in numbers for d in (-1, 0, 1) if 0 <= n + d < limit})


@holds("compress.tiles", strategies.edges, pr=60)
def tiles(case: Edge) -> None:
    """Forward visits a tile iff one of its pairs is visible, without a mask iff all are; backward visits the same."""
    shape = dict(tile_m=case.tile_m, tile_n=case.tile_n, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k)
    shape |= dict(factor=case.factor, offset=case.offset)
    m_tiles, n_tiles = -(-case.seqlen_q * case.group // case.tile_m), -(-case.seqlen_k // case.tile_n)
    edge = keys_seen_by(case.seqlen_q // 2, case.factor, case.offset) // case.tile_n
    some_m = near([0, m_tiles - 1, m_tiles // 2], m_tiles)
    for m in some_m:
        begin, full_end, end = compressed_tile_range(m, **shape, qhead_per_kvhead=case.group)
        assert 0 <= begin <= full_end <= end <= n_tiles, f"m tile {m}: {begin, full_end, end} of {n_tiles}"
        first = m * case.tile_m // case.group
        last = min(((m + 1) * case.tile_m - 1) // case.group, case.seqlen_q - 1)
        for n in near([0, full_end, end, n_tiles - 1], n_tiles):
            start, stop = n * case.tile_n, min((n + 1) * case.tile_n, case.seqlen_k)
            some = start * case.factor + case.offset <= last
            whole = (n + 1) * case.tile_n <= case.seqlen_k and (stop - 1) * case.factor + case.offset <= first
            assert (begin <= n < end) == some, f"tile {m, n} is visited: {begin <= n < end}, has a visible pair: {some}"
            assert (n < full_end) == (whole and some), f"tile {m, n} goes without a mask: {n < full_end}, may: {whole}"
    for n in near([0, n_tiles - 1, edge], n_tiles):
        begin, end = compressed_query_tile_range(n, **shape, qhead_per_kvhead=case.group)
        for m in near([0, begin, end, m_tiles - 1], m_tiles):
            forward = compressed_tile_range(m, **shape, qhead_per_kvhead=case.group)
            visited = forward[0] <= n < forward[2]
            assert (begin <= m < end) == visited, f"tile {m, n}: backward {begin <= m < end}, forward {visited}"


@holds("compress.rows and keys", strategies.edges)
def rows_and_keys(case: Edge) -> None:
    """How many keys a row sees and the first row that sees a key are each other's inverse."""
    for row in (0, case.seqlen_q // 2, case.seqlen_q - 1, -5):
        seen = keys_seen_by(row, case.factor, case.offset)
        assert seen == 0 or (seen - 1) * case.factor + case.offset <= row
        assert seen * case.factor + case.offset > row
    for key in (0, case.seqlen_k // 2, case.seqlen_k - 1):
        row = first_row_seeing(key, case.factor, case.offset)
        assert keys_seen_by(row, case.factor, case.offset) == key + 1


@holds("compress.shares", strategies.edges)
def shares(case: Edge) -> None:
    """The shares that backward cuts the queries into hold each tile of queries once."""
    compress = CompressArgs(case.factor, case.offset)
    tile_m, tile_n = max(case.tile_m, 64), max(case.tile_n, 64)
    sizes = (min(case.seqlen_q, 1 << 18), min(case.seqlen_k, 1 << 14), tile_m, tile_n)
    plan = query_shares(compress, *sizes, case.heads, case.num_sms)
    assert LEAST_TILES <= plan.tiles <= MOST_QUERIES // tile_m, f"{plan} is too long or too short"
    tiles = -(-sizes[0] // tile_m)
    end = plan.count * plan.tiles
    assert end - plan.tiles < tiles <= end, f"{plan} ends at tile {end} of {tiles}"
    unseen = unseen_query_tiles(compress, *sizes)
    for m in near([unseen, tiles - 1], tiles):
        options = dict(tile_m=tile_m, tile_n=tile_n, seqlen_q=sizes[0], seqlen_k=sizes[1], **compress._asdict())
        sees = compressed_tile_range(m, **options)[2] > 0
        assert sees == (m >= unseen), f"query tile {m} sees keys: {sees}, but {unseen} are said to see none"


def by_definition(mask: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks [M, N] in which a dense mask lets something through, and everything."""
    (rows, columns), (T_q, T_k) = block, mask.shape
    M, N = -(-T_q // rows), -(-T_k // columns)
    listed, full = torch.zeros(2, M, N, dtype=torch.bool).unbind()
    for m in range(M):
        for n in range(N):
            part = mask[m * rows : (m + 1) * rows, n * columns : (n + 1) * columns]
            listed[m, n] = part.any()
            full[m, n] = part.all() and (n + 1) * columns <= T_k
    return listed, full & listed


@holds("windows.lists", strategies.windows, pr=30)
def window_lists(case: Window) -> None:
    """Blocks of a sliding window, aligned at the ends, are those of its dense mask."""
    lists = lists_from_window(case.seqlen_q, case.seqlen_k, case.left, case.right, case.block, causal=case.causal)
    at = torch.arange(case.seqlen_q)[:, None] + case.seqlen_k - case.seqlen_q
    key = torch.arange(case.seqlen_k)[None, :]
    mask = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    right = 0 if case.causal else case.right
    if case.left not in (None, -1):
        mask &= key >= at - case.left
    if right not in (None, -1):
        mask &= key <= at + right
    listed, full = by_definition(mask, case.block)
    got = table_of(lists, listed.shape[1])
    assert got[0][0, 0].equal(listed), f"listed {got[0].int().tolist()}, expected {listed.int().tolist()}"
    extra = got[1][0, 0] & ~full
    assert not extra.any(), f"blocks {extra.nonzero().tolist()} count as full, and are not"
    missed = full & ~got[1][0, 0]
    # A block of rows that reach over the last query may count as masked: its rows past the end are looked at.
    assert not missed[: case.seqlen_q // case.block[0]].any(), f"full blocks {missed.nonzero().tolist()} are masked"


@holds("windows.dense", strategies.windows, pr=30)
def dense_lists(case: Window) -> None:
    """Blocks of any dense mask."""
    import random

    draw = random.Random(case.seed)
    mask = pattern_table(draw.choice(PATTERNS), case.seqlen_q, case.seqlen_k, draw.choice((0.1, 0.5, 0.95)), draw)
    listed, full = by_definition(mask, case.block)
    got = table_of(lists_from_dense(mask, case.block), listed.shape[1])
    assert got[0][0, 0].equal(listed), f"listed {got[0].int().tolist()}, expected {listed.int().tolist()}"
    assert got[1][0, 0].equal(full), f"full {got[1].int().tolist()}, expected {full.int().tolist()}"
