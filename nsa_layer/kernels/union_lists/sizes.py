"""Sizes of lists by token that follow from a call's shape alone: entries of a union, partial sums of a key block."""

from __future__ import annotations

import math

ROWS = 128  # (token, head) pairs of a tile
KEYS = 64  # of an entry
MOST_WORDS = 4  # of bits beside an entry that attention's kernels read
CHUNKS = 64  # of a sequence's tokens, in which pairs are counted, at most


def tokens_of_tile(G: int) -> int:
    """Tokens at most that have rows in a tile: row r belongs to token ``r // G``."""
    first = G - math.gcd(G, ROWS)  # of the first token's heads, the most that are rows of the tile before
    return (first + ROWS - 1) // G + 1


def words_of_entry(G: int, block_size: int = KEYS) -> int:
    """32-bit words with a bit for each token of a tile, 1, 2 or 4; as many for each of an entry's blocks."""
    return {1: 1, 2: 2}.get(-(-tokens_of_tile(G) // 32), 4) * max(1, KEYS // block_size)


def union_room(G: int, n: int, block_size: int, S: int, q_tile: int = 1) -> int:
    """Entries at most of the union of a tile of rows, in a sequence of S keys; q_tile tokens share a list of n."""
    lists = (tokens_of_tile(G) - 1 + q_tile - 1) // q_tile + 1
    return min(lists * n * max(1, block_size // KEYS), -(-S // KEYS))


def most_partials(pairs: int, cap: int) -> int:
    """Room for partials, numbers in `Pairs.items`: only rows of more than `cap` tokens have some."""
    return 2 * pairs // cap
