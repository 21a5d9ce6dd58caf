"""Attention calls that between them have every option, and every pair of options that goes together.

`covering` picks few of them that have as many pairs as so few can.
"""

from dataclasses import fields
from itertools import combinations

from fuzz.case import Attention as Case

LONG = dict(T_q=700, T_k=700)
# Of packed sequences: tails, one query, no queries, no keys, more keys than queries and fewer.
PACK = ((300, 300), (1, 129), (0, 200), (700, 640), (130, 0), (257, 900))
PACKED = dict(packed=PACK, lists="both")
# More than multiprocessors, and than tiles of all others.
MANY = tuple((i * 7 % 50, i * 11 % 140) for i in range(400))

SHORT = Case(D=64, T_q=100, T_k=700, lists="both", list_heads=4, deterministic=True)  # some heads list nothing
WITHOUT_PLAN = PACKED | dict(deterministic=True)
SM90 = [
    Case(T_q=512, T_k=512),
    Case(D=128, causal=True),
    Case(T_q=500, T_k=600, window=(None, 40), mask_mod="thirds"),
    Case(T_q=1500, T_k=700, window=(100, None), deterministic=True),
    Case(D=128, window=(20, 2**31 - 1)),
    Case(D=128, T_k=500, causal=True, mask_mod="keyed"),
    Case(D=128, T_q=1200, T_k=500, Hq=6, window=(299, 0)),
    Case(D=128, **LONG, Hq=2, window=(200, 0)),
    Case(D=128, **LONG, Hq=8, window=(200, None)),
    Case(D=128, **LONG, Hq=8, window=(100, 0), mask_mod="thirds"),
    Case(D=192, **LONG, window=(200, 0)),
    Case(D=256, **LONG, window=(200, 0)),
    Case(**LONG, Hq=6, lists="both", list_heads=2),
    Case(**LONG, causal=True, lists="both", block=(64, 128), pack_gqa=False),
    Case(**LONG, window=(200, 0), lists="partial", deterministic=True, launch="right to left"),
    Case(T_k=700, Hkv=4, mask_mod="keyed", lists="both", overlap=False),
    Case(T_q=200, T_k=700, window=(2**31 - 1, 0), lists="both", block=(128, 64)),
    Case(**LONG, Hq=8, Hkv=1, causal=True, lists="both", deterministic=True, launch="right to left", plan=3),
    Case(T_q=1, T_k=129, lists="partial"),
    Case(**LONG, window=(None, 100), lists="full", block=(128, 64)),
    Case(**LONG, causal=True, lists="both", list_heads=2, block=(64, 64)),
    Case(**LONG, Hkv=4, causal=True, lists="no full", plan=3),
    Case(T_q=1, lists="both", deterministic=True),
    SHORT,
    Case(**LONG, Hkv=4, mask_mod="thirds", lists="both", block=(192, 128)),
    Case(**LONG, lists="both", block=(256, 128)),
    Case(**LONG, causal=True, lists="both", list_heads=2, block=(128, 64), pack_gqa=False),
    Case(**LONG, Hq=8, window=(200, 0), lists="both", plan=100),
    Case(**LONG, lists="full", deterministic=True),
    Case(**LONG, causal=True, lists="full"),
    Case(D=96, **LONG, Hkv=4, mask_mod="keyed", lists="both", deterministic=True, launch="longest first", plan=3),
    Case(D=96, **LONG, lists="both", block=(256, 128)),
    Case(D=96, T_q=1, T_k=129, mask_mod="thirds", lists="no full", list_heads=2),
    Case(D=96, **LONG, window=(200, 30), lists="both", list_heads=2, block=(128, 64)),
    Case(D=96, **LONG, Hq=8, mask_mod="keyed", lists="no full", deterministic=True),
    Case(D=96, **LONG, causal=True, lists="both", block=(64, 128)),
    Case(D=128, T_q=700, T_k=640, Hq=8, causal=True, lists="both", list_heads=2, pack_gqa=True),
    Case(D=128, T_q=1, Hkv=1, lists="full", plan=1),
    Case(D=128, **LONG, Hq=8, Hkv=1, causal=True, lists="no full", block=(128, 64)),
    Case(D=128, **LONG, mask_mod="thirds", lists="both", deterministic=True, launch="middle first", plan=3),
    Case(D=128, **LONG, Hkv=4, mask_mod="thirds", lists="both", block=(256, 64)),
    Case(D=128, **LONG, window=(2**31 - 1, 2**31 - 1), lists="both"),
    Case(D=128, **LONG, Hq=6, window=(100, None), mask_mod="thirds", lists="both", list_heads=2, block=(128, 64)),
    Case(D=128, **LONG, causal=True, mask_mod="keyed", lists="both", list_heads=4, block=(192, 128)),
    Case(D=128, T_q=640, T_k=1024, window=(200, 30), lists="both", pack_gqa=False),
    Case(D=128, T_k=66, causal=True, lists="both", block=(64, 64)),
    Case(D=128, **LONG, Hkv=1, mask_mod="thirds", lists="both", deterministic=True, launch="longest first", plan=3),
    Case(D=128, **LONG, lists="both", overlap=False),
    Case(D=128, **LONG, Hq=6, lists="full", list_heads=6),
    Case(D=128, T_k=700, Hq=6, causal=True, mask_mod="thirds", lists="both", list_heads=2),
    Case(D=128, T_q=640, T_k=1024, window=(130, None), mask_mod="thirds", lists="both"),
    Case(D=128, **LONG, causal=True, lists="both", q_tiles=2, pack_gqa=False),
    Case(D=128, **LONG, Hq=6, lists="both", list_heads=2, pack_gqa=False),
    Case(D=128, **LONG, causal=True, lists="both", block=(256, 128)),
    Case(D=128, T_q=700, T_k=640, Hkv=4, mask_mod="thirds", lists="both"),
    Case(D=128, **LONG, Hq=6, causal=True, mask_mod="thirds", lists="both", list_heads=6, block=(128, 64)),
    Case(D=128, T_q=700, T_k=65, lists="both", block=(128, 64)),
    Case(D=128, **LONG, Hkv=4, causal=True, lists="both", deterministic=True, launch="right to left"),
    Case(D=128, T_q=700, causal=True, mask_mod="keyed", lists="both"),
    Case(D=128, **LONG, Hq=8, causal=True, lists="both", list_heads=2, pack_gqa=False),
    Case(D=192, Dv=128, **LONG, Hkv=4, causal=True, lists="both", block=(256, 96)),
    Case(D=192, Dv=128, **LONG, Hkv=4, lists="both", block=(64, 96)),
    Case(D=256, lists="both", block=(64, 64)),
    Case(D=256, lists="both", block=(256, 64)),
    Case(D=256, causal=True, lists="both", block=(128, 64)),
    Case(packed=((100, 130), (257, 300), (1, 1)), causal=True, mask_mod="thirds"),
    Case(packed=PACK, window=(100, 20), lists="both", form="stacked", block=(128, 64)),
    Case(Hkv=4, packed=PACK, mask_mod="thirds", lists="both", form="shared", list_heads=4),
    Case(packed=MANY, causal=True, lists="both", form="compact"),
    Case(Hkv=1, packed=PACK, causal=True, mask_mod="keyed", lists="both", form="shared"),
    Case(packed=PACK, causal=True, lists="both", form="stacked", list_heads=4, q_tiles=2),
    Case(Hkv=4, packed=PACK, mask_mod="keyed", lists="both", form="stacked", block=(64, 128)),
    Case(Hkv=4, packed=PACK, mask_mod="thirds", lists="both", form="ragged", list_heads=4),
    Case(packed=PACK, lists="both", form="compact", q_tiles=3),
    Case(packed=PACK, mask_mod="thirds", lists="both", form="stacked", list_heads=2, plan=2),
    Case(Hkv=4, packed=PACK, lists="both", form="compact", list_heads=4, deterministic=True, plan=2),
    Case(Hkv=1, packed=PACK, causal=True, mask_mod="keyed", lists="both", form="compact"),
    Case(Hkv=1, packed=PACK, causal=True, mask_mod="keyed", lists="both", form="ragged"),
    Case(D=96, Hkv=4, packed=PACK, lists="no full", form="compact", block=(192, 128)),
    Case(D=96, packed=PACK, window=(None, 100), lists="both", form="ragged"),
    Case(D=128, **PACKED, causal=True, form="ragged", deterministic=True, launch="right to left", plan=2),
    Case(D=128, packed=PACK, lists="full", form="compact", q_tiles=2),
    Case(D=128, Hkv=4, packed=PACK, lists="both", q_tiles=3),
    Case(D=128, Hq=6, packed=PACK, window=(200, 0), lists="both", form="ragged", list_heads=2, block=(64, 128)),
    Case(
        D=128, **PACKED, causal=True, form="stacked", list_heads=4, deterministic=True, launch="longest first", plan=2
    ),
    Case(D=128, Hkv=1, packed=PACK, window=(200, 0), lists="no full", form="ragged", list_heads=4),
    Case(D=128, packed=PACK, causal=True, lists="both", form="shared"),
    Case(D=128, Hkv=1, packed=PACK, window=(200, 0), lists="both", form="compact", list_heads=4),
    Case(D=128, packed=MANY, lists="both", form="stacked"),
    Case(D=128, packed=PACK, mask_mod="thirds", lists="both", form="compact", list_heads=2, block=(128, 64)),
    Case(D=128, Hkv=1, packed=PACK, window=(200, 0), lists="both", form="stacked", list_heads=4),
    Case(D=128, Hkv=1, packed=PACK, window=(200, 0), lists="both", form="shared", list_heads=4),
    Case(D=128, packed=PACK, causal=True, lists="no full", form="ragged", block=(128, 64)),
    Case(D=128, causal=True, form="compact", **WITHOUT_PLAN),
    Case(D=64, mask_mod="thirds", form="ragged", list_heads=4, launch="right to left", **WITHOUT_PLAN),
    Case(D=64, form="compact", Hkv=4, list_heads=4, **WITHOUT_PLAN),
    Case(D=128, causal=True, form="stacked", list_heads=2, launch="right to left", **WITHOUT_PLAN),
    Case(D=64, mask_mod="thirds", form="stacked", list_heads=4, block=(128, 64), **WITHOUT_PLAN),
    Case(D=128, list_heads=4, **WITHOUT_PLAN),
]
# What only tiles of 256 queries and pairs of CTAs have.
ONLY_SM100 = [
    Case(D=128, T_q=1500, T_k=1500, Hkv=4, mask_mod="thirds", lists="both", list_heads=4, block=(256, 256)),
    Case(D=128, T_k=129, Hkv=1, lists="full", block=(256, 256)),
    Case(D=128, T_q=1500, T_k=1500, causal=True, lists="both", block=(256, 128)),
    Case(D=128, T_q=1500, T_k=1500, mask_mod="thirds", lists="both", list_heads=2, block=(256, 128)),
    Case(T_q=1500, T_k=1500, causal=True, lists="both", block=(256, 256)),
    Case(**LONG, causal=True, lists="both", block=(128, 128), pack_gqa=False, deterministic=True),
    Case(
        D=128, **LONG, causal=True, mask_mod="keyed", lists="both", list_heads=4, block=(384, 128), deterministic=True
    ),
    Case(D=128, Hq=6, packed=PACK, window=(200, 0), lists="both", form="ragged", list_heads=2, block=(128, 128)),
    Case(Hkv=4, packed=PACK, mask_mod="keyed", lists="both", form="stacked", block=(128, 128)),
    Case(D=96, Hkv=4, packed=PACK, lists="no full", form="compact", block=(384, 128)),
    Case(D=128, **LONG, Hkv=4, lists="both", block=(128, 256), deterministic=True),
    Case(**LONG, Hkv=4, mask_mod="thirds", lists="both", block=(128, 256), deterministic=True),
    Case(D=128, packed=PACK, mask_mod="keyed", lists="both", form="ragged", block=(128, 512), pack_gqa=False),
    Case(D=192, Dv=128, **LONG, causal=True, mask_mod="thirds", lists="both", block=(256, 256), deterministic=True),
    Case(D=192, Dv=128, Hkv=4, packed=PACK, mask_mod="keyed", lists="both", form="compact", block=(128, 512)),
    Case(D=256, **LONG, causal=True, mask_mod="thirds", lists="both", block=(128, 128), deterministic=True),
    Case(D=256, packed=PACK, mask_mod="keyed", lists="both", form="ragged", block=(128, 256)),
    Case(D=128, **LONG, lists="both", block=(384, 128), pack_gqa=False),
]


