"""The pytest hook of runs whose processes share a GPU: after a test each gives back the memory that it holds unused."""

from __future__ import annotations

import sys

import pytest

KEPT = 1 << 30  # bytes that a process may hold unused between tests


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Free the GPU memory that PyTorch holds unused after a large case."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
