"""The options that kernels are compiled for: a small fixed set in which every feature meets most others."""

from __future__ import annotations

import math

from fuzz.case import Attention, Kind
from nsa_layer.fork import fork_status

ALL = (
    Kind(),
    Kind(D=128, mask="causal", dtype="float16"),
    Kind(D=128, mask="causal", deterministic=True, Hkv=4),
    Kind(D=128, packed=True, mask="causal"),
    Kind(mask="window", Hq=8, Hkv=2, pack_gqa=True),
    Kind(D=128, packed=True, mask="window", deterministic=True),
    Kind(mask="table", Hkv=4),
    Kind(D=128, mask="table", packed=True, Hkv=1),
    Kind(D=192, Dv=128, mask="causal", Hkv=4),
    Kind(D=96, mask="window", expanded="batch"),
    Kind(D=256, mask="causal", Hkv=4),
    Kind(D=128, mask="causal", expanded="heads"),
    Kind(D=128, mask="compressed"),
    Kind(mask="compressed", Hkv=4, deterministic=True),
    Kind(D=128, mask="compressed", packed=True, Hq=6, Hkv=1),
    Kind(mask="compressed", packed=True, deterministic=True),
    Kind(lists=True, heads="kv"),
    Kind(D=128, lists=True, heads="q", mask="causal", deterministic=True, passes=1),
    Kind(D=128, lists=True, heads="one", mask="table", passes=1),
    Kind(lists=True, heads="one", mask="table", block_k=64),
    Kind(D=128, lists=True, heads="kv", mask="causal", block_k=64, passes=1),
    Kind(lists=True, heads="q", block_q=64),
    Kind(D=128, lists=True, heads="kv", block_q=256, mask="causal", passes=1),
    Kind(D=128, lists=True, heads="all", block_q=192, block_k=64, mask="table"),
    Kind(D=192, Dv=128, lists=True, heads="kv", block_k=96, Hkv=4),
    Kind(D=256, lists=True, heads="one", block_k=64, Hkv=4),
    Kind(D=128, lists=True, heads="kv", deterministic=True, full_lists=False, mask="window", passes=1),
    Kind(D=128, lists=True, heads="kv", plan=True, passes=1),
    Kind(lists=True, heads="q", plan=True, deterministic=True, mask="causal", passes=1),
    Kind(D=128, lists=True, heads="kv", packed=True, form="compact", passes=1),
    Kind(lists=True, heads="one", packed=True, form="padded", mask="causal"),
    Kind(D=128, lists=True, heads="q", packed=True, form="stacked", mask="table"),
    Kind(lists=True, heads="kv", packed=True, form="ragged", mask="causal"),
    Kind(D=128, lists=True, heads="kv", packed=True, form="compact", deterministic=True, passes=1),
    Kind(D=128, lists=True, heads="q", packed=True, form="ragged", deterministic=True, mask="causal", passes=1),
    Kind(lists=True, heads="one", packed=True, form="padded", deterministic=True, mask="table", passes=1),
    Kind(D=128, lists=True, heads="kv", packed=True, form="stacked", deterministic=True, mask="causal", passes=1),
    Kind(D=128, lists=True, heads="kv", packed=True, form="stacked", deterministic=True),
    Kind(lists=True, heads="kv", packed=True, form="stacked", deterministic=True, block_k=64, mask="causal"),
    Kind(D=128, lists=True, heads="kv", packed=True, form="ragged", plan=True),
    Kind(D=128, lists=True, heads="one", packed=True, form="compact", plan=True, deterministic=True, block_k=64),
    Kind(lists=True, heads="q", packed=True, form="stacked", plan=True),
    Kind(D=128, lists=True, heads="kv", packed=True, form="stacked", plan=True, deterministic=True, passes=1),
    Kind(D=128, lists=True, heads="one", mask="compressed"),
    Kind(D=128, lists=True, heads="kv", mask="causal", block_k=64, deterministic=True, passes=2),
    Kind(lists=True, heads="q", mask="table", Hkv=4, plan=True, passes=2),
    Kind(lists=True, heads="kv", plan=True, deterministic=True, mask="causal", block_k=64),
    Kind(D=128, lists=True, heads="q", packed=True, form="stacked", mask="window", deterministic=True, passes=2),
    Kind(lists=True, heads="kv", packed=True, form="ragged", mask="table", block_k=64, passes=2),
    Kind(D=96, lists=True, heads="one", mask="window", passes=2),
    Kind(lists=True, heads="all", dtype="float16", Hkv=1, block_q=256, expanded="heads", passes=2),
    Kind(D=128, lists=True, heads="kv", deterministic=True, full_lists=False),
    # So many heads that a CTA of backward loops over several of them.
    Kind(mask="window", Hq=32, Hkv=4),
    Kind(D=128, mask="window", Hq=24, Hkv=8, deterministic=True),
    Kind(D=128, packed=True, mask="window", Hq=24, Hkv=4, deterministic=True),
    # Masks over blocks of 64 keys: some are for forward of two blocks at a step, some are not.
    Kind(D=128, lists=True, heads="kv", mask="compressed", block_k=64),
    Kind(lists=True, heads="q", packed=True, form="compact", mask="compressed", block_k=64, deterministic=True),
    Kind(D=96, lists=True, heads="one", mask="window", block_k=64),
)


