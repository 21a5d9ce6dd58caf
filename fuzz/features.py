"""Features of a drawn case, in words: counted in every run, and claimed of the strategies, so that a test can ask.

Those listed here follow from several drawn values; choices and flags are features by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.attention_lists import in_two_passes
from fuzz.case import DIFFERENCES, Attention, Blocks, Edge, Packed, Prompt, Ranks, Served, Texts, Window
from fuzz.kinds import heads_of_a_cta
from nsa_tools.testing.cases import Case

FEATURES: dict[type, dict[str, Callable[[Any], object]]] = {
    Blocks: {
        "a slot for all": lambda c: c.slots >= max(2, c.B * c.H * c.N),
        "nothing full": lambda c: c.full == 0.0,
        "one block": lambda c: c.M == 1 or c.N == 1,
    },
    Packed: {
        "an empty sequence": lambda c: any(0 in pair for pair in c.packed),
        "nothing in a sequence": lambda c: (0, 0) in c.lengths,
        "one sequence": lambda c: len(c.lengths) == 1,
    },
    Edge: {
        "no query sees a key": lambda c: c.keys_seen == 0,
        "all keys are seen": lambda c: c.keys_seen >= c.seqlen_k,
        "some keys are seen": lambda c: 0 < c.keys_seen < c.seqlen_k,
        "offset past the queries": lambda c: c.offset >= c.seqlen_q,
        "many queries": lambda c: c.seqlen_q > 1 << 20,
        "a tile that spans more than 2**24 tokens": lambda c: c.factor * c.tile_n > 1 << 24,
        "a tail of queries": lambda c: c.seqlen_q % c.tile_m,
        "a tail of keys": lambda c: c.seqlen_k % c.tile_n,
    },
    Window: {"fewer keys": lambda c: c.seqlen_k < c.seqlen_q},
    Ranks: {
        "an empty sequence": lambda c: c.lengths is not None and 0 in c.lengths,
        **{f"differs {name}": lambda c, name=name: c.differs == name for name in DIFFERENCES},
    },
    Texts: {
        "the same text": lambda c: c.old == c.new,
        "an empty text": lambda c: not c.old or not c.new,
        "carriage returns": lambda c: "\r" in c.old + c.new,
    },
    Served: {
        "a gradient": lambda c: c.needs,
        "pages shared": lambda c: c.shared,
        "a sequence without new tokens": lambda c: any(0 in call for call in c.counts),
        "one token each": lambda c: any(set(call) == {1} for call in c.counts),
        "one sequence": lambda c: len(c.counts[0]) == 1,
    },
    Prompt: {
        "padding behind": lambda c: any(right for _, right in c.rows),
        "padding on both sides": lambda c: any(left and right for left, right in c.rows),
        "a row of padding": lambda c: any(left == c.T for left, _ in c.rows),
        "padding alone": lambda c: all(left == c.T for left, _ in c.rows),
        "a turn that ended early": lambda c: any(c.ended),
        "a cache of transformers": lambda c: c.first and not c.ours,
    },
    Case: {
        "the seed's rule": lambda c: c.config.rule == "seed",
        "an empty sequence": lambda c: c.lengths is not None and 0 in c.lengths,
        "no complete block": lambda c: c.T < c.config.span and c.lengths is None,
        "one token": lambda c: c.T == 1,
        "overlapping blocks": lambda c: c.config.stride < c.config.span,
        "an offset that leaks": lambda c: c.config.offset < c.config.span - 1,
        "a list for each token": lambda c: c.config.by_token,
        "compressed blocks of another size": lambda c: c.config.span != c.config.block_size,
        "nothing forced": lambda c: not c.config.init_blocks and not c.config.local_blocks,
        "more forced blocks than entries": lambda c: c.config.forces_too_many,
        "tiles smaller than blocks": lambda c: c.config.q_tile < c.config.block_size,
        "compression weights": lambda c: c.compress_weights and not {"k_cmp", "v_cmp"} <= {*c.own_keys},
        "heads alone": lambda c: c.Hq == c.Hkv,
    },
    Attention: {
        "an empty sequence": lambda c: any(0 in pair for pair in c.lengths),
        "one token": lambda c: (1, 1) in c.lengths or c.lengths[0][0] == 1,
        "many tiny sequences": lambda c: len(c.lengths) > 5,
        "one huge sequence": lambda c: max(map(max, c.lengths)) >= 1500,
        "fewer keys": lambda c: c.lengths[0][1] < c.lengths[0][0],
        "two passes": lambda c: c.lists is not None and in_two_passes(c),
        "semaphore values": lambda c: c.lists is not None and c.deterministic and c.locks,
        "a CTA loops over all heads of a group": lambda c: heads_of_a_cta(c) == c.Hq // c.Hkv > 1,
        "a CTA loops over some heads of a group": lambda c: 1 < heads_of_a_cta(c) < c.Hq // c.Hkv,
    },
}


def features(case: object) -> set[str]:
    """The features of a case."""
    values = {f"{name} {value}" for name, value in vars(case).items() if isinstance(value, (str, bool))}
    return values | {name for name, has in FEATURES.get(type(case), {}).items() if has(case)}
