"""Features of a drawn case, in words: counted in every run, and claimed of the strategies, so that a test can ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz import case as cases
from fuzz.attention_lists import in_two_passes
from fuzz.case import Attention, Blocks, Edge, Fields, Packed, Prompt, Ranks, Served, Texts, Window, Words
from fuzz.corrupt import FAULTS, PACKED_FAULTS
from fuzz.kinds import heads_of_a_cta
from fuzz.serving import CACHE_FAULTS, NEEDS
from nsa_tools.testing.cases import Case

# Fields each of whose values is a feature.
CHOICES: dict[type, dict[str, tuple]] = {
    Blocks: dict(pattern=cases.PATTERNS, launch=cases.LAUNCHES, fault=FAULTS),
    Packed: dict(pattern=cases.PATTERNS, form=cases.FORMS, fault=PACKED_FAULTS),
    Ranks: dict(call=cases.CALLS, mode=("heads", "gather"), differs=cases.DIFFERENCES),
    Served: dict(kept=cases.KEPT, fault=CACHE_FAULTS),
    Prompt: dict(gate=("input", "query"), compression=("mean", "linear")),
    Case: dict(gate=("weight", "given", "none", "cmp", "slc", "swa")),
    Attention: dict(layout=cases.LAYOUTS),
}
# Features that a case has or has not, and has not is one as well.
EITHER: dict[type, dict[str, Callable[[Any], object]]] = {
    Blocks: {
        "full lists": lambda c: c.full is not None,
        "nothing full": lambda c: c.full == 0.0,
        "all full": lambda c: c.full == 1.0,
        "some full": lambda c: c.full not in (None, 0.0, 1.0),
        "rising rows": lambda c: not c.shuffle,
        "wide rows": lambda c: c.spare,
        "repeated lists": lambda c: c.repeat,
        "grouped heads": lambda c: c.group > 1,
        "one slot": lambda c: c.slots == 1,
        "a slot for all": lambda c: c.slots >= max(2, c.B * c.H * c.N),
        "some slots": lambda c: 1 < c.slots < c.B * c.H * c.N,
        "one block": lambda c: c.M == 1 or c.N == 1,
    },
    Packed: {
        "an empty sequence": lambda c: any(0 in pair for pair in c.packed),
        "nothing in a sequence": lambda c: (0, 0) in c.lengths,
        "many tiny sequences": lambda c: len(c.lengths) > 5,
        "one sequence": lambda c: len(c.lengths) == 1,
        "one huge sequence": lambda c: max(map(max, c.lengths)) >= 40,
    },
    Edge: {
        "no query sees a key": lambda c: c.keys_seen == 0,
        "all keys are seen": lambda c: c.keys_seen >= c.seqlen_k,
        "some keys are seen": lambda c: 0 < c.keys_seen < c.seqlen_k,
        "offset below 0": lambda c: c.offset < 0,
        "offset past the queries": lambda c: c.offset >= c.seqlen_q,
        "factor 1": lambda c: c.factor == 1,
        "packed heads": lambda c: c.group > 1,
        "many queries": lambda c: c.seqlen_q > 1 << 20,
        "a tile that spans more than 2**24 tokens": lambda c: c.factor * c.tile_n > 1 << 24,
        "a tail of queries": lambda c: c.seqlen_q % c.tile_m,
        "a tail of keys": lambda c: c.seqlen_k % c.tile_n,
    },
    Window: {
        "a limit to the left": lambda c: c.left not in (None, -1),
        "a limit to the right": lambda c: c.right not in (None, -1) or c.causal,
        "causal": lambda c: c.causal,
        "fewer keys": lambda c: c.seqlen_k < c.seqlen_q,
    },
    Ranks: {
        "packed": lambda c: c.lengths is not None,
        "an empty sequence": lambda c: c.lengths is not None and 0 in c.lengths,
        "zigzag": lambda c: c.load_balance,
        "validate": lambda c: c.validate,
    },
    Texts: {
        "the same text": lambda c: c.old == c.new,
        "an empty text": lambda c: not c.old or not c.new,
        "another file at hand": lambda c: c.other is not None,
        "carriage returns": lambda c: "\r" in c.old + c.new,
    },
    Fields: {
        "anything": lambda c: c.values,
        **{n: lambda c, n=n: n in c.values for n in ("block_size", "compress_size", "compress_stride", "rule")},
    },
    Words: {},
    Served: {
        **{f"a gradient of {name}": lambda c, name=name: name in c.needs for name in NEEDS},
        "a gradient": lambda c: c.needs,
        "pages shared": lambda c: c.shared,
        "overlapping blocks": lambda c: c.stride < 8,
        "a sequence without new tokens": lambda c: any(0 in call for call in c.counts),
        "one token each": lambda c: any(set(call) == {1} for call in c.counts),
        "one sequence": lambda c: len(c.counts[0]) == 1,
    },
    Prompt: {
        "padding in front": lambda c: any(left for left, _ in c.rows),
        "padding behind": lambda c: any(right for _, right in c.rows),
        "padding on both sides": lambda c: any(left and right for left, right in c.rows),
        "a row of padding": lambda c: any(left == c.T for left, _ in c.rows),
        "padding alone": lambda c: all(left == c.T for left, _ in c.rows),
        "a turn that ended early": lambda c: any(c.ended),
        "a cache": lambda c: c.first,
        "a cache of transformers": lambda c: c.first and not c.ours,
    },
    Case: {
        "the seed's rule": lambda c: c.config.rule == "seed",
        "causal": lambda c: c.causal,
        "packed": lambda c: c.lengths is not None,
        "an empty sequence": lambda c: c.lengths is not None and 0 in c.lengths,
        "no complete block": lambda c: c.T < c.config.span and c.lengths is None,
        "one token": lambda c: c.T == 1,
        "overlapping blocks": lambda c: c.config.stride < c.config.span,
        "an offset that leaks": lambda c: c.config.offset < c.config.span - 1,
        "a list for each token": lambda c: c.config.by_token,
        "compressed blocks of another size": lambda c: c.config.span != c.config.block_size,
        "nothing forced": lambda c: not c.config.init_blocks and not c.config.local_blocks,
        "a window": lambda c: c.config.window_size,
        "more forced blocks than entries": lambda c: c.config.forces_too_many,
        "tiles smaller than blocks": lambda c: c.config.q_tile < c.config.block_size,
        "compression weights": lambda c: c.compress_weights and not {"k_cmp", "v_cmp"} <= {*c.own_keys},
        "keys of a branch's own": lambda c: c.own_keys,
        "heads alone": lambda c: c.Hq == c.Hkv,
        "another width of v": lambda c: c.Dv not in (None, c.D),
    },
    Attention: {
        "autograd": lambda c: c.autograd,
        "an empty sequence": lambda c: any(0 in pair for pair in c.lengths),
        "one token": lambda c: (1, 1) in c.lengths or c.lengths[0][0] == 1,
        "many tiny sequences": lambda c: len(c.lengths) > 5,
        "one huge sequence": lambda c: max(map(max, c.lengths)) >= 1500,
        "fewer keys": lambda c: c.lengths[0][1] < c.lengths[0][0],
    },
}


def features(case: object) -> set[str]:
    """The features of a case."""
    kind = type(case)
    if kind is Fields and not isinstance(case.values, dict):
        return {"no dictionary"}
    found = {f"{name} {getattr(case, name)}" for name in CHOICES.get(kind, {})}
    found |= {name if has(case) else f"not {name}" for name, has in EITHER[kind].items()}
    return found | (_of_lists(case) if kind is Attention else set())


def claims(kind: type) -> set[str]:
    """The features that the strategy of a kind of case has to reach; faults where it is asked for them."""
    fields = {name: values for name, values in CHOICES.get(kind, {}).items() if name != "fault"}
    chosen = {f"{name} {value}" for name, values in fields.items() for value in values}
    either = {name for each in EITHER[kind] for name in (each, f"not {each}")}
    if kind is Attention:  # of lists under a causal mask; what kernels are compiled for gives the others
        lengths = {"an empty sequence", "many tiny sequences", "one huge sequence"}
        either = {name for name in either if name.removeprefix("not ") not in lengths}
        either |= {"rising rows", "rows in no order", "wide rows", "compact rows"}
        chosen |= {f"pattern {name}" for name in cases.PATTERNS}
    return chosen | either


def faults(kind: type) -> set[str]:
    return {f"fault {fault}" for fault in CHOICES[kind]["fault"]}


def _of_lists(c: Attention) -> set[str]:
    """Features of an attention call that depend on its lists, its mask, and what its kernels loop over."""
    heads, group, listed = heads_of_a_cta(c), c.Hq // c.Hkv, c.lists is not None
    two = listed and in_two_passes(c)
    has = {
        f"mask {c.mask}": True,
        f"lists {c.form}": listed,
        f"pattern {c.pattern}": listed or c.mask_mod == "table",
        f"deterministic, {c.launch}": c.deterministic,
        "rows in no order" if c.shuffle else "rising rows": listed,
        "wide rows" if c.spare else "compact rows": listed,
        "two passes" if two else "one pass": listed,
        "semaphore values" if c.locks else "no semaphore values": listed and c.deterministic,
        "a CTA loops over all heads of a group": heads == group > 1,
        "a CTA loops over some heads of a group": 1 < heads != group,
    }
    return {name for name, value in has.items() if value}
