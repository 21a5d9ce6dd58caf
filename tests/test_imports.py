"""Imports go in one direction, nsa_tools, fuzz, benchmarks, tests -> nsa_layer -> flash_attn.cute, and backends of the
layer never import one another: what one gets wrong, another can show."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_layer import support
from nsa_tools.commands import TOOLS_EXTRA

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "flash_attn": (),
    "nsa_layer": ("flash_attn",),
    "nsa_tools": ("nsa_layer", "flash_attn"),
    "fuzz": ("nsa_tools", "nsa_layer", "flash_attn", "patches"),
    "benchmarks": ("fuzz", "nsa_tools", "nsa_layer", "flash_attn"),
    "patches": (),
}
OURS = {*MAY_IMPORT, "tests"}
# What the kernels need beside PyTorch; imported lazily, with them.
KERNELS = {"cuda", "cutlass"}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """The names of modules that a file imports, inside functions too; of ``from a import b`` both a and a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def roots(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


def reached(module: str) -> set[str]:
    """Every module of nsa_layer that a module leads to, itself included."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        file = ROOT / f"{name.replace('.', '/')}.py"
        if name not in seen and name.startswith("nsa_layer.") and file.exists():
            seen.add(name)
            waiting += imports(file)
    return seen


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_in_one_direction(package: str) -> None:
    assert files(package)
    for file in files(package):
        if file == ROOT / "nsa_layer" / "__main__.py":
            continue  # it alone runs the tools
        others = roots(file) & OURS - {package}
        assert others <= set(MAY_IMPORT[package]), f"{file.relative_to(ROOT)} imports {sorted(others)}"


def test_only_main_names_the_tools() -> None:
    """By a string neither, as for `importlib.import_module`."""
    naming = [file.name for file in files("nsa_layer") if "nsa_tools" in file.read_text()]
    assert naming == ["__main__.py"]


def test_layer_imports_pytorch_and_what_kernels_need() -> None:
    for file in files("nsa_layer"):
        others = roots(file) - OURS - sys.stdlib_module_names
        assert others <= {"torch"} | KERNELS, f"{file.relative_to(ROOT)} imports {sorted(others)}"


def test_layer_runs_with_pytorch_alone() -> None:
    without = (*KERNELS, *TOOLS_EXTRA, "einops", "quack", "tvm_ffi", "nsa_tools")
    program = f"""
import sys
sys.modules |= dict.fromkeys({without}, None)
import torch
from nsa_layer import NSAttention
x = torch.randn(1, 70, 32, requires_grad=True)
NSAttention(32, num_heads=4, num_kv_heads=2)(x).sum().backward()
assert x.grad.isfinite().all()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", support.BACKENDS)
def test_backends_are_independent(backend: str) -> None:
    others = {module for name, module in support.BACKENDS.items() if name != backend}
    found = reached(support.BACKENDS[backend])
    assert support.BACKENDS[backend] in found
    assert not found & others


def test_reference_shares_nothing_but_the_problem() -> None:
    assert reached("nsa_layer.reference") <= {"nsa_layer.reference", "nsa_layer.config", "nsa_layer.call_spec"}