def options(case: Case) -> set[tuple[str, object]]:
    """The options of a case that decide its kernels and the edges of them that it meets."""
    found = {(field.name, getattr(case, field.name)) for field in fields(case)}
    others = ("T_q", "T_k", "B", "Hq", "Hkv", "packed", "window", "list_heads", "plan")
    found -= {(name, getattr(case, name)) for name in others}
    (T_q, T_k), *more = case.lengths
    lists = {1: "one", case.Hkv: "a key/value head", case.Hq: "a query head"}[case.list_heads] if case.lists else None
    found |= {
        ("group", case.Hq // case.Hkv),
        ("packed", bool(case.packed)),
        ("many", len(more) > 40),
        ("lists of", lists),
        ("window", tuple(side is not None for side in case.window)),
    }
    return found | {("plan", bool(case.plan)), ("keys", (T_k > T_q) - (T_k < T_q)), ("one query", 1 in (T_q, T_k))}


def pairs(case: Case) -> set[tuple]:
    """The pairs of a case's options."""
    return set(combinations(sorted(options(case), key=str), 2))


def covering(cases: list[Case], count: int) -> list[Case]:
    """So many of the cases, each with the most pairs of options that those before it lack.

    Masks of a mask_mod unroll to several times the code: a case with one has to have twice as many pairs.
    """
    left = {case: pairs(case) for case in cases}
    chosen: list[Case] = []
    for _ in range(count):
        chosen.append(max(left, key=lambda case: len(left[case]) / (2 if case.mask_mod else 1)))
        had = left.pop(chosen[-1])
        left = {case: own - had for case, own in left.items()}
    return chosen
