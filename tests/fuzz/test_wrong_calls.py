"""Every call of the catalogue is refused as it says, and the calls they are made from are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import nsa_layer
from flash_attn import cute
from flash_attn.cute import block_lists
from fuzz.wrong_calls import Table, tables
from fuzz.wrong_calls.attention import TWO_PASSES
from fuzz.wrong_calls.check import complaint, fake_gpu, no_kernels

ROOT = Path(__file__).resolve().parents[2]
# Words of the documentation that are also names of functions, or functions that take what they get as it is.
NOT_CALLED = {
    "BlockSparseTensorsTorch": "holds tensors; whoever takes them checks them",
    "ContextParallel": "needs process groups, and so do those that take one: test_context_parallel has wrong ones",
    "shard_sequence": "takes a ContextParallel", "unshard_sequence": "takes a ContextParallel",
    "attention": "a word", "attend": "takes what nsa has checked", "backward": "a word", "BlockMask": "is PyTorch's",
    "index_loss": "takes a model: test_index_layers has wrong ones",
    "block_size": "a field", "mean": "is a tensor's", "tensor": "a word", "width": "an argument",
}  # fmt: skip


def defined() -> set[str]:
    """Functions and classes of modules that users import from."""
    files = [*(ROOT / "flash_attn" / "cute").rglob("*.py"), *(ROOT / "nsa_layer").glob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in nodes if isinstance(node, kinds)} | set(cute.__all__)


def documented() -> set[str]:
    """Functions and classes that the pages for users name or call."""
    words: set[str] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if page.stem in ("architecture", "notes", "fuzzing"):
            continue
        text = page.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```python(.*?)```", text, re.DOTALL))
        words |= set(re.findall(r"`(?:\w+\.)*(\w+)[(`]", text)) | set(re.findall(r"\b(\w+)\(", code))
        words |= {word for line in re.findall(r"import ([\w, ]+)", code) for word in re.split(r"[,\s]+", line)}
    return words & defined()


PUBLIC = {*nsa_layer.__all__, *cute.__all__, *block_lists.__all__} | documented()
# Right calls of these launch kernels, or need what only they give.
LAUNCH = ("flash_attn_func", "flash_attn_varlen_func", "backward", "convert", "lists_from_block_mask", "warm_up")


def test_the_catalogue_has_every_function() -> None:
    assert {"nsa", "flash_attn_func", "validate_lists"} <= PUBLIC, "the pages are read"
    missing = PUBLIC - {table.function.split(",")[0] for table in tables()} - set(NOT_CALLED)
    assert not missing, f"public functions without wrong calls: {sorted(missing)}"


@pytest.mark.parametrize("table", list(tables()), ids=lambda table: table.function)
def test_wrong_calls_are_refused(table: Table) -> None:
    if not table.function.startswith(LAUNCH):
        table.call(**table.good("cpu"))  # so that a check which remembers right calls has this one to remember
    said = [(call[0], complaint(table, *call)) for call in table.calls()]
    assert said and not [(name, text) for name, text in said if text is not None]


@pytest.mark.parametrize("table", TWO_PASSES, ids=lambda table: table.function)
def test_right_calls_of_two_passes_reach_a_kernel(table: Table) -> None:
    """The calls that wrong ones are made from are not refused."""
    with fake_gpu(), no_kernels(), pytest.raises(RuntimeError, match="a kernel is compiled"):
        table.call(**table.good("cuda"))


def taken(x: torch.Tensor) -> None: ...


def other(x: torch.Tensor) -> None:
    raise KeyError("x")


def late(x: torch.Tensor) -> None:
    x + 1
    raise ValueError("x is wrong")


def writes(x: torch.Tensor) -> None:
    x.numpy()[0] = 7
    raise ValueError("x is wrong")


def good(x: torch.Tensor) -> None:
    raise ValueError("x is wrong")


def test_complaints() -> None:
    """A call that is taken, raises something else or other words, begins first, or changes its input."""
    for call, words, expected in (
        (taken, "", "was taken"),
        (other, "", "raised KeyError"),
        (good, "not said", "raised ValueError: x is wrong"),
        (late, "", "refused only after"),
        (writes, "", "changed one of its inputs"),
        (good, "x is", None),
    ):
        table = Table("made up", call, lambda device: {"x": torch.ones(3)}, ())
        said = complaint(table, "x", ValueError, words, lambda x: x)
        assert said is None if expected is None else expected in said
