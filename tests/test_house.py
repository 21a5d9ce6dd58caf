"""The packages are kept readable: which may import which, no circle, no long function, no deep folder, few records.

Imports go in one direction, nsa_tools, fuzz, benchmarks, tests -> nsa_layer -> flash_attn.cute, and backends of the
layer never import one another: what one gets wrong, another can show. docs/architecture.md has a picture of all imports
between folders, which `python tests/test_house.py` draws.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from graphlib import TopologicalSorter
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
# Modules of nsa_layer outside its packages, by the folder that they count as; the others are its "api".
FOLDER_OF = {
    **dict.fromkeys(("config", "call", "checks", "cached_call", "cache_slots", "saved_shapes"), "config"),
    **dict.fromkeys(("autocast", "derivatives", "fork", "profiler_ranges", "projection", "support"), "support"),
    "block_mlp": "eager",
    "reference": "reference",
}
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PICTURE = re.compile(r"(?<=do not edit -->\n).*?(?=<!-- end -->)", re.DOTALL)
PATHS = re.compile(r"`((?:nsa_layer|nsa_tools|flash_attn|patches|tests|fuzz|benchmarks|docs)/[\w/.]*)`")
# What the kernels need beside PyTorch; imported lazily, with them.
KERNELS = {"cuda", "cutlass"}
# The extra [hf].
HF_EXTRA = {"transformers", "accelerate"}
PACKAGES = {
    "nsa_layer": ROOT / "nsa_layer",
    "flash_attn.cute": ROOT / "flash_attn" / "cute",
    "nsa_tools": ROOT / "nsa_tools",
}
LONGEST, DEEPEST, MOST_RECORDS = 80, 2, 25


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
        path = ROOT / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
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
        extra = HF_EXTRA if file.is_relative_to(ROOT / "nsa_layer" / "integrations") else set()
        assert others <= {"torch"} | KERNELS | extra, f"{file.relative_to(ROOT)} imports {sorted(others)}"


def test_layer_runs_with_pytorch_alone() -> None:
    without = (*KERNELS, *TOOLS_EXTRA, *HF_EXTRA, "einops", "quack", "tvm_ffi", "nsa_tools")
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
    others = [f"nsa_layer.{name}" for name in support.BACKENDS if name != backend]
    modules = reached(support.BACKENDS[backend])
    assert support.BACKENDS[backend] in modules
    assert not [module for module in modules for other in others if f"{module}.".startswith(f"{other}.")]


def test_reference_shares_nothing_but_the_problem() -> None:
    assert reached("nsa_layer.reference") <= {"nsa_layer.reference", "nsa_layer.config", "nsa_layer.call"}


def folder_of(module: str) -> tuple[str, str] | None:
    """The package that a module belongs to, and its folder there ("" where a package is one); None: not ours."""
    package, *rest = module.split(".")
    if package not in MAY_IMPORT:
        return None
    rest = rest[1:] if package == "flash_attn" else rest
    folder, name = ROOT / package / ("cute" if package == "flash_attn" else ""), rest[0] if rest else ""
    if package not in ("nsa_layer", "flash_attn"):
        return package, ""
    if name and (folder / name).is_dir():
        return package, name
    if package == "nsa_layer":
        return package, FOLDER_OF.get(name, "api")
    return package, "facades" if (folder / f"{name}.py").exists() else "upstream"


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the packages, and its file: upstream's, patched, where the package is installed."""
    (upstream,) = map(Path, importlib.util.find_spec("flash_attn.cute").submodule_search_locations)
    ours = {file.relative_to(ROOT): file for package in MAY_IMPORT for file in files(package)}
    theirs = {Path("flash_attn", "cute", file.relative_to(upstream)): file for file in upstream.rglob("*.py")}
    for path, file in (theirs | ours).items():
        if path != Path("nsa_layer", "__main__.py"):
            yield ".".join(path.with_suffix("").parts).removesuffix(".__init__"), file


def picture() -> str:
    """Folders and what they import, as a Mermaid graph: folders of their own package, other packages as a whole."""
    arrows = defaultdict(set)
    for module, file in modules():
        own, named = folder_of(module), set(imports(file))
        for other in map(folder_of, named - {name.rpartition(".")[0] for name in named}):
            if other not in (None, own):
                arrows[own].add(other)
    lines = ["```mermaid", "flowchart TD"]
    for package in MAY_IMPORT:
        folders = [own for own in sorted(arrows) if own[0] == package]
        inside = {own[1]: {to[1] for to in arrows[own] if to[0] == package} for own in folders}
        drawn = [f"        {name} --> {' & '.join(sorted(to))}" for name, to in inside.items() if to]
        lines += [f"    subgraph {package}", *drawn, "    end"] if drawn else []
    for own in sorted(arrows):
        if others := sorted({to[0] for to in arrows[own]} - {own[0]}):
            lines.append(f"    {own[1] or own[0]} --> {' & '.join(others)}")
    return "\n".join([*lines, "```", ""])


def test_the_picture_is_that_of_the_code() -> None:
    assert all((ROOT / "nsa_layer" / f"{name}.py").exists() for name in FOLDER_OF)
    assert PICTURE.findall(ARCHITECTURE.read_text()) == [picture()], "python tests/test_house.py draws it"


