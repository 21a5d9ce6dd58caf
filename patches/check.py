"""What must be true of the queue at any time; CI runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from patches.codec import Library, encode
from patches.console import say, steps
from patches.errors import QueueError, located
from patches.materialise import (
    Files,
    apply_patch,
    checked_overlay,
    load_pin,
    load_queue,
    patch_place,
    texts,
)
from patches.overview import is_current
from patches.patchfile import Patch
from patches.quotes import quotations
from patches.wheel import fetch, package_files, read_text


def check(root: Path) -> int:
    """Verify hashes, round trip, headers, tests, quotations and UPSTREAM.md; all problems are printed."""
    queue = load_queue(root)
    upstream = package_files(fetch(load_pin(root)))
    problems = [*_problems(root, queue, upstream)]
    for problem in problems:
        say(str(problem))
    say(f"{len(queue)} patches: " + (f"{len(problems)} problems" if problems else "all is well"))
    return 1 if problems else 0


def _problems(root: Path, queue: list[Patch], upstream: Files) -> Iterator[QueueError]:
    kept = {patch_place(patch.slug) for patch in queue}
    for path in sorted((root / "patches").glob("*.patch")):
        if patch_place(path.stem) not in kept:
            yield located(patch_place(path.stem), None, "not in patches/series")
    files, quoted = upstream, texts(upstream)
    for patch in steps(queue, "checking"):
        yield from _patch_problems(root, patch, quoted)
        try:
            after = apply_patch(files, patch)
        except QueueError as error:
            yield error
            return
        yield from _form_problems(root, patch, files, after)
        files = after
    try:
        checked_overlay(root, files)
    except QueueError as error:
        yield error
    if not is_current(root):
        yield located("UPSTREAM.md", None, "the table is not that of the queue; `python -m patches save` writes it")


def _patch_problems(root: Path, patch: Patch, quoted: dict[str, str]) -> Iterator[QueueError]:
    place = patch_place(patch.slug)
    yield from quotations(read_text(root / place), place, quoted)
    pin = load_pin(root)
    if patch.header.base != pin.base:
        yield located(place, None, f"Base is {patch.header.base}, the pin is {pin.version}")
    for test in patch.header.tests:
        name, _, node = test.partition("::")
        function = node.partition("[")[0].rpartition("::")[2]
        if not (root / name).is_file():
            yield located(place, None, f"its test {name} does not exist")
        elif not re.search(rf"^\s*def {function or 'test'}", read_text(root / name), re.MULTILINE):
            yield located(place, None, f"{name} holds no test" + (f" {function}" if function else ""))


def _form_problems(root: Path, patch: Patch, before: Files, after: Files) -> Iterator[QueueError]:
    """The file must be what `save` would write for the same change."""
    place = patch_place(patch.slug)
    library = Library(texts(before))
    for edit in patch.edits:
        if tuple(encode(before[edit.path].decode(), after[edit.path].decode(), library)) != edit.ops:
            yield located(place, edit.line, f"edits of {edit.path} are not in the form that `save` writes")
    if read_text(root / place) != patch.text:
        yield located(place, 1, "not in the form that `save` writes")
