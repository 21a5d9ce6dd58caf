"""Edit scripts that turn one text into another and hold only the text that is new.

An edit script is a list of operations on the *old* text, in the order of its lines (counted from 1). What the new
text takes over, moved or re-indented code included, is named by line number, so that no old line is ever quoted:

    a L n                     add the n lines that follow, each behind a "+", after old line L
    d L n                     drop old lines L .. L+n-1
    c L source n indent PATH  after old line L, copy lines source .. source+n-1, indented by `indent` more, of the
                              old text or, where PATH is given, of that other file as it is before the patch
    s L start:end "text"      in old line L, replace the columns start .. end-1 (a JSON string)

Lines are split at "\\n" alone: "\\r" stays part of its line, and a missing newline at the end stays missing.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from types import MappingProxyType

# Below this many characters a line says too little to be worth a reference instead of its own text.
MIN_COPY = 16
# From this many non-space characters on, a line that stands in upstream is a quotation (see quotes.py).
MIN_QUOTE = 24
# The ratio of difflib from which on a line is written as a change of another.
MIN_RATIO = 0.6


class CodecError(ValueError):
    """An edit script that cannot be read or does not fit the text it is applied to; `line` counts from 0."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Add:
    """Lines of our own, after old line `at`."""

    at: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Old lines that the new text does without."""

    at: int
    count: int


@dataclass(frozen=True)
class Copy:
    """Lines that stand elsewhere in the old text, or in the file `path`, placed after old line `at`."""

    at: int
    source: int
    count: int
    indent: int
    path: str | None = None


@dataclass(frozen=True)
class Splice:
    """One replacement of columns within old line `at`."""

    at: int
    start: int
    end: int
    text: str


Op = Add | Drop | Copy | Splice
# Other files that lines may be copied from, by path.
Texts = Mapping[str, str]
NO_TEXTS: Texts = MappingProxyType({})


def weight(line: str) -> int:
    """The number of characters of a line that are not white space."""
    return len("".join(line.split()))


@lru_cache(maxsize=256)
def _lines(text: str) -> list[str]:
    return text.split("\n")


@lru_cache(maxsize=256)
def _index(text: str) -> dict[str, list[int]]:
    """The places of each line worth a reference, whatever its indentation; one text serves many patches."""
    index: dict[str, list[int]] = {}
    for number, line in enumerate(_lines(text)):
        if len(line.strip()) >= MIN_COPY:
            index.setdefault(line.lstrip(" "), []).append(number)
    return index


def decode(old: str, ops: Sequence[Op], others: Texts = NO_TEXTS) -> str:
    """The new text that `ops` make of `old`, with other files to copy from; CodecError where they do not fit."""
    lines, out, done = _lines(old), [], 0
    position = 0
    while position < len(ops):
        op = ops[position]
        upto = op.at if isinstance(op, (Add, Copy)) else op.at - 1
        if not done <= upto <= len(lines):
            raise CodecError(f"old line {op.at} is out of order or beyond the end ({len(lines)} lines)")
        out += lines[done:upto]
        done = upto
        position += 1
        if isinstance(op, Add):
            out += op.lines
        elif isinstance(op, Copy):
            out += _copied(op, lines, others)
        elif isinstance(op, Drop):
            done += op.count
            if done > len(lines):
                raise CodecError(f"drops old lines up to {done} of {len(lines)}")
        else:
            if done >= len(lines):
                raise CodecError(f"changes old line {op.at} of {len(lines)}")
            splices = list(takewhile(lambda other: isinstance(other, Splice) and other.at == op.at, ops[position:]))
            out.append(_spliced(lines[done], [op, *splices]))
            position += len(splices)
            done += 1
    return "\n".join(out + lines[done:])


def _copied(op: Copy, lines: list[str], others: Texts) -> Iterator[str]:
    if op.path is not None and op.path not in others:
        raise CodecError(f"copies from {op.path}, which does not exist")
    source = lines if op.path is None else _lines(others[op.path])
    if op.source < 1 or op.source - 1 + op.count > len(source):
        raise CodecError(f"copies lines {op.source} .. {op.source + op.count - 1} of {len(source)}")
    return (_shift(line, op.indent) for line in source[op.source - 1 : op.source - 1 + op.count])


def _spliced(line: str, splices: Sequence[Splice]) -> str:
    for left, right in zip(splices, splices[1:]):
        if left.end > right.start:
            raise CodecError(f"changes of old line {left.at} overlap or are out of order")
    for op in reversed(splices):
        if not 0 <= op.start <= op.end <= len(line):
            raise CodecError(f"columns {op.start}:{op.end} of old line {op.at}, which has {len(line)}")
        line = line[: op.start] + op.text + line[op.end :]
    return line


def encode(old: str, new: str, others: Texts = NO_TEXTS) -> list[Op]:
    """The operations that turn `old` into `new`, proven by decoding them."""
    ops = _Encoder(old, others).run(_lines(new))
    if decode(old, ops, others) != new:
        raise AssertionError("encode is not faithful")
    return ops


class _Encoder:
    def __init__(self, old: str, others: Texts):
        self.old = _lines(old)
        self.where = _index(old)
        self.others = others

    def run(self, new: list[str]) -> list[Op]:
        ops: list[Op] = []
        for i1, i2, j1, j2 in _changes(self.old, new):
            ops += self._replace(i1, i2, new[j1:j2])
        return list(_join_drops(ops))

    def _replace(self, i: int, end: int, new: list[str]) -> Iterator[Op]:
        """Old lines i .. end-1 by `new`: each old line becomes the new one most like it, or is dropped."""
        while i < end and new:
            match = self._most_alike(self.old[i], new)
            if match is None:
                yield Drop(i + 1, 1)
            else:
                yield from self._insert(i, new[:match])
                yield from _splices(i + 1, self.old[i], new[match])
                new = new[match + 1 :]
            i += 1
        if i < end:
            yield Drop(i + 1, end - i)
        yield from self._insert(end, new)

    def _most_alike(self, line: str, candidates: list[str]) -> int | None:
        matcher = difflib.SequenceMatcher(None, b=line, autojunk=False)
        best, at = MIN_RATIO, None
        for number, candidate in enumerate(candidates):
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
                best, at = matcher.ratio(), number
        # A line that stands elsewhere is named there: spelling out how another one differs from it would quote it.
        return None if at is None or self._places(candidates[at]) else at

    def _insert(self, at: int, new: list[str]) -> Iterator[Op]:
        """New lines after old line `at`: the longest run that stands somewhere is copied, the rest is our own."""
        own: list[str] = []
        position = 0
        while position < len(new):
            copy = max(self._runs(at, new, position), key=lambda run: run.count, default=None)
            if copy is None:
                own.append(new[position])
                position += 1
                continue
            if own:
                yield Add(at, tuple(own))
                own = []
            yield copy
            position += copy.count
        if own:
            yield Add(at, tuple(own))

    def _places(self, line: str) -> list[tuple[str | None, int]]:
        """The places where a line stands, but for its indentation: in this file, or else in others."""
        own = line.lstrip(" ")
        if own in self.where:
            return [(None, number) for number in self.where[own]]
        paths = sorted(self.others) if weight(own) >= MIN_QUOTE else ()
        return [(path, number) for path in paths for number in _index(self.others[path]).get(own, ())]

    def _runs(self, at: int, new: list[str], position: int) -> Iterator[Copy]:
        for path, start in self._places(new[position]):
            source = self.old if path is None else _lines(self.others[path])
            indent = _indent(new[position]) - _indent(source[start])
            pairs = zip(source[start:], new[position:])
            count = sum(1 for _ in takewhile(lambda pair: _shift(pair[0], indent) == pair[1], pairs))
            yield Copy(at, start + 1, count, indent, path)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _shift(line: str, indent: int) -> str:
    if not line.strip():
        return line
    return " " * indent + line if indent >= 0 else line[-indent:]


def _changes(old: list[str], new: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """The stretches in which two texts differ; what both begin and end with is set aside first, for speed."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    matcher = difflib.SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            yield i1 + head, i2 + head, j1 + head, j2 + head


