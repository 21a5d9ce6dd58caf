"""Memory plans keep to the budget, and what they do to save memory changes no bit."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import stub_kernels
import torch
from layer_calls import needs_hopper

from nsa_layer import MemoryPolicy, NSAConfig, nsa
from nsa_layer.call import Call
from nsa_layer.config import BRANCHES as ALL_BRANCHES
from nsa_layer.cute.memory_plan import Sizes, plan_memory, predict
from nsa_layer.operators import attend
from nsa_tools.measure.peak_memory import peak_bytes
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run

CPU = torch.device("cpu")
TILES, TOKENS = NSAConfig(q_tile=128), NSAConfig()
COUNTS = dict(tokens=1 << 16, keys=1 << 16, longest=1 << 16, list_width=16, rows=4)
SIZES = Sizes(**COUNTS, Hq=32, Hkv=8, D=128, Dv=128, itemsize=2, config=TILES)


def peak(sizes: Sizes, policy: MemoryPolicy) -> int:
    plan = plan_memory(sizes, policy, CPU)
    parts = predict(sizes, plan.groups[0][1], plan.kept)
    return parts["saved"] + max(parts["forward"], parts["backward"])


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("Hkv", [1, 3, 8])
def test_schedules_keep_to_the_budget_and_take_every_head_once(Hkv: int, needs_grad: bool) -> None:
    sizes = SIZES._replace(Hq=4 * Hkv, Hkv=Hkv, needs_grad=needs_grad)
    most = peak(sizes, MemoryPolicy())
    seen = set()
    for share in range(100, 0, -1):
        budget = most * share // 100
        plan = plan_memory(sizes, MemoryPolicy(budget=budget), CPU)
        assert [head for first, end in plan.groups for head in range(first, end)] == list(range(Hkv))
        least = len(plan.groups) == Hkv and not any(plan.kept)
        assert least or peak(sizes, MemoryPolicy(budget=budget)) <= budget
        seen.add((plan.groups, plan.kept))
    assert len(seen) > 1 or (Hkv == 1 and not needs_grad)


ALL, NOTHING = (True,) * 3, (False,) * 3


@pytest.mark.parametrize(
    "recompute, kept", [("auto", ALL), ("none", ALL), ("compressed", (False, True, True)), ("all", NOTHING)]
)
def test_outputs_that_are_kept(recompute: str, kept: tuple[bool, ...]) -> None:
    """As asked for; all, of heads at once, where there is plenty of memory, and none without backward."""
    for budget in (None, 10**30, *[0] * (recompute != "auto")):
        plan = plan_memory(SIZES, policy := MemoryPolicy(budget=budget, recompute=recompute), CPU)
        assert plan.kept == kept and (plan.groups == ((0, 8),)) == (budget != 0)
        assert plan_memory(SIZES._replace(needs_grad=False), policy, CPU).kept == NOTHING
    assert predict(SIZES._replace(needs_grad=False), 8, NOTHING)["saved"] == 0


def test_a_branch_that_is_not_there_takes_no_memory() -> None:
    """The selected branch with gates: its output, log-sum-exp, gates and lists are saved; nothing has accumulators."""
    config = TOKENS.replace(rule="index", branches=("selected",))
    sizes = SIZES._replace(config=config)
    one, whole = (predict(of, 8, ALL) for of in (sizes, SIZES._replace(config=TOKENS)))
    assert one["saved"] == (1 << 16) * (32 * (128 * 2 + 2 * 4) + 8 * 16 * 4)
    assert one["forward"] < whole["forward"] and one["backward"] < whole["backward"] - 4 * (1 << 16) * 32 * 128
    loss = predict(sizes._replace(index_row=512), 8, ALL)
    assert loss["saved"] - one["saved"] == (1 << 16) * 8 * 16 * 4
    assert loss["forward"] - one["forward"] == (1 << 16) * (32 + 8) * 16 * 4
    window = predict(sizes._replace(config=TOKENS.replace(branches=("window",))), 8, ALL)
    assert window["saved"] == (1 << 16) * 32 * (128 * 2 + 2 * 4)
    assert predict(sizes._replace(config=config.replace(branches=ALL_BRANCHES)), 8, ALL) == whole


BY_INDEX = NSAConfig(rule="index", branches=("selected",))
INDEX_CALLS = {
    "a batch": Case(B=2, T=4096, config=BY_INDEX, index_dim=32),
    "one key, small blocks": Case(T=8192, config=BY_INDEX.replace(block_size=16), index_dim=16, one_key=True),
    "packed, large blocks": Case(lengths=(5000, 3192), config=BY_INDEX.replace(block_size=128), index_dim=64),
    "no loss": Case(T=8192, config=BY_INDEX, index_dim=32, index_loss=False),
    "long lists": Case(T=8192, config=BY_INDEX.replace(block_counts=64), index_dim=32),
    "gates": Case(T=8192, config=BY_INDEX, index_dim=32, gate="weight"),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("name", INDEX_CALLS)
def test_a_call_with_an_index_allocates_what_is_predicted(
    name: str, needs_grad: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the host's allocations, without a GPU; less in groups of heads, each of which has workspace for its own."""
    gate = "weight" if name == "gates" else "none"
    inputs = make_inputs(replace(INDEX_CALLS[name], Hq=8, D=128, dtype=torch.bfloat16, gate=gate), device)
    case, tensors = inputs.case, {name: x.requires_grad_(needs_grad) for name, x in inputs.tensors().items()}
    needed = [x for name, x in tensors.items() if case.index_loss or "index" not in name]
    sizes = Sizes.of(Call(**tensors, cu_seqlens=inputs.cu_seqlens, spec=case.spec), needs_grad=needs_grad)
    options = dict(config=case.config, cu_seqlens=inputs.cu_seqlens, return_index_loss=case.index_loss, backend="cute")
    monkeypatch.setattr(stub_kernels, "LAUNCHED", deque(maxlen=0))  # nothing is kept
    peaks = []
    for policy in (MemoryPolicy(), MemoryPolicy(budget=0)):

        def step(policy: MemoryPolicy = policy) -> None:
            results = nsa(**tensors, **options, memory=policy)
            o, *loss = results if case.index_loss else (results,)
            if needs_grad:
                torch.autograd.grad([o, *loss], needed, [inputs.do, *map(torch.ones_like, loss)])

        with stub_kernels.stubbed_layer() if device == "cpu" else nullcontext():
            step()
            peaks.append(peak_bytes(step, device))
        plan = plan_memory(sizes, policy, CPU)
        assert len(plan.groups) == 1 + (policy.budget == 0)
        parts = predict(sizes, plan.groups[0][1], plan.kept)
        of_backward = parts["backward"] + parts["gradients"] - inputs.do.nbytes * needs_grad
        expected = parts["outputs"] + parts["saved"] + max(parts["forward"], of_backward)
        assert 0.95 < peaks[-1] / expected < 1.05, (policy, peaks[-1] / expected)
    assert peaks[1] < peaks[0] or not (needs_grad or case.index_loss)  # else there are lists alone


