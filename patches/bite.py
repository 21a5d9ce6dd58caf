"""Whether each patch's test fails without that patch: a test that passes either way proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from patches.console import say
from patches.digest import tree_hash
from patches.errors import QueueError
from patches.gitrepo import Git, create
from patches.materialise import MARKER, load_pin, load_queue, marker_source
from patches.patchfile import Patch
from patches.tree import furnish, queue_commits


@dataclass(frozen=True)
class _Outcome:
    """What pytest said about some tests."""

    passed: int
    failed: int
    skipped: int
    said: str


def bite(root: Path, slugs: list[str]) -> int:
    """Run the tests of these patches, or of all, with the whole queue and with one patch left out."""
    queue = load_queue(root)
    unknown = [slug for slug in slugs if slug not in {patch.slug for patch in queue}]
    if unknown:
        raise QueueError(f"no patch {unknown[0]} in patches/series")
    failures = 0
    with tempfile.TemporaryDirectory(prefix="flash-attn-nsa-bite-") as scratch:
        git = create(Path(scratch) / "tree", queue_commits(root, queue), load_pin(root).tag)
        furnish(root, git.folder)
        commits = git.text("rev-list", "--reverse", f"{load_pin(root).tag}..HEAD").split()
        whole: dict[tuple[str, ...], _Outcome] = {}
        for patch, commit in zip(queue, commits):
            if slugs and patch.slug not in slugs:
                continue
            say(f"{patch.slug}: {' '.join(patch.header.tests)}")
            tests = patch.header.tests
            whole[tests] = whole.get(tests) or _run(root, git.folder, tests)
            verdict, good = _verdict(root, git, queue, patch, commit, whole[tests])
            say(f"  {verdict}")
            failures += not good
    say("every test bites" if not failures else f"{failures} patches whose test does not bite")
    return 1 if failures else 0


def _verdict(root: Path, git: Git, queue: list[Patch], patch: Patch, commit: str, whole: _Outcome) -> tuple[str, bool]:
    if whole.failed or not whole.passed + whole.skipped:
        return f"fails with the patch\n{whole.said}", False
    if not whole.passed:
        return f"not shown here: all {whole.skipped} tests are skipped on this machine", True
    head = git.text("rev-parse", "HEAD").strip()
    slugs, left_out = [other.slug for other in queue if other is not patch], "it"
    reverted = git.run("revert", "--no-commit", commit, check=False)
    try:
        if reverted.returncode:  # later patches build on it: they are left out too
            git.run("reset", "--quiet", "--hard", f"{commit}~1")
            slugs = slugs[: queue.index(patch)]
            left_out = f"it and the {len(queue) - 1 - len(slugs)} after it, some of which build on it"
        source = marker_source(load_pin(root), slugs, tree_hash(root, linked=True))
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
