"""The flash_attn.cute that Python would import: the patched build, a stock one, an outdated tree, or none.

Nothing of flash_attn is imported to find out, since that needs a GPU stack; the build's marker module is run by itself.
"""

from __future__ import annotations

import importlib.util
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

INSTALL = "install this repository's build: `pip install .` (or `pip install -e .`) in a checkout of it"


@dataclass(frozen=True)
class ForkStatus:
    """The pin and the patches of our build, or the reason why it is not what Python finds, and the remedy."""

    kind: Literal["patched", "stock", "stale", "missing"]
    pin: str | None = None
    version: str | None = None
    patches: tuple[str, ...] = ()
    location: str | None = None
    detail: str = ""
    remedy: str = ""


def fork_status() -> ForkStatus:
    """Look at the flash_attn.cute that `import flash_attn.cute` would find now."""
    spec = importlib.util.find_spec("flash_attn")
    folders = [Path(folder).resolve() for folder in (spec and spec.submodule_search_locations) or ()]
    packages = [folder / "cute" for folder in folders if (folder / "cute" / "__init__.py").is_file()]
    if not packages:
        other = next((folder for folder in folders if (folder / "__init__.py").is_file()), None)
        if other is None:
            return ForkStatus("missing", detail="no flash_attn.cute on Python's path", remedy=INSTALL)
        detail = f"{other} is a flash_attn package of its own (FlashAttention-2), and holds no flash_attn.cute"
        remedy = "install the wheel (`pip install .` in a checkout of this repository), or uninstall flash-attn"
        return ForkStatus("missing", location=str(other), detail=detail, remedy=remedy)
    package, patched = packages[0], [folder for folder in packages if (folder / "build_info.py").is_file()]
    if package not in patched:
        detail, remedy = f"{package} is not this repository's build", INSTALL
        if patched:
            detail += f"; it hides the one in {patched[0]}"
            remedy = f"remove flash-attn-4 from {package.parent.parent}, then install this repository's build again"
        return ForkStatus("stock", location=str(package), detail=detail, remedy=remedy)
    built = runpy.run_path(str(package / "build_info.py"))
    pin, version, patches = built.get("PIN"), built.get("VERSION"), built.get("PATCHES") or ()
    build = dict(pin=pin, version=version, patches=patches, location=str(package))
    root = _repository(package)
    if root is not None and built.get("TREE_HASH") != _tree_hash(root):
        tree = package.parent.parent
        remedy = f"run `python -m patches tree{'' if tree == root / '.tree' else f' {tree}'}` in {root}"
        detail = f"{package} was made from other patches than {root / 'patches'}"
        return ForkStatus("stale", **build, detail=detail, remedy=remedy)
    return ForkStatus("patched", **build, detail=f"flash_attn.cute {version} with {len(patches)} patches")


def require_patched() -> ForkStatus:
    """The status of the patched build; ImportError with the reason and the remedy where Python would find another."""
    status = fork_status()
    if status.kind != "patched":
        raise ImportError(f"flash_attn.cute is {status.kind}: {status.detail}; {status.remedy}")
    return status


def _repository(package: Path) -> Path | None:
    """The repository that a tree's links lead to; None for an installed wheel, or where the repository is gone."""
    layer = package.parent.parent / "nsa_layer"
    root = layer.resolve().parent
    return root if layer.is_symlink() and (root / "patches" / "digest.py").is_file() else None


def _tree_hash(root: Path) -> str:
    """The hash that a tree made now would have, computed by the repository's own code."""
    return runpy.run_path(str(root / "patches" / "digest.py"))["tree_hash"](root, linked=True)
