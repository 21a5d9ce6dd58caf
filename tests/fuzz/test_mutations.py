"""Planted faults are found within their time, by the properties that name them, and only while they are planted."""

from __future__ import annotations

import pytest

from fuzz.failures import parse_case
from fuzz.mutations import MUTATIONS, all_mutations, planted
from fuzz.prop import GPU, properties
from fuzz.run import Budget, check_one, run_property

ALL = all_mutations()
HANGS = "codec hangs"  # for the watchdog, see test_pool
ON_A_CPU = [name for name, mutation in ALL.items() if not mutation.needs and name != HANGS]


def test_there_are_enough() -> None:
    assert len(ON_A_CPU) >= 12 and MUTATIONS is not None
    assert {"leaking selection", "missing tail mask", "swapped write order", "dropped last block"} < set(ALL)
    assert all(mutation.what and mutation.properties for mutation in ALL.values())


@pytest.mark.parametrize("name", ON_A_CPU)
def test_it_is_found(name: str) -> None:
    chosen = [prop for prop in properties().values() if prop.name.startswith(ALL[name].properties) and not prop.needs]
    assert chosen
    budget = Budget(examples=400, seconds=ALL[name].seconds / len(chosen), shrink=0.3, seed=1)
    with planted(name):
        failures = (run_property(prop, budget).failure for prop in chosen)
        failure = next((failure for failure in failures if failure is not None), None)
    assert failure is not None, f"none of {[prop.name for prop in chosen]} noticed"
    case = parse_case(failure.case)
    assert repr(case) == failure.case
    assert check_one(properties()[failure.property], case) is None, "it fails without the fault as well"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, mutation in ALL.items() if mutation.needs == GPU])
def test_it_is_found_in_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attn.cute import interface
    from flash_attn.cute.cache_utils import JITCache

    for function in ("_flash_attn_fwd", "_flash_attn_bwd"):  # never on disk
        monkeypatch.setattr(getattr(interface, function), "compile_cache", JITCache())
    prop = properties()["attention.is its definition"]
    suiting = [i for i, kind in enumerate(prop.kinds) if ALL[name].suits(kind)]
    with planted(name):
        outcomes = (run_property(prop, Budget(examples=15, shrink=0), kind=i) for i in suiting)
        assert any(outcome.failure is not None for outcome in outcomes)
