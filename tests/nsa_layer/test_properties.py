"""What must hold for any input: drawn cases against the reference, permutations, linearity in v, longer sequences."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_layer import NSAConfig
from nsa_layer.testing import Case, Inputs, assert_close_to_reference, make_inputs, run

# Drawn anew on every machine alike: a failure is a Case to paste, and nothing is kept beside the tests.
few = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    size = draw(st.sampled_from((1, 4, 6, 16)))
    return NSAConfig(
        block_size=size,
        block_stride=draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])),
        block_counts=draw(st.integers(1, 6)),
        q_tile=draw(st.sampled_from([n for n in range(1, 33) if n % size == 0 or size % n == 0])),
        window_size=draw(st.integers(1, 40)),
        tile_query=draw(st.sampled_from(("before", "mean"))),
        importance=draw(st.sampled_from(("softmax", "logit"))),
        per_head=draw(st.booleans()),
        compress_offset=draw(st.none() | st.integers(-20, 40)),
        force_blocks=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases in fp64, where a wrong mask cannot hide behind rounding."""
    Hkv = draw(st.integers(1, 3))
    lengths = draw(st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any).map(tuple))
    return Case(
        B=draw(st.integers(1, 3)),
        T=draw(st.integers(1, 90)),
        Hq=Hkv * draw(st.integers(1, 4)),
        Hkv=Hkv,
        D=draw(st.integers(2, 9)),
        Dv=draw(st.none() | st.integers(2, 9)),
        dtype=torch.float64,
        config=draw(configs()),
        causal=draw(st.booleans()),
        lengths=lengths,
        gate=draw(st.sampled_from(("weight", "given", "none"))),
        compress_weights=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def output(inputs: Inputs) -> torch.Tensor:
    return run("eager", inputs).o


@settings(few, max_examples=120)
@given(cases())
def test_drawn_cases(case: Case) -> None:
    assert_close_to_reference(case, "eager")


@few
@given(cases(), st.randoms(use_true_random=False))
def test_batches_and_groups_do_not_meet(case: Case, random) -> None:
    """Permuting batches, or key/value heads with their query heads, permutes the output."""
    case = replace(case, lengths=None)
    inputs = make_inputs(case)
    batches, groups = list(range(case.B)), list(range(case.Hkv))
    random.shuffle(batches)
    random.shuffle(groups)
    G = case.Hq // case.Hkv
    heads = [g * G + i for g in groups for i in range(G)]
    moved = {"q": inputs.q[batches][:, :, heads]}
    moved |= {name: getattr(inputs, name)[batches][:, :, groups] for name in ("k", "v")}
    moved["do"] = inputs.do[batches][:, :, heads]
    if inputs.gates is not None:
        moved["gates"] = inputs.gates[batches][:, :, heads]
    if inputs.gate_weight is not None:
        moved["gate_weight"] = inputs.gate_weight[heads]
    if case.compress_weights:
        moved |= {name: getattr(inputs, name)[groups] for name in ("compress_k_weight", "compress_v_weight")}
    torch.testing.assert_close(output(replace(inputs, **moved)), output(inputs)[batches][:, :, heads])


@few
@given(cases())
def test_heads_of_a_group_are_alike(case: Case) -> None:
    """Reversing the query heads of each group reverses their outputs: the choice is one sum, or each head's own."""
    case = replace(case, lengths=None)
    inputs = make_inputs(case)
    G = case.Hq // case.Hkv
    heads = [g * G + i for g in range(case.Hkv) for i in reversed(range(G))]
    moved = {"q": inputs.q[:, :, heads], "do": inputs.do[:, :, heads]}
    if inputs.gates is not None:
        moved["gates"] = inputs.gates[:, :, heads]
    if inputs.gate_weight is not None:
        moved["gate_weight"] = inputs.gate_weight[heads]
    torch.testing.assert_close(output(replace(inputs, **moved)), output(inputs)[:, :, heads])


@few
@given(cases())
def test_linear_in_v(case: Case) -> None:
    inputs = make_inputs(case)
    other = make_inputs(replace(case, seed=case.seed + 1000)).v
    both = output(replace(inputs, v=inputs.v + 3 * other))
    torch.testing.assert_close(both, output(inputs) + 3 * output(replace(inputs, v=other)))


@few
@given(cases(), st.integers(1, 50))
def test_later_tokens_change_nothing_earlier(case: Case, more: int) -> None:
    """A prefix gives the prefix of the output, whatever T is: positions count from the start."""
    offset = case.config.block_size - 1
    causal = case.config.replace(compress_offset=max(case.config.offset, offset), tile_query="before")
    case = replace(case, lengths=None, causal=True, config=causal, T=case.T + more)
    inputs = make_inputs(case)
    T = case.T - more
    names = [name for name in ("q", "k", "v", "do", "gates") if getattr(inputs, name) is not None]
    prefix = replace(inputs, case=replace(case, T=T), **{name: getattr(inputs, name)[:, :T] for name in names})
    torch.testing.assert_close(output(prefix), output(inputs)[:, :T])
