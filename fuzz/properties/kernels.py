"""The kernels on a GPU against dense attention in fp64, and the same bits where that is promised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fuzz import strategies
from fuzz.attention import NAMES, Call, Tensors, assert_close, make, reference, rounded_terms, run, sequences, visible
from fuzz.case import Attention
from fuzz.kinds import EXACT, KINDS
from fuzz.prop import GPU, holds


def assert_right(call: Call, got: Tensors) -> None:
    """`assert_results` of a call."""
    exact, rough = reference(call, torch.float64), reference(call, call.q.dtype)
    rounding, seen = (partial(of, call) for of in (rounded_terms, visible))
    assert_results(got, exact, rough, seen, partial(sequences, call.case), rounding=rounding)


def assert_results(
    got: Tensors,
    exact: Tensors,
    rough: Tensors,
    seen: Callable[[int], torch.Tensor],
    split: Callable[[torch.Tensor, bool], Sequence[torch.Tensor]],
    rounding: Callable[[str], float] = lambda name: 0.0,
    **limits: float,
) -> None:
    """Output, log-sum-exp and gradients are those of the definition; what is hidden is exactly nothing.

    seen: pairs of a sequence, bool [heads, queries, keys]. split: a tensor of queries, or keys, into sequences.
    """
    lse, true = got["lse"], exact["lse"]
    assert lse.isneginf().equal(true.isneginf()), "log-sum-exp: -inf in the wrong rows"
    some = ~true.isneginf()
    torch.testing.assert_close(lse[some].double(), true[some], rtol=1e-3, atol=2e-3, msg=lambda said: f"lse: {said}")
    for name in exact.keys() - {"lse"}:
        assert_close(name, got[name], exact[name], rough[name], rounding=rounding(name), **limits)
    parts = [split(got[name], name in ("dk", "dv")) for name in NAMES]
    for b, of_sequence in enumerate(zip(*parts, strict=True)):
        shown = seen(b)
        blind, unseen = ~shown.any(0).any(1), ~shown.any(0).any(0)
        for name, part in zip(NAMES, of_sequence, strict=True):
            hidden = part[unseen if name in ("dk", "dv") else blind]
            assert not hidden.any(), f"{name} of sequence {b} is not 0 where nothing is visible"


@holds("attention.is its definition", strategies.attention, kinds=KINDS, needs=GPU, stock=True)
def is_its_definition(case: Attention) -> None:
    call = make(case)
    (got,) = run(call)
    assert_right(call, got)


@holds("attention.same bits", strategies.attention, kinds=EXACT, needs=GPU, stock=True)
def same_bits(case: Attention) -> None:
    """Output and deterministic gradients, 200 times over, while other work comes and goes."""
    call, first = make(case), None
    other, square = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for turn in range(20):
        with torch.cuda.stream(other):
            for _ in range((case.seed + 7 * turn) % 20):
                square @ square
        for again in run(call, times=10):
            first = again if first is None else first
            for name, x in again.items():
                assert x.equal(first[name]), f"{name} has {int((x != first[name]).sum())} other numbers in round {turn}"
