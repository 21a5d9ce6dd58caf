"""Markers: `gpu` tests run where CUDA is, on a GPU that the kernels support."""

from __future__ import annotations

import os

import pytest

# Tests look at how kernels are compiled; one out of the user's cache would not be.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10):
        return
    skip = pytest.mark.skip(reason="needs a Hopper or Blackwell GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
