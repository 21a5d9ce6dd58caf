"""Features of a drawn case, in words: counted in every run, and claimed of the strategies, so that a test can ask.

The functions below name every feature that a kind of case can have, and say which of them this one has.
"""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.attention import in_two_passes
from fuzz.case import (
    CALLS,
    DIFFERENCES,
    FORMS,
    KEPT,
    LAUNCHES,
    LAYOUTS,
    PATTERNS,
    Attention,
    Blocks,
    Edge,
    Fields,
    Packed,
    Prompt,
    Ranks,
    Served,
    Texts,
    Window,
    Words,
)
from fuzz.corrupt import FAULTS, PACKED_FAULTS
from fuzz.kinds import heads_of_a_cta
from fuzz.serving import CACHE_FAULTS, NEEDS
from nsa_tools.testing.cases import Case

Features = dict[str, bool]
GATES = ("weight", "given", "none", "cmp", "slc", "swa")


def features(case: object) -> set[str]:
    """The features of a case."""
    return {name for name, has in _of[type(case)](case).items() if has}


def claims(kind: type) -> set[str]:
    """The features that the strategy of a kind of case has to reach; faults where it is asked for them."""
    if kind is Attention:  # of lists under a causal mask; what kernels are compiled for gives the others
        free = ("pattern", "layout", "autograd", "no autograd", "one token", "fewer keys", "rows", "rising", "wide")
        return {name for name in _attention(Attention()) if name.startswith(free)}
    return {name for name in _of[kind](kind()) if not name.startswith("fault: ")}


def faults(kind: type) -> set[str]:
    return {name for name in _of[kind](kind()) if name.startswith("fault: ")}


def _one_of(word: str, names: Iterable[str], own: str) -> Features:
    return {f"{word} {name}": name == own for name in names}


def _either(name: str, other: str, has: bool) -> Features:
    return {name: has, other: not has}


def _blocks(c: Blocks) -> Features:
    own = _one_of("pattern", PATTERNS, c.pattern) | _one_of("launch", LAUNCHES, c.launch)
    return own | _one_of("fault:", FAULTS, c.fault) | {
        "no full lists": c.full is None,
        "nothing full": c.full == 0.0,
        "all full": c.full == 1.0,
        "some full": c.full not in (None, 0.0, 1.0),
        **_either("rows in no order", "rising rows", c.shuffle),
        **_either("wide rows", "compact rows", c.spare > 0),
        **_either("repeated lists", "lists of their own", c.repeat),
        **_either("grouped heads", "heads alone", c.group > 1),
        "one slot": c.slots == 1,
        "a slot for all": c.slots >= max(2, c.B * c.H * c.N),
        "some slots": 1 < c.slots < c.B * c.H * c.N,
        "one block": c.M == 1 or c.N == 1,
    }  # fmt: skip


def _packed(c: Packed) -> Features:
    own = _one_of("pattern", PATTERNS, c.pattern) | _one_of("form", FORMS, c.form)
    return own | _one_of("fault:", PACKED_FAULTS, c.fault) | {
        "an empty sequence": any(0 in pair for pair in c.lengths),
        "nothing in a sequence": (0, 0) in c.lengths,
        "many tiny sequences": len(c.lengths) > 5,
        "one sequence": len(c.lengths) == 1,
        "one huge sequence": max(map(max, c.lengths)) >= 40,
    }  # fmt: skip


