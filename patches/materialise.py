"""The files of the package, made from wheel and queue; no git and nothing outside the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from patches.codec import CodecError, Texts, decode
from patches.digest import overlay_files, own_packages, patch_files, tree_hash
from patches.errors import QueueError, located
from patches.patchfile import FileEdit, Patch, parse_patch
from patches.wheel import Pin, digest, fetch, package_files, read_pin, read_text

Files = dict[str, bytes]
CUTE = "flash_attn/cute/"
MARKER = f"{CUTE}build_info.py"


def repository(root: Path | None = None) -> Path:
    """The root of the repository that this package stands in."""
    return (root or Path(__file__).parent.parent).resolve()


def load_pin(root: Path) -> Pin:
    return read_pin(root / "patches" / "upstream.toml")


def load_queue(root: Path) -> list[Patch]:
    """The patches in their order."""
    return [parse_patch(read_text(path), path.stem) for path in patch_files(root)]


def pick(queue: list[Patch], name: str) -> Patch:
    """The patch of a name: that of its file, with or without the number."""
    for patch in queue:
        if Path(name).name.removesuffix(".patch") in (patch.name, patch.header.slug):
            return patch
    raise QueueError(f"no patch {name}; `python -m patches status` lists them")


def texts(files: Mapping[str, bytes]) -> dict[str, str]:
    """The Python files as text, for the codec's references between files."""
    return {path: data.decode("utf-8", errors="replace") for path, data in files.items() if path.endswith(".py")}


def apply_patch(files: Files, patch: Patch) -> Files:
    """The files after one patch; errors name the patch file, its line and both hashes."""
    others = texts(files)
    return {**files, **{edit.path: _edited(files, edit, patch.place, others) for edit in patch.edits}}


def _edited(files: Files, edit: FileEdit, place: str, others: Texts) -> bytes:
    if edit.path not in files:
        raise located(place, edit.line, f"{edit.path} is not in the upstream wheel")
    found = digest(files[edit.path])
    if found != edit.before:
        raise located(
            place,
            edit.line,
            f"{edit.path} is not what the patch was made for (sha256 {edit.before[:16]}..., found {found[:16]}...); "
            "save the queue again from a tree that holds it",
        )
    try:
        result = decode(files[edit.path].decode("utf-8"), edit.script, others).encode("utf-8")
    except CodecError as error:
        raise located(place, edit.line + 1 + error.line, f"does not apply to {edit.path}: {error}") from None
    if digest(result) != edit.after:
        raise located(place, edit.line, f"{edit.path} comes out wrong: sha256 expected {edit.after}")
    return result


def patched_files(root: Path) -> Files:
    """The upstream package with the whole queue applied."""
    files = package_files(fetch(load_pin(root)))
    for patch in load_queue(root):
        files = apply_patch(files, patch)
    return files


def checked_overlay(root: Path, files: Iterable[str]) -> dict[str, Path]:
    """Our own modules; an error where a module or sub-package has the name of one that upstream or the build has."""
    overlay, taken = overlay_files(root), {_top_level(name) for name in (*files, MARKER)}
    for name in overlay:
        if _top_level(name) in taken:
            raise QueueError(f"{name}: upstream or the build has a module of that name; change it by a patch")
    return overlay


def _top_level(name: str) -> str:
    return name.removeprefix(CUTE).partition("/")[0].removesuffix(".py")


def own_package_files(root: Path) -> dict[str, Path]:
    """The files of our packages beside flash_attn.cute that an installation holds, by path."""
    found = sorted(path for folder in own_packages(root).values() for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path for path in found if "__pycache__" not in path.parts}


def marker(root: Path, *, linked: bool, patches: Iterable[str] | None = None) -> str:
    """The source of the module by which an installed copy says what it was made from."""
    pin, names = load_pin(root), [path.stem for path in patch_files(root)] if patches is None else patches
    listed = "".join(f'    "{name}",\n' for name in names)
    return (
        '"""The pin and the patches that this copy of flash_attn.cute was made from; written by the build."""\n\n'
        f'PIN = "{pin.version}"\n'
        f'VERSION = "{pin.local_version}"\n'
        f"PATCHES = (\n{listed})\n"
        f'TREE_HASH = "{tree_hash(root, linked=linked)}"\n'
    )


def installed_files(root: Path) -> Files:
    """Everything that a wheel holds: upstream's package patched, our modules, the marker and our packages."""
    files = patched_files(root)
    own = checked_overlay(root, files) | own_package_files(root)
    files |= {name: path.read_bytes() for name, path in own.items()}
    return files | {MARKER: marker(root, linked=False).encode()}


def write_files(folder: Path, files: Files) -> None:
    """Write files below a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
