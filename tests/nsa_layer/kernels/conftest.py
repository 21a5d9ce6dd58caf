"""Workers that compile for an architecture, as the fork's tests have them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "flash_attn"))

from fa_compile import MULTIPROCESSORS, Worker, shared_worker  # noqa: E402


@pytest.fixture(params=[pytest.param(arch, marks=pytest.mark.xdist_group(arch)) for arch in MULTIPROCESSORS])
def compiler(request: pytest.FixtureRequest) -> Worker:
    """A worker for each architecture in turn."""
    return shared_worker(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of a test take turns on the architectures: the others of each case are for sweeps."""
    traced: dict[object, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if "compiler" in item.fixturenames:
            arch = item.callspec.params["compiler"]
            traced.setdefault(item.function, {}).setdefault(arch, []).append(item)
    for by_arch in traced.values():
        for turn, cases in enumerate(by_arch.values()):
            for item in cases[1 - turn :: 2] if len(cases) > 1 else ():
                item.add_marker(pytest.mark.sweep)
