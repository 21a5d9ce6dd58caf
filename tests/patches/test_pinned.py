"""The queue of this repository on the real wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fuzz.attention import compile_case
from fuzz.case import Attention
from patches.__main__ import main
from patches.digest import overlay_files
from patches.materialise import checked_overlay, load_pin, load_queue, patched_files, repository
from patches.wheel import fetch

sys.path.insert(0, str(Path(__file__).parents[1] / "flash_attn"))

from exported_calls import import_all  # noqa: E402
from fa_compile import Worker  # noqa: E402
from fa_dq import compile_pass  # noqa: E402

ROOT = repository()
IDENTITY = {f"GIT_{who}_{what}": "somebody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


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
    return root


def test_check_is_clean(capsys):
    status = main(["check"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.sweep
def test_tree_and_save_give_the_queue_back(copy):
    assert main(["--repository", str(copy), "tree"]) == 0
    expected = patched_files(ROOT)
    assert all((copy / ".tree" / name).read_bytes() == data for name, data in expected.items())
    before = {path.name: path.read_bytes() for path in (copy / "patches").iterdir() if path.is_file()}
    assert main(["--repository", str(copy), "save"]) == 0
    assert {path.name: path.read_bytes() for path in (copy / "patches").iterdir() if path.is_file()} == before


@pytest.fixture(scope="module")
def exported(wheel, tmp_path_factory) -> Path:
    """Upstream's files, to which `git am` has applied the exported patches."""
    upstream, patches = tmp_path_factory.mktemp("upstream"), tmp_path_factory.mktemp("export")
    shutil.unpack_archive(wheel, upstream, "zip")
    assert main(["export", "--output", str(patches)]) == 0
    commands = f"git init -q && git add flash_attn && git commit -qm Upstream && git am -q {patches}/*.patch"
    subprocess.run(commands, shell=True, cwd=upstream, check=True, env=os.environ | IDENTITY)
    return upstream


def test_the_exported_patches_make_the_package(exported):
    names = subprocess.check_output(["git", "-C", str(exported), "ls-files"], text=True).splitlines()
    patched = patched_files(ROOT)
    expected = patched | {name: path.read_bytes() for name, path in checked_overlay(ROOT, patched).items()}
    assert {name: (exported / name).read_bytes() for name in names} == expected
    subjects = subprocess.check_output(["git", "-C", str(exported), "log", "--reverse", "--format=%s"], text=True)
    patches = [patch.header.subject for patch in load_queue(ROOT)]
    assert subjects.splitlines() == ["Upstream", *patches, "Add the modules that callers import"]


@pytest.mark.sweep  # the test before shows that the files are those that all other tests compile
def test_kernels_compile_from_the_exported_files(exported, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(exported))
    ours = overlay_files(ROOT)
    with closing(Worker("sm_90")) as sm90, closing(Worker("sm_100")) as sm100:
        found = sm90.trace(import_all, [name.removesuffix(".py").replace("/", ".") for name in ours])
        assert found == [str(exported / name) for name in ours]
        listed = Attention(D=128, T_q=512, T_k=512, lists="both", block=(128, 128))
        for worker, case in (
            (sm90, Attention(D=128, T_q=512, T_k=32, compress=(16, 15))),
            (sm90, listed),
            (sm100, listed),
        ):
            worker.trace(compile_case, case)
        sm90.trace(compile_pass, listed, "dq")
