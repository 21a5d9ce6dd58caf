"""SHARD=i/n keeps the i-th of n parts, which together are all tests."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest


def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shard: str) -> list[int]:
    """The numbers of those of 100 tests that a shard keeps."""
    (conftest,) = (p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "_keep_shard"))
    monkeypatch.setenv("SHARD", shard)
    items = [SimpleNamespace(location=("tests/test_one.py",), name=f"test[{i}]", number=i) for i in range(100)]
    conftest._keep_shard(Mock(), items)
    return [item.number for item in items]


def test_each_test_is_in_one_shard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [kept(request, monkeypatch, f"{i}/3") for i in (1, 2, 3)]
    assert all(parts) and sorted(sum(parts, [])) == kept(request, monkeypatch, "") == [*range(100)]
    for shard in ("0/2", "3/2", "2", "a/b"):
        with pytest.raises(pytest.UsageError, match="expected i/n with 1 <= i <= n"):
            kept(request, monkeypatch, shard)