def test_architecture_names_what_exists() -> None:
    named = set(PATHS.findall(ARCHITECTURE.read_text()))
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


def modules_of(package: str) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    folder = PACKAGES[package]
    files = {file.relative_to(folder).with_suffix(""): file for file in folder.rglob("*.py")}
    return {".".join([package, *path.parts]).removesuffix(".__init__"): file for path, file in files.items()}


def imports_of(file: Path, known: Container[str]) -> Iterator[str]:
    """Modules among known ones that a file imports, inside functions too, unless for types alone."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in members)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_one_another_in_a_circle(package: str) -> None:
    known = modules_of(package)
    arrows = {name: set(imports_of(file, known)) & known.keys() - {name, package} for name, file in known.items()}
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
    for name, file in modules_of(package).items():
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and not is_on_the_device(node):
                count = code_lines(node, source.splitlines())
                long |= {f"{name}.{node.name}": count} if count > LONGEST else {}
    assert long == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_deep(package: str) -> None:
    depths = {name: len(file.relative_to(PACKAGES[package]).parts) - 1 for name, file in modules_of(package).items()}
    assert [name for name, depth in depths.items() if depth > DEEPEST] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports two of one name as one module."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}


def test_records_are_few_and_listed() -> None:
    """Of the layer, outside of its kernels."""
    records, text = set(), ARCHITECTURE.read_text(encoding="utf-8")
    for name, file in modules_of("nsa_layer").items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if ".kernels" not in name else ():
            if isinstance(node, ast.ClassDef):
                kinds = map(ast.unparse, (*node.bases, *node.decorator_list))
                records |= {node.name} if any("NamedTuple" in kind or "dataclass" in kind for kind in kinds) else set()
    assert len(records) <= MOST_RECORDS and not {name for name in records if f"`{name}`" not in text}


# Names that modules of the layer share, each with one meaning: what every backend has.
SHARED = {"attend", "attend_cached", "backward", "compress", "forward", "gate_values", "select_blocks"}
SHARED |= {"Tensor", "__all__"}


def test_a_name_of_host_code_has_one_meaning() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for file in files("nsa_layer"):
        if file.is_relative_to(ROOT / "nsa_layer" / "kernels"):
            continue  # sizes and steps of one kernel
        for node in ast.parse(file.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Pass())]
            names = {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
            for name in names | ({node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set()):
                where[name].add(str(file))
    assert {name for name, modules in where.items() if len(modules) > 1} <= SHARED


@pytest.mark.parametrize("package", ["flash_attn.cute", "nsa_tools"])
def test_a_public_function_or_class_has_one_meaning(package: str) -> None:
    where = defaultdict(list)
    for module, file in modules_of(package).items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                where[node.name].append(module)
    shared = {name for name, modules in where.items() if len(modules) > 1}
    assert shared <= {"main", "unsupported"}  # of each command; of each backward pass that may refuse a call


# Names that say nothing, and words that the field has others for: slot, capacity, shard, work tile, semaphore.
VAGUE_NAMES = {"places", "room", "rooms", "stretch", "turns", "Turns", "TURNS", "item", "recorded", "those", "takes"}
VAGUE_NAMES |= {"given", "found", "made"}  # of the layer's host code alone
VAGUE_WORDS = re.compile(r"\b(places|rooms?|stretch(es)?|what is left|goes in parts)\b", re.IGNORECASE)
RIDDLE = re.compile(r"(What|Whether|Where|How|Those|These)\b")


def is_host_code(module: str) -> bool:
    return module.startswith("nsa_layer") and ".kernels" not in module


@pytest.mark.parametrize("package", PACKAGES)
def test_names_and_docstrings_are_in_words_of_the_field(package: str) -> None:
    names, riddles = set(), set()
    for module, file in modules_of(package).items():
        text = file.read_text(encoding="utf-8")
        assert not VAGUE_WORDS.search(text), f"{module}: {VAGUE_WORDS.search(text)}"
        for node in ast.walk(ast.parse(text)):
            here = {getattr(node, field, None) for field in ("name", "arg", "id")}
            names |= here if is_host_code(module) else here - {"given", "found", "made"}
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                said = ast.get_docstring(node) or ""
                riddles |= {f"{module}: {said.splitlines()[0]}"} if RIDDLE.match(said) else set()
    assert not names & VAGUE_NAMES and not riddles, (names & VAGUE_NAMES, riddles)


def test_docs_and_tests_are_in_words_of_the_field() -> None:
    code = [file for folder in ("tests", "fuzz", "benchmarks", "examples", "patches") for file in files(folder)]
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(file for file in code if file != Path(__file__))):
        text = file.read_text(encoding="utf-8").replace("`stretch`", "")  # of an operator that is gone
        assert not VAGUE_WORDS.search(text), f"{file}: {VAGUE_WORDS.search(text)}"


if __name__ == "__main__":
    ARCHITECTURE.write_text(PICTURE.sub(picture().replace("\\", r"\\"), ARCHITECTURE.read_text()))
