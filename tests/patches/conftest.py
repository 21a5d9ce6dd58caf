"""A small repository on a wheel made up here, so that the commands can be tried on anything."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from patches.__main__ import main
from patches.digest import PACKAGES
from patches.wheel import WHEEL_VARIABLE, digest

FIRST = '''"""The first module of the made-up package."""


def count_up_to(limit: int) -> list[int]:
    result = []
    for number in range(limit):
        result.append(number)
    return result


def the_last_one_counted(limit: int) -> int:
    return count_up_to(limit)[-1]
'''
SECOND = '''"""The second module."""

from flash_attn.cute.first import count_up_to


def total_of_all_numbers(limit: int) -> int:
    return sum(count_up_to(limit))
'''
MODULES = {
    "flash_attn/cute/__init__.py": '"""A made-up package."""\n',
    "flash_attn/cute/first.py": FIRST,
    "flash_attn/cute/second.py": SECOND,
}
TEST = """from flash_attn.cute.first import count_up_to


def test_counts_to_the_end():
    assert count_up_to(2)[-1] == 2
"""
# Of these upstream's files name only the first; each of the others names the next, in a way of its own.
OURS = {
    "ours.py": 'OURS = True\nIMPORTED_LATER = "flash_attn.cute.part.kernel"\n',
    "part/__init__.py": "from . import loads\n",
    "part/loads.py": "from ..below import BELOW\n",
    "part/kernel.py": "KERNEL = True\n",
    "below.py": "BELOW = True\n",
    "facade.py": "from flash_attn.cute.part import kernel\n",
}
TRAILERS = """
Reason: bugfix
Upstream-Status: Pending
Test: tests/flash_attn/test_first.py
"""
BODY = "Why it is needed.\n"


def make_wheel(folder: Path, version: str, modules: dict[str, str]) -> Path:
    """A wheel of the name that the real one has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flash_attn_4-{version}-py3-none-any.whl"
    info = f"flash_attn_4-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in modules.items():
            wheel.writestr(zipfile.ZipInfo(name), text)
        for name in ("LICENSE", "AUTHORS"):
            wheel.writestr(zipfile.ZipInfo(f"{info}/licenses/{name}"), f"{name} of the made-up package\n")
    return path


@dataclass
class Sandbox:
    """A repository with a queue, and the commands on it."""

    root: Path
    wheels: Path
    capsys: pytest.CaptureFixture

    @property
    def tree(self) -> Path:
        return self.root / ".tree"

    def run(self, *args: str, status: int = 0) -> str:
        """Run a command, expect an exit status, and return what it printed."""
        self.capsys.readouterr()
        found = main(["--repository", str(self.root), *args])
        printed = self.capsys.readouterr()
        assert found == status, printed.out + printed.err
        return printed.out + printed.err

    def git(self, *args: str) -> str:
        command = ["git", "-c", "user.name=Somebody", "-c", "user.email=somebody@localhost", *args]
        return subprocess.run(command, cwd=self.tree, check=True, capture_output=True, text=True).stdout.strip()

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.tree / "flash_attn" / "cute" / name
        text = path.read_bytes().decode()
        assert old in text
        path.write_bytes(text.replace(old, new, 1).encode())

    def commit(self, subject: str, trailers: str = TRAILERS, body: str = BODY) -> None:
        self.git("commit", "--all", "--quiet", "--message", f"{subject}\n\n{body}{trailers}")

    @property
    def names(self) -> list[str]:
        """The names of the patch files."""
        return sorted(path.stem for path in (self.root / "patches").glob("*.patch"))

    def patch(self, name: str) -> Path:
        return self.root / "patches" / f"{name}.patch"

    def pin(self, path: Path, version: str) -> None:
        """Write upstream.toml for a wheel."""
        (self.root / "patches" / "upstream.toml").write_text(
            f'distribution = "flash-attn-4"\nversion = "{version}"\n'
            f'sha256 = "{digest(path.read_bytes())}"\nrelease = "1"\n'
        )


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Sandbox:
    """A repository whose queue is empty."""
    sandbox = Sandbox(tmp_path / "repository", tmp_path / "wheels", capsys)
    wheel = make_wheel(sandbox.wheels, "1.0", MODULES)
    monkeypatch.setenv(WHEEL_VARIABLE, str(sandbox.wheels))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # for the tests that `check --bite` runs
    files = {
        "UPSTREAM.md": "<!-- written by `python -m patches save`: do not edit -->\n<!-- end -->\n",
        **{f"flash_attn/cute/{name}": text for name, text in OURS.items()},
        **{f"{name}/__init__.py": "" for name in PACKAGES},
        "tests/flash_attn/test_first.py": TEST,
    }
    for name, text in files.items():
        path = sandbox.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (sandbox.root / "patches").mkdir()
    sandbox.pin(wheel, "1.0")
    sandbox.run("tree")
    return sandbox


@pytest.fixture
def sandbox(empty: Sandbox) -> Sandbox:
    """A repository with two patches, saved."""
    empty.edit("first.py", "range(limit)", "range(limit + 1)")
    empty.commit("Count the limit too")
    empty.edit("second.py", "return sum", "from flash_attn.cute import ours\n\n    assert ours.OURS\n    return sum")
    empty.commit("Call our own module")
    empty.run("save")
    return empty
