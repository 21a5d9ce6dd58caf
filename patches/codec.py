"""Edit scripts that turn one text into another and hold only the text that is new.

An edit script works on the *old* text, in the order of its lines (counted from 1). What the new text takes over, moved
or re-indented code included, is named by line number, so that no old line is ever quoted:

    a L                        go to the end of old line L
    d L n                      drop old lines L .. L+n-1
    c L source n indent PATH   after old line L, copy lines source .. source+n-1, indented by `indent` more, of the
                               old text or, where PATH is given, of that other file as it is before the patch
    s L start:end "text" ...   in old line L, replace the columns start .. end-1 (a JSON string), once or more
    +text                      a line of our own, behind all of the above

Lines are split at "\\n" alone: "\\r" stays part of its line, and a missing newline at the end stays missing.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, takewhile
from os.path import commonprefix
from types import MappingProxyType

# Below this many characters a line says too little to be worth a reference instead of its own text.
MIN_COPY = 16
# From this many non-space characters on, a line that stands in upstream is a quotation (see check.py).
MIN_QUOTE = 24
# The ratio of difflib from which on a line is written as a change of another.
MIN_RATIO = 0.6

_SPLICE = r' (\d+):(\d+) ("(?:[^"\\]|\\.)*")'
_FORMS = (
    re.compile(r"(a) (\d+)"),
    re.compile(r"(d) (\d+) (\d+)"),
    re.compile(r"(c) (\d+) (\d+) (\d+) ([+-]\d+)(?: (\S+))?"),
    re.compile(rf"(s) (\d+)((?:{_SPLICE})+)"),
)
# Other files that lines may be copied from, by path.
Texts = Mapping[str, str]
NO_TEXTS: Texts = MappingProxyType({})


class CodecError(ValueError):
    """A line of an edit script that cannot be read or does not fit the old text; `line` counts from 0."""

    def __init__(self, message: str, line: int):
        super().__init__(message)
        self.line = line


def weight(line: str) -> int:
    """The number of characters of a line that are not white space."""
    return len("".join(line.split()))


def own_texts(line: str) -> list[str]:
    """The text that a line of an edit script brings itself."""
    if line.startswith("+"):
        return [line[1:]]
    return [json.loads(text) for _, _, text in re.findall(_SPLICE, line)] if line.startswith("s ") else []


@lru_cache(maxsize=256)
def _lines(text: str) -> list[str]:
    return text.split("\n")


@lru_cache(maxsize=256)
def _index(text: str) -> dict[str, list[int]]:
    """Line numbers by text without its indentation, of lines worth a reference; one text serves many patches."""
    index: dict[str, list[int]] = {}
    for number, line in enumerate(_lines(text)):
        if len(line.strip()) >= MIN_COPY:
            index.setdefault(line.lstrip(" "), []).append(number)
    return index


def decode(old: str, script: Sequence[str], others: Texts = NO_TEXTS) -> str:
    """The new text that an edit script makes of `old`, with other files to copy from."""
    lines, out, done = _lines(old), [], 0
    for number, entry in enumerate(script):
        if entry.startswith("+"):
            out.append(entry[1:])
            continue
        try:
            first, count, new = _read(entry, lines, others)
            if not done <= first <= first + count <= len(lines):
                raise ValueError(f"out of order or beyond the end ({len(lines)} lines)")
        except ValueError as error:
            raise CodecError(f"{entry!r}: {error}", number) from None
        out += [*lines[done:first], *new]
        done = first + count
    return "\n".join(out + lines[done:])


def _read(entry: str, lines: Sequence[str], others: Texts) -> tuple[int, int, list[str]]:
    """The old line that an operation goes behind, how many lines it takes away there, and what it puts instead."""
    match = next(filter(None, (form.fullmatch(entry) for form in _FORMS)), None)
    if match is None:
        raise ValueError("expected an operation (a, d, c, s or +)")
    kind, at, *rest = match.groups()
    if kind == "a":
        return int(at), 0, []
    if kind == "d":
        return int(at) - 1, int(rest[0]), []
    if kind == "s":
        return int(at) - 1, 1, [_spliced(_span(lines, int(at), 1)[0], re.findall(_SPLICE, rest[0]))]
    source, count, indent, path = *map(int, rest[:3]), rest[3]
    if path is not None and path not in others:
        raise ValueError(f"there is no {path}")
    copied = _span(lines if path is None else _lines(others[path]), source, count)
    return int(at), 0, [_shift(line, indent) for line in copied]


def _span(lines: Sequence[str], start: int, count: int) -> Sequence[str]:
    if start < 1 or start - 1 + count > len(lines):
        raise ValueError(f"there are only {len(lines)} lines")
    return lines[start - 1 : start - 1 + count]


def _spliced(line: str, splices: Sequence[tuple[str, str, str]]) -> str:
    out, done = [], 0
    for start, end, text in splices:
        if not done <= int(start) <= int(end) <= len(line):
            raise ValueError(f"columns {start}:{end} overlap, are out of order or beyond the end ({len(line)})")
        out += [line[done : int(start)], json.loads(text)]
        done = int(end)
    return "".join(out) + line[done:]


def encode(old: str, new: str, others: Texts = NO_TEXTS) -> list[str]:
    """The edit script that turns `old` into `new`, proven by decoding it."""
    script = list(_Encoder(old, others).run(_lines(new)))
    if decode(old, script, others) != new:
        raise AssertionError("encode is not faithful")
    return script


class _Encoder:
    def __init__(self, old: str, others: Texts):
        self.old = _lines(old)
        self.where = _index(old)
        self.others = others
        self.at = 0  # the old line behind which the script stands
        self.replaced = range(0)  # the old lines that it is about

    def run(self, new: list[str]) -> Iterator[str]:
        for i1, i2, j1, j2 in _changes(self.old, new):
            self.replaced = range(i1, i2)
            yield from self._replace(i1, i2, new[j1:j2])

    def _replace(self, i: int, end: int, new: list[str]) -> Iterator[str]:
        """Old lines i .. end-1 by `new`: each old line becomes the new one most like it, or is dropped."""
        for number in range(i, end):
            match = self._most_alike(self.old[number], new)
            if match is not None:
                yield from self._rewrite(i, number, new[:match])
                yield f"s {number + 1}" + _splices(self.old[number], new[match])
                new = new[match + 1 :]
                i = self.at = number + 1
        yield from self._rewrite(i, end, new)

    def _most_alike(self, line: str, candidates: list[str]) -> int | None:
        matcher = difflib.SequenceMatcher(None, b=line, autojunk=False)
        best, at = MIN_RATIO, None
        for number, candidate in enumerate(candidates):
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
                best, at = matcher.ratio(), number
        # A line that stands elsewhere is named there: spelling out how another one differs from it would quote it.
        return None if at is None or self._places(candidates[at]) else at

    def _rewrite(self, i: int, end: int, new: list[str]) -> Iterator[str]:
        """Nothing of old lines i .. end-1, and new ones: the longest run that stands somewhere is copied."""
        if i < end:
            yield f"d {i + 1} {end - i}"
            self.at = end
        while new:
            count, copy = max(self._copies(end, new), key=lambda copy: copy[0], default=(1, None))
            if copy is None and self.at != end:
                yield f"a {end}"
            yield copy or "+" + new[0]
            self.at = end
            new = new[count:]

    def _places(self, line: str) -> list[tuple[str | None, int]]:
        """(file, number) of the lines equal to this one but for indentation: in this file, or else in others."""
        own = line.lstrip(" ")
        # A short line counts where it is replaced: the block around it may just be indented.
        here = self.where.get(own) or [n for n in self.replaced if own and self.old[n].lstrip(" ") == own]
        if here:
            return [(None, number) for number in here]
        paths = sorted(self.others) if weight(own) >= MIN_QUOTE else ()
        return [(path, number) for path in paths for number in _index(self.others[path]).get(own, ())]

    def _copies(self, at: int, new: list[str]) -> Iterator[tuple[int, str]]:
        """The lengths of the runs that `new` may begin with a copy of, and the operations that copy them."""
        for path, start in self._places(new[0]):
            source = self.old if path is None else _lines(self.others[path])
            indent = _indent(new[0]) - _indent(source[start])
            pairs = zip(source[start:], new)
            count = sum(1 for _ in takewhile(lambda pair: _shift(pair[0], indent) == pair[1], pairs))
            if count > 1 or len(new[0].strip()) >= MIN_COPY:
                yield count, f"c {at} {start + 1} {count} {indent:+d}" + (f" {path}" if path else "")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _shift(line: str, indent: int) -> str:
    if not line.strip():
        return line
    return " " * indent + line if indent >= 0 else line[-indent:]


def _changes(old: list[str], new: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """The ranges of lines in which two texts differ; what both begin and end with is set aside first, for speed."""
    head = len(commonprefix([old, new]))
    tail = len(commonprefix([old[head:][::-1], new[head:][::-1]]))
    matcher = difflib.SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False)
    for tag, *bounds in matcher.get_opcodes():
        if tag != "equal":
            yield tuple(bound + head for bound in bounds)


def _splices(old: str, new: str) -> str:
    """The replacements that make one line of another, word by word."""
    before, after = (re.findall(r"\w+|\s+|[^\w\s]", line) for line in (old, new))
    columns = [0, *accumulate(map(len, before))]
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return "".join(
        f" {columns[i1]}:{columns[i2]} {json.dumps(''.join(after[j1:j2]))}"
        for tag, i1, i2, j1, j2 in changes
        if tag != "equal"
    )
