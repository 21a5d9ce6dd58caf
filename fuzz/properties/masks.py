"""The tiles that a mask makes the kernels visit, and those that need no mask: arithmetic against definitions."""

from __future__ import annotations

import torch

from flash_attn.cute.block_lists import lists_from_dense, lists_from_window
from flash_attn.cute.compressed_causal.mask import CompressArgs
from flash_attn.cute.compressed_causal.schedule import LEAST_TILES, MOST_SHARE_QUERIES, first_query_tile, query_shares
from fuzz import strategies
from fuzz.blocks import pattern_table, table_of, tiles_of
from fuzz.case import PATTERNS, Edge, Window
from fuzz.prop import holds


def near(numbers: list[int], limit: int) -> list[int]:
    """Each number and what is next to it, within 0 .. limit - 1."""
    return sorted({n + d for n in numbers for d in (-1, 0, 1) if 0 <= n + d < limit})


@holds("compress.tiles", strategies.edges, pr=60)
def tiles(case: Edge) -> None:
    """Backward visits a query tile iff its last query sees the first key of the key tile."""
    compress, m_tiles = CompressArgs(case.factor, case.offset), -(-case.seqlen_q // case.tile_m)
    edge = max(case.seqlen_q // 2 - case.offset, 0) // case.factor
    for n in near([0, case.seqlen_k // case.tile_n, edge // case.tile_n], -(-case.seqlen_k // case.tile_n)):
        first = first_query_tile(compress, n * case.tile_n, case.seqlen_q, case.tile_m)
        for m in near([0, first, m_tiles - 1], m_tiles):
            last = min((m + 1) * case.tile_m, case.seqlen_q) - 1
            sees = n * case.tile_n * case.factor + case.offset <= last
            assert (m >= first) == sees, f"tile {m, n} is visited: {m >= first}, has a visible pair: {sees}"


@holds("compress.shares", strategies.edges)
def shares(case: Edge) -> None:
    """The shares that backward cuts the queries into hold each tile of queries once."""
    compress = CompressArgs(case.factor, case.offset)
    tile_m, tile_n = max(case.tile_m, 64), max(case.tile_n, 64)
    sizes = (min(case.seqlen_q, 1 << 18), min(case.seqlen_k, 1 << 14), tile_m, tile_n)
    plan = query_shares(compress, *sizes, case.heads, case.num_sms)
    assert LEAST_TILES <= plan.tiles <= MOST_SHARE_QUERIES // tile_m, f"{plan} is too long or too short"
    tiles = -(-sizes[0] // tile_m)
    limits = [plan.limits(share) for share in range(plan.count)]
    assert limits == [(at, at + plan.tiles) for at in range(0, plan.count * plan.tiles, plan.tiles)], f"{limits}"
    assert limits[-1][0] < tiles <= limits[-1][1], f"{plan} ends at tile {limits[-1][1]} of {tiles}"


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
    listed, full = tiles_of(mask, case.block)
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
    listed, full = tiles_of(mask, case.block)
    got = table_of(lists_from_dense(mask, case.block), listed.shape[1])
    assert got[0][0, 0].equal(listed), f"listed {got[0].int().tolist()}, expected {listed.int().tolist()}"
    assert got[1][0, 0].equal(full), f"full {got[1].int().tolist()}, expected {full.int().tolist()}"
