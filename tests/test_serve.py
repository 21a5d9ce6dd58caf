"""`examples/serve.py`: every sequence is what one call gives, pages that are wrong are found, and Ctrl-C ends a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import serve as example  # noqa: E402

SMALL = "--requests 6 --tokens 12 --slots 3 --pages {pages} --page {page}"
OPTIONS = [(16, "--layout HND"), (64, "--fp8"), (32, "--rule index --fp8"), (16, "--rule index --layout HND")]


def serve(page: int = 16, more: str = "") -> dict[str, float]:
    """In a pool that holds about two sequences."""
    return example.serve(example.options([*SMALL.format(page=page, pages=576 // page).split(), *more.split()]))


@pytest.mark.parametrize("page, more", OPTIONS)
def test_sequences_are_what_one_call_gives(page: int, more: str) -> None:
    counts = serve(page, more)
    assert counts["sequences"] == 6 and counts["tokens shared"] > 100 and counts["drafts taken back"] > 50


@pytest.mark.gpu
@pytest.mark.parametrize("page, more", OPTIONS)
def test_sequences_are_what_one_call_gives_on_the_kernels(page: int, more: str) -> None:
    test_sequences_are_what_one_call_gives(page, more)


def finds_too_much(original: Callable) -> Callable:
    """The page behind the known ones counts as known."""

    def take(pool: object, tokens: bytes, capacity: int) -> tuple[list[int], int]:
        pages, length = original(pool, tokens, capacity)
        return pages, min(length + pool.size, len(tokens) // pool.size * pool.size)

    return take


def lies_with_first_tokens(original: Callable) -> Callable:
    """A fault: where a block has several pages, sequences that share its first page share its compressed key."""

    def tables(pool: object, pages: torch.Tensor) -> dict[str, torch.Tensor]:
        first = pages[:, :: pool.config.stride // pool.size]
        return original(pool, pages) | dict(cmp_page_table=first)

    return tables


@pytest.mark.parametrize("name, fault", [("take", finds_too_much), ("tables", lies_with_first_tokens)])
def test_wrong_pages_are_found(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable) -> None:
    monkeypatch.setattr(example.Pool, name, fault(getattr(example.Pool, name)))
    with pytest.raises(AssertionError, match="from the whole call"):
        serve()


def test_a_run_that_is_interrupted_says_what_it_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = iter(range(20)), example.Engine.step

    def interrupted(engine: object) -> list:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(example.Engine, "step", interrupted)
    counts = serve()
    assert 0 < counts["sequences"] < 6 and counts["steps"] == 20
