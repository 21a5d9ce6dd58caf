"""Finds lines of a patch file that stand literally in upstream: the repository holds none of its text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patches.codec import MIN_QUOTE, Texts, own_texts, weight
from patches.errors import QueueError, located
from patches.patchfile import Patch

# A text that stands this often in upstream is an idiom of the language, not somebody's text.
COMMON = 5
_IMPORT = re.compile(r"(from [\w.]+ )?import [\w., ()]+( as \w+)?")


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