def small_case(lengths: tuple[int, ...] | None, gate: str, deterministic: bool) -> Case:
    q_tile = 128 if lengths else 32 if gate == "given" else 1
    config = NSAConfig(deterministic=deterministic, block_counts=6, q_tile=q_tile, window_size=200)
    sizes = dict(T=1000, Hq=12, Hkv=3, D=128, dtype=torch.bfloat16, own_keys=() if gate == "weight" else OWN_KEYS)
    return Case(**sizes, config=config, lengths=lengths, gate=gate, compress_weights=gate == "weight")


PACK = (700, 0, 1, 500)
GATES_AND_LENGTHS = pytest.mark.parametrize(
    ("gate", "lengths"), [("weight", None), ("weight", PACK), ("given", None), ("none", PACK)]
)


@pytest.mark.gpu
@GATES_AND_LENGTHS
def test_computing_again_changes_no_bit(lengths: tuple[int, ...] | None, gate: str) -> None:
    needs_hopper()
    inputs = make_inputs(small_case(lengths, gate, deterministic=True), "cuda")
    plain = run("cute", inputs)
    for recompute in ("compressed", "all"):
        again = run("cute", inputs, memory=MemoryPolicy(recompute=recompute))
        assert torch.equal(again.aux.block_indices, plain.aux.block_indices)
        for name, x in again.tensors().items():
            assert torch.equal(x, plain.tensors()[name]), (name, recompute)


