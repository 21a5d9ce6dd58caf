"""The hash of everything a tree is made from; nsa_layer/fork.py loads this file by its place, so it imports nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path


def overlay_files(root: Path) -> dict[str, Path]:
    """Our own modules of flash_attn.cute, by their path in the package."""
    found = sorted((root / "flash_attn" / "cute").rglob("*.py"))
    return {path.relative_to(root).as_posix(): path for path in found}


def tree_hash(root: Path, *, linked: bool) -> str:
    """The hash of pin, series, patches and overlay of a repository.

    In a tree with links the overlay's content is always that of the repository, so there only its names count.
    """
    series = root / "patches" / "series"
    named = [line.strip() for line in series.read_text(encoding="utf-8").splitlines()]
    slugs = [slug for slug in named if slug and not slug.startswith("#")]
    parts = [root / "patches" / "upstream.toml", *(root / "patches" / f"{slug}.patch" for slug in slugs)]
    whole = hashlib.sha256()
    for part in parts:
        _add(whole, part.name, part.read_bytes())
    for name, path in overlay_files(root).items():
        _add(whole, name, b"" if linked else path.read_bytes())
    return whole.hexdigest()


def _add(whole, name: str, data: bytes) -> None:
    whole.update(f"{name}\0{len(data)}\0".encode())
    whole.update(data)
