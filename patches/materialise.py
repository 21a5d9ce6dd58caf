"""From wheel and queue to the files of the package; no git and nothing outside the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patches.codec import CodecError, Library, decode
from patches.digest import overlay_files, tree_hash
from patches.errors import QueueError, located
from patches.patchfile import FileEdit, Patch, parse_patch, parse_series
from patches.wheel import Pin, digest, fetch, package_files, read_pin, read_text

Files = dict[str, bytes]
MARKER = "flash_attn/cute/build_info.py"


def repository(root: Path | None = None) -> Path:
    """The root of the repository that this package stands in."""
    return (root or Path(__file__).parent.parent).resolve()


def load_pin(root: Path) -> Pin:
    return read_pin(root / "patches" / "upstream.toml")


def load_queue(root: Path) -> list[Patch]:
    """The patches in the order of the series."""
    series = root / "patches" / "series"
    queue = []
    for slug in parse_series(read_text(series), "patches/series"):
        place = patch_place(slug)
        patch = parse_patch(read_text(root / place), place)
        if patch.slug != slug:
            raise located(place, 1, f"the subject makes it {patch.slug}, the file is called {slug}")
        queue.append(patch)
    return queue


def patch_place(slug: str) -> str:
    return f"patches/{slug}.patch"


def texts(files: Mapping[str, bytes]) -> dict[str, str]:
    """The Python files as text, for the codec's references between files."""
    return {path: data.decode("utf-8", errors="replace") for path, data in files.items() if path.endswith(".py")}


def apply_patch(files: Files, patch: Patch) -> Files:
    """The files after one patch; errors name the patch file, its line and both hashes."""
    place = patch_place(patch.slug)
    library = Library(texts(files))
    return {**files, **{edit.path: _edited(files, edit, place, library) for edit in patch.edits}}


def _edited(files: Files, edit: FileEdit, place: str, library: Library) -> bytes:
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
        result = decode(files[edit.path].decode("utf-8"), edit.ops, library).encode("utf-8")
    except (CodecError, UnicodeDecodeError) as error:
        raise located(place, edit.line, f"does not apply to {edit.path}: {error}") from None
    if digest(result) != edit.after:
        raise located(place, edit.line, f"{edit.path} comes out wrong: sha256 expected {edit.after}")
    return result


def patched_files(root: Path) -> Files:
    """The upstream package with the whole queue applied."""
    files = package_files(fetch(load_pin(root)))
    for patch in load_queue(root):
        files = apply_patch(files, patch)
    return files


def checked_overlay(root: Path, files: Files) -> dict[str, Path]:
    """Our own modules; an error where one would replace a module of upstream."""
    overlay = overlay_files(root)
    for name in overlay:
        if name in files or name == MARKER:
            raise QueueError(f"{name}: upstream or the build has a module of that name; change it by a patch")
    return overlay


def layer_files(root: Path) -> dict[str, Path]:
    """The files of nsa_layer that an installation holds."""
    found = sorted(path for path in (root / "nsa_layer").rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): path
        for path in found
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def marker(root: Path, *, linked: bool) -> str:
    """The source of the module by which an installed copy says what it was made from."""
    pin = load_pin(root)
    slugs = parse_series(read_text(root / "patches" / "series"), "patches/series")
    return marker_source(pin, slugs, tree_hash(root, linked=linked))


def marker_source(pin: Pin, slugs: list[str], tree: str) -> str:
    listed = "".join(f'    "{slug}",\n' for slug in slugs)
    return (
        '"""What this copy of flash_attn.cute was made from; written by the build."""\n\n'
        f'PIN = "{pin.version}"\n'
        f'VERSION = "{pin.local_version}"\n'
        f"PATCHES = (\n{listed})\n"
        f'TREE_HASH = "{tree}"\n'
    )


def installed_files(root: Path) -> Files:
    """Everything that a wheel holds: upstream's package patched, our modules, the marker and the layer."""
    files = patched_files(root)
    files.update({name: path.read_bytes() for name, path in checked_overlay(root, files).items()})
    files[MARKER] = marker(root, linked=False).encode()
    files.update({name: path.read_bytes() for name, path in layer_files(root).items()})
    return files
