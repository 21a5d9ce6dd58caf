"""The queue as ordinary git patches, for pull requests to upstream; our modules that a patch needs go with it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from patches.errors import QueueError
from patches.gitrepo import Commit, Git, create
from patches.materialise import Files, checked_overlay, load_pin, load_queue, pick, write_files
from patches.tree import queue_commits

_SPELT_OUT = re.compile(r"\bflash_attn\.cute(?:\.\w+)+")
_IMPORT = re.compile(r"^ *from +(\.*)([\w.]*) +import +(\([^)]*\)|.*)", re.MULTILINE)
REST = """Add the modules that callers import

No patch needs them: they prepare what calls take.
"""


def export(root: Path, output: Path, name: str | None) -> None:
    """Write format-patch files with context: the whole queue and all our modules, or one patch on plain upstream."""
    queue = load_queue(root)
    index = None if name is None else queue.index(pick(queue, name))
    if not queue:
        raise QueueError("there are no patches: nothing to export")
    _make_room(root, output)
    tag = load_pin(root).tag
    base, *commits = queue_commits(root, queue, prose_only=True)
    modules = {path: file.read_bytes() for path, file in checked_overlay(root, base.files).items()}
    with tempfile.TemporaryDirectory(prefix="flash-attn-nsa-export-") as scratch:
        folder = Path(scratch) / "tree"
        if index is None:
            git = create(folder, [base, *_with_modules(commits, modules)], tag)
        else:
            git = create(folder, [base, *commits], tag)
            _alone(git, tag, f"HEAD~{len(queue) - 1 - index}", modules)
        options = ("--full-index", "--no-signature", "--zero-commit", "--unified=5")
        print(git.text("format-patch", *options, "--output-directory", str(output), f"{tag}..HEAD"))


def _with_modules(commits: Iterable[Commit], modules: Files) -> Iterator[Commit]:
    """The commits, each with the modules of our own that it is the first to need, and one with those that are left."""
    left = dict(modules)
    for commit in commits:
        needed = _needed(commit.files, left)
        left = {path: data for path, data in left.items() if path not in needed}
        yield replace(commit, files=commit.files | needed)
    if left:
        yield Commit(REST, left)


def _needed(files: Files, modules: Files) -> Files:
    """The modules that some files name, directly or through one another."""
    needed: Files = {}
    fresh = files
    while fresh:
        names = {name for path, data in fresh.items() for name in _names(path, data.decode())}
        wanted = {part for name in names for part in _prefixes(name)}
        fresh = {path: data for path, data in modules.items() if _dotted(path) in wanted and path not in needed}
        needed |= fresh
    return needed


def _names(path: str, text: str) -> Iterator[str]:
    """The modules that a file imports or spells out: some are named by a string and imported at run time."""
    yield from _SPELT_OUT.findall(text)
    for dots, module, names in _IMPORT.findall(text):
        package = path.split("/")[: -len(dots)] if dots else []
        parent = ".".join([*package, *filter(None, [module])])
        yield from (f"{parent}.{name}" for name in re.findall(r"\w+", names))


def _prefixes(name: str) -> Iterator[str]:
    """A dotted name and the packages around it, which are imported with it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _dotted(path: str) -> str:
    """The name by which a module is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _alone(git: Git, tag: str, commit: str, modules: Files) -> None:
    """Put one patch and the modules it needs on plain upstream."""
    commit = git.text("rev-parse", commit)
    git.run("checkout", "--quiet", "--detach", tag)
    if git.run("cherry-pick", commit, check=False).returncode:
        files = ", ".join(git.text("diff", "--name-only", "--diff-filter=U").split())
        raise QueueError(f"the patch needs earlier ones ({files}); export the whole queue")
    changed = git.text("diff", "--name-only", tag, "HEAD").splitlines()
    write_files(git.folder, _needed({path: git.file("HEAD", path) for path in changed}, modules))
    git.run("add", "--all")
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
