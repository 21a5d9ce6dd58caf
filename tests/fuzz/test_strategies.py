"""The strategies reach what they claim to reach, and the printed coverage is what was drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis.errors import NoSuchExample

from fuzz import strategies
from fuzz.case import Kind
from fuzz.features import CLAIMS, FAULT_CLAIMS, features
from fuzz.kinds import KINDS

WAYS: dict[str, Callable] = {
    "blocks": strategies.blocks,
    "packed": strategies.packed,
    "edges": strategies.edges,
    "windows": strategies.windows,
    "texts": strategies.texts,
    "fields": strategies.fields,
    "layer": strategies.layer_cases,
    "attention": lambda: strategies.attention(Kind(mask="causal")),
}
quiet = settings(
    max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
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


@pytest.mark.parametrize("name", WAYS)
def test_claims_are_reached(name: str) -> None:
    (kind,), counts = drawn(WAYS[name]())
    missing = sorted(set(CLAIMS[kind]) - set(counts))
    assert not missing, f"never drawn: {missing}; drawn: {dict(counts)}"


@pytest.mark.parametrize("way", [strategies.blocks, strategies.packed])
def test_every_fault_is_drawn(way: Callable) -> None:
    (kind,), counts = drawn(way(faults=True))
    assert set(FAULT_CLAIMS[kind]) <= set(counts)


def test_packed_kernels_see_every_kind_of_pack() -> None:
    kind = next(kind for kind in KINDS if kind.packed)
    _, counts = drawn(strategies.attention(kind))
    assert {"an empty sequence", "many tiny sequences", "one huge sequence", "layout fused"} <= set(counts)


def test_data_never_changes_what_kernels_are_compiled_for() -> None:
    for kind in KINDS[:3]:
        with pytest.raises(NoSuchExample):
            find(strategies.attention(kind), lambda case: case.kind != kind, settings=settings(quiet, max_examples=50))


def test_kinds_meet() -> None:
    """What is compiled for covers each feature, and most pairs of mask and lists."""
    for name, values in {
        "D": {64, 128, 192},
        "mask": {"none", "causal", "window", "compressed", "table"},
        "form": {"padded", "compact", "stacked", "ragged"},
        "heads": {"one", "kv", "q"},
        "block_k": {64, 128},
        "dtype": {"bfloat16", "float16"},
    }.items():
        assert {getattr(kind, name) for kind in KINDS} == values
    assert {(kind.mask, kind.lists) for kind in KINDS} >= {(m, s) for m in ("causal", "compressed") for s in (0, 1)}
