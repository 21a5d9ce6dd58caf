"""The strategies reach every feature, and draw for kernels what their kinds are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from flash_attn.cute.bwd_sm90 import two_pass
from fuzz import sanitize, strategies
from fuzz.attention_lists import backward_lists, in_two_passes, passes_by_capacity, two_passes
from fuzz.case import DIFFERENCES, FORMS, Attention
from fuzz.kinds import COMPRESSED, KINDS, call, listed
from fuzz.properties.models import prompts

Has = Callable[[Any], object]
# Those that follow from several drawn values; that choices and flags are drawn, is hypothesis's.
FEATURES: dict[Callable, dict[str, Has]] = {
    strategies.blocks: {"a slot for all": lambda c: c.slots >= max(2, c.B * c.H * c.N)},
    strategies.packed: {
        "an empty sequence": lambda c: any(0 in pair for pair in c.packed),
        "nothing in a sequence": lambda c: (0, 0) in c.lengths,
    },
    strategies.edges: {
        "no query sees a key": lambda c: c.keys_seen == 0,
        "all keys are seen": lambda c: c.keys_seen >= c.seqlen_k,
        "some keys are seen": lambda c: 0 < c.keys_seen < c.seqlen_k,
        "offset past the queries": lambda c: c.offset >= c.seqlen_q,
        "a tile that spans more than 2**24 tokens": lambda c: c.factor * c.tile_n > 1 << 24,
        "a tail of queries": lambda c: c.seqlen_q % c.tile_m,
        "a tail of keys": lambda c: c.seqlen_k % c.tile_n,
    },
    strategies.ranks: {
        "an empty sequence": lambda c: c.lengths is not None and 0 in c.lengths,
        **{f"differs {name}": lambda c, name=name: c.differs == name for name in DIFFERENCES},
    },
    strategies.texts: {
        "the same text": lambda c: c.old == c.new,
        "an empty text": lambda c: not c.old or not c.new,
        "carriage returns": lambda c: "\r" in c.old + c.new,
    },
    strategies.served: {
        "pages shared": lambda c: c.shared,
        "a sequence without new tokens": lambda c: any(0 in call for call in c.counts),
        "one token each": lambda c: any(set(call) == {1} for call in c.counts),
    },
    prompts: {
        "padding behind": lambda c: any(right for _, right in c.rows),
        "padding on both sides": lambda c: any(left and right for left, right in c.rows),
        "a row of padding": lambda c: any(left == c.T for left, _ in c.rows),
        "padding alone": lambda c: all(left == c.T for left, _ in c.rows),
        "a turn that ended early": lambda c: any(c.ended),
        "a cache of transformers": lambda c: c.first and not c.ours,
    },
    strategies.layer_cases: {
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
    },
}
quiet = settings(
    max_examples=5_000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip


def reached(strategy: SearchStrategy, has: Has, most: int = 5_000) -> bool:
    """True if a case is drawn that has a feature."""
    try:
        find(strategy, lambda case: bool(has(case)), settings=settings(quiet, max_examples=most))
    except NoSuchExample:
        return False
    return True


def without(has: Has) -> Has:
    return lambda case: not has(case)


@pytest.mark.parametrize("strategy", FEATURES, ids=lambda strategy: strategy.__name__)
def test_features_are_reached(strategy: Callable) -> None:
    for name, has in FEATURES[strategy].items():
        assert reached(strategy(), has), f"never drawn: {name}"
        assert reached(strategy(), without(has)), f"always drawn: {name}"
    assert not reached(strategy(), lambda case: False, most=50)


def test_kinds_meet() -> None:
    """The options compiled for cover each feature, and most pairs of mask and lists."""
    for name, values in {
        "D": {64, 96, 128, 192, 256},
        "mask": {"none", "causal", "window", "compressed", "table"},
        "form": {*FORMS, "shared"},
        "list_heads": {1, 2, 4},
        "expanded": {"", "batch", "heads"},
        "passes": {None, 1, 2},
        "dtype": {"bfloat16", "float16"},
    }.items():
        assert {getattr(kind, name) for kind in KINDS} == values
    masked = {(kind.mask, kind.lists is None) for kind in KINDS}
    assert masked >= {(m, s) for m in ("causal", "compressed") for s in (False, True)}
    masks = {"none", "causal", "window", "compressed", "table"}
    blocks = {kind.block for kind in KINDS if kind.lists}
    assert [{block[side] for block in blocks} for side in (0, 1)] == [{64, 128, 192, 256}, {64, 96, 128}]
    assert {(kind.mask, kind.block[1]) for kind in KINDS if kind.lists} >= {(m, n) for m in masks for n in (64, 128)}
    exact = [kind for kind in KINDS if kind.lists and kind.deterministic]
    assert {kind.form for kind in exact if kind.packed} == set(FORMS), "deterministic lists of every form"
    assert {(bool(kind.packed), kind.plan) for kind in exact} == {(p, s) for p in (False, True) for s in (0, 1)}
    ordered = [kind for kind in exact if not two_passes(kind)]
    assert {kind.form for kind in ordered if kind.packed} == set(FORMS), "and in one pass"
    assert {bool(kind.packed) for kind in BY_CAPACITY} == {False, True}
    both = [kind for kind in KINDS if two_passes(kind)]
    assert {kind.form for kind in both if kind.packed} >= {"compact", "stacked", "ragged"}
    for name, values in {
        "D": {64, 96, 128}, "list_heads": {1, 2, 4}, "plan": {0, 1}, "deterministic": {False, True},
        "lists": {"both", "no full"}, "mask": {"none", "causal", "window", "table"},
    }.items():  # fmt: skip
        assert {getattr(kind, name) for kind in both} == values, f"{name} of kinds in two passes"
    assert "shared" in {kind.form for kind in both} and {kind.block[1] for kind in both} == {64, 128}


BY_CAPACITY = [kind for kind in KINDS if passes_by_capacity(kind)]
AUTOGRAD = (lambda c: c.autograd, lambda c: not c.autograd)
LENGTHS = (
    lambda c: any(0 in pair for pair in c.lengths),  # an empty sequence
    lambda c: len(c.lengths) > 5,  # many tiny ones
    lambda c: max(map(max, c.lengths)) >= 1500,  # one huge one
    lambda c: c.layout == "fused",
)
FACTORS = (lambda c: c.compress[0] > 99, lambda c: c.compress[1] > 99, lambda c: c.compress[1] < -99)
OF_KINDS = [
    (call(**COMPRESSED), FACTORS, (lambda c: c.compress == (1, 0),)),  # that is plain causal
    (listed(causal=True), (lambda c: c.T_q == 1, lambda c: c.T_k < c.T_q, lambda c: c.T_k >= c.T_q, *AUTOGRAD), ()),
    *((kind, (in_two_passes, without(in_two_passes), *AUTOGRAD), ()) for kind in BY_CAPACITY),
    *(  # semaphore values are ignored, through autograd too
        (kind, (in_two_passes, lambda c: c.locks, lambda c: not c.locks, *AUTOGRAD), (without(in_two_passes),))
        for kind in KINDS
        if kind.passes == 2 and kind.deterministic
    ),
    *(  # asked for, through autograd too, which would take two by itself: its lists say so
        (kind, (without(in_two_passes), lambda c: c.locks, *AUTOGRAD), (in_two_passes, lambda c: not c.locks))
        for kind in [kind for kind in KINDS if kind.passes == 1 and kind.deterministic][:1]
    ),
    *((kind, LENGTHS, ()) for kind in [kind for kind in KINDS if kind.packed][:1]),
]


@pytest.mark.parametrize(("kind", "wanted", "never"), OF_KINDS, ids=[repr(kind) for kind, _, _ in OF_KINDS])
def test_what_kinds_are_drawn_with(kind: Attention, wanted: tuple[Has, ...], never: tuple[Has, ...]) -> None:
    assert all(reached(strategies.attention(kind), has) for has in wanted)
    assert not any(reached(strategies.attention(kind), has, most=100) for has in never)


def heads_of_a_cta(case: Attention) -> int:
    """Query heads that a CTA of SM90 backward loops over under a window, on a GPU of 132 multiprocessors."""
    T_q, T_k = (tuple(pair[side] for pair in case.lengths) for side in (0, 1))
    return two_pass.window_heads_per_cta(
        case.window, (sum(T_q), sum(T_k)) if case.packed else (T_q[0], T_k[0]),
        batch=1 if case.packed else len(case.lengths), heads=(case.Hq, case.Hkv),
        tile=(128 if case.D <= 64 else 64, 128), sms=132,
    )  # fmt: skip


def test_ctas_loop_over_several_heads() -> None:
    """In backward under a window, all heads of a group and some, each where bits are to repeat and where not."""
    found: dict[tuple[bool, bool], set[str]] = {}
    loops = {
        "some": lambda c: 1 < heads_of_a_cta(c) < c.Hq // c.Hkv,
        "all": lambda c: heads_of_a_cta(c) == c.Hq // c.Hkv,
    }
    for kind in (kind for kind in KINDS if kind.mask == "window" and kind.Hq >= 24):
        drawn = {name for name, has in loops.items() if reached(strategies.attention(kind), has, most=100)}
        found.setdefault((bool(kind.packed), kind.deterministic), set()).update(drawn)
    assert set(found) == {(False, False), (False, True), (True, True)}
    assert all(found.values()) and set().union(*found.values()) == {*loops}


@pytest.mark.parametrize("case", [case for case in sanitize.CASES if isinstance(case, Attention)], ids=repr)
def test_stages_are_filled_anew(case: Attention) -> None:
    """Races are about the earlier content of a stage: a CTA of backward loops over more rows than two stages hold."""
    (rows, _), (block_q, block_k) = case.lengths[0], case.block or (128, 128)
    if case.lists:
        lists = backward_lists(case, device="cpu")
        counts = lists.mask_block_cnt + (0 if lists.full_block_cnt is None else lists.full_block_cnt)
        most = counts if lists.plan is None else lists.plan[:, 4] - lists.plan[:, 3]
        rows = block_q * int(most.max())
    elif case.mask == "window":
        assert case.window[1] is None or case.window[0] + block_k > 384
    assert rows > 2 * (64 if block_k == 64 else 128)
