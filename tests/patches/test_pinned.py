"""The queue of this repository on the real wheel."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from patches.__main__ import main
from patches.materialise import apply_patch, checked_overlay, load_pin, load_queue, patched_files, repository
from patches.wheel import WHEEL_VARIABLE, fetch, licence_files, package_files

ROOT = repository()
IDENTITY = ("-c", "user.name=Somebody", "-c", "user.email=somebody@localhost")


@pytest.fixture(scope="module")
def wheel() -> Path:
    return fetch(load_pin(ROOT))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the commands read and write."""
    root = tmp_path / "repository"
    names = ("patches", "flash_attn", "tests/flash_attn")
    files = [path for name in names for path in (ROOT / name).rglob("*") if path.suffix != ".pyc" and path.is_file()]
    for path in [*files, ROOT / "UPSTREAM.md"]:
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (root / "nsa_layer").mkdir()
    return root


def test_check_is_clean(capsys):
    status = main(["check"])
    assert status == 0, capsys.readouterr().out


def test_tree_and_save_give_the_queue_back(copy):
    assert main(["--repository", str(copy), "tree"]) == 0
    expected = patched_files(ROOT)
    assert all((copy / ".tree" / name).read_bytes() == data for name, data in expected.items())
    before = {path.name: path.read_bytes() for path in (copy / "patches").iterdir() if path.is_file()}
    assert main(["--repository", str(copy), "save"]) == 0
    assert {path.name: path.read_bytes() for path in (copy / "patches").iterdir() if path.is_file()} == before


def test_git_am_takes_the_exported_files_on_upstreams_tree(wheel, tmp_path):
    upstream = tmp_path / "upstream"
    for name, data in package_files(wheel).items():
        (upstream / name).parent.mkdir(parents=True, exist_ok=True)
        (upstream / name).write_bytes(data)

    def git(*args: str) -> str:
        command = ["git", *IDENTITY, "-C", str(upstream), *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Upstream")
    assert main(["export", "--output", str(tmp_path / "export")]) == 0
    git("am", *map(str, sorted((tmp_path / "export").glob("*.patch"))))

    patched = patched_files(ROOT)
    expected = patched | {name: path.read_bytes() for name, path in checked_overlay(ROOT, patched).items()}
    found = {name: (upstream / name).read_bytes() for name in git("ls-files").splitlines()}
    assert {name: data for name, data in found.items() if name in patched} == patched
    assert found == {name: data for name, data in expected.items() if name in found}
    assert int(git("rev-list", "--count", "HEAD")) == 1 + len(load_queue(ROOT))


def test_the_pin_moves_to_a_version_that_took_a_patch(wheel, copy, tmp_path, monkeypatch, capsys):
    queue = load_queue(ROOT)
    files = apply_patch(package_files(wheel), queue[0])
    touched = {edit.path for patch in queue for edit in patch.edits}
    files = {name: data if name in touched else data + b"# later\n" for name, data in files.items()}
    version = load_pin(ROOT).version + ".post1"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / wheel.name).write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(wheels / f"flash_attn_4-{version}-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for name, data in licence_files(wheel).items():
            archive.writestr(f"flash_attn_4-{version}.dist-info/licenses/{name}", data)
    monkeypatch.setenv(WHEEL_VARIABLE, str(wheels))
    assert main(["--repository", str(copy), "rebase", version]) == 0
    assert f"taken by upstream, dropped: {queue[0].header.subject}" in capsys.readouterr().out
    assert [patch.slug for patch in load_queue(copy)] == [patch.slug for patch in queue[1:]]
    assert main(["--repository", str(copy), "check"]) == 0
