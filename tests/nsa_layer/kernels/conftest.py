"""Workers that compile for an architecture, as the fork's tests have them; memory that shows what is not written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "flash_attn"))

from fa_compile import MULTIPROCESSORS, Worker, shared_worker  # noqa: E402


@pytest.fixture(params=[pytest.param(arch, marks=pytest.mark.xdist_group(arch)) for arch in MULTIPROCESSORS])
def compiler(request: pytest.FixtureRequest) -> Worker:
    """A worker for each architecture in turn."""
    return shared_worker(request.param)


@pytest.fixture
def filled() -> Iterator[None]:
    """`torch.empty` gives NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
