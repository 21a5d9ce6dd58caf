"""Fixtures of all tests: the selection of those that run, and the run's pool of compiled kernels.

`gpu` tests run where CUDA is, on a GPU that the kernels support. `SHARD=i/n` keeps the i-th of n parts.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

import pytest
from fa_compile import MULTIPROCESSORS, Worker, shared_worker

from patches.gpu_memory import pytest_runtest_teardown  # noqa: F401, a hook

# Tests look at how kernels are compiled; one out of the user's cache would not be.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")

# Under xdist a group stays on one worker: an architecture's kernels are imported once, not twice.
ARCHITECTURES = [pytest.param(arch, marks=pytest.mark.xdist_group(arch)) for arch in MULTIPROCESSORS]


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of compiled kernels that all processes of this run share, and that goes with it."""
    if not hasattr(config, "workerinput"):  # xdist's workers inherit it
        folder = tempfile.mkdtemp(prefix="kernels-of-a-test-run-")
        os.environ["KERNEL_POOL"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(params=ARCHITECTURES)
def compiler(request: pytest.FixtureRequest) -> Worker:
    """A worker that compiles, for each architecture in turn."""
    return shared_worker(request.param)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without Python's garbage collector, which leaves alone for good all that was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _take_turns(items)
    _keep_shard(config, items)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10):
        return
    skip = pytest.mark.skip(reason="needs a Hopper or Blackwell GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _take_turns(items: list[pytest.Item]) -> None:
    """Cases of a test that are not swept anyway take turns on the architectures: the other ones are for sweeps."""
    traced: dict[object, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if "compiler" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("sweep"):
            arch = item.callspec.params["compiler"]
            traced.setdefault(item.function, {}).setdefault(arch, []).append(item)
    for by_arch in traced.values():
        for turn, cases in enumerate(by_arch.values()):
            for item in cases[1 - turn :: 2] if len(cases) > 1 else ():
                item.add_marker(pytest.mark.sweep)


def _keep_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the tests of other shards; each test's is a hash of its name, the same on every machine."""
    if not os.environ.get("SHARD"):
        return
    try:
        own, of = map(int, os.environ["SHARD"].split("/"))
    except ValueError:
        own, of = 0, 0
    if not 1 <= own <= of:
        raise pytest.UsageError(f"SHARD is {os.environ['SHARD']!r}, expected i/n with 1 <= i <= n")
    shards: tuple[list[pytest.Item], list[pytest.Item]] = [], []
    for item in items:
        name = f"{item.location[0]}::{item.name}"  # under xdist the node id has the group's name, too
        shards[zlib.crc32(name.encode()) % of == own - 1].append(item)
    dropped, items[:] = shards
    config.hook.pytest_deselected(items=dropped)
