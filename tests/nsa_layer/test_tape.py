"""Calls of a layout that came before: they allocate and launch the same, without the host's work."""

from __future__ import annotations

import dis
from dataclasses import replace
from functools import partial

import pytest
import torch
from stub_kernels import launches, stubbed_layer

from nsa_layer import MemoryPolicy, NSAConfig, nsa
from nsa_layer.config import BRANCHES
from nsa_layer.operators import tape
from nsa_tools.testing.cases import Case, make_inputs, run

of_layer = partial(Case, T=300, D=64, dtype=torch.bfloat16)
BY_INDEX = NSAConfig(rule="index", branches=("selected",), init_blocks=1, local_blocks=2)
TILES = NSAConfig(q_tile=128, block_counts=4)
CASES = {
    "by token": of_layer(),
    "tiles": of_layer(config=TILES, gate="given"),
    "deterministic": of_layer(config=TILES.replace(deterministic=True), compress_weights=True),
    "deterministic by token": of_layer(config=NSAConfig(deterministic=True), Hq=8),
    "no window": of_layer(config=NSAConfig(window_size=0), gate="none"),
    "a branch left out": of_layer(config=NSAConfig(branches=BRANCHES[:2])),
    "not causal": of_layer(config=TILES, causal=False, B=2),
    "keys of branches": of_layer(own_keys=("k_cmp", "v_cmp", "k_win", "v_win")),
    "by index": of_layer(config=BY_INDEX, gate="none", index_dim=32),
    "by index, one key": of_layer(config=BY_INDEX, gate="none", index_dim=16, one_key=True, Hkv=1),
    "index and gates": of_layer(config=BY_INDEX.replace(branches=BRANCHES), index_dim=32),
    "one token": of_layer(T=1),
    "padded": of_layer(D=56, Dv=40, compress_weights=True),
    "padded, tiles": of_layer(D=128, Dv=64, config=TILES),
    "unequal": of_layer(D=192, Dv=128),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tape_launches_what_the_call_did(name: str) -> None:
    """Forward and backward: the same kernels and arguments, of other tensors."""
    with stubbed_layer():
        told = []
        for _ in range(4):
            inputs = make_inputs(CASES[name])
            tensors = [*inputs.tensors().values(), inputs.do]
            told.append(launches(lambda: run("cute", inputs), tensors)[0])
        made = [x for x in tape._tapes.values() if callable(x)]
    assert len(made) == 2 and len(told[0]) > 3
    assert all(one == told[0] for one in told[1:])


def test_calls_with_a_memory_budget_have_none() -> None:
    """Recording keeps all workspace until the call ends."""
    with stubbed_layer():
        for policy, tapes in ((MemoryPolicy(budget=0), 0), (MemoryPolicy(), 2)):
            for _ in range(3):
                run("cute", make_inputs(CASES["by index"]), memory=policy)
            assert sum(map(callable, tape._tapes.values())) == tapes


@pytest.mark.parametrize("needs_grad", [True, False])
def test_tensors_that_outlive_a_transform_have_tapes(needs_grad: bool) -> None:
    """Their wrappers have no address."""
    q, k, v = (torch.randn(1, 128, H, 64, dtype=torch.bfloat16) for H in (4, 2, 2))
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    with stubbed_layer():
        for _ in range(3):
            nsa(kept[0], k.requires_grad_(needs_grad), v, backend="cute")
        assert sum(map(callable, tape._tapes.values())) == 1


def test_results_have_the_same_layout() -> None:
    with stubbed_layer():
        inputs = make_inputs(CASES["index and gates"])
        results = [run("cute", inputs) for _ in range(3)]
        assert sum(map(callable, tape._tapes.values())) == 2
    layouts = [[(x.shape, x.stride(), x.dtype) for x in (r.o, *r.grads.values(), r.aux.gates)] for r in results]
    assert layouts[0] == layouts[1] == layouts[2]


def test_calls_of_another_layout_have_their_own() -> None:
    q, k, v = (torch.randn(1, 128, H, 64, dtype=torch.bfloat16) for H in (4, 2, 2))
    apart = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16).transpose(1, 2)
    odd = torch.randn(4 + 128 * 2 * 64, dtype=torch.bfloat16)[4:].view(1, 128, 2, 64)
    others = [(q, k, k), (q, apart, v), (q.half(), k.half(), v.half()), (q[:, :64], k[:, :64], v[:, :64]), (q, odd, v)]
    with stubbed_layer():
        calls = [partial(nsa, *x, backend="cute") for x in [(q, k, v), *others]]
        calls.append(partial(calls[0], config=NSAConfig(window_size=64)))
        told = [[launches(call, [q, k, v])[0] for call in calls] for _ in range(3)]
        assert sum(map(callable, tape._tapes.values())) == len(calls)
    assert told[0] == told[1] == told[2]