FEW = 8  # blocks that the capacity of a row of forward lists, up to which two passes are the default


def two_passes(kind: Kind, capacity: float = math.inf) -> bool:
    """True if backward takes two passes on SM90: where it is asked to, or as the documentation says.

    capacity: of a row of forward lists, where it holds as many blocks in every row.
    """
    if not kind.lists or kind.passes is not None:
        return kind.lists and kind.passes == 2
    few = kind.form in ("padded", "compact") and capacity <= FEW
    pays = kind.deterministic or kind.block_k == 64 or few
    heads = kind.D in (64, 96, 128) and kind.Dv in (None, kind.D)
    return pays and heads and kind.block_q % 128 == 0 and kind.block_k in (64, 128) and kind.mask != "compressed"


def passes_by_room(kind: Kind) -> bool:
    """True if the capacity of forward lists decides: few blocks take two passes, more take one."""
    return two_passes(kind, FEW) != two_passes(kind)


def heads_of_a_cta(case: Attention, sms: int = 132) -> int:
    """Query heads that a CTA of SM90 backward loops over, on a GPU of so many multiprocessors."""
    kind = case.kind
    if kind.lists or kind.mask != "window" or kind.D > 128 or fork_status().kind == "stock":
        return 1
    from flash_attn.cute.bwd_sm90.two_pass import window_heads_per_cta

    T_q, T_k = (tuple(pair[side] for pair in case.lengths) for side in (0, 1))
    return window_heads_per_cta(
        case.window,
        (sum(T_q), sum(T_k)) if kind.packed else (T_q[0], T_k[0]),
        batch=1 if kind.packed else len(case.lengths),
        heads=(kind.Hq, kind.Hkv),
        tile=(128 if kind.D <= 64 else 64, 128),
        sms=sms,
    )


def in_stock(kind: Kind | None) -> bool:
    """True if the unpatched package has all that this asks for, and gets it right where its faults are known."""
    if kind is None:
        return True
    own = kind.packed or kind.deterministic or kind.plan or kind.passes is not None or kind.heads not in ("one", "q")
    blocks = (kind.block_q, kind.block_k) == (128, 128)
    lists = not kind.lists or not own and blocks
    return lists and kind.mask != "compressed" and not (kind.mask == "table" and kind.packed)


KINDS = tuple(filter(in_stock, ALL)) if fork_status().kind == "stock" else ALL
EXACT = tuple(kind for kind in KINDS if kind.deterministic)
"""Those whose gradients have to have the same bits twice."""
