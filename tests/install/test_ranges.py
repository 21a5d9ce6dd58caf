"""The oldest and the newest of the declared ranges work, and constraints.txt is what its command writes.

PyTorch is the installed one, since others are gigabytes: ``OLDEST_TORCH=torch==2.11.0`` has the oldest ranges tested
with another.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from patches.materialise import repository
from patches.tree import DEFAULT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = repository()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RANGES = [Requirement(line) for line in (*PROJECT["dependencies"], *EXTRAS["tools"], *EXTRAS["hf"])]
INDEX = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet", "setuptools"]
# transformers, safetensors and matplotlib; a compilation, with the DSL and tvm-ffi.
TESTS = ("tests/nsa_layer/test_hf.py", "tests/nsa_tools/test_demo.py", "tests/flash_attn/test_compiling.py")


@pytest.fixture(autouse=True, scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    if subprocess.run([*INDEX, "-d", str(tmp_path_factory.mktemp("found"))]).returncode:
        pytest.skip("no package index at hand")


def oldest() -> list[str]:
    bounds = {x.name: spec.version for x in RANGES for spec in x.specifier if spec.operator == ">="}
    torch = bounds.pop("torch")
    assert {"transformers", "accelerate", "apache-tvm-ffi", "matplotlib"} < set(bounds) and torch == "2.11"
    return [f"{name}=={version}" for name, version in bounds.items()] + os.environ.get("OLDEST_TORCH", "").split()


def between() -> list[str]:
    return ["transformers==5.23.0", *EXTRAS["tools"]]


def newest() -> list[str]:
    return ["--upgrade", *(f"{x.name}{x.specifier}" for x in RANGES if x.name != "torch")]


@pytest.mark.sweep  # minutes each
@pytest.mark.parametrize("wanted", [oldest, between, newest])
def test_a_range(wanted, environment, tmp_path):
    environment.run("-m", "pip", "install", "--quiet", *wanted(), cwd=tmp_path)
    paths = os.pathsep.join((str(ROOT / DEFAULT), str(ROOT)))
    ran = environment.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not (sweep or gpu)", *TESTS),
        cwd=ROOT,
        PYTHONPATH=paths,
    )
    assert " passed" in ran.stdout and "failed" not in ran.stdout


def test_constraints_are_those_that_the_command_writes(tmp_path):
    """But for newer releases: what fits pyproject.toml is kept."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["make", "constraints", "UPGRADE=", f"PYTHON={sys.executable}"], cwd=tmp_path, check=True)
    assert (tmp_path / "constraints.txt").read_text() == (ROOT / "constraints.txt").read_text()
