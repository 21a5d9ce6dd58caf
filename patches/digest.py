"""The hash of everything a tree is made from; nsa_layer/fork.py loads this file by its place, so it imports nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Our packages beside flash_attn.cute: a tree links them, wheels and source distributions hold them.
PACKAGES = ("nsa_layer", "nsa_tools")


def own_packages(root: Path) -> dict[str, Path]:
    """The folders of our packages, by name."""
    return {name: root / name for name in PACKAGES if (root / name / "__init__.py").is_file()}


def overlay_files(root: Path) -> dict[str, Path]:
    """Our own modules of flash_attn.cute and its sub-packages, by their path in the package."""
    found = sorted((root / "flash_attn" / "cute").rglob("*.py"))
    return {path.relative_to(root).as_posix(): path for path in found}


def patch_files(root: Path) -> list[Path]:
    """The queue: patch files in the order of their names, which begin with numbers."""
    return sorted((root / "patches").glob("*.patch"))


def tree_hash(root: Path, *, linked: bool) -> str:
    """The hash of pin, patches, overlay and names of packages of a repository.

    In a tree with links the overlay's content is always that of the repository, so there only its names count.
    """
    whole = hashlib.sha256()
    for path in (root / "patches" / "upstream.toml", *patch_files(root)):
        _add(whole, path.name, path.read_bytes())
    for name, path in overlay_files(root).items():
        _add(whole, name, b"" if linked else path.read_bytes())
    for name in own_packages(root):
        _add(whole, name, b"")
    return whole.hexdigest()


def _add(whole, name: str, data: bytes) -> None:
    whole.update(f"{name}\0{len(data)}\0".encode())
    whole.update(data)