def _splices(at: int, old: str, new: str) -> Iterator[Splice]:
    """The replacements that make one line of another, word by word."""
    before, after = (re.findall(r"\w+|\s+|[^\w\s]", line) for line in (old, new))
    columns = [0]
    for token in before:
        columns.append(columns[-1] + len(token))
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield Splice(at, columns[i1], columns[i2], "".join(after[j1:j2]))


def _join_drops(ops: Iterable[Op]) -> list[Op]:
    joined: list[Op] = []
    for op in ops:
        last = joined[-1] if joined else None
        if isinstance(op, Drop) and isinstance(last, Drop) and last.at + last.count == op.at:
            joined[-1] = Drop(last.at, last.count + op.count)
        else:
            joined.append(op)
    return joined


def format_ops(ops: Iterable[Op]) -> list[str]:
    """The lines of a patch file that stand for `ops`."""
    out: list[str] = []
    for op in ops:
        if isinstance(op, Add):
            out += [f"a {op.at} {len(op.lines)}", *("+" + line for line in op.lines)]
        elif isinstance(op, Drop):
            out.append(f"d {op.at} {op.count}")
        elif isinstance(op, Copy):
            where = f" {op.path}" if op.path else ""
            out.append(f"c {op.at} {op.source} {op.count} {op.indent:+d}{where}")
        else:
            out.append(f"s {op.at} {op.start}:{op.end} {json.dumps(op.text)}")
    return out


_FORMS = {
    "a": re.compile(r"a (\d+) (\d+)"),
    "d": re.compile(r"d (\d+) (\d+)"),
    "c": re.compile(r"c (\d+) (\d+) (\d+) ([+-]\d+)(?: (\S+))?"),
    "s": re.compile(r"s (\d+) (\d+):(\d+) (\".*\")"),
}


def parse_ops(lines: Sequence[str]) -> list[Op]:
    """The operations that the lines of a patch file stand for; CodecError with the number of a wrong line."""
    ops: list[Op] = []
    position = 0
    while position < len(lines):
        line = lines[position]
        form = _FORMS.get(line[:1])
        match = form.fullmatch(line) if form else None
        if match is None:
            raise CodecError(f"expected an operation (a, d, c or s), found {line!r}", position)
        position += 1
        if line[0] == "a":
            at, count = map(int, match.groups())
            own = lines[position : position + count]
            if len(own) < count or not all(text.startswith("+") for text in own):
                raise CodecError(f"expected {count} lines behind a '+'", position)
            ops.append(Add(at, tuple(text[1:] for text in own)))
            position += count
        elif line[0] == "d":
            ops.append(Drop(*map(int, match.groups())))
        elif line[0] == "c":
            ops.append(Copy(*map(int, match.groups()[:4]), match[5]))
        else:
            try:
                ops.append(Splice(*map(int, match.groups()[:3]), json.loads(match[4])))
            except json.JSONDecodeError as error:
                raise CodecError(f"not a JSON string: {error.msg}", position - 1) from None
    return ops
