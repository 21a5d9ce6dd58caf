"""The kernels on a GPU against dense attention in fp64, and the same bits where that is promised."""

from __future__ import annotations

from functools import partial

import torch

from fuzz import strategies
from fuzz.attention import make_inputs, run
from fuzz.case import Attention
from fuzz.kinds import EXACT, KINDS
from fuzz.oracle import assert_right, rounded_terms
from fuzz.prop import GPU, holds


@holds("attention.is its definition", strategies.attention, kinds=KINDS, needs=GPU, stock=True)
def is_its_definition(case: Attention) -> None:
    x = make_inputs(case)
    (got,) = run(case, x)
    assert_right(case, x, got, partial(rounded_terms, x))


@holds("attention.same bits", strategies.attention, kinds=EXACT, needs=GPU, stock=True)
def same_bits(case: Attention) -> None:
    """Output and deterministic gradients, 200 times over, while other work comes and goes."""
    x, first = make_inputs(case), None
    other, square = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for turn in range(20):
        with torch.cuda.stream(other):
            for _ in range((case.seed + 7 * turn) % 20):
                square @ square
        for again in run(case, x, times=10):
            first = again if first is None else first
            for name, t in again.items():
                assert t.equal(first[name]), f"{name} has {int((t != first[name]).sum())} other numbers in round {turn}"
