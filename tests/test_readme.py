"""The Python examples of the README and of pages of docs/ run, and what they name exists."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from nsa_layer import NSAConfig, nsa, support

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
OPERATOR = (REPOSITORY / "docs" / "operator.md").read_text()
HF = pytest.param("huggingface", marks=pytest.mark.xdist_group("hf"))
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["../README", "pytorch", "serving", "distributed", HF])
def test_examples_of_a_page_run_one_after_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    page = REPOSITORY / "docs" / f"{name}.md"
    examples = EXAMPLE.findall(page.read_text())
    assert len(examples) >= 2
    module = ModuleType("__page__")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where PyTorch 2.11 looks for what it compiles
    exec(compile("\n".join(examples), page.name, "exec"), vars(module))


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLE.findall(README))
def test_example_runs_on_a_gpu(example: str) -> None:
    exec(compile(example, "README.md", "exec"), {"__name__": "__readme__"})


def test_every_option_is_in_the_tables() -> None:
    rows = "\n".join(line for line in OPERATOR.splitlines() if line.startswith("|"))
    for name in [*inspect.signature(nsa).parameters, *(f.name for f in fields(NSAConfig))]:
        assert name == "config" or f"`{name}`" in rows, name


def test_defaults_in_the_table_are_those_of_the_code() -> None:
    for field in fields(NSAConfig):
        (row,) = [line for line in OPERATOR.splitlines() if line.startswith(f"| `{field.name}` |")]
        shown = row.split("|")[2].strip().strip("`").strip('"')
        if field.default is not None:
            assert shown == str(field.default), row


PAGES = [REPOSITORY / "README.md", REPOSITORY / "UPSTREAM.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, heading = target.partition("#")
        if not target.startswith("https://"):
            path = page.parent / file if file else page
            assert path.exists(), target
            assert not heading or heading in anchors(path), target


def test_the_support_table_is_that_of_the_code() -> None:
    """A row names features with equal cells, separated by "; ": what runs (90), what only compiles (100), the rest."""
    rows = re.search(r"^\| feature \| sm_90 \| sm_100 \|.*\n\|[:|-]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    shown: dict[str, tuple[str, ...]] = {}
    for row in rows[1].splitlines():
        names, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for name in names.split("; "):
            assert name not in shown, name
            shown[name] = tuple(cells)
    runs, lacks = tuple(support.ARCHITECTURES.values()), ("no", "no")
    assert shown == dict.fromkeys(support.SUPPORTED, runs) | dict.fromkeys(support.LACKING, lacks)
