"""The options that kernels are compiled for: a small fixed set in which every feature meets most others.

Each is a case whose data are drawn: lengths, a window's sides, factor and offset, patterns, entries of a work tile.
"""

from __future__ import annotations

from typing import Any

from fuzz.case import Attention

PACKED, WINDOW, COMPRESSED = dict(packed=((1, 1),)), dict(window=(0, 0)), dict(compress=(16, 15))


def call(**options: Any) -> Attention:
    return Attention(**dict(T_q=128, T_k=128, B=1, pattern="random") | options)


def listed(block_q: int = 128, block_k: int = 128, **options: Any) -> Attention:
    """With lists."""
    return call(**dict(lists="both", block=(block_q, block_k)) | options)


def packed(form: str, **options: Any) -> Attention:
    """With lists of packed sequences."""
    return listed(**PACKED, form=form, **options)


KINDS = (
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


EXACT = tuple(case for case in KINDS if case.deterministic)
"""Those whose gradients have to have the same bits twice."""
