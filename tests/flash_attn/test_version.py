"""The value of __version__ in a build, in an installed copy and in a bare source tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ASK = "import flash_attn.cute.runtime.version as v; print(v.__version__)"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder like site-packages with a copy of the package that has nothing in it but its version."""
    import flash_attn.cute.runtime.version as version

    package = tmp_path / "site" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "runtime").mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "runtime" / "version.py").write_bytes(Path(version.__file__).read_bytes())
    return tmp_path / "site"


def describe(site: Path, version: str) -> None:
    metadata = site / f"flash_attn_4-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")


def ask(*folders: Path) -> str:
    # -I and -S: neither this environment's paths nor its packages.
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}; {ASK}"
    return subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=True).stdout.strip()


def test_built_copy_says_what_the_build_wrote(site: Path) -> None:
    (site / "flash_attn" / "cute" / "build_info.py").write_text('VERSION = "4.0.0b36+nsa.7"\n')
    describe(site, "4.0.0b36")
    assert ask(site) == "4.0.0b36+nsa.7"


def test_copy_without_marker_says_what_its_distribution_says(site: Path) -> None:
    describe(site, "4.0.0b36")
    assert ask(site) == "4.0.0b36"


def test_metadata_of_another_copy_does_not_count(site: Path, tmp_path: Path) -> None:
    describe(tmp_path / "stock", "4.0.0b35")
    assert ask(site, tmp_path / "stock") == "0+unknown"
    describe(site, "4.0.0b36")
    assert ask(tmp_path / "stock", site) == "4.0.0b36"


def test_this_package_reports_its_version() -> None:
    import flash_attn.cute
    from flash_attn.cute import build_info

    assert flash_attn.cute.__version__ == build_info.VERSION
