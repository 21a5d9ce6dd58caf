"""The table of patches, made from their headers; UPSTREAM.md shows it between two comments."""

from __future__ import annotations

import re
from pathlib import Path

from patches.errors import located
from patches.materialise import load_pin, load_queue
from patches.patchfile import Patch
from patches.wheel import Pin, read_text

BEGIN = "<!-- written by `python -m patches save`: do not edit -->"
END = "<!-- end -->"


def overview(pin: Pin, queue: list[Patch]) -> str:
    """The pin and the patches on it, in Markdown."""
    out = [
        f"Pin: `{pin.distribution}=={pin.version}`, sha256 `{pin.sha256}`; a build of it is version"
        f" `{pin.local_version}`.",
        "",
        "| # | Patch | Why | Reason | Pull request | Files | Own lines | Test |",
        "|--:|---|---|---|---|---|--:|---|",
    ]
    touched: dict[str, int] = {}  # the last patch so far that changes a file
    for number, patch in enumerate(queue, 1):
        header = patch.header
        files = ", ".join(f"`{edit.path.rsplit('/', 1)[-1]}`" for edit in patch.edits)
        tests = ", ".join(f"`{test}`" for test in header.tests)
        linked = f"[{header.subject}]({patch.place})"
        after = max((touched.get(edit.path, 0) for edit in patch.edits), default=0)
        ready = f"after {after}" if after else "ready"
        request = ready if header.upstream_status == "Pending" else header.upstream_status
        cells = (str(number), linked, _first_sentence(header.body), header.reason, request, files, _size(patch), tests)
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        touched |= dict.fromkeys((edit.path for edit in patch.edits), number)
    return "\n".join(out) + "\n"


def _first_sentence(body: str) -> str:
    return re.split(r"(?<=[.:]) ", " ".join(body.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(":")


def _size(patch: Patch) -> str:
    """Lines of our own and, behind a minus, the old lines they stand for."""
    lines = [line for edit in patch.edits for line in edit.script]
    changed = sum(line.startswith("s ") for line in lines)
    added = sum(line.startswith("+") for line in lines) + changed
    dropped = sum(int(line.split()[2]) for line in lines if line.startswith("d ")) + changed
    return f"+{added} -{dropped}"


def refreshed(root: Path) -> str:
    """The text of UPSTREAM.md with the table that the queue makes."""
    text = read_text(root / "UPSTREAM.md")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise located("UPSTREAM.md", None, f"must hold the lines {BEGIN!r} and {END!r} once each")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n\n{overview(load_pin(root), load_queue(root))}\n{END}{tail}"
