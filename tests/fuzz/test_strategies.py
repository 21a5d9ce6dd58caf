"""The strategies reach every feature, and draw for kernels what their kinds are for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from flash_attn.cute.bwd_sm90 import two_pass
from fuzz import strategies
from fuzz.attention import both_lists, make_inputs
from fuzz.attention_lists import in_two_passes
from fuzz.case import FORMS, Attention, Blocks, Edge, Packed, Prompt, Ranks, Served, Texts, Window
from fuzz.features import FEATURES, features
from fuzz.kinds import COMPRESSED, FEW, KINDS, call, listed, passes_by_capacity, two_passes
from fuzz.properties.models import prompts
from nsa_tools.testing.cases import Case

WAYS: dict[type, Callable] = {
    Blocks: strategies.blocks,
    Packed: strategies.packed,
    Edge: strategies.edges,
    Window: strategies.windows,
    Texts: strategies.texts,
    Ranks: strategies.ranks,
    Served: strategies.served,
    Prompt: prompts,
    Case: strategies.layer_cases,
}
quiet = settings(
    max_examples=5_000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip


def reached(strategy: SearchStrategy, feature: str, most: int = 5_000) -> bool:
    """True if a case with a feature is drawn, or one without it if its name begins with "not "."""
    name, without = feature.removeprefix("not "), feature.startswith("not ")
    try:
        find(strategy, lambda case: (name in features(case)) != without, settings=settings(quiet, max_examples=most))
    except NoSuchExample:
        return False
    return True


@pytest.mark.parametrize("kind", WAYS)
def test_features_are_reached(kind: type) -> None:
    missed = [f"{no}{name}" for name in FEATURES[kind] for no in ("", "not ") if not reached(WAYS[kind](), no + name)]
    assert not missed
    assert not reached(WAYS[kind](), "of no case", most=50)


def test_kernels_see_any_factor() -> None:
    pairs: set[tuple[int, int]] = set()

    @settings(quiet, max_examples=100)
    @given(strategies.attention(call(**COMPRESSED)))
    def draw(case: Attention) -> None:
        pairs.add(case.compress)

    draw()
    assert min(len({factor for factor, _ in pairs}), len({offset for _, offset in pairs})) > 8
    assert (1, 0) not in pairs, "that is plain causal"


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
    both = [kind for kind in KINDS if two_passes(kind)]
    assert {kind.form for kind in both if kind.packed} >= {"compact", "stacked", "ragged"}
    for name, values in {
        "D": {64, 96, 128}, "list_heads": {1, 2, 4}, "plan": {0, 1}, "deterministic": {False, True},
        "lists": {"both", "no full"}, "mask": {"none", "causal", "window", "table"},
    }.items():  # fmt: skip
        assert {getattr(kind, name) for kind in both} == values, f"{name} of kinds in two passes"
    assert "shared" in {kind.form for kind in both} and {kind.block[1] for kind in both} == {64, 128}


def test_two_passes_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuzzing expects two passes exactly where a call on SM90 takes them: by argument, or as the lists alone say."""
    monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", "132")
    for kind, blocks in itertools.product(KINDS, (1, FEW, FEW + 1)):
        if not kind.lists or kind.compress:
            continue
        size = dict(packed=((128, blocks * kind.block[1]),)) if kind.packed else dict(T_k=blocks * kind.block[1])
        case = replace(kind, **size, pattern="full", full=1.0, spare=0)
        x, (forward, backward) = make_inputs(case, "cpu"), both_lists(case, "cpu").values()
        given = dict(arch=90, q=x.q, v=x.v, deterministic=kind.deterministic, forward=forward, backward=backward)
        for passes in {kind.passes, None}:
            assert two_pass.takes(passes, **given) == in_two_passes(case), case


BY_CAPACITY = [kind for kind in KINDS if passes_by_capacity(kind)]
AUTOGRAD = ("autograd True", "autograd False")
LENGTHS = ("an empty sequence", "many tiny sequences", "one huge sequence", "layout fused")
OF_KINDS = [
    (listed(causal=True), ("one token", "fewer keys", "not fewer keys", *AUTOGRAD), ()),
    *((kind, ("two passes", "not two passes", *AUTOGRAD), ()) for kind in BY_CAPACITY),
    *(  # semaphore values are ignored, through autograd too
        (kind, ("two passes", "semaphore values", "not semaphore values", *AUTOGRAD), ("not two passes",))
        for kind in KINDS
        if kind.passes == 2 and kind.deterministic
    ),
    *(  # asked for, through autograd too, which would take two by itself: its lists say so
        (kind, ("not two passes", "semaphore values", *AUTOGRAD), ("two passes", "not semaphore values"))
        for kind in [kind for kind in KINDS if kind.passes == 1 and kind.deterministic][:1]
    ),
    *((kind, LENGTHS, ()) for kind in [kind for kind in KINDS if kind.packed][:1]),
]


@pytest.mark.parametrize(("kind", "wanted", "never"), OF_KINDS, ids=repr)
def test_what_kinds_are_drawn_with(kind: Attention, wanted: tuple[str, ...], never: tuple[str, ...]) -> None:
    assert not [feature for feature in wanted if not reached(strategies.attention(kind), feature)]
    assert not [feature for feature in never if reached(strategies.attention(kind), feature, most=100)]


def test_lists_decide_on_passes_in_batches_and_packs() -> None:
    assert {bool(kind.packed) for kind in BY_CAPACITY} == {False, True}


def test_ctas_loop_over_several_heads() -> None:
    """In backward under a window, all heads of a group and some, each where bits are to repeat and where not."""
    found: dict[tuple[bool, bool], set[str]] = {}
    for kind in (kind for kind in KINDS if kind.mask == "window" and kind.Hq >= 24):
        names = [f"a CTA loops over {which} heads of a group" for which in ("some", "all")]
        drawn = {name for name in names if reached(strategies.attention(kind), name, most=100)}
        found.setdefault((bool(kind.packed), kind.deterministic), set()).update(drawn)
    assert set(found) == {(False, False), (False, True), (True, True)}
    assert all(found.values()) and set().union(*found.values()) == {*names}
