"""A patch file: a header that says why the patch exists, then edits that hold only our own text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from patches.codec import CodecError, Op, format_ops, parse_ops
from patches.errors import located

KEYS = ("Reason", "Upstream-Status", "Test", "Base")
REASONS = ("feature", "hook", "bugfix")
STATUS_FORMS = (
    r"Pending",
    r"Submitted https?://\S+",
    r"Merged \S+",
    r"Denied https?://\S+, .+",
    r"Inappropriate .+",
)
STATUS_HELP = "Pending | Submitted <url> | Merged <version> | Denied <url>, <why we keep it> | Inappropriate <why>"
_EDIT = re.compile(r"@@ (\S+) ([0-9a-f]{64}) -> ([0-9a-f]{64})")
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): +(\S.*)")


@dataclass(frozen=True)
class Header:
    """What a patch is for; `body` says why it exists and why it is not a module of our own."""

    subject: str
    body: str
    reason: str
    upstream_status: str
    tests: tuple[str, ...]
    base: str

    @property
    def slug(self) -> str:
        """The name of the patch file, made of the subject."""
        words, slug = re.findall(r"[a-z0-9]+", self.subject.lower()), ""
        for word in words:
            if slug and len(slug) + len(word) + 1 > 60:
                break
            slug = f"{slug}-{word}" if slug else word
        return slug

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
    """What a patch does to one file, between two exact versions of it; `line` is where the patch file says so."""

    path: str
    before: str
    after: str
    ops: tuple[Op, ...]
    line: int = 0


@dataclass(frozen=True)
class Patch:
    """One patch of the queue."""

    header: Header
    edits: tuple[FileEdit, ...]

    @property
    def slug(self) -> str:
        return self.header.slug

    @property
    def text(self) -> str:
        """The content of the patch file."""
        parts = [self.header.text]
        for edit in self.edits:
            lines = [f"@@ {edit.path} {edit.before} -> {edit.after}", *format_ops(edit.ops)]
            parts.append("\n" + "\n".join(lines) + "\n")
        return "".join(parts)


def parse_header(message: str, place: object, base: str | None = None) -> Header:
    """Read a commit message or the head of a patch file; `base` stands in for the message's own, since it moves."""
    lines = message.rstrip().split("\n")
    start = len(lines)
    while start > 0 and lines[start - 1].strip():
        start -= 1
    values = _trailers(lines[start:], start + 1, place)
    if base is not None:
        values["Base"] = base
    missing = [key for key in KEYS if key not in values]
    if missing or start == 0:
        raise located(place, start + 1, f"the last paragraph lacks {', '.join(missing or KEYS)}")
    body = "\n".join(lines[1:start]).strip("\n")
    header = Header(
        subject=lines[0].strip(),
        body=body,
        reason=values["Reason"],
        upstream_status=values["Upstream-Status"],
        tests=tuple(re.split(r"[,\s]+", values["Test"].strip())),
        base=values["Base"],
    )
    _validate(header, lines, place)
    return header


def _trailers(lines: Sequence[str], first: int, place: object) -> dict[str, str]:
    values: dict[str, str] = {}
    key = None
    for number, line in enumerate(lines, first):
        if key and line.startswith((" ", "\t")):
            values[key] += f" {line.strip()}"
            continue
        match = _TRAILER.fullmatch(line.rstrip())
        if match is None or match[1] not in KEYS:
            raise located(place, number, f"expected one of {', '.join(KEYS)} behind the body, found {line!r}")
        key = match[1]
        if key in values:
            raise located(place, number, f"a second {key}")
        values[key] = match[2].strip()
    return values


def _validate(header: Header, lines: Sequence[str], place: object) -> None:
    def at(key: str) -> int:
        return next((number for number, line in enumerate(lines, 1) if line.startswith(key + ":")), 1)

    if re.match(r"(fixup|squash|amend)! ", header.subject):
        raise located(place, 1, "still to be folded in: git rebase -i --autosquash onto the upstream tag")
    if not header.slug:
        raise located(place, 1, f"the subject {header.subject!r} gives no file name")
    if not header.body:
        raise located(place, 2, "no body: say why the patch exists and why it is not a module of our own")
    if header.reason not in REASONS:
        raise located(place, at("Reason"), f"Reason must be one of {', '.join(REASONS)}; got {header.reason!r}")
    if not any(re.fullmatch(form, header.upstream_status) for form in STATUS_FORMS):
        raise located(
            place, at("Upstream-Status"), f"Upstream-Status must be {STATUS_HELP}; got {header.upstream_status!r}"
        )
    for test in header.tests:
        if not re.fullmatch(r"tests/[\w./-]+\.py(::\S+)?", test):
            raise located(place, at("Test"), f"Test must name files below tests/, got {test!r}")


def parse_patch(text: str, place: object) -> Patch:
    """Read a patch file; errors name its line."""
    lines = text.split("\n")
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
        try:
            ops = tuple(parse_ops(body))
        except CodecError as error:
            raise located(place, start + 2 + (error.line or 0), str(error)) from None
        edits.append(FileEdit(match[1], match[2], match[3], ops, start + 1))
    return Patch(header, tuple(edits))


def parse_series(text: str, place: object) -> list[str]:
    """The slugs of the queue in order."""
    slugs: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        slug = line.strip()
        if not slug or slug.startswith("#"):
            continue
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
            raise located(place, number, f"not the name of a patch: {slug!r}")
        if slug in slugs:
            raise located(place, number, f"a second {slug}")
        slugs.append(slug)
    return slugs
