"""What racecheck reports, read: which instructions of which kernel, and which addresses of shared memory.

The sanitizer names an access by its kernel and how far into it the instruction is. Where the kernel's cubin was kept
and a disassembler is at hand, that is an instruction: a bulk copy is another one than a store of a thread.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_ACCESS = re.compile(
    r"(?P<kind>Read|Write) (?:access|Thread \([^)]*\)) at (?:(?P<first>0x[0-9a-f]+) in )?(?P<kernel>[\w$]+)[^+\n]*"
    r"(?:\+(?P<last>0x[0-9a-f]+))?"
)
_SHARED = re.compile(r"Potential (?P<kind>RAW|WAR|WAW) hazard detected at __shared__ (?P<address>0x[0-9a-f]+)")
_COUNT = re.compile(r"\[(\d+) hazards?\]")
_SECTION = re.compile(r"^\.text\.([\w$]+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")


@dataclass(frozen=True)
class Access:
    """Attributes:
    kind: "Read" or "Write".
    kernel: its name; offset: of the instruction, bytes.
    """

    kind: str
    kernel: str
    offset: int


def accesses(text: str) -> dict[Access, int]:
    """All accesses that a report names, and with how many hazards, 0 where it does not say."""
    found: dict[Access, int] = defaultdict(int)
    for line in text.splitlines():
        access, count = _access(line), _COUNT.search(line)
        if access is not None:
            found[access] += int(count[1]) if count else 0
    return dict(found)


def shared_ranges(text: str) -> dict[tuple[str, Access, Access], tuple[int, int, int]]:
    """Of a report of single hazards: kind and the two accesses -> lowest and highest address, and how many."""
    addresses: dict[tuple[str, Access, Access], list[int]] = defaultdict(list)
    lines = text.splitlines()
    for i, line in enumerate(lines):
        hazard = _SHARED.search(line)
        if hazard is None:
            continue
        pair = [access for access in map(_access, lines[i + 1 : i + 3]) if access is not None]
        if len(pair) == 2:
            addresses[hazard["kind"], pair[0], pair[1]].append(int(hazard["address"], 16))
    return {key: (min(of), max(of), len(of)) for key, of in addresses.items()}


def _access(line: str) -> Access | None:
    found = _ACCESS.search(line)
    offset = found and (found["first"] or found["last"])
    return Access(found["kind"], found["kernel"], int(offset, 16)) if offset else None


def find_disassembler(sanitizer: str | None = None) -> str | None:
    """nvdisasm: on the path, beside the sanitizer, or in triton's wheel."""
    folders = [Path(sanitizer).resolve().parent] if sanitizer else []
    folders += [folder.parent / "bin" for folder in folders]
    triton = find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folders.append(Path(next(iter(triton.submodule_search_locations))) / "backends" / "nvidia" / "bin")
    beside = (str(folder / "nvdisasm") for folder in folders if (folder / "nvdisasm").is_file())
    return shutil.which("nvdisasm") or next(beside, None)


def instructions(cubins: Path, disassembler: str) -> dict[tuple[str, int], str]:
    """(kernel, offset) -> instruction, of all cubins in a folder."""
    found: dict[tuple[str, int], str] = {}
    for cubin in sorted(cubins.glob("*.cubin")):
        done = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, timeout=120)
        found.update(parse_instructions(done.stdout))
    return found


def parse_instructions(text: str) -> Iterator[tuple[tuple[str, int], str]]:
    kernel = ""
    for line in text.splitlines():
        section, instruction = _SECTION.match(line), _INSTRUCTION.search(line)
        kernel = section[1] if section else kernel
        if instruction:
            yield (kernel, int(instruction[1], 16)), instruction[2]


def explained(text: str, known: dict[tuple[str, int], str]) -> list[str]:
    """A report in short: each access with its instruction, each pair's addresses."""
    lines = []
    for access, count in accesses(text).items():
        lines.append(f"{_said(access, known)}, of {access.kernel[:90]}" + (f", {count} hazards" if count else ""))
    for (kind, one, other), (low, high, count) in shared_ranges(text).items():
        both = f"{_said(one, known)}; {_said(other, known)}"
        lines.append(f"{kind} at shared {low:#x} .. {high:#x}, {count} times: {both}")
    return lines


def _said(access: Access, known: dict[tuple[str, int], str]) -> str:
    return f"{access.kind} at +{access.offset:#x}: {known.get((access.kernel, access.offset), 'instruction not known')}"
