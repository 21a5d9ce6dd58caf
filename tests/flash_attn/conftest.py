"""The architectures to compile for, each with one worker process a session."""

from types import SimpleNamespace

import pytest
from fa_compile import MULTIPROCESSORS, Worker, shared_worker

# Under xdist a group stays on one worker: an architecture's kernels are imported once, not twice.
ARCHITECTURES = [pytest.param(arch, marks=pytest.mark.xdist_group(arch)) for arch in MULTIPROCESSORS]


@pytest.fixture(params=ARCHITECTURES)
def compiler(request: pytest.FixtureRequest) -> Worker:
    """A worker for each architecture in turn."""
    return shared_worker(request.param)


@pytest.fixture
def compiler_sm90() -> Worker:
    return shared_worker("sm_90")


@pytest.fixture
def compiler_sm100() -> Worker:
    return shared_worker("sm_100")


@pytest.fixture
def by_warp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernels by token compute products warp by warp, as SM100's do."""
    from flash_attn.cute.multiply import form

    monkeypatch.setattr(form, "FORCED", request.param)
    return request.param


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that get as far as the autograd function say so, and do no more."""
    from flash_attn.cute import interface

    stand_in = SimpleNamespace(apply=lambda *args: "launched")
    monkeypatch.setattr(interface, "FlashAttnFunc", stand_in)
    monkeypatch.setattr(interface, "FlashAttnVarlenFunc", stand_in)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture, arch in (("compiler_sm90", "sm_90"), ("compiler_sm100", "sm_100")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.xdist_group(arch))
