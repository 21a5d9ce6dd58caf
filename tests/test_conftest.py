"""The shard of tests that a run keeps; the GPU memory that a test gives back to the run's other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    (module,) = (p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "_keep_shard"))
    return module


def kept(conftest: Any, monkeypatch: pytest.MonkeyPatch, shard: str) -> list[int]:
    """The numbers of those of 100 tests that a shard keeps."""
    monkeypatch.setenv("SHARD", shard)
    items = [SimpleNamespace(location=("tests/test_one.py",), name=f"test[{i}]", number=i) for i in range(100)]
    conftest._keep_shard(Mock(), items)
    return [item.number for item in items]


def test_each_test_is_in_one_shard(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [kept(conftest, monkeypatch, f"{i}/3") for i in (1, 2, 3)]
    assert all(parts) and sorted(sum(parts, [])) == kept(conftest, monkeypatch, "") == [*range(100)]
    for shard in ("0/2", "3/2", "2", "a/b"):
        with pytest.raises(pytest.UsageError, match="expected i/n with 1 <= i <= n"):
            kept(conftest, monkeypatch, shard)


@pytest.mark.parametrize("reserved, frees", [(1 << 30, 0), ((1 << 30) + 1, 1)])
def test_gpu_memory_goes_back_after_large_tests(
    conftest: Any, monkeypatch: pytest.MonkeyPatch, reserved: int, frees: int
) -> None:
    freed = Mock()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", freed)
    conftest.pytest_runtest_teardown()
    assert freed.call_count == frees
