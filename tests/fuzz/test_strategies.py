"""The strategies reach what they claim to reach, and the printed coverage is what was drawn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from flash_attn.cute.bwd_sm90 import two_pass
from fuzz import strategies
from fuzz.attention import both_lists, make_inputs
from fuzz.attention_lists import in_two_passes
from fuzz.case import FORMS, Attention
from fuzz.features import claims, faults, features
from fuzz.kinds import COMPRESSED, FEW, KINDS, call, listed, passes_by_capacity, two_passes
from fuzz.properties.models import prompts

WAYS: dict[str, Callable] = {
    "blocks": strategies.blocks,
    "faults of blocks": lambda: strategies.blocks(faults=True),
    "packed": strategies.packed,
    "faults of packed": lambda: strategies.packed(faults=True),
    "edges": strategies.edges,
    "windows": strategies.windows,
    "texts": strategies.texts,
    "fields": strategies.fields,
    "ranks": strategies.ranks,
    "served": strategies.served,
    "prompts": prompts,
    "faults of served": lambda: strategies.served(faults=True),
    "layer": strategies.layer_cases,
    "attention": lambda: strategies.attention(listed(causal=True)),
}
quiet = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def drawn(strategy: object) -> tuple[set[type], Counter]:
    kinds, counts = set(), Counter()

    @quiet
    @given(strategy)
    def draw(case: object) -> None:
        kinds.add(type(case))
        counts.update(features(case))

    draw()
    return kinds, counts


def assert_reached(strategy: object, wanted: Iterable[str], counts: Counter, most: int = 5_000) -> None:
    """Features that the examples behind `counts` lack are looked for among more: the first ones depend on the modules
    that a process has loaded, whose constants hypothesis draws too."""
    for claim in sorted(set(wanted) - set(counts)):
        more = settings(quiet, max_examples=most, phases=[Phase.generate])  # no smaller one
        try:
            find(strategy, lambda case, claim=claim: claim in features(case), settings=more)
        except NoSuchExample:
            pytest.fail(f"never drawn: {claim}; drawn: {dict(counts)}")


@pytest.mark.parametrize("name", WAYS)
def test_claims_are_reached(name: str) -> None:
    (kind,), counts = drawn(WAYS[name]())
    assert_reached(WAYS[name](), faults(kind) if "faults" in name else claims(kind), counts)


def test_a_claim_that_nothing_reaches_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="never drawn: a claim"):
        assert_reached(strategies.texts(), ["a claim"], Counter(), most=50)


def test_kernels_see_any_factor() -> None:
    pairs: set[tuple[int, int]] = set()

    @quiet
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
AUTOGRAD = {"autograd", "not autograd"}
OF_KINDS = [
    *((kind, {"two passes", "one pass"} | AUTOGRAD, set()) for kind in BY_CAPACITY),
    *(  # semaphore values are ignored, through autograd too
        (kind, {"two passes", "semaphore values", "no semaphore values"} | AUTOGRAD, {"one pass"})
        for kind in KINDS
        if kind.passes == 2 and kind.deterministic
    ),
    *(  # asked for, through autograd too, which would take two by itself: its lists say so
        (kind, {"one pass", "semaphore values"} | AUTOGRAD, {"two passes", "no semaphore values"})
        for kind in [kind for kind in KINDS if kind.passes == 1 and kind.deterministic][:1]
    ),
    *(
        (kind, {"an empty sequence", "many tiny sequences", "one huge sequence", "layout fused"}, set())
        for kind in [kind for kind in KINDS if kind.packed][:1]
    ),
]


# A set's repr differs from process to process, and all workers have to collect the same names.
@pytest.mark.parametrize(
    ("kind", "wanted", "never"), OF_KINDS, ids=lambda x: repr(sorted(x) if isinstance(x, set) else x)
)
def test_what_kinds_are_drawn_with(kind: Attention, wanted: set[str], never: set[str]) -> None:
    _, counts = drawn(strategies.attention(kind))
    assert_reached(strategies.attention(kind), wanted, counts)
    assert not never & set(counts)


def test_lists_decide_on_passes_in_batches_and_packs() -> None:
    assert {bool(kind.packed) for kind in BY_CAPACITY} == {False, True}


def test_ctas_loop_over_several_heads() -> None:
    """In backward under a window, all heads of a group and some, each where bits are to repeat and where not."""
    found: dict[tuple[bool, bool], Counter] = {}
    for kind in KINDS:
        if kind.mask == "window" and kind.Hq >= 24:
            _, counts = drawn(strategies.attention(kind))
            found.setdefault((bool(kind.packed), kind.deterministic), Counter()).update(counts)
    some, every = (f"a CTA loops over {which} heads of a group" for which in ("some", "all"))
    assert set(found) == {(False, False), (False, True), (True, True)}
    for counts in found.values():
        assert counts[some] + counts[every] >= 5, "of 100"
    total = sum(found.values(), Counter())
    assert total[some] >= 10 and total[every] >= 5
