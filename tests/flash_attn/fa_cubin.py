"""Machine code of kernels: whether they fit the registers, and whether products overlap."""

import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROGRAM, INFO = 1, 0x70000000  # types of sections
EXECUTABLE = 4  # flag of a section
OPCODES = {0x9F0: "product", 0xDF0: "product", 0x9C5: "order", 0x308: "exp2"}  # HGMMA; WARPGROUP.*; MUFU
WAIT = 1 << 47  # of "order": DEPBAR, not ARRIVE
LEFT = 0xFF00  # of a DEPBAR's second word: how many groups of products may still be under way


def cubins(launch: Callable[[], Any], kind: str = "") -> list[bytes]:
    """The cubins of a call's kernels, by their names; of classes whose names, modules before them, hold `kind`.

    In a worker; other kernels are only traced.
    """
    import cutlass.cute as cute
    from cutlass.cutlass_dsl import CuTeDSL
    from fa_compile import uncached

    with uncached(), tempfile.TemporaryDirectory() as dumps, pytest.MonkeyPatch.context() as patch:
        compile_ = cute.compile

        def kept(kernel: Any, *args: Any, options: str) -> Any:
            with patch.context() as others:
                if kind not in f"{kernel.__module__}.{type(kernel).__name__}":
                    others.setattr(CuTeDSL._get_dsl().envar, "dryrun", True)
                return compile_(kernel, *args, options=f"{options} --keep-cubin --dump-dir {dumps}")

        patch.setattr(cute, "compile", kept)
        launch()
        return [path.read_bytes() for path in sorted(Path(dumps).rglob("*.cubin"))]


class Code(NamedTuple):
    """Machine code of a kernel.

    Attributes:
        stack: bytes of stack of every function, which hold what did not fit its registers.
        serialized: the compiler waits for every product by itself, for want of registers or else; None without any.
        exponentials: after each wait that leaves products under way, how many stand before the next wait.
    """

    stack: list[int]
    serialized: bool | None
    exponentials: list[int]


def machine_code(compile_: Callable[..., Any], *args: Any, kind: str = "") -> list[Code]:
    """The code of a call's kernels, of classes whose names, modules before them, hold `kind`; in a worker."""
    code = cubins(lambda: compile_(*args), kind)
    return [Code(_frames(cubin), _serialized(cubin), _exponentials_under_products(cubin)) for cubin in code]


def _frames(cubin: bytes) -> list[int]:
    """Attribute 0x11 of every function."""
    found = []
    for _, kind, _, at, end in _sections(cubin):
        while kind == INFO and at < end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if (form, attribute) == (4, 0x11):
                found.append(struct.unpack_from("<I", cubin, at + 8)[0])
            at += 4 + (value if form == 4 else 0)
    return found


def _serialized(cubin: bytes) -> bool | None:
    found = Counter(kind for kind, _, _ in _instructions(cubin))
    return found["order"] >= found["product"] if found["product"] else None


def _exponentials_under_products(cubin: bytes) -> list[int]:
    found, counts = [], False
    for kind, word, control in _instructions(cubin):
        if kind == "order" and word & WAIT:
            counts = bool(control & LEFT)
            found += [0] * counts
        elif kind == "exp2" and counts:
            found[-1] += 1
    return found


def _instructions(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """Kind, and both words, of those instructions that `OPCODES` has."""
    for _, program in programs(cubin):
        for word, control in struct.iter_unpack("<QQ", program):
            if word & 0xFFF in OPCODES:
                yield OPCODES[word & 0xFFF], word, control


def programs(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and instructions of each kernel: the executable sections of an ELF file."""
    sections = [*_sections(cubin)]
    names = sections[struct.unpack_from("<H", cubin, 62)[0]][3]
    for name, kind, flags, at, end in sections:
        if kind == PROGRAM and flags & EXECUTABLE:
            first = names + name
            yield cubin[first : cubin.index(b"\0", first)].decode(), cubin[at:end]


def _sections(cubin: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Place of the name, type, flags, begin and end of each section."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    for i in range(count):
        name, kind, flags, _, at, length = struct.unpack_from("<IIQQQQ", cubin, table + size * i)
        yield name, kind, flags, at, at + length
