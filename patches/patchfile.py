"""A patch file: a header that says why the patch exists, then edits that hold only our own text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from patches.errors import located

KEYS = ("Reason", "Upstream-Status", "Test", "Base")
REASONS = ("feature", "hook", "bugfix")
STATUS = re.compile(r"Pending|Submitted https?://\S+|Merged \S+|Denied https?://\S+, .+|Inappropriate .+")
STATUS_HELP = "Pending | Submitted <url> | Merged <version> | Denied <url>, <why we keep it> | Inappropriate <why>"
# As git has it: longer ones are cut where commits are listed, and the file's name is made of it.
MAX_SUBJECT = 72
_EDIT = re.compile(r"@@ (\S+) ([0-9a-f]{64}) -> ([0-9a-f]{64})")


@dataclass(frozen=True)
class Header:
    """The purpose of a patch; `body` says why it exists and why it is not a module of our own."""

    subject: str
    body: str
    reason: str
    upstream_status: str
    tests: tuple[str, ...]
    base: str

    @property
    def slug(self) -> str:
        """The subject as the name of a file."""
        return "-".join(re.findall(r"[a-z0-9]+", self.subject.lower()))

    @property
    def prose(self) -> str:
        """Subject and body, which is what upstream gets to read."""
        return f"{self.subject}\n\n{self.body}\n"

    @property
    def text(self) -> str:
        """The whole header, in the one form that `save` writes; also the message of the patch's commit."""
        values = (self.reason, self.upstream_status, " ".join(self.tests), self.base)
        trailers = "".join(f"{key}: {value}\n" for key, value in zip(KEYS, values))
        return f"{self.prose}\n{trailers}"


@dataclass(frozen=True)
class FileEdit:
    """The change of one file between two exact versions of it; `line` is that of the patch file where it begins."""

    path: str
    before: str
    after: str
    script: tuple[str, ...]
    line: int = 0


@dataclass(frozen=True)
class Patch:
    """One patch of the queue; `name` is that of its file."""

    name: str
    header: Header
    edits: tuple[FileEdit, ...]

    @property
    def place(self) -> str:
        """The patch file, from the repository's root."""
        return place_of(self.name)

    @property
    def text(self) -> str:
        """The content of the patch file."""
        parts = [self.header.text]
        for edit in self.edits:
            lines = [f"@@ {edit.path} {edit.before} -> {edit.after}", *edit.script]
            parts.append("\n" + "\n".join(lines) + "\n")
        return "".join(parts)


def place_of(name: str) -> str:
    return f"patches/{name}.patch"


def patch_names(headers: Sequence[Header]) -> list[str]:
    """The names of the patch files of a queue: number and subject, so that their order is the queue's."""
    digits = max(2, len(str(len(headers))))
    return [f"{number:0{digits}}-{header.slug}" for number, header in enumerate(headers, 1)]


def parse_header(message: str, place: object, base: str | None = None) -> Header:
    """Read a commit message or the head of a patch file; `base` stands in for the message's own, since it moves."""
    lines = message.rstrip().split("\n")
    start = len(lines)
    while start > 0 and lines[start - 1].strip():
        start -= 1
    found = [line.partition(": ")[::2] for line in lines[start:]]
    values = dict(found) | ({} if base is None else {"Base": base})
    if start == 0 or sorted(values) != sorted(KEYS) or len(dict(found)) < len(found):
        names = ", ".join(key for key, _ in found)
        raise located(place, start + 1, f"expected one line for each of {', '.join(KEYS)} at the end, found {names}")
    header = Header(
        subject=lines[0].strip(),
        body="\n".join(lines[1:start]).strip("\n"),
        reason=values["Reason"].strip(),
        upstream_status=values["Upstream-Status"].strip(),
        tests=tuple(re.split(r"[,\s]+", values["Test"].strip())),
        base=values["Base"].strip(),
    )
    _validate(header, lines, place)
    return header


def _validate(header: Header, lines: Sequence[str], place: object) -> None:
    def at(key: str) -> int:
        return next((number for number, line in enumerate(lines, 1) if line.startswith(key + ":")), 1)

    if re.match(r"(fixup|squash|amend)! ", header.subject):
        raise located(place, 1, "still to be folded in: git rebase -i --autosquash onto the upstream tag")
    if not header.slug or len(header.subject) > MAX_SUBJECT:
        expected = f"a subject of 1 to {MAX_SUBJECT} characters"
        raise located(place, 1, f"expected {expected}, got {len(header.subject)}: {header.subject!r}")
    if not header.body:
        raise located(place, 2, "no body: say why the patch exists and why it is not a module of our own")
    if header.reason not in REASONS:
        raise located(place, at("Reason"), f"Reason must be one of {', '.join(REASONS)}; got {header.reason!r}")
    if not STATUS.fullmatch(header.upstream_status):
        message = f"Upstream-Status must be {STATUS_HELP}; got {header.upstream_status!r}"
        raise located(place, at("Upstream-Status"), message)
    for test in header.tests:
        if not re.fullmatch(r"tests/[\w./-]+\.py(::\S+)?", test):
            raise located(place, at("Test"), f"Test must name files below tests/, got {test!r}")


def parse_patch(text: str, name: str) -> Patch:
    """Read a patch file; errors name its line."""
    lines, place = text.split("\n"), place_of(name)
    starts = [number for number, line in enumerate(lines) if line.startswith("@@ ")]
    if not starts:
        raise located(place, None, "no `@@ path sha256 -> sha256` line: the patch changes nothing")
    header = parse_header("\n".join(lines[: starts[0]]), place)
    edits = []
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        match = _EDIT.fullmatch(lines[start])
        if match is None:
            raise located(place, start + 1, f"expected `@@ path sha256 -> sha256`, found {lines[start]!r}")
        body = lines[start + 1 : end]
        while body and not body[-1]:
            body.pop()
        edits.append(FileEdit(*match.groups(), tuple(body), start + 1))
    return Patch(name, header, tuple(edits))
