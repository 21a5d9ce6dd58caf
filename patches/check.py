"""The invariants of the queue; CI checks them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from patches.codec import MIN_QUOTE, Texts, encode, own_texts, weight
from patches.errors import QueueError, located
from patches.materialise import Files, apply_patch, checked_overlay, load_pin, load_queue, texts
from patches.overview import refreshed
from patches.patchfile import Patch, patch_names
from patches.wheel import Pin, fetch, package_files, read_text

# A text that stands this often in upstream is an idiom of the language, not somebody's text.
COMMON = 5
_IMPORT = re.compile(r"(from [\w.]+ )?import [\w., ()]+( as \w+)?")


def check(root: Path) -> int:
    """Verify hashes, round trip, headers, tests, quotations and UPSTREAM.md; all problems are printed."""
    queue = load_queue(root)
    problems = list(_problems(root, load_pin(root), queue))
    for problem in problems:
        print(problem)
    print(f"{len(queue)} patches: " + (f"{len(problems)} problems" if problems else "all is well"))
    return 1 if problems else 0


def _problems(root: Path, pin: Pin, queue: list[Patch]) -> Iterator[QueueError]:
    files = package_files(fetch(pin))
    quoted = texts(files)
    for patch, name in zip(queue, patch_names([patch.header for patch in queue])):
        if patch.name != name:
            yield located(patch.place, 1, f"number and subject make it {name}; `python -m patches save` renames it")
        yield from quotations(patch, quoted)
        if patch.header.base != pin.base:
            yield located(patch.place, None, f"Base is {patch.header.base}, the pin is {pin.version}")
        yield from _test_problems(root, patch)
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
    if read_text(root / "UPSTREAM.md") != refreshed(root):
        yield located("UPSTREAM.md", None, "the table is not that of the queue; `python -m patches save` writes it")


def _test_problems(root: Path, patch: Patch) -> Iterator[QueueError]:
    for test in patch.header.tests:
        name, _, node = test.partition("::")
        function = node.partition("[")[0].rpartition("::")[2]
        if not (root / name).is_file():
            yield located(patch.place, None, f"its test {name} does not exist")
        elif not re.search(rf"^\s*def {function or 'test'}", read_text(root / name), re.MULTILINE):
            yield located(patch.place, None, f"{name} holds no test" + (f" {function}" if function else ""))


def _form_problems(root: Path, patch: Patch, before: Files, after: Files) -> Iterator[QueueError]:
    """The file must be what `save` would write for the same change."""
    others = texts(before)
    for edit in patch.edits:
        if tuple(encode(before[edit.path].decode(), after[edit.path].decode(), others)) != edit.script:
            yield located(patch.place, edit.line, f"edits of {edit.path} are not in the form that `save` writes")
    if read_text(root / patch.place) != patch.text:
        yield located(patch.place, 1, "not in the form that `save` writes")


def quotations(patch: Patch, upstream: Texts) -> Iterator[QueueError]:
    """An error for each line of a patch file that quotes one of the upstream files."""
    for number, text in _own_texts(patch.text):
        if found := _quoted_from(text, upstream):
            yield located(patch.place, number, f"quotes upstream ({found}): {text!r}; say it in other words")


def _quoted_from(text: str, upstream: Texts) -> str | None:
    """The place of a text of consequence in upstream, as `path:line`, or None."""
    text = text.strip().lstrip("# ")
    if weight(text) < MIN_QUOTE or _IMPORT.fullmatch(text):
        return None
    holders = {path: content.count(text) for path, content in upstream.items() if text in content}
    if not holders or sum(holders.values()) >= COMMON:
        return None
    path = min(holders)
    line = upstream[path][: upstream[path].index(text)].count("\n") + 1
    return f"{path}:{line}"


def _own_texts(patch_text: str) -> Iterator[tuple[int, str]]:
    """The header of a patch file, its added lines and the words it puts into old lines, each with its line number."""
    in_header = True
    for number, line in enumerate(patch_text.split("\n"), 1):
        in_header = in_header and not line.startswith("@@ ")
        yield from ((number, text) for text in ([line] if in_header else own_texts(line)))
