"""Processes that are the ranks of groups of gloo: tests of context parallelism share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fuzz.rank_processes import ranks
from nsa_layer.operators import tape


@pytest.fixture(autouse=True)
def no_tapes() -> None:
    """Calls of an earlier test leave none, which would not see what a test replaces."""
    tape.forget()


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """``on_ranks(2, work, *args)`` runs ``work(group, *args)`` on each of 2 ranks, or of 4."""
    with ranks((2, 4), str(tmp_path_factory.mktemp("ranks") / "store")) as run:
        yield run


@pytest.fixture
def same_numbers() -> None:
    torch.manual_seed(0)
