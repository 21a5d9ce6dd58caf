"""The options that kernels are compiled for: a small fixed set in which every feature meets most others.

Each is a case whose data are drawn: lengths, a window's sides, factor and offset, patterns, entries of a work tile.
"""

from __future__ import annotations

import math
from typing import Any

from fuzz.case import Attention
from nsa_layer.fork import fork_status

PACKED, WINDOW, COMPRESSED = dict(packed=((1, 1),)), dict(window=(0, 0)), dict(compress=(16, 15))


def call(**options: Any) -> Attention:
    return Attention(**dict(T_q=128, T_k=128, B=1, pattern="random") | options)


def listed(block_q: int = 128, block_k: int = 128, **options: Any) -> Attention:
    """With lists."""
    return call(**dict(lists="both", block=(block_q, block_k)) | options)


def packed(form: str, **options: Any) -> Attention:
    """With lists of packed sequences."""
    return listed(**PACKED, form=form, **options)


ALL = (
    call(),
    call(D=128, causal=True, dtype="float16"),
    call(D=128, causal=True, deterministic=True, Hkv=4),
    call(D=128, causal=True, **PACKED),
    call(Hq=8, pack_gqa=True, **WINDOW),
    call(D=128, deterministic=True, **PACKED, **WINDOW),
    call(mask_mod="table", Hkv=4),
    call(D=128, mask_mod="table", Hkv=1, **PACKED),
    call(D=192, Dv=128, causal=True, Hkv=4),
    call(D=96, expanded="batch", **WINDOW),
    call(D=256, causal=True, Hkv=4),
    call(D=128, causal=True, expanded="heads"),
    call(D=128, **COMPRESSED),
    call(Hkv=4, deterministic=True, **COMPRESSED),
    call(D=128, Hq=6, Hkv=1, **PACKED, **COMPRESSED),
    call(deterministic=True, **PACKED, **COMPRESSED),
    listed(list_heads=2),
    listed(D=128, list_heads=4, causal=True, deterministic=True, passes=1),
    listed(D=128, mask_mod="table", passes=1),
    listed(mask_mod="table", block_k=64),
    listed(D=128, list_heads=2, causal=True, block_k=64, passes=1),
    listed(list_heads=4, block_q=64),
    listed(D=128, list_heads=2, block_q=256, causal=True, passes=1),
    listed(D=128, form="shared", block_q=192, block_k=64, mask_mod="table"),
    listed(D=192, Dv=128, list_heads=4, block_k=96, Hkv=4),
    listed(D=256, block_k=64, Hkv=4),
    listed(D=128, list_heads=2, deterministic=True, lists="no full", passes=1, **WINDOW),
    listed(D=128, list_heads=2, plan=1, passes=1),
    listed(list_heads=4, plan=1, deterministic=True, causal=True, passes=1),
    packed("compact", D=128, list_heads=2, passes=1),
    packed("padded", causal=True),
    packed("stacked", D=128, list_heads=4, mask_mod="table"),
    packed("ragged", list_heads=2, causal=True),
    packed("compact", D=128, list_heads=2, deterministic=True, passes=1),
    packed("ragged", D=128, list_heads=4, deterministic=True, causal=True, passes=1),
    packed("padded", deterministic=True, mask_mod="table", passes=1),
    packed("stacked", D=128, list_heads=2, deterministic=True, causal=True, passes=1),
    packed("stacked", D=128, list_heads=2, deterministic=True),
    packed("stacked", list_heads=2, deterministic=True, block_k=64, causal=True),
    packed("ragged", D=128, list_heads=2, plan=1),
    packed("compact", D=128, plan=1, deterministic=True, block_k=64),
    packed("stacked", list_heads=4, plan=1),
    packed("stacked", D=128, list_heads=2, plan=1, deterministic=True, passes=1),
    listed(D=128, **COMPRESSED),
    listed(D=128, list_heads=2, causal=True, block_k=64, deterministic=True, passes=2),
    listed(list_heads=4, mask_mod="table", Hkv=4, plan=1, passes=2),
    listed(list_heads=2, plan=1, deterministic=True, causal=True, block_k=64),
    packed("stacked", D=128, list_heads=4, deterministic=True, passes=2, **WINDOW),
    packed("ragged", list_heads=2, mask_mod="table", block_k=64, passes=2),
    listed(D=96, passes=2, **WINDOW),
    listed(form="shared", dtype="float16", Hkv=1, block_q=256, expanded="heads", passes=2),
    listed(D=128, list_heads=2, deterministic=True, lists="no full"),
    # So many heads that a CTA of backward loops over several of them.
    call(Hq=32, Hkv=4, **WINDOW),
    call(D=128, Hq=24, Hkv=8, deterministic=True, **WINDOW),
    call(D=128, Hq=24, Hkv=4, deterministic=True, **PACKED, **WINDOW),
    # Masks over blocks of 64 keys: some are for forward of two blocks at a step, some are not.
    listed(D=128, list_heads=2, block_k=64, **COMPRESSED),
    packed("compact", list_heads=4, block_k=64, deterministic=True, **COMPRESSED),
    listed(D=96, block_k=64, **WINDOW),
)


FEW = 8  # blocks that the capacity of a row of forward lists, up to which two passes are the default


def two_passes(case: Attention, capacity: float = math.inf) -> bool:
    """True if backward takes two passes on SM90: where it is asked to, or as the documentation says.

    capacity: of a row of forward lists, where it holds as many blocks in every row.
    """
    if case.lists is None or case.passes is not None:
        return case.lists is not None and case.passes == 2
    block_q, block_k = case.block
    few = case.form in ("padded", "compact", "shared") and capacity <= FEW
    pays = case.deterministic or block_k == 64 or few
    heads = case.D in (64, 96, 128) and case.Dv in (None, case.D)
    return pays and heads and block_q % 128 == 0 and block_k in (64, 128) and case.compress is None


def passes_by_capacity(case: Attention) -> bool:
    """True if the capacity of forward lists decides: few blocks take two passes, more take one."""
    return two_passes(case, FEW) != two_passes(case)


def heads_of_a_cta(case: Attention, sms: int = 132) -> int:
    """Query heads that a CTA of SM90 backward loops over, on a GPU of so many multiprocessors."""
    if case.lists is not None or case.mask != "window" or case.D > 128 or fork_status().kind == "stock":
        return 1
    from flash_attn.cute.bwd_sm90.two_pass import window_heads_per_cta

    T_q, T_k = (tuple(pair[side] for pair in case.lengths) for side in (0, 1))
    return window_heads_per_cta(
        case.window, (sum(T_q), sum(T_k)) if case.packed else (T_q[0], T_k[0]),
        batch=1 if case.packed else len(case.lengths), heads=(case.Hq, case.Hkv),
        tile=(128 if case.D <= 64 else 64, 128), sms=sms,
    )  # fmt: skip


def in_stock(case: Attention | None) -> bool:
    """True if the unpatched package has all that this asks for, and gets it right where its faults are known."""
    if case is None:
        return True
    own = case.packed or case.deterministic or case.plan or case.passes is not None or case.form == "shared"
    plain = not own and case.list_heads in (1, case.Hq) and case.block == (128, 128)
    return (case.lists is None or plain) and case.compress is None and not (case.mask_mod == "table" and case.packed)


KINDS = tuple(filter(in_stock, ALL)) if fork_status().kind == "stock" else ALL
EXACT = tuple(case for case in KINDS if case.deterministic)
"""Those whose gradients have to have the same bits twice."""
