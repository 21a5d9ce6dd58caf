"""Memory that shows what is not written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def filled() -> Iterator[None]:
    """`torch.empty` gives NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