def _edge(c: Edge) -> Features:
    seen = max((c.seqlen_q - 1 - c.offset) // c.factor + 1, 0)
    return {
        "no query sees a key": seen == 0,
        "all keys are seen": seen >= c.seqlen_k,
        "some keys are seen": 0 < seen < c.seqlen_k,
        "offset below 0": c.offset < 0,
        "offset past the queries": c.offset >= c.seqlen_q,
        "factor 1": c.factor == 1,
        "packed heads": c.group > 1,
        "many queries": c.seqlen_q > 1 << 20,
        "a tile that spans more than 2**24 tokens": c.factor * c.tile_n > 1 << 24,
        "a tail of queries": c.seqlen_q % c.tile_m > 0,
        "a tail of keys": c.seqlen_k % c.tile_n > 0,
    }


def _window(c: Window) -> Features:
    left, right = c.left not in (None, -1), c.right not in (None, -1) or c.causal
    return {
        **_either("a limit to the left", "no limit to the left", left),
        **_either("a limit to the right", "no limit to the right", right),
        "causal": c.causal,
        **_either("fewer keys", "as many keys, or more", c.seqlen_k < c.seqlen_q),
    }


def _ranks(c: Ranks) -> Features:
    own = _one_of("call", CALLS, c.call) | _one_of("mode", ("heads", "gather"), c.mode)
    own |= {f"differs in {name}" if name else "nothing differs": name == c.differs for name in DIFFERENCES}
    return own | {
        **_either("packed", "one sequence", c.lengths is not None),
        "an empty sequence": c.lengths is not None and 0 in c.lengths,
        **_either("zigzag", "in order", c.load_balance is not None),
        "validate": c.validate,
    }


def _texts(c: Texts) -> Features:
    return {
        **_either("the same text", "another text", c.old == c.new),
        "an empty text": not c.old or not c.new,
        "another file at hand": c.other is not None,
        "carriage returns": "\r" in c.old + c.new,
    }


def _fields(c: Fields) -> Features:
    if not isinstance(c.values, dict):
        return {"no dictionary": True}
    given = {name: name in c.values for name in ("block_size", "compress_size", "compress_stride", "rule")}
    return given | _either("something given", "nothing given", bool(c.values))


def _served(c: Served) -> Features:
    own = _one_of("kept in", KEPT, c.kept) | _one_of("fault:", CACHE_FAULTS, c.fault)
    own |= {f"a gradient of {name}": name in c.needs for name in NEEDS}
    return own | {
        "pages shared": c.shared > 0,
        "overlapping blocks": c.stride < 8,
        "a sequence without new tokens": any(0 in call for call in c.counts),
        "one token each": any(set(call) == {1} for call in c.counts),
        "one sequence": len(c.counts[0]) == 1,
        "no gradient": not c.needs,
    }


def _prompt(c: Prompt) -> Features:
    return {
        "padding in front": any(left for left, _ in c.rows),
        "padding behind": any(right for _, right in c.rows),
        "padding on both sides": any(left and right for left, right in c.rows),
        "a row of padding": any(left == c.T for left, _ in c.rows),
        "padding alone": all(left == c.T for left, _ in c.rows),
        "a turn that ended early": any(c.ended),
        **_either("a cache", "no cache", c.first > 0),
        "a cache of transformers": c.first > 0 and not c.ours,
        **_one_of("gate", ("input", "query"), c.gate),
        **_one_of("compression", ("mean", "linear"), c.compression),
    }


def _layer(c: Case) -> Features:
    config = c.config
    return _one_of("gate", GATES, c.gate) | _one_of("rule", ("nsa", "seed"), config.rule) | {
        **_either("causal", "not causal", c.causal),
        **_either("packed", "a batch", c.lengths is not None),
        "an empty sequence": c.lengths is not None and 0 in c.lengths,
        "no complete block": c.T < config.span and c.lengths is None,
        "one token": c.T == 1,
        "overlapping blocks": config.stride < config.span,
        "an offset that leaks": config.offset < config.span - 1,
        **_either("a list for each token", "a list for a tile", config.by_token),
        "compressed blocks of another size": config.span != config.block_size,
        "nothing forced": not config.init_blocks and not config.local_blocks,
        "no window": not config.window_size,
        "more forced blocks than entries": config.forces_too_many,
        "tiles smaller than blocks": config.q_tile < config.block_size,
        "compression weights": c.compress_weights and not {"k_cmp", "v_cmp"} <= {*c.own_keys},
        "keys of a branch's own": bool(c.own_keys),
        "heads alone": c.Hq == c.Hkv,
        "another width of v": c.Dv not in (None, c.D),
    }  # fmt: skip


def _attention(c: Attention) -> Features:
    kind, (heads, group) = c.kind, (heads_of_a_cta(c), c.kind.Hq // c.kind.Hkv)
    listed, ordered, two = kind.lists, kind.lists and kind.deterministic, kind.lists and in_two_passes(c)
    pattern = c.pattern if listed or kind.mask == "table" else ""
    own = _one_of("layout", LAYOUTS, c.layout) | _one_of("pattern", PATTERNS, pattern)
    own |= {f"mask {kind.mask}": True, f"lists {kind.form}": listed, f"deterministic, {c.launch}": kind.deterministic}
    return own | {
        "no lists": not listed,
        **_either("autograd", "no autograd", c.autograd),
        "rows in no order": listed and c.shuffle,
        "rising rows": listed and not c.shuffle,
        "wide rows": listed and c.spare > 0,
        "compact rows": listed and c.spare == 0,
        "two passes": two,
        "one pass": listed and not two,
        "semaphore values": ordered and c.locks,
        "no semaphore values": ordered and not c.locks,
        "a CTA walks all heads of a group": heads == group > 1,
        "a CTA walks some heads of a group": 1 < heads != group,
        "an empty sequence": any(0 in pair for pair in c.lengths),
        "one token": (1, 1) in c.lengths or c.lengths[0][0] == 1,
        "many tiny sequences": len(c.lengths) > 5,
        "one huge sequence": max(map(max, c.lengths)) >= 1500,
        **_either("fewer keys", "as many keys, or more", c.lengths[0][1] < c.lengths[0][0]),
    }


_of = {
    Blocks: _blocks, Packed: _packed, Edge: _edge, Window: _window, Texts: _texts, Fields: _fields, Case: _layer,
    Attention: _attention, Served: _served, Ranks: _ranks,
    Words: lambda c: {},
    Prompt: _prompt,
}  # fmt: skip
