"""The materialised tree: a git repository of the patched package, with our own modules linked into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from patches.digest import own_packages
from patches.errors import QueueError
from patches.gitrepo import GENERATED, Commit, Git, create
from patches.materialise import MARKER, apply_patch, checked_overlay, load_pin, load_queue, marker
from patches.patchfile import Patch
from patches.wheel import Pin, fetch, package_files

DEFAULT = ".tree"


def make_tree(root: Path, folder: Path, *, force: bool = False) -> None:
    """Write the tree, or leave it where it is up to date; work in it that is not saved is never thrown away."""
    if folder.exists() and any(folder.iterdir()) and not force:
        unsaved = _unsaved(folder)
        if is_fresh(root, folder):
            print(f"{folder}: up to date" + (f", with work not saved yet ({unsaved})" if unsaved else ""))
            return
        if unsaved:
            raise QueueError(
                f"{folder} is out of date and holds work that is not saved ({unsaved}).\n"
                f"Remedy: `python -m patches save {folder}` keeps it, `python -m patches tree --force` drops it."
            )
    commits = queue_commits(root, load_queue(root))
    new = folder.with_name(f"{folder.name}.new-{os.getpid()}")
    try:
        git = create(new, commits, load_pin(root).tag)
        git.run("update-ref", GENERATED, "HEAD")
        furnish(root, new)
        _swap(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(f"{folder}: upstream and {len(commits) - 1} patches")


def queue_commits(root: Path, queue: Sequence[Patch], *, prose_only: bool = False) -> list[Commit]:
    """Upstream's files as one commit and a commit per patch; `prose_only` leaves our bookkeeping out of messages."""
    pin = load_pin(root)
    files = package_files(fetch(pin))
    commits = [Commit(f"{pin.base}\n", files)]
    for patch in queue:
        files = apply_patch(files, patch)
        message = patch.header.prose if prose_only else patch.header.text
        commits.append(Commit(message, {edit.path: files[edit.path] for edit in patch.edits}))
    return commits


def is_fresh(root: Path, folder: Path) -> bool:
    """True if the tree holds what the repository would build."""
    try:
        made = (folder / MARKER).read_text(encoding="utf-8") == marker(root, linked=True)
    except OSError:
        return False
    return made and all((folder / name).exists() for name in own_packages(root))


def furnish(root: Path, folder: Path) -> None:
    """Link our own modules and packages into a tree, write the marker, and hide all of it from the tree's git.

    Modules are linked file by file, in sub-packages too: the kernel cache hashes the sources that it finds by rglob,
    which does not follow links to folders.
    """
    git = Git(folder)
    targets = own_packages(root) | checked_overlay(root, git.files("HEAD"))
    for stale in (path for path in (folder / "flash_attn").rglob("*.py") if path.is_symlink()):
        stale.unlink()
    for name, target in targets.items():
        _link(folder / name, target)
    (folder / MARKER).write_text(marker(root, linked=True), encoding="utf-8")
    exclude = git.git_path("info/exclude")
    exclude.parent.mkdir(exist_ok=True)
    hidden = [f"/{name}" for name in (*targets, MARKER)]
    exclude.write_text("\n".join([*hidden, "__pycache__/", ".pytest_cache/", ""]), encoding="utf-8")


def _link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise QueueError(f"{link}: a file of its own is in the place of a link to {target}; move it there")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent.resolve()), target_is_directory=target.is_dir())


def _unsaved(folder: Path) -> str | None:
    """The work in a tree that is not in the patch files, in words, or None."""
    git = Git(folder)
    if not git.is_repository() or not git.text("tag", "--list", "upstream-*"):
        raise QueueError(f"{folder} is not empty and not a tree of the patch queue; name another folder")
    if git.busy():
        return f"git is in the middle of a {git.busy()}"
    if git.modified():
        return f"{len(git.modified())} files changed and not committed"
    if git.resolve("HEAD") != git.resolve(GENERATED):
        return "commits since it was made"
    return None


def open_tree(folder: Path, pin: Pin) -> Git:
    """A tree ready to be read: of this pin, nothing half done, one line of commits on upstream's."""
    git = Git(folder)
    if not folder.is_dir() or not git.is_repository():
        raise QueueError(f"{folder} is no git repository; `python -m patches tree {folder}` makes one")
    if git.busy():
        raise QueueError(f"{folder}: git is in the middle of a {git.busy()}; finish it or abort it first")
    if git.modified():
        changed = "\n  ".join(git.modified())
        raise QueueError(f"{folder}: changed and not committed:\n  {changed}")
    if git.resolve(pin.tag) is None:
        raise QueueError(f"{folder} has no tag {pin.tag}: it was not made for the pin {pin.base}")
    if git.run("merge-base", "--is-ancestor", pin.tag, "HEAD", check=False).returncode:
        raise QueueError(f"{folder}: HEAD does not descend from {pin.tag}")
    merges = git.text("rev-list", "--merges", f"{pin.tag}..HEAD")
    if merges:
        raise QueueError(f"{folder}: commit {merges.split()[0][:12]} is a merge; the queue is a line, rebase it")
    return git


def _swap(new: Path, folder: Path) -> None:
    """Put a finished tree in the place of the old one, so that none is ever half written."""
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
