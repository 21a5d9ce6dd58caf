"""`window_size=0`: the sliding window is left out, in numbers, launches and saved tensors; caches: `test_kvcache`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer

from nsa_layer import NSACache, NSAConfig, NSAttention, nsa
from nsa_layer.cute.memory_plan import predict
from nsa_tools.shape import Shape
from nsa_tools.testing.cases import Case, make_inputs, run

NO_WINDOW = NSAConfig(block_size=8, block_counts=4, window_size=0)
BACKENDS = ["eager", "reference"]
GATES = ["weight", "given", "none"]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_a_window_that_counts_nothing(backend: str, gate: str) -> None:
    """Output and gradients of a call whose third gate is 0; the third gate of this one may be anything."""
    case = Case(T=50, Hq=4, Hkv=2, D=8, dtype=torch.float64, config=NO_WINDOW, gate=gate, compress_weights=True)
    inputs = make_inputs(case)
    got = run(backend, inputs)
    gates = got.aux.gates.clone()
    assert gate != "none" or (gates == 1 / 3).all()
    gates[..., 2] = 0
    windowed = replace(case, config=NO_WINDOW.replace(window_size=16), gate="given")
    want = run(backend, replace(inputs, case=windowed, gates=gates, gate_weight=None))
    torch.testing.assert_close(got.o, want.o)
    for name in ("k", "v", "compress_k_weight", "compress_v_weight"):
        torch.testing.assert_close(got.grads[name], want.grads[name])
    assert (got.aux.lse_swa == -torch.inf).all() and got.aux.lse_swa.shape == got.aux.lse_cmp.shape
    if gate == "given":
        torch.testing.assert_close(got.grads["gates"][..., :2], want.grads["gates"][..., :2])
        assert not got.grads["gates"][..., 2].any()
        inputs.gates[..., 2] = torch.nan
        assert run(backend, inputs).o.equal(got.o)
    if gate == "weight":
        assert not got.grads["gate_weight"][:, 2].any() and got.grads["gate_weight"][:, :2].any()


def test_the_module_makes_no_keys_for_it() -> None:
    torch.manual_seed(0)
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=NO_WINDOW, kv_per_branch=True, gate="input")
    assert sorted(layer.branch_proj) == ["k_cmp", "v_cmp"]
    x = torch.randn(1, 20, 32)
    sizes = dict(batch=1, max_seqlen=32, num_kv_heads=2, head_dim=8, config=NO_WINDOW, dtype=torch.float32)
    cache = NSACache(**sizes, own_sources=True)
    with torch.no_grad():
        parts = [layer(x[:, first:end], cache=cache) for first, end in ((0, 13), (13, 20))]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x))


def launched(
    config: NSAConfig, T: int = 300, gate: str = "weight", G: int = 2
) -> tuple[list[object], list[object], int]:
    """Names of what forward and backward launch on the kernels, and the bytes that are saved between."""
    LAUNCHED.clear()
    case = Case(T=T, Hq=2 * G, Hkv=2, D=64, dtype=torch.bfloat16, config=config, gate=gate)
    inputs, saved = make_inputs(case), {}
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors().items()}

    def note(x: torch.Tensor) -> torch.Tensor:
        saved[x.data_ptr(), x.shape] = x.numel() * x.element_size()
        return x

    with stubbed_layer(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        o, aux = nsa(**leaves, config=config, backend="cute", return_aux=True)
        forward = [at[0] for at, _ in LAUNCHED]
        o.backward(inputs.do)
    assert (aux.lse_swa == -torch.inf).all() or config.window_size
    assert all(x.grad is not None for x in leaves.values())
    return forward, [at[0] for at, _ in LAUNCHED][len(forward) :], sum(saved.values())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("q_tile", [1, 128])
@pytest.mark.parametrize("G", [1, 2])
def test_the_kernels_launch_and_save_less(q_tile: int, gate: str, G: int) -> None:
    """One attention call less in each direction, with what it takes and leaves: an output and a log-sum-exp."""
    pytest.importorskip("cutlass")
    config = NSAConfig(q_tile=q_tile, window_size=0)
    forward, backward, saved = launched(config, gate=gate, G=G)
    more_forward, more_backward, more_saved = launched(config.replace(window_size=512), gate=gate, G=G)
    assert len(more_forward) - len(forward) == 1 and len(more_backward) - len(backward) >= 1
    left = list(more_forward)
    for name in forward:
        left.remove(name)
    assert left == ["_flash_attn_fwd"]
    assert more_saved - saved == 300 * 2 * G * (64 * 2 + 4)
    launched(config, T=20, G=G)  # no compressed key is complete: the selected branch alone


def test_memory_is_planned_without_it() -> None:
    sizes = dict(B=1, T=4096, Hq=8, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16)
    with_window, without = (Shape(**sizes, config=NSAConfig(window_size=w)).sizes() for w in (512, 0))
    kept = (True, True, True)
    more, fewer = (predict(each, 2, kept) for each in (with_window, without))
    assert more["saved"] - fewer["saved"] == 4096 * 8 * (64 * 2 + 4)
    assert fewer["forward"] < more["forward"] and fewer["backward"] < more["backward"]
