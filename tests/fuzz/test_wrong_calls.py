"""Every wrong call of the catalogue is refused by name, and the calls they are made from are right."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import nsa_layer
from flash_attn import cute
from flash_attn.cute import block_lists
from fuzz.wrong_calls import Spec, WrongCall, catalogue, specs
from fuzz.wrong_calls.check import complaint, fake_gpu, main, no_kernels
from fuzz.wrong_calls.two_passes import SPECS as TWO_PASSES

CALLS = catalogue()
ROOT = Path(__file__).resolve().parents[2]
# Words of the documentation that are also names of functions, or functions that take what they get as it is.
NOT_CALLED = {
    "BlockSparseTensorsTorch": "holds tensors; whoever takes them checks them",
    "block_size": "a field", "tensor": "a word", "width": "an argument",
}  # fmt: skip


def defined() -> set[str]:
    """Functions and classes of modules that users import from."""
    files = [*(ROOT / "flash_attn" / "cute").rglob("*.py"), *(ROOT / "nsa_layer").glob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in nodes if isinstance(node, kinds)} | set(cute.__all__)


def documented() -> set[str]:
    """Functions and classes that the documentation names or calls."""
    words: set[str] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```python(.*?)```", text, re.DOTALL))
        words |= set(re.findall(r"`(?:\w+\.)*(\w+)[(`]", text)) | set(re.findall(r"\b(\w+)\(", code))
        words |= {word for line in re.findall(r"import ([\w, ]+)", code) for word in re.split(r"[,\s]+", line)}
    return words & defined()


PUBLIC = {*nsa_layer.__all__, *cute.__all__, *block_lists.__all__} | documented()
# Right calls of these launch kernels.
LAUNCH = ("flash_attn_func", "flash_attn_varlen_func", "backward of", "backward_dq", "backward_layout", "convert")


def test_the_catalogue_is_large_and_has_every_function() -> None:
    assert len(CALLS) >= 150
    assert len({call.name for call in CALLS}) == len(CALLS)
    assert {"nsa", "flash_attn_func", "validate_lists", "plan_backward"} <= PUBLIC, "the pages are read"
    missing = PUBLIC - {call.spec.function.split(",")[0] for call in CALLS} - set(NOT_CALLED)
    assert not missing, f"public functions without wrong calls: {sorted(missing)}"
    assert set(NOT_CALLED) <= PUBLIC, "no function has this name any more"
    counts = Counter(call.spec.function for call in CALLS)
    assert all(counts[spec.function] for spec in specs())


@pytest.mark.parametrize("spec", list(specs()), ids=lambda spec: spec.function)
def test_wrong_calls_are_refused(spec: Spec) -> None:
    said = {call.name: complaint(call) for call in CALLS if call.spec is spec}
    assert said and not {name: text for name, text in said.items() if text is not None}


ALONE = [s for s in specs() if not s.function.startswith(LAUNCH) and s.function not in ("lists_from_block_mask",)]


@pytest.mark.parametrize("spec", ALONE, ids=lambda spec: spec.function)
def test_what_they_are_made_from_is_right(spec: Spec) -> None:
    spec.call(**spec.good("cpu"))


@pytest.mark.parametrize("spec", TWO_PASSES, ids=lambda spec: spec.function)
def test_right_calls_of_two_passes_reach_a_kernel(spec: Spec) -> None:
    """What the wrong ones are made from is not refused."""
    with fake_gpu(), no_kernels(), pytest.raises(RuntimeError, match="a kernel is compiled"):
        spec.call(**spec.good("cuda"))


@pytest.mark.gpu
def test_wrong_calls_on_a_gpu() -> None:
    assert main([]) == 0


def wrong(call: object, *words: str) -> WrongCall:
    spec = Spec("made up", call, lambda device: {"x": torch.ones(3)}, also={"x": words})
    return WrongCall(spec, "x", "anything", {})


def test_complaints() -> None:
    def taken(x: torch.Tensor) -> None: ...

    def unnamed(x: torch.Tensor) -> None:
        raise ValueError("something is wrong")

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

    expected = [
        (taken, "was taken"),
        (unnamed, "does not name x"),
        (other, "raised KeyError"),
        (late, "refused only after"),
    ]
    for call, text in [*expected, (writes, "changed one of its inputs")]:
        assert text in complaint(wrong(call))
    assert complaint(wrong(good)) is None
