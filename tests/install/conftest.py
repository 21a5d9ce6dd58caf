"""Checkouts and virtual environments in which the distribution is built and installed for real.

An environment has the packages of the one that runs the tests as links, since installing PyTorch and the compiler again
for each test would take longer than all the rest. What is built here and what only tools need is left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from patches.digest import PACKAGES
from patches.materialise import load_pin, repository, write_files
from patches.wheel import WHEEL_VARIABLE, fetch

ROOT = repository()
CHECKOUT = (
    "patches", "flash_attn", *PACKAGES, "tests", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md",
    "UPSTREAM.md",
)  # fmt: skip
ADDED = ("nsa_tools/__init__.py", "flash_attn/cute/a_package/__init__.py", "flash_attn/cute/a_package/module.py")
LEFT_OUT = ("flash_attn", *PACKAGES, "__editable__", "matplotlib", "safetensors", "tabulate", "tqdm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.install)
            # The wheel and the links are made once by the worker that runs all of these.
            item.add_marker(pytest.mark.xdist_group("install"))


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the variables that its processes get."""

    folder: Path
    variables: dict[str, str]

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(self, *args: str, cwd: Path, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python and expect an exit status."""
        how = dict(cwd=cwd, env=self.variables | variables, capture_output=True, text=True)
        done = subprocess.run([self.python, *args], **how)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def pip(self, *args: object, status: int = 0, **variables: str) -> str:
        """Install without dependencies and build isolation; what was printed."""
        done = self.run(
            *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"),
            *map(str, args),
            cwd=self.folder,
            status=status,
            **variables,
        )
        return done.stdout + done.stderr

    def inspect(self, cwd: Path, status: int = 0) -> tuple[dict, str]:
        """The report of `inspect --require-patched` on flash_attn.cute, and its complaints."""
        done = self.run("-m", "nsa_layer", "inspect", "--require-patched", "--json", cwd=cwd, status=status)
        return json.loads(done.stdout)["flash_attn.cute"], done.stderr


@pytest.fixture(scope="session")
def upstream_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned wheel, alone in a folder."""
    return Path(shutil.copy(fetch(load_pin(ROOT)), tmp_path_factory.mktemp("wheels")))


@pytest.fixture(scope="session")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the packages of the environment that runs the tests, without those that are left out."""
    folder = tmp_path_factory.mktemp("borrowed")
    for name in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        for path in Path(name).iterdir():
            if not path.name.startswith(LEFT_OUT):
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def environment(tmp_path: Path, borrowed: Path, upstream_wheel: Path) -> Environment:
    """A fresh environment that builds from the given wheel."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GIT_", "COV_"))}
    made = Environment(folder, variables | {WHEEL_VARIABLE: str(upstream_wheel.parent)})
    # addsitedir, not the path alone: the compiler's own .pth file is among the links.
    (made.site_packages / "borrowed.pth").write_text(f"import site; site.addsitedir({str(borrowed)!r})\n")
    return made


def copy_checkout(target: Path) -> Path:
    """A copy of what git holds of the repository, with a sub-package and every package of ours in it."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    target.mkdir(parents=True)
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        elif source.is_file():
            shutil.copy(source, target / name)
    write_files(target, {name: b"" for name in ADDED if not (target / name).exists()})
    return target


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a test's own."""
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory, upstream_wheel: Path) -> Path:
    """The wheel, built from a checkout in which the tests and an old build lie about."""
    folder = copy_checkout(tmp_path_factory.mktemp("build") / "checkout")
    (folder / "build/lib/nsa_layer").mkdir(parents=True)
    (folder / "build/lib/nsa_layer/left_over.py").write_text("")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."],
        cwd=folder,
        env=os.environ | {WHEEL_VARIABLE: str(upstream_wheel)},
        check=True,
    )
    return next((folder / "dist").glob("*.whl"))
