"""The queue as ordinary git patches, for pull requests to upstream; the modules that a patch calls go with it."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from patches.console import say
from patches.errors import QueueError
from patches.gitrepo import Commit, Git, create
from patches.materialise import Files, checked_overlay, load_pin, load_queue
from patches.tree import queue_commits

PACKAGE = "flash_attn.cute."


def export(root: Path, output: Path, slug: str | None) -> None:
    """Write format-patch files with context: the whole series, or one patch put on plain upstream."""
    queue = load_queue(root)
    slugs = [patch.slug for patch in queue]
    if slug is not None and slug not in slugs:
        raise QueueError(f"no patch {slug} in patches/series; it holds {', '.join(slugs) or 'none'}")
    if not queue:
        raise QueueError("patches/series is empty: there is nothing to export")
    _make_room(root, output)
    tag = load_pin(root).tag
    base, *commits = queue_commits(root, queue, prose_only=True)
    modules = {name: path.read_bytes() for name, path in checked_overlay(root, base.files).items()}
    with tempfile.TemporaryDirectory(prefix="flash-attn-nsa-export-") as scratch:
        folder = Path(scratch) / "tree"
        if slug is None:
            git = create(folder, [base, *_with_modules(commits, modules)], tag)
        else:
            git = create(folder, [base, *commits], tag)
            _alone(git, tag, slugs.index(slug), modules)
        options = ("--full-index", "--no-signature", "--zero-commit", "--unified=5")
        written = git.text("format-patch", *options, "--output-directory", str(output), f"{tag}..HEAD").splitlines()
    for path in written:
        say(path)


def _with_modules(commits: Iterable[Commit], modules: Files) -> Iterable[Commit]:
    """The commits, each with the modules of our own that it is the first to call."""
    left = dict(modules)
    for commit in commits:
        called = _called(commit.files, left)
        left = {name: data for name, data in left.items() if name not in called}
        yield replace(commit, files={**commit.files, **called})


def _called(files: Files, modules: Files) -> Files:
    """The modules that some files import, directly or through one another."""
    called: Files = {}
    fresh = files
    while fresh:
        names = {name for data in fresh.values() for name in _imports(data)}
        fresh = {path: data for path, data in modules.items() if Path(path).stem in names and path not in called}
        called |= fresh
    return called


def _imports(source: bytes) -> Iterator[str]:
    """The names of the modules of flash_attn.cute that a module may import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[2] for alias in node.names if alias.name.startswith(PACKAGE))
        elif isinstance(node, ast.ImportFrom) and (node.level == 1 or f"{node.module}.".startswith(PACKAGE)):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def _alone(git: Git, tag: str, index: int, modules: Files) -> None:
    """Put one patch and the modules it calls on plain upstream."""
    commit = git.text("rev-list", "--reverse", f"{tag}..HEAD").split()[index]
    git.run("checkout", "--quiet", "--detach", tag)
    if git.run("cherry-pick", commit, check=False).returncode:
        files = ", ".join(git.text("diff", "--name-only", "--diff-filter=U").split())
        raise QueueError(f"the patch needs earlier ones ({files}); export the whole series")
    changed = git.text("diff", "--name-only", tag, "HEAD").splitlines()
    for name, data in _called({path: git.file("HEAD", path) for path in changed}, modules).items():
        (git.folder / name).write_bytes(data)
        git.run("add", name)
    git.run("commit", "--quiet", "--amend", "--no-edit")


def _make_room(root: Path, output: Path) -> None:
    """Drop what an earlier export left in the default folder; other folders are the user's own."""
    if output.exists() and not output.is_dir():
        raise QueueError(f"{output} is not a folder")
    old = list(output.glob("*.patch"))
    if old and output.resolve() != root / "export":
        raise QueueError(f"{output} holds patches already; name an empty folder")
    for path in old:
        path.unlink()
