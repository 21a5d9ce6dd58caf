"""Every property that needs no GPU, for as long as the `pr` profile says; those that need one, briefly where one is."""

from __future__ import annotations

import pytest

from fuzz.prop import GPU, properties
from fuzz.run import Budget, run_property

ALL = properties()


def assert_holds(name: str, kind: int, budget: Budget) -> None:
    outcome = run_property(ALL[name], budget, kind=kind)
    assert outcome.failure is None, f"{outcome.failure.case}\n{outcome.failure.error}\n{outcome.failure.trace}"
    assert outcome.examples, "no example ran"


@pytest.mark.parametrize("name", [name for name, prop in ALL.items() if not prop.needs])
def test_it_holds(name: str) -> None:
    assert_holds(name, 0, Budget(examples=ALL[name].pr, seconds=30, shrink=10))


# Some kinds of kernels of each property: compiling them all takes minutes. `python -m fuzz` takes all.
KERNELS = [(name, kind) for name, prop in ALL.items() if prop.needs == GPU for kind in range(0, len(prop.kinds), 6)]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), KERNELS)
def test_it_holds_for_kernels(name: str, kind: int) -> None:
    assert_holds(name, kind, Budget(examples=8, seconds=20, shrink=10))
