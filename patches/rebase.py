"""Moving the pin: the new wheel becomes the base, and git puts the patches on it with a three-way merge."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from patches.console import say
from patches.errors import QueueError
from patches.gitrepo import GENERATED, Commit, Git, import_commits
from patches.materialise import load_pin
from patches.save import save
from patches.tree import make_tree, open_tree
from patches.wheel import Pin, fetch, next_pin, package_files

_STATE = "patches-rebase.json"


@dataclass(frozen=True)
class _Move:
    """A move of the pin that is under way."""

    old: Pin
    new: Pin
    head: str
    subjects: tuple[str, ...]

    def store(self, git: Git) -> None:
        git.git_path(_STATE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def _load(git: Git) -> _Move | None:
    if not git.is_repository() or not git.git_path(_STATE).is_file():
        return None
    state = json.loads(git.git_path(_STATE).read_text(encoding="utf-8"))
    return _Move(Pin(**state["old"]), Pin(**state["new"]), state["head"], tuple(state["subjects"]))


def _under_way(git: Git) -> _Move:
    move = _load(git)
    if move is None:
        raise QueueError(f"{git.folder}: no rebase is under way; `python -m patches rebase VERSION` starts one")
    return move


def rebase_start(root: Path, folder: Path, version: str) -> int:
    """Put the queue on another version of upstream; 1 where git stops at a conflict."""
    git, old = Git(folder), load_pin(root)
    if _load(git):
        raise QueueError(f"{folder}: a rebase is under way; go on with --continue or --abort")
    if not re.fullmatch(r"[\w.]+", version):
        raise QueueError(f"not a version: {version!r}")
    if version == old.version:
        raise QueueError(f"the pin is {old.base} already")
    make_tree(root, folder)
    open_tree(folder, old)
    if git.resolve("HEAD") != git.resolve(GENERATED):
        raise QueueError(f"{folder} holds commits that are not saved; `python -m patches save {folder}` first")
    new = next_pin(old, version)
    branch = f"upstream/{version}"
    import_commits(git, branch, [Commit(f"{new.base}\n", package_files(fetch(new)))], new.tag)
    git.run("branch", "--quiet", "-D", branch)
    move = _Move(old, new, git.text("rev-parse", "HEAD"), _subjects(git, old.tag))
    move.store(git)
    say(f"{old.base} -> {new.version}, {len(move.subjects)} patches")
    git.run("rebase", "--quiet", "--empty=drop", "--onto", new.tag, old.tag, check=False)
    return _finish(root, git, move)


def rebase_continue(root: Path, folder: Path) -> int:
    """Go on after a conflict was resolved, or after `save` refused what came out."""
    git = Git(folder)
    move = _under_way(git)
    if git.busy():
        unmerged = git.text("diff", "--name-only", "--diff-filter=U").split()
        if unmerged:
            raise QueueError(f"{folder}: still in conflict, or not yet `git add`ed: {', '.join(unmerged)}")
        done = git.run("rebase", "--continue", check=False)
        if done.returncode and not git.text("diff", "--name-only", "--diff-filter=U"):
            raise QueueError(f"{folder}: git rebase --continue: {done.stderr.decode(errors='replace').strip()}")
    return _finish(root, git, move)


def rebase_abort(root: Path, folder: Path) -> int:
    """Put the tree back to where it was on the old pin."""
    git = Git(folder)
    move = _under_way(git)
    if git.busy():
        git.run("rebase", "--abort")
    git.run("reset", "--quiet", "--hard", move.head)
    git.run("tag", "--delete", move.new.tag)
    git.git_path(_STATE).unlink()
    say(f"{folder}: back on {move.old.base}")
    return 0


def _subjects(git: Git, tag: str) -> tuple[str, ...]:
    return tuple(git.text("log", "--reverse", "--format=%s", f"{tag}..HEAD").splitlines())


def _finish(root: Path, git: Git, move: _Move) -> int:
    if git.busy():
        subject = git.text("log", "-1", "--format=%s", "REBASE_HEAD")
        files = "\n  ".join(git.text("diff", "--name-only", "--diff-filter=U").split())
        say(
            f"conflict in patch {subject!r}:\n  {files}\n"
            f"Resolve it in {git.folder}, `git add` the files there, then `python -m patches rebase --continue`;\n"
            "`python -m patches rebase --abort` goes back. If upstream has the change, take its side."
        )
        return 1
    if git.run("merge-base", "--is-ancestor", move.new.tag, "HEAD", check=False).returncode:
        raise QueueError(f"{git.folder}: git did not put the patches on {move.new.tag}; --abort goes back")
    save(root, git.folder, move.new)
    git.run("tag", "--delete", move.old.tag)
    git.git_path(_STATE).unlink()
    kept = _subjects(git, move.new.tag)
    for subject in move.subjects:
        if subject not in kept:
            say(f"taken by upstream, dropped: {subject}")
    say(f"the pin is {move.new.base}, sha256 {move.new.sha256}; {len(kept)} patches")
    return 0
