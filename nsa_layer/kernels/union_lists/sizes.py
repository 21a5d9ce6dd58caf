"""Sizes of lists by token that follow from a call's shape alone: entries of a union, partial sums of a key block."""

from __future__ import annotations

import math

from nsa_layer.support import UNION_BLOCK, UNION_ROWS

CHUNKS = 64  # of a sequence's tokens, in which pairs are counted, at most
WORK_TILES = 1024  # of the dk, dv pass, up to four times as many, beside one for each key block with few pairs


def tokens_of_tile(G: int) -> int:
    """Tokens at most that have rows in a tile: row r belongs to token ``r // G``."""
    first = G - math.gcd(G, UNION_ROWS)  # of the first token's heads, the most that are rows of the tile before
    return (first + UNION_ROWS - 1) // G + 1


def words_of_entry(G: int, block_size: int = UNION_BLOCK) -> int:
    """32-bit words with a bit for each token of a tile, 1, 2 or 4; as many for each of an entry's blocks."""
    return {1: 1, 2: 2}.get(-(-tokens_of_tile(G) // 32), 4) * max(1, UNION_BLOCK // block_size)


def union_capacity(G: int, n: int, block_size: int, S: int, q_tile: int = 1) -> int:
    """Entries at most of the union of a tile of rows, in a sequence of S keys; q_tile tokens share a list of n."""
    lists = (tokens_of_tile(G) - 1 + q_tile - 1) // q_tile + 1
    return min(lists * n * max(1, block_size // UNION_BLOCK), -(-S // UNION_BLOCK))


def longest_work_tile(pairs: int, rows: int) -> int:
    """The most pairs of a token and a listed block in a work tile of the dk, dv pass; a pair has `rows` rows.

    Proportional to all pairs, so that no CTA waits for a long tile, and partial sums are few in any call. A power of
    four in rows, so that few kernels are compiled.
    """
    return max(1, 4 ** min(10, max(6, ((pairs * rows // WORK_TILES).bit_length() - 1) // 2)) // rows)


def most_partials(pairs: int, longest: int) -> int:
    """Capacity for partial sums, which only key blocks of more than `longest` pairs have, see `KeyPairs`."""
    return 2 * pairs // longest
