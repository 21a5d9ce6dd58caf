"""Packed sequences give what the same sequences give one at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_layer import NSAConfig, nsa
from nsa_layer.inputs import Arguments, check_inputs
from nsa_layer.packing import Packing
from nsa_layer.problem import Problem
from nsa_layer.testing import LSES, Case, Inputs, make_inputs, run

SMALL = NSAConfig(block_size=16, block_counts=6, q_tile=32, window_size=24)
LENGTHS = (33, 0, 1, 15, 16, 130, 0)


def one_at_a_time(inputs: Inputs) -> list[Inputs]:
    """The sequences of a pack that are not empty, as calls of their own with B = 1."""
    case, starts, alone = inputs.case, inputs.cu_seqlens.tolist(), []
    for start, length in zip(starts, case.lengths):
        if length:
            part = {name: getattr(inputs, name) for name in ("q", "k", "v", "do", "gates")}
            part = {name: x if x is None else x[None, start : start + length] for name, x in part.items()}
            alone.append(replace(inputs, **part, cu_seqlens=None, case=replace(case, T=length, lengths=None)))
    return alone


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "gate": "given"},
        {"config": SMALL.replace(block_stride=8), "gate": "none"},
        {"config": NSAConfig.seed(block_size=16, block_counts=6, q_tile=32, window_size=24), "gate": "none"},
    ],
    ids=repr,
)
def test_one_at_a_time(backend: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    case = Case(**({"lengths": LENGTHS, "config": SMALL, "dtype": dtype, "compress_weights": True} | options))
    inputs = make_inputs(case)
    packed, alone = run(backend, inputs), [run(backend, part) for part in one_at_a_time(inputs)]
    for name, x in packed.tensors().items():
        parts = [r.tensors()[name] for r in alone]
        if name in LSES:
            expected = torch.cat([part[0] for part in parts], dim=-1)
        else:
            expected = sum(parts) if name.endswith("_weight") else torch.cat([part[0] for part in parts])
        if case.gate == "weight" or name in ("dq", "dcompress_k_weight", "dcompress_v_weight"):
            # Products and sums over all tokens at once, in whatever order the library takes.
            finite = expected.masked_fill(expected == -torch.inf, 0)
            bound = 16 * torch.finfo(dtype).eps * float(finite.abs().max())
            torch.testing.assert_close(x, expected, rtol=0, atol=bound, msg=name)
        else:
            assert torch.equal(x, expected), name
    tile = 0
    for r in alone:
        choice = r.aux.block_indices[0]
        here = packed.aux.block_indices[:, tile : tile + choice.shape[1]]
        assert torch.equal(here[..., : choice.shape[-1]], choice)
        assert (here[..., choice.shape[-1] :] == -1).all()
        tile += choice.shape[1]
    assert tile == packed.aux.block_indices.shape[1]


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_sequences_never_see_each_other(backend: str) -> None:
    inputs = make_inputs(Case(lengths=(40, 50), config=SMALL))
    other = {name: getattr(inputs, name).clone() for name in ("q", "k", "v")}
    for x in other.values():
        x[40:] = 100.0
    before, after = run(backend, inputs), run(backend, replace(inputs, **other))
    assert torch.equal(before.o[:40], after.o[:40])
    assert not torch.equal(before.o[40:], after.o[40:])
    for name in ("q", "k", "v"):
        assert torch.equal(before.grads[name][:40], after.grads[name][:40])


def test_starts_on_the_host_are_copied_once() -> None:
    """To the device that everything else is on; on that device they are taken as they are."""
    problem = Problem(SMALL, True, 1.0, LENGTHS)
    starts = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    assert Packing.of(problem, starts, starts.device).cu_seqlens is starts
    first, second = (Packing.of(problem, starts.clone(), torch.device("meta")) for _ in range(2))
    assert first.cu_seqlens is second.cu_seqlens and first.cu_tiles is second.cu_tiles
    assert first.cu_seqlens.device.type == "meta" and first.cu_seqlens.shape == starts.shape


def test_a_capture_keeps_what_it_reads_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_layer import packing

    known, new = (Problem(SMALL, True, 1.0, lengths) for lengths in ((5, 6), (6, 5)))
    device = torch.device("meta")
    starts = {of.lengths: torch.tensor([0, *accumulate(of.lengths)], dtype=torch.int32) for of in (known, new)}
    Packing.of(known, starts[known.lengths], device)
    monkeypatch.setattr(packing, "_is_captured", lambda device: True)
    monkeypatch.setattr(packing, "_held", {})
    captured = Packing.of(known, starts[known.lengths], device)
    assert {id(t) for t in (captured.cu_seqlens, captured.cu_blocks, captured.cu_tiles)} <= packing._held.keys()
    with pytest.raises(RuntimeError, match="make it once before"):
        Packing.of(new, starts[new.lengths], device)


def test_starts_on_the_host_go_with_tokens_on_a_gpu() -> None:
    """Nothing on the GPU is read: these tokens are nowhere."""
    starts = torch.tensor([0, 3, 20], dtype=torch.int32)
    with FakeTensorMode():
        q, k, v = (torch.empty(20, H, 8, device="cuda") for H in (4, 2, 2))
    names = ("gate_weight", "gates", "compress_k_weight", "compress_v_weight", "softmax_scale", "max_seqlen")
    arguments = Arguments(q, k, v, config=SMALL, cu_seqlens=starts, causal=True, **dict.fromkeys(names))
    problem = check_inputs(arguments)
    assert problem.lengths == (3, 17)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_starts_on_the_host_give_the_same_bits(D: int) -> None:
    config = NSAConfig(block_counts=6)
    case = Case(lengths=(300, 0, 1, 700), Hq=8, Hkv=2, D=D, dtype=torch.bfloat16, config=config)
    inputs = make_inputs(case, "cuda")
    given = dict(q=inputs.q, k=inputs.k, v=inputs.v, gate_weight=inputs.gate_weight, config=config)
    with torch.no_grad():
        o, other = (nsa(**given, cu_seqlens=inputs.cu_seqlens.to(device)) for device in ("cuda", "cpu"))
    assert torch.equal(o, other)
