"""From the commits of a tree back to patch files, and the proof that these make the same tree again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from patches.check import quotations
from patches.codec import encode
from patches.digest import patch_files
from patches.errors import QueueError
from patches.gitrepo import GENERATED, Git
from patches.materialise import Files, apply_patch, load_pin, texts
from patches.overview import refreshed
from patches.patchfile import FileEdit, Patch, parse_header, patch_names
from patches.tree import furnish, open_tree
from patches.wheel import Pin, digest, fetch, package_files, write_pin


def save(root: Path, folder: Path, pin: Pin | None = None) -> None:
    """Write the queue from a tree's commits; nothing is written unless all of it is right."""
    moved, pin = pin, pin or load_pin(root)
    git = open_tree(folder, pin)
    upstream = package_files(fetch(pin))
    _same_base(git, pin, upstream)
    queue = _read_queue(git, pin, upstream)
    for path in patch_files(root):
        path.unlink()
    for patch in queue:
        (root / patch.place).write_bytes(patch.text.encode("utf-8"))
    if moved:
        write_pin(root / "patches" / "upstream.toml", moved)
    git.run("update-ref", GENERATED, "HEAD")
    furnish(root, folder)
    (root / "UPSTREAM.md").write_text(refreshed(root), encoding="utf-8")
    print(f"patches: {len(queue)} saved from {folder}")


def _read_queue(git: Git, pin: Pin, upstream: Files) -> list[Patch]:
    """The patches that a tree's commits stand for; all that is wrong with them is said at once."""
    errors, headers = [], {}
    for commit in git.text("rev-list", "--reverse", f"{pin.tag}..HEAD").split():
        message = git.run("log", "-1", "--format=%B", commit).stdout.decode("utf-8")
        try:
            headers[commit] = parse_header(message, f"commit {commit[:12]}", pin.base)
        except QueueError as error:
            errors.append(error)
    subjects = [header.subject for header in headers.values()]
    twice = {subject for subject in subjects if subjects.count(subject) > 1}
    _raise([*errors, *(QueueError(f"two commits have the subject {subject!r}") for subject in sorted(twice))])

    quoted, queue, files = texts(upstream), [], upstream
    for (commit, header), name in zip(headers.items(), patch_names([*headers.values()])):
        try:
            edits, files = _edits(git, commit, files)
        except QueueError as error:
            raise QueueError(f"commit {commit[:12]} ({header.subject}): {error}") from None
        queue.append(Patch(name, header, edits))
    _raise(error for patch in queue for error in quotations(patch, quoted))
    for patch in queue:
        upstream = apply_patch(upstream, patch)
    if upstream != files:
        raise AssertionError("the patch files do not reproduce the tree")
    return queue


def _edits(git: Git, commit: str, files: Files) -> tuple[tuple[FileEdit, ...], Files]:
    """The edits of a commit, and the files after it."""
    others, changed, edits = texts(files), {}, []
    listed = git.text("diff-tree", "-r", "--no-renames", "--name-status", "--no-commit-id", commit)
    for line in listed.splitlines():
        status, path = line.split("\t", 1)
        if status != "M":
            verb = {"A": "adds", "D": "removes"}.get(status, "changes the kind of")
            raise QueueError(f"{verb} {path}; a patch only edits, a new module belongs in flash_attn/cute/ here")
        old, new = files[path], git.file(commit, path)
        if old == new:
            raise QueueError(f"changes the mode of {path} alone")
        try:
            script = encode(old.decode("utf-8"), new.decode("utf-8"), others)
        except UnicodeDecodeError:
            raise QueueError(f"{path} is not UTF-8") from None
        edits.append(FileEdit(path, digest(old), digest(new), tuple(script)))
        changed[path] = new
    if not edits:
        raise QueueError("changes nothing; drop it with git rebase -i")
    return tuple(edits), files | changed


def _same_base(git: Git, pin: Pin, upstream: Files) -> None:
    """Refuse a tree whose tagged commit does not hold the wheel's files, byte for byte."""
    blobs = {path: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() for path, data in upstream.items()}
    for path, _ in sorted(git.files(pin.tag).items() ^ blobs.items()):
        raise QueueError(f"{git.folder}: {path} at {pin.tag} is not the wheel's")


def _raise(errors: Iterable[QueueError]) -> None:
    if said := "\n".join(map(str, errors)):
        raise QueueError(said)
