"""A small repository on a wheel made up here, so that the commands can be tried on anything."""

from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from contextlib import redirect_stderr, redirect_stdout
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

    @property
    def tree(self) -> Path:
        return self.root / ".tree"

    def run(self, *args: str, status: int = 0) -> str:
        """Run a command, expect an exit status, and return what it printed."""
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(printed):
            found = main(["--repository", str(self.root), *args])
        assert found == status, printed.getvalue()
        return printed.getvalue()

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


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a repository with two patches, saved."""
    folder = tmp_path_factory.mktemp("saved")
    made = Sandbox(folder / "repository", folder / "wheels")
    wheel = make_wheel(made.wheels, "1.0", MODULES)
    files = {
        "UPSTREAM.md": "<!-- written by `python -m patches save`: do not edit -->\n<!-- end -->\n",
        **{f"flash_attn/cute/{name}": text for name, text in OURS.items()},
        **{f"{name}/__init__.py": "" for name in PACKAGES},
        "tests/flash_attn/test_first.py": TEST,
        "patches/upstream.toml": f'distribution = "flash-attn-4"\nversion = "1.0"\n'
        f'sha256 = "{digest(wheel.read_bytes())}"\nrelease = "1"\n',
    }
    for name, text in files.items():
        path = made.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WHEEL_VARIABLE, str(made.wheels))
        made.run("tree")
        made.edit("first.py", "range(limit)", "range(limit + 1)")
        made.commit("Count the limit too")
        made.edit("second.py", "return sum", "from flash_attn.cute import ours\n\n    assert ours.OURS\n    return sum")
        made.commit("Call our own module")
        made.run("save")
    return folder


@pytest.fixture
def sandbox(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A copy of a test's own."""
    folder = shutil.copytree(saved, tmp_path / "sandbox", symlinks=True)
    monkeypatch.setenv(WHEEL_VARIABLE, str(folder / "wheels"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # for the tests that `check --bite` runs
    return Sandbox(folder / "repository", folder / "wheels")
