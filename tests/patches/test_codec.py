"""The codec says nothing that the old text says. That any text comes back: `fuzz/properties/options.py`."""

from __future__ import annotations

import pytest

from patches.codec import CodecError, decode, encode, own_texts

OLD = """def load(pointer, count):
    values = read_from(pointer, count)
    for value in values:
        check_that_it_is_finite(value)
    return values


def store(pointer, values):
    write_to(pointer, values)
"""


def round_trip(old: str, new: str, **others: str) -> list[str]:
    """Encode and decode; the edit script."""
    script = encode(old, new, others)
    assert not any("\n" in line for line in script)  # a patch file is split there
    assert decode(old, script, others) == new
    return script


def test_moved_and_indented_code_is_named_not_quoted():
    head, tail = OLD.split("\n\n\n")
    indented = "\n".join("    " + line if line else line for line in head.split("\n"))
    lines = round_trip(OLD, tail + "\n\nif True:\n" + indented + "\n")
    assert not [line for line in lines if "check_that_it_is_finite" in line]
    assert any(line.startswith("c ") and line.endswith(" +4") for line in lines)


BLOCK = "    load(\n        x,\n        y,\n    )"
CALLED = "    the_helper_that_everybody_calls(pointer, values)"


@pytest.mark.parametrize(
    ("old", "new", "script"),
    [
        (
            f"a\n{BLOCK}\nb",
            "a\n    if ready:\n    " + BLOCK.replace("\n", "\n    ") + "\nb",
            ["d 2 4", "+    if ready:", "c 5 2 4 +4"],
        ),
        (OLD, OLD.replace("(pointer, count)\n", "(pointer, count, 4)\n"), ['s 2 37:37 ", 4"']),
        (
            OLD,
            OLD.replace("write_to(pointer, values", 'save_to(pointer, values, "all"'),
            ['s 9 4:12 "save_to" 28:28 ", \\"all\\""'],
        ),
        (OLD, f"{OLD}{CALLED}\n", ["c 9 2 1 +0 helpers"]),
        ("a\nb", "a\nour line\nb", ["a 1", "+our line"]),
        ("a\nb\nc", "a\nour\nown\nc", ["d 2 1", "+our", "+own"]),
    ],
    ids=["indented", "within a line", "twice in a line", "of another file", "our own", "behind the line before"],
)
def test_only_what_is_new_is_quoted(old: str, new: str, script: list[str]):
    assert round_trip(old, new, helpers=f"def f():\n{CALLED}\n") == script


def test_our_own_text_within_a_line_is_known():
    assert own_texts('s 9 4:12 "save_to" 28:28 ", \\"all\\""') == ["save_to", ', "all"']


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (["x 1 2"], 0),
        (["d 1 1", "d one 1"], 1),
        (['s 1 0:1 "\\u12"'], 0),
        (["+one", ""], 1),
        (["d 3 1", "+x", "a 1"], 2),
        (["d 2 3"], 0),
        (["a 4"], 0),
        (["c 1 3 2 +0"], 0),
        (["c 1 0 1 +0"], 0),
        (["c 1 1 1 +0 nowhere.py"], 0),
        (['s 1 1:3 "x"'], 0),
        (['s 1 0:2 "x" 1:2 "y"'], 0),
        (['s 4 0:0 "x"'], 0),
    ],
)
def test_a_line_that_cannot_be_read_or_does_not_fit_is_named(script: list[str], line: int):
    with pytest.raises(CodecError) as raised:
        decode("ab\ncd\nef", script)
    assert raised.value.line == line
