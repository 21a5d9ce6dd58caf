"""`python -m patches test-upstream`, on a small checkout with tests that pass, fail and skip."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from patches import upstream_tests
from patches.errors import QueueError
from patches.materialise import load_pin, repository
from patches.wheel import Pin

TESTS = """
import sys
from types import ModuleType, SimpleNamespace
import pytest
from flash_attn.cute import build
STOCK_ONLY = "deterministic bwd only on another card"

@pytest.mark.parametrize("case", range(70))
def test_passes(case): pass

def test_fails_on_ours(): assert build == "stock"

def test_always_fails(): assert False

@pytest.mark.skipif(True, reason=STOCK_ONLY)
def test_of_the_fork(): assert build == "patched"

def test_in_the_body():
    pytest.skip("padded Q + packed K")

def test_reference_is_compiled_anew(monkeypatch):
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    resets, q = [], torch.zeros(1, 1, 16, 16)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(True))
    flex_attention(q, q, q)
    assert not resets
    for i in range(2):
        flex_attention(q, q, q, score_mod=lambda score, b, h, m, n, sequence=i: score)
    assert len(resets) == 2

def test_leaves_gpu_memory():
    torch = sys.modules["torch"] = ModuleType("torch")
    torch.cuda = SimpleNamespace(held=2 << 30, memory_reserved=lambda: torch.cuda.held)
    torch.cuda.empty_cache = lambda: setattr(torch.cuda, "held", 0)

def test_finds_gpu_memory_free(): assert not sys.modules["torch"].cuda.held
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a pin, whose builds are modules that say their name, and a GPU."""
    root = tmp_path / "repository"
    (root / "patches").mkdir(parents=True)
    pinned = repository(None) / "patches" / "upstream.toml"
    (root / "patches" / "upstream.toml").write_text(pinned.read_text())
    ours = tmp_path / "patched" / "flash_attn" / "cute"
    ours.mkdir(parents=True)
    (ours / "__init__.py").write_text('build = "patched"')
    (ours / "build_info.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "patched"))
    monkeypatch.setattr(upstream_tests, "fetch", lambda pin: None)
    stock = {"flash_attn/cute/__init__.py": b'build = "stock"'}
    monkeypatch.setattr(upstream_tests, "package_files", lambda wheel: stock)
    monkeypatch.setattr(upstream_tests, "_card", lambda: "a card")
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "upstream"
    (folder / "tests" / "cute").mkdir(parents=True)
    (folder / "tests" / "cute" / "test_utils.py").write_text(TESTS)
    _git(folder, "init", "-q")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-qm", "tests")
    _git(folder, "tag", upstream_tests.pinned_tag(load_pin(repository(None))))
    return folder


def _git(folder: Path, *args: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e@localhost")
    subprocess.run(["git", "-C", str(folder), *who, *args], check=True)


def run(root: Path, checkout: Path, **options: object) -> int:
    return upstream_tests.test_upstream(root, checkout, workers=1, only="test_utils", **options)


@pytest.mark.sweep
def test_failures_that_stock_lacks_are_told(root: Path, checkout: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(QueueError, match="is of other tests than these; record stock's outcomes"):
        run(root, checkout)
    assert run(root, checkout, stock=True, shard=(2, 2)) == 0
    assert "test_utils: 32 of 77 cases" in capfd.readouterr().out
    assert not (root / upstream_tests.RECORD).exists(), "parts are left"
    assert run(root, checkout, stock=True, shard=(1, 2)) == 0
    record = json.loads((root / upstream_tests.RECORD).read_text())
    assert record["files"] == {"test_utils": {"passed": 74, "failed": 1, "skipped": 2}}
    assert record["failed"] == ["test_utils.py::test_always_fails"] and record["pinned"]

    assert run(root, root / upstream_tests.FOLDER) == 1
    said = capfd.readouterr().out
    assert "| test_utils | 73 | 2 | 2 | 74 | 1 | 2 |" in said
    assert "| test_utils | 2 | 0 | 0 |  |  |  |" in said, "lifted skips have a table of their own"
    verdict = said.rpartition("Skipped by upstream")[2]
    assert "FAILED test_utils.py::test_fails_on_ours" in verdict and "test_always_fails" not in verdict
    assert "1 failures that stock does not have" in said


def test_other_commits_and_builds_are_refused(root: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "tests" / "cute" / "test_utils.py").write_text(TESTS + "\n")
    _git(checkout, "commit", "-qam", "later")
    with pytest.raises(QueueError, match=r"is not at the tag fa4-v4\.0\.0\.beta\d+ .* HEAD is [0-9a-f]{40}"):
        run(root, checkout, stock=True)
    monkeypatch.setattr(upstream_tests, "_card", lambda: None)
    with pytest.raises(QueueError, match="no GPU here; .* is ready to be carried to one"):
        run(root, checkout, stock=True, any_commit=True)


def test_the_tag_of_a_version() -> None:
    assert upstream_tests.pinned_tag(Pin("flash-attn-4", "4.0.0b36", "0" * 64)) == "fa4-v4.0.0.beta36"
    assert upstream_tests.pinned_tag(Pin("flash-attn-4", "4.0.0", "0" * 64)) == "fa4-v4.0.0"
