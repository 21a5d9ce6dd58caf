"""The three implementations never import one another: what one gets wrong, another can show."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nsa_layer
from nsa_layer import support

PACKAGE = Path(nsa_layer.__file__).parent


def imported(module: str) -> set[str]:
    """Every module of nsa_layer that a module leads to, itself included, imports inside functions too."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        file = PACKAGE.parent / f"{name.replace('.', '/')}.py"
        if name in seen or not file.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nsa_layer"):
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return seen


@pytest.mark.parametrize("backend", support.BACKENDS)
def test_backends_are_independent(backend: str) -> None:
    others = {module for name, module in support.BACKENDS.items() if name != backend}
    found = imported(support.BACKENDS[backend])
    assert support.BACKENDS[backend] in found
    assert not found & others


def test_the_reference_shares_nothing_but_the_problem() -> None:
    assert imported("nsa_layer.reference") <= {"nsa_layer.reference", "nsa_layer.config", "nsa_layer.problem"}
