"""From the commits of a tree back to patch files, and the proof that these make the same tree again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patches.codec import Library, encode
from patches.console import say, steps
from patches.errors import QueueError
from patches.gitrepo import GENERATED, Git
from patches.materialise import Files, apply_patch, load_pin, patch_place, texts
from patches.overview import refresh
from patches.patchfile import FileEdit, Header, Patch, parse_header
from patches.quotes import quotations
from patches.tree import furnish, open_tree
from patches.wheel import Pin, digest, fetch, package_files, write_pin


@dataclass(frozen=True)
class _Source:
    """A commit that becomes a patch."""

    commit: str
    header: Header

    @property
    def slug(self) -> str:
        return self.header.slug


def save(root: Path, folder: Path, pin: Pin | None = None) -> None:
    """Write the queue from a tree's commits; nothing is written unless all of it is right."""
    moved, pin = pin, pin or load_pin(root)
    git = open_tree(folder, pin)
    upstream = package_files(fetch(pin))
    _same_base(git, pin, upstream)
    queue = read_queue(git, pin, upstream)
    write_queue(root, queue)
    if moved:
        write_pin(root / "patches" / "upstream.toml", moved)
    git.run("update-ref", GENERATED, "HEAD")
    furnish(root, folder)
    refresh(root)
    say(f"patches: {len(queue)} saved from {folder}")


def read_queue(git: Git, pin: Pin, upstream: Files) -> list[Patch]:
    """The patches that a tree's commits stand for; all that is wrong with them is said at once."""
    errors: list[QueueError] = []
    sources: list[_Source] = []
    for commit in git.text("rev-list", "--reverse", f"{pin.tag}..HEAD").split():
        message = git.run("log", "-1", "--format=%B", commit).stdout.decode("utf-8")
        try:
            sources.append(_Source(commit, parse_header(message, f"commit {commit[:12]}", pin.base)))
        except QueueError as error:
            errors.append(error)
    slugs = [source.slug for source in sources]
    errors += [QueueError(f"{slug}: two commits make a patch of this name") for slug in slugs if slugs.count(slug) > 1]
    _raise(errors)

    quoted, queue, files = texts(upstream), [], upstream
    for source in steps(sources, "encoding"):
        try:
            patch, files = _patch(git, source, files)
        except QueueError as error:
            raise QueueError(f"commit {source.commit[:12]} ({source.header.subject}): {error}") from None
        errors += quotations(patch.text, patch_place(patch.slug), quoted)
        queue.append(patch)
    _raise(errors)
    for patch in queue:
        upstream = apply_patch(upstream, patch)
    if upstream != files:
        raise AssertionError("the patch files do not reproduce the tree")
    return queue


def _patch(git: Git, source: _Source, files: Files) -> tuple[Patch, Files]:
    library, changed, edits = Library(texts(files)), {}, []
    listed = git.text("diff-tree", "-r", "--no-renames", "--name-status", "--no-commit-id", source.commit)
    for line in listed.splitlines():
        status, path = line.split("\t", 1)
        if status != "M":
            verb = {"A": "adds", "D": "removes"}.get(status, "changes the kind of")
            raise QueueError(f"{verb} {path}; a patch only edits, a new module belongs in flash_attn/cute/ here")
        old, new = files[path], git.file(source.commit, path)
        if old == new:
            raise QueueError(f"changes the mode of {path} alone")
        try:
            before, after = old.decode("utf-8"), new.decode("utf-8")
        except UnicodeDecodeError:
            raise QueueError(f"{path} is not UTF-8") from None
        edits.append(FileEdit(path, digest(old), digest(new), tuple(encode(before, after, library))))
        changed[path] = new
    if not edits:
        raise QueueError("changes nothing; drop it with git rebase -i")
    return Patch(source.header, tuple(edits)), {**files, **changed}


def write_queue(root: Path, queue: list[Patch]) -> None:
    """Put patch files and series in place, and drop the files of patches that are gone."""
    folder = root / "patches"
    for patch in queue:
        (root / patch_place(patch.slug)).write_bytes(patch.text.encode("utf-8"))
    (folder / "series").write_text("".join(f"{patch.slug}\n" for patch in queue), encoding="utf-8")
    kept = {f"{patch.slug}.patch" for patch in queue}
    for path in folder.glob("*.patch"):
        if path.name not in kept:
            path.unlink()


def _same_base(git: Git, pin: Pin, upstream: Files) -> None:
    """The tagged commit must hold the wheel's files, byte for byte."""
    stored = git.files(pin.tag)
    if sorted(stored) != sorted(upstream):
        differing = sorted(set(stored) ^ set(upstream))[0]
        raise QueueError(f"{git.folder}: {pin.tag} is not the wheel's content; {differing} is only in one of them")
    for path, data in upstream.items():
        if git.file(pin.tag, path) != data:
            raise QueueError(f"{git.folder}: {path} at {pin.tag} is not the wheel's")


def _raise(errors: list[QueueError]) -> None:
    if errors:
        raise QueueError("\n".join(str(error) for error in errors))
