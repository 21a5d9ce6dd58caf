"""How the packages are kept readable: no circle of imports, no long function, no deep folder."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "nsa_layer": ROOT / "nsa_layer",
    "flash_attn.cute": ROOT / "flash_attn" / "cute",
    "nsa_tools": ROOT / "nsa_tools",
}
LONGEST, DEEPEST, MOST_RECORDS = 80, 2, 25


def modules(package: str) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    folder = PACKAGES[package]
    files = {file.relative_to(folder).with_suffix(""): file for file in folder.rglob("*.py")}
    return {".".join([package, *path.parts]).removesuffix(".__init__"): file for path, file in files.items()}


def imported_first(file: Path, known: Container[str]) -> Iterator[str]:
    """Modules among known ones imported when the file is imported, not by a function later or for types alone."""
    waiting = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in members)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_one_another_in_a_circle(package: str) -> None:
    known = modules(package)
    arrows = {name: set(imported_first(file, known)) & known.keys() - {name, package} for name, file in known.items()}
    TopologicalSorter(arrows).prepare()  # or a CycleError that has the circle


def code_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    """Lines of code below a function's signature and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    below = lines[body[0].lineno - 1 : function.end_lineno] if body else []
    return sum(line.strip() != "" and not line.lstrip().startswith("#") for line in below)


def is_on_the_device(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(mark) or "kernel" in ast.unparse(mark) for mark in function.decorator_list)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_host_function_is_long(package: str) -> None:
    long = {}
    for name, file in modules(package).items():
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and not is_on_the_device(node):
                count = code_lines(node, source.splitlines())
                long |= {f"{name}.{node.name}": count} if count > LONGEST else {}
    assert long == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_deep(package: str) -> None:
    depths = {name: len(file.relative_to(PACKAGES[package]).parts) - 1 for name, file in modules(package).items()}
    assert [name for name, depth in depths.items() if depth > DEEPEST] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports two of one name as one module."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}


def test_records_are_few_and_listed() -> None:
    """Of the layer, outside of its kernels."""
    records, text = set(), (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name, file in modules("nsa_layer").items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if ".kernels" not in name else ():
            if isinstance(node, ast.ClassDef):
                kinds = map(ast.unparse, (*node.bases, *node.decorator_list))
                records |= {node.name} if any("NamedTuple" in kind or "dataclass" in kind for kind in kinds) else set()
    assert len(records) <= MOST_RECORDS and not {name for name in records if f"`{name}`" not in text}
