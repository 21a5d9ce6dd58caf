"""Moving the pin: the new wheel becomes the base, and git puts the patches on it with a three-way merge."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from patches.errors import QueueError
from patches.gitrepo import GENERATED, Commit, Git, import_commits
from patches.materialise import load_pin
from patches.save import save
from patches.tree import make_tree, open_tree
from patches.wheel import Pin, fetch, next_pin, package_files

# The new pin, while a move is under way; upstream.toml has the old one until all is saved.
_STATE = "patches-rebase.json"


def rebase_start(root: Path, folder: Path, version: str) -> int:
    """Put the queue on another version of upstream; 1 where git stops at a conflict."""
    git, old = Git(folder), load_pin(root)
    if git.is_repository() and git.git_path(_STATE).is_file():
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
    git.git_path(_STATE).write_text(json.dumps(asdict(new)), encoding="utf-8")
    print(f"{old.base} -> {new.version}, {len(_subjects(git, old))} patches")
    git.run("rebase", "--quiet", "--empty=drop", "--onto", new.tag, old.tag, check=False)
    return _finish(root, git, old, new)


def rebase_continue(root: Path, folder: Path) -> int:
    """Go on after a conflict was resolved, or after `save` refused what came out."""
    git = Git(folder)
    new = _under_way(git)
    if git.busy():
        if unmerged := _unmerged(git):
            raise QueueError(f"{folder}: still in conflict, or not yet `git add`ed: {', '.join(unmerged)}")
        done = git.run("rebase", "--continue", check=False)
        if done.returncode and not _unmerged(git):
            raise QueueError(f"{folder}: git rebase --continue: {done.stderr.decode(errors='replace').strip()}")
    return _finish(root, git, load_pin(root), new)


def rebase_abort(root: Path, folder: Path) -> int:
    """Put the tree back to where it was on the old pin."""
    git = Git(folder)
    new = _under_way(git)
    if git.busy():
        git.run("rebase", "--abort")
    git.run("reset", "--quiet", "--hard", GENERATED)
    git.run("tag", "--delete", new.tag)
    git.git_path(_STATE).unlink()
    print(f"{folder}: back on {load_pin(root).base}")
    return 0


def _under_way(git: Git) -> Pin:
    """The pin that a move under way leads to."""
    if not git.is_repository() or not git.git_path(_STATE).is_file():
        raise QueueError(f"{git.folder}: no rebase is under way; `python -m patches rebase VERSION` starts one")
    return Pin(**json.loads(git.git_path(_STATE).read_text(encoding="utf-8")))


def _unmerged(git: Git) -> list[str]:
    return git.text("diff", "--name-only", "--diff-filter=U").split()


def _subjects(git: Git, pin: Pin) -> list[str]:
    """The subjects of the patches that were saved last."""
    return git.text("log", "--reverse", "--format=%s", f"{pin.tag}..{GENERATED}").splitlines()


def _finish(root: Path, git: Git, old: Pin, new: Pin) -> int:
    if git.busy():
        subject = git.text("log", "-1", "--format=%s", "REBASE_HEAD")
        files = "\n  ".join(_unmerged(git))
        print(
            f"conflict in patch {subject!r}:\n  {files}\n"
            f"Resolve it in {git.folder}, `git add` the files there, then `python -m patches rebase --continue`;\n"
            "`python -m patches rebase --abort` goes back. If upstream has the change, take its side."
        )
        return 1
    if git.run("merge-base", "--is-ancestor", new.tag, "HEAD", check=False).returncode:
        raise QueueError(f"{git.folder}: git did not put the patches on {new.tag}; --abort goes back")
    before = _subjects(git, old)
    save(root, git.folder, new)
    kept = _subjects(git, new)
    git.run("tag", "--delete", old.tag)
    git.git_path(_STATE).unlink()
    for subject in before:
        if subject not in kept:
            print(f"taken by upstream, dropped: {subject}")
    print(f"the pin is {new.base}, sha256 {new.sha256}; {len(kept)} patches")
    return 0