@pytest.mark.gpu
@GATES_AND_LENGTHS
def test_groups_of_heads_are_as_exact(lengths: tuple[int, ...] | None, gate: str) -> None:
    case = small_case(lengths, gate, deterministic=False)
    for policy in (MemoryPolicy(budget=0), MemoryPolicy(budget=0, recompute="none")):
        assert_close_to_reference(case, partial(attend, memory=policy), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("branches, gate", [(ALL_BRANCHES, "weight"), (("selected",), "none")])
@pytest.mark.parametrize("lengths", [None, PACK])
def test_head_groups_share_an_index_key(lengths: tuple[int, ...] | None, branches: tuple[str, ...], gate: str) -> None:
    """Whose gradient and loss are those of all groups; with gates and all branches, and of one branch."""
    config = NSAConfig(rule="index", branches=branches, block_counts=6, window_size=200)
    sizes = dict(T=1000, Hq=12, Hkv=3, D=128, dtype=torch.bfloat16, lengths=lengths, gate=gate)
    case = Case(**sizes, config=config, index_dim=32, one_key=True)
    for policy in (MemoryPolicy(budget=0), MemoryPolicy(budget=0, recompute="none")):
        assert_close_to_reference(case, partial(attend, memory=policy), "cuda")


@pytest.mark.gpu
def test_gradients_that_lie_otherwise_are_taken() -> None:
    """`sum` hands back one number in the place of all; others come in other orders, or from a place that is not 16."""
    q, k, v = (torch.randn(1, 300, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    whole = torch.randn(1, 300, 4 * 64 + 3, device="cuda", dtype=torch.bfloat16)
    do = torch.randn(1, 64, 4, 300, device="cuda", dtype=torch.bfloat16).transpose(1, 3)
    for lying in (torch.ones((), device="cuda", dtype=torch.bfloat16).expand(1, 300, 4, 64), do, do.flip(-1)):
        got = torch.autograd.grad(nsa(q, k, v), (q, k, v), lying)
        expected = torch.autograd.grad(nsa(q, k, v), (q, k, v), lying.contiguous())
        assert all(torch.allclose(a, b, rtol=2e-2, atol=1e-3) for a, b in zip(got, expected))
    moved = whole[..., 3:].unflatten(-1, (4, 64))
    assert moved.data_ptr() % 16
    torch.testing.assert_close(nsa(moved, k, v), nsa(moved.contiguous(), k, v), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["weight", "given"])
@pytest.mark.parametrize("q_tile", [1, 128])
def test_a_budget_lowers_the_peak_and_the_prediction_holds(q_tile: int, gate: str) -> None:
    sizes, MIB = dict(T=1 << 15, Hq=32, Hkv=8, D=128, dtype=torch.bfloat16), 1 << 20
    inputs = make_inputs(Case(**sizes, config=NSAConfig(q_tile=q_tile), gate=gate), "cuda")
    leaves = {name: x.requires_grad_() for name, x in inputs.tensors().items()}

    def step(policy: MemoryPolicy) -> None:
        o = nsa(**leaves, config=inputs.case.config, memory=policy)
        torch.autograd.grad(o, list(leaves.values()), inputs.do)

    of_call, peaks = Sizes.of(Call(**leaves, spec=inputs.case.spec), needs_grad=True), []
    for budget in (None, 512 * MIB, 256 * MIB):
        policy = MemoryPolicy(budget=budget)
        for _ in range(2):
            step(policy)
        peaks.append(peak_bytes(lambda: step(policy), "cuda"))
        plan = plan_memory(of_call, policy, inputs.q.device)
        parts = predict(of_call, plan.groups[0][1], plan.kept)
        # do is an input here.
        predicted = parts["saved"] + max(parts["forward"], parts["backward"]) + parts["gradients"]
        assert 0.95 < peaks[-1] / predicted < 1.05, (policy, peaks[-1] / predicted)
    assert peaks[0] > 1.5 * peaks[1] > 1.5 * peaks[2]
