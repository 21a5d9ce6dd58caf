"""constraints.txt pins all that an install by the Makefile takes, for each Python, within the declared ranges."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINS = [Requirement(line) for line in LINES]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# Pinned by the Makefile, and only where there is no GPU: PyTorch's builds for GPUs bring the Triton that they need.
OF_MAKEFILE = {"torch", "triton"}


def pins(python: str) -> dict[str, str]:
    """The version of each package that is pinned for a Python, such as "3.11"; the first and the last of its releases
    agree."""
    found: dict[str, str] = {}
    for full in (f"{python}.0", f"{python}.99"):
        for pin in PINS:
            place = dict(python_version=python, python_full_version=full, sys_platform="linux", extra="")
            if pin.marker is None or pin.marker.evaluate(place | dict(platform_machine="x86_64")):
                version = str(pin.specifier).removeprefix("==")
                assert found.setdefault(canonicalize_name(pin.name), version) == version, pin.name
    return found


def declared() -> list[Requirement]:
    """All requirements of pyproject.toml, those on this project's own extras aside."""
    project = PROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), PROJECT["build-system"]["requires"]]
    lists += PROJECT["dependency-groups"].values()
    requirements = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in requirements if requirement.name != project["name"]]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_requirement_is_pinned_within_its_range(python: str) -> None:
    pinned = pins(python)
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        if name not in OF_MAKEFILE:
            assert requirement.specifier.contains(pinned[name]), f"{requirement}, pinned {pinned[name]}"


def test_it_holds_exact_versions_and_no_place_to_get_them_from() -> None:
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; [^/:@]+)?", line), line
    assert not OF_MAKEFILE & {pin.name for pin in PINS}
    assert LINES == sorted(LINES, key=lambda line: line.split("==")[0]), "not as `make constraints` writes it"


def test_the_makefile_pins_pytorch_within_its_range_and_takes_the_rest_from_the_file() -> None:
    makefile = (ROOT / "Makefile").read_text()
    torch, any_torch = re.search(r"^TORCH := .*,(torch==[\d.]+),(torch>=[\d.]+)\)$", makefile, re.M).groups()
    wanted = next(requirement for requirement in declared() if requirement.name == "torch")
    assert wanted.specifier == Requirement(any_torch).specifier
    assert wanted.specifier.contains(str(Requirement(torch).specifier).removeprefix("=="))
    assert makefile.count("-m pip install") == 2, "PIP_INSTALL, and the one for uv"


@pytest.mark.parametrize("python", PYTHONS)
def test_what_the_installed_pytorch_requires_is_pinned(python: str) -> None:
    """CUDA's libraries aside, whose versions each release of PyTorch names itself."""
    pinned = pins(python)
    requirements = map(Requirement, metadata.requires("torch") or ())
    general = [x for x in requirements if x.marker is None or x.marker.evaluate({"extra": "", "platform_system": ""})]
    assert len(general) >= 6
    for requirement in general:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