def test_a_tape_computes_what_the_function_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views, writes in place, parts, an input that is returned, and one that is there twice."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    made = []

    @tape.replayed
    def function(x: torch.Tensor, y: torch.Tensor | None, factor: float) -> tuple[torch.Tensor | None, ...]:
        made.append(1)
        unread = torch.empty_like(x).fill_(7).sin()
        first, second = x.detach().split(2, dim=1)
        out = torch.empty(3, 4).copy_(x * factor)
        out[:, :2].add_(first @ second.T @ torch.ones(3, 2)).mul_(2)
        more = out.new_zeros(3).index_add_(0, torch.arange(3), out[:, 1])
        return out, None if y is None else (y + unread.mul(0)).T, more.clone(), x

    for i in range(5):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        for inputs in ((x, y, 0.5), (x, x, 0.5), (x, None, 0.25)):
            results, want = function(*inputs), function.__wrapped__(*inputs)
            made.pop()
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(results, want, strict=True))
            assert results[0].data_ptr() != want[0].data_ptr()
    assert len(made) == 2 * 3


def test_a_call_that_reads_numbers_has_no_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)

    @tape.replayed
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + 1,) if x.sum() > 0 else (x - 1,)

    for value in (1.0, 1.0, 1.0, -1.0):
        assert function(torch.full((3,), value))[0][0] == 2 * value


def test_temporaries_end_with_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    function = tape.replayed(lambda x: (((x * 2) + 1) * 3,))
    function(torch.ones(2)), function(torch.ones(2))
    (code,) = tape._tapes.values()
    assert [step.opname for step in dis.get_instructions(code)].count("DELETE_FAST") == 2


def test_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(tape, "MOST_TAPES", 8)
    function = tape.replayed(lambda x: (x + 1,))
    for n in [*range(1, 30), *range(1, 30)]:
        function(torch.ones(n))
        assert len(tape._tapes) <= 8


def test_long_calls_and_observed_ones_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_layer.profiler_ranges import observed

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(tape, "LONGEST", 40)
    function, kept = tape.replayed(lambda x: (x + 1,)), tape._tapes
    for _ in range(3):
        function(torch.ones(11))
    with observed(lambda name: pytest.fail(name)), torch.no_grad():
        for _ in range(3):
            function(torch.ones(3))
    assert not kept
    for _ in range(3):
        function(torch.ones(10))
    assert len(kept) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_same(name: str) -> None:
    """A tape gives the bits of o that a plain call gives, and in deterministic mode those of gradients."""
    tape.forget()
    results = []
    for seed in (0, 1, 0, 1):
        results.append(run("cute", make_inputs(replace(CASES[name], seed=seed), "cuda")))
    assert sum(map(callable, tape._tapes.values())) == 2
    tape.forget()
    for seed in (0, 1):
        plain = run("cute", make_inputs(replace(CASES[name], seed=seed), "cuda"))
        taped = results[2 + seed]
        assert torch.equal(plain.o, taped.o)
        for grad, of_tape in zip(plain.grads.values(), taped.grads.values(), strict=True):
            close = dict(rtol=0, atol=0) if CASES[name].config.deterministic else {}
            torch.testing.assert_close(of_tape, grad, **close)
