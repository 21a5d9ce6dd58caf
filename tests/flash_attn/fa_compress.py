"""Compressed-causal attention calls: what kernels are compiled for, and the edges of the mask that they are run on."""

from collections.abc import Iterator
from dataclasses import replace

from fuzz.case import Attention as Case

FIXED = Case(D=128, compress=(64, 63), T_q=1000)
KINDS = [
    replace(FIXED, D=64, Hkv=4),
    replace(FIXED, D=64, packed=((1, 1),), deterministic=True),
    replace(FIXED, D=96, pack_gqa=False),
    replace(FIXED, deterministic=True),
    replace(FIXED, Hkv=4, packed=((1, 1),)),
    replace(FIXED, Hq=6, Hkv=1, packed=((1, 1),), pack_gqa=True),
    replace(FIXED, Hkv=4, deterministic=True),
    replace(FIXED, D=192, Dv=128, Hkv=4),
    replace(FIXED, D=192, Dv=128, Hkv=4, packed=((1, 1),), deterministic=True),
    replace(FIXED, D=256, pack_gqa=True),
    replace(FIXED, D=256, Hkv=4, packed=((1, 1),)),
    replace(FIXED, Hkv=1),
    replace(FIXED, Hkv=4),
    replace(FIXED, D=64, Hkv=1),
]


def with_edges(kind: Case) -> list[Case]:
    """Calls that are compiled as `kind` is, each with a seed of its own."""
    return [replace(case, seed=seed) for seed, case in enumerate((_packed if kind.packed else _fixed)(kind))]


def at_most_seen(T: int, factor: int, offset: int) -> int:
    return max((T - 1 - offset) // factor + 1, 0)


def _fixed(kind: Case) -> Iterator[Case]:
    """Keys below, at and above what is seen; tiles that no query sees; rows that see nothing; edges of several tiles of
    keys in one share of the queries."""
    edges = [
        (300, 1, 1), (513, 1, 31), (300, 1, -45), (300, 2, 0), (385, 3, 2), (1000, 3, -20), (513, 5, 4), (640, 7, 31),
        (1000, 16, 15), (1000, 16, 31), (777, 60, 59), (2100, 64, 63), (1025, 64, -100), (1500, 96, 0),
        (2100, 1000, 999), (2100, 1024, -1024), (129, 3, 0), (127, 3, 5), (64, 2, 142),
        (300, 16, 300), (2100, 2, -100), (2100, 16, 156), (2100, 64, 300),
    ]  # fmt: skip
    for T, factor, offset in edges:
        seen = at_most_seen(T, factor, offset)
        for T_k in sorted({max(seen - 7, 1), max(seen, 1), seen + 1, seen + 290}):
            yield replace(kind, T_q=T, T_k=T_k, compress=(factor, offset))
    # One query; no query sees any key; all queries see all keys.
    more = [(1, 5, 4, 0), (1, 5, 4, -9), (200, 50, 3, 200), (130, 400, 1, 200), (200, 300, 3, -3000)]
    for T_q, T_k, factor, offset in more:
        yield replace(kind, T_q=T_q, T_k=T_k, compress=(factor, offset))
    yield replace(kind, B=1, T_q=4096, T_k=2000, compress=(2, 1))


def _packed(kind: Case) -> Iterator[Case]:
    lengths = [
        ((300, 18), (1, 1), (513, 40), (64, 3)),
        ((0, 0), (200, 150), (40, 0), (0, 30), (700, 233)),
        ((128, 128), (129, 129), (127, 127), (1, 200)),
        ((1000, 62), (20, 9), (256, 400)),
    ]
    for each in lengths:
        for pair in [(16, 15), (16, 31), (3, 2), (1, 1), (1, -30), (60, -200), (1000, 999), (5, 0)]:
            yield replace(kind, packed=each, compress=pair)
