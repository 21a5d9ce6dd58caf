"""The proof that each patch's test fails without that patch: a test that passes either way proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from patches.errors import QueueError
from patches.gitrepo import Git, create
from patches.materialise import MARKER, load_pin, load_queue, marker, pick
from patches.patchfile import Patch
from patches.tree import furnish, queue_commits


@dataclass(frozen=True)
class _Outcome:
    """The counts of a run of pytest, and the end of what it printed."""

    passed: int
    failed: int
    skipped: int
    said: str


def bite(root: Path, names: list[str]) -> int:
    """Run the tests of these patches, or of all, with the whole queue and with one patch left out."""
    queue, pin = load_queue(root), load_pin(root)
    chosen = [pick(queue, name) for name in names] or queue
    failures = 0
    with tempfile.TemporaryDirectory(prefix="flash-attn-nsa-bite-") as scratch:
        git = create(Path(scratch) / "tree", queue_commits(root, queue), pin.tag)
        furnish(root, git.folder)
        commits = git.text("rev-list", "--reverse", f"{pin.tag}..HEAD").split()
        whole: dict[tuple[str, ...], _Outcome] = {}
        for patch, commit in zip(queue, commits):
            if patch not in chosen:
                continue
            tests = patch.header.tests
            print(f"{patch.name}: {' '.join(tests)}", flush=True)
            whole[tests] = whole.get(tests) or _run(root, git.folder, tests)
            verdict, good = _verdict(root, git, queue, patch, commit, whole[tests])
            print(f"  {verdict}", flush=True)
            failures += not good
    print("every test bites" if not failures else f"{failures} patches whose test does not bite")
    return 1 if failures else 0


def _verdict(root: Path, git: Git, queue: list[Patch], patch: Patch, commit: str, whole: _Outcome) -> tuple[str, bool]:
    if whole.failed or not whole.passed + whole.skipped:
        return f"fails with the patch\n{whole.said}", False
    if not whole.passed:
        return f"not shown here: all {whole.skipped} tests are skipped on this machine", True
    head = git.text("rev-parse", "HEAD")
    left, left_out = [other for other in queue if other is not patch], "it"
    try:
        if git.run("revert", "--no-commit", commit, check=False).returncode:
            # Later patches build on it: they are left out too.
            git.run("reset", "--quiet", "--hard", f"{commit}~1")
            left = queue[: queue.index(patch)]
            left_out = f"it and the {len(queue) - 1 - len(left)} after it, some of which build on it"
        source = marker(root, linked=True, patches=[other.name for other in left])
        (git.folder / MARKER).write_text(source, encoding="utf-8")
        without = _run(root, git.folder, patch.header.tests)
    finally:
        git.run("revert", "--quit", check=False)
        git.run("reset", "--quiet", "--hard", head)
        furnish(root, git.folder)
    if without.failed:
        return f"bites: {without.failed} of {without.failed + without.passed} fail without {left_out}", True
    return f"passes without {left_out} ({without.passed} passed, {without.skipped} skipped)", False


def _run(root: Path, tree: Path, tests: tuple[str, ...]) -> _Outcome:
    """Run pytest from the repository's root on the kernels of `tree`."""
    report = tree.parent / "report.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    if not report.is_file():
        raise QueueError(f"pytest did not run {' '.join(tests)} (exit code {done.returncode}):\n{said}")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return _Outcome(count["tests"] - failed - count["skipped"], failed, count["skipped"], said)
