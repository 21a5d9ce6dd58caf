"""Git, run so that neither the user's settings nor the clock change its results."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patches.errors import QueueError

NAME, EMAIL, EPOCH = "patch queue", "patches@localhost", 946684800
BRANCH = "patches"
GENERATED = "refs/patches/generated"
_SETTINGS = ("core.hooksPath=/dev/null", "commit.gpgSign=false", "core.autocrlf=false", "core.fileMode=false")


@dataclass(frozen=True)
class Commit:
    """One commit to be written: a message and the files it changes."""

    message: str
    files: dict[str, bytes]


class Git:
    """A repository on disk."""

    def __init__(self, folder: Path):
        self.folder = folder

    def run(self, *args: str, stdin: bytes | None = None, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run git; a failure is an error with what git said, unless `check` is off."""
        if shutil.which("git") is None:
            raise QueueError("git is not installed; it is needed for everything but building a wheel")
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        environment |= {"GIT_COMMITTER_NAME": NAME, "GIT_COMMITTER_EMAIL": EMAIL, "GIT_EDITOR": "true", "LC_ALL": "C"}
        command = ["git", "-C", str(self.folder), *settings, *args]
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment)
        if check and done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise QueueError(f"git {args[0]} failed in {self.folder}: {said}")
        return done

    def text(self, *args: str) -> str:
        return self.run(*args).stdout.decode("utf-8", errors="replace").strip()

    def resolve(self, revision: str) -> str | None:
        """The commit that a name stands for, or None."""
        done = self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", check=False)
        return done.stdout.decode().strip() or None

    def file(self, revision: str, path: str) -> bytes:
        return self.run("cat-file", "blob", f"{revision}:{path}").stdout

    def files(self, revision: str) -> dict[str, str]:
        """The blob name of each file of a commit, by path."""
        listed = self.run("ls-tree", "-r", "-z", revision).stdout.decode("utf-8").split("\0")
        return {line.split("\t", 1)[1]: line.split()[2] for line in listed if line}

    def git_path(self, name: str) -> Path:
        return self.folder / self.text("rev-parse", "--git-path", name)

    def is_repository(self) -> bool:
        """True if the folder is the top of a repository of its own, not merely inside one."""
        return (self.folder / ".git").exists()

    def busy(self) -> str | None:
        """The operation that git is in the middle of, or None."""
        for name in ("rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "REVERT_HEAD", "MERGE_HEAD"):
            if self.git_path(name).exists():
                return name.split("_HEAD")[0].lower().replace("-merge", "").replace("-apply", "")
        return None

    def modified(self) -> list[str]:
        """Tracked files that differ from the last commit."""
        return self.text("status", "--porcelain", "--untracked-files=no").splitlines()


def create(folder: Path, commits: Sequence[Commit], tag: str) -> Git:
    """A new repository with these commits, the first of them tagged; the same commits give the same hashes."""
    folder.mkdir(parents=True)
    git = Git(folder)
    git.run("init", "--quiet", "--initial-branch", BRANCH)
    for setting in _SETTINGS[1:]:
        git.run("config", *setting.split("=", 1))
    import_commits(git, BRANCH, commits, tag)
    git.run("reset", "--quiet", "--hard", BRANCH)
    return git


def import_commits(git: Git, branch: str, commits: Sequence[Commit], tag: str) -> None:
    """Write commits as a new branch without a parent, in one git process; the first is tagged."""
    stream = bytearray()
    for number, commit in enumerate(commits):
        stream += f"commit refs/heads/{branch}\ncommitter {NAME} <{EMAIL}> {EPOCH + number} +0000\n".encode()
        stream += _data(commit.message.encode("utf-8"))
        for path, content in commit.files.items():
            stream += f"M 100644 inline {path}\n".encode() + _data(content)
        if number == 0:
            stream += f"reset refs/tags/{tag}\nfrom refs/heads/{branch}\n\n".encode()
    git.run("fast-import", "--quiet", stdin=bytes(stream))


def _data(content: bytes) -> bytes:
    return f"data {len(content)}\n".encode() + content + b"\n"
