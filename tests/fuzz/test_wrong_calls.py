"""Every wrong call of the catalogue is refused by name, and the calls they are made from are right."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fuzz.wrong_calls import Spec, WrongCall, catalogue, specs
from fuzz.wrong_calls.check import complaint, main

CALLS = catalogue()
FUNCTIONS = {
    "nsa", "NSAConfig", "NSAttention", "NSAttention.forward", "RotaryEmbedding", "flash_attn_func", "lists_from_dense",
    "flash_attn_varlen_func", "lists_from_blocks", "lists_from_window", "lists_from_block_mask", "transpose_lists",
    "draw_lists", "plan_backward", "compute_dq_write_order", "validate_lists", "cu_total_blocks", "merged_walk",
    "deterministic_walk", "launch_order", "launch_rows", "simulate", "compression",
}  # fmt: skip
LAUNCH = ("flash_attn_func", "flash_attn_varlen_func", "backward of")  # their good calls run kernels


def test_the_catalogue_is_large_and_has_every_function() -> None:
    assert len(CALLS) >= 150
    assert len({call.name for call in CALLS}) == len(CALLS)
    assert FUNCTIONS <= {call.spec.function.split(",")[0] for call in CALLS}
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
