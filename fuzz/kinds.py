"""What kernels are compiled for: a small set in which every feature meets most others. Data is drawn, this is not."""

from __future__ import annotations

from fuzz.case import Kind
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
    Kind(D=128, mask="compressed"),
    Kind(mask="compressed", Hkv=4, deterministic=True),
    Kind(D=128, mask="compressed", packed=True, Hq=6, Hkv=1),
    Kind(mask="compressed", packed=True, deterministic=True),
    Kind(lists=True, heads="kv"),
    Kind(D=128, lists=True, heads="q", mask="causal", deterministic=True),
    Kind(D=128, lists=True, heads="one", mask="table"),
    Kind(lists=True, heads="one", mask="table", block_k=64),
    Kind(D=128, lists=True, heads="kv", mask="causal", block_k=64),
    Kind(D=128, lists=True, heads="kv", deterministic=True, full_lists=False, mask="window"),
    Kind(D=128, lists=True, heads="kv", plan=True),
    Kind(lists=True, heads="q", plan=True, deterministic=True, mask="causal"),
    Kind(D=128, lists=True, heads="kv", packed=True, form="compact"),
    Kind(lists=True, heads="one", packed=True, form="padded", mask="causal"),
    Kind(D=128, lists=True, heads="q", packed=True, form="stacked", mask="table"),
    Kind(lists=True, heads="kv", packed=True, form="ragged", mask="causal"),
    Kind(D=128, lists=True, heads="one", mask="compressed"),
)


def in_stock(kind: Kind | None) -> bool:
    """Whether the unpatched package has what this asks for, and gets it right where its faults are known."""
    return kind is None or kind.mask != "compressed" and not kind.lists and not (kind.mask == "table" and kind.packed)


KINDS = tuple(filter(in_stock, ALL)) if fork_status().kind == "stock" else ALL
EXACT = tuple(kind for kind in KINDS if kind.deterministic)
"""Those whose gradients have to have the same bits twice."""
