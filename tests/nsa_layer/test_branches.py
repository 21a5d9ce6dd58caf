"""Keys of a branch's own, and no window, on the kernels, in launches and saved tensors.

By the definition: `test_reference`; in plain PyTorch: `fuzz/properties/layer.py`; caches: `test_kvcache`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer
from torch.utils._pytree import tree_leaves

from nsa_layer import MemoryPolicy, NSAConfig, nsa
from nsa_layer.cute.memory_plan import predict
from nsa_tools.shape import Shape
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run

SUBSETS = [OWN_KEYS, OWN_KEYS[:2], OWN_KEYS[2:], ("k_cmp", "v_win"), ("v_cmp", "k_win"), OWN_KEYS[1:]]
LENGTHS = [None, (300, 0, 33, 513)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("q_tile", [1, 128])
@pytest.mark.parametrize("own", SUBSETS, ids=str)
def test_kernels_pool_what_is_not_given(own: tuple[str, ...], q_tile: int, lengths: tuple[int, ...] | None) -> None:
    """Every group of heads has them; no part of k and v is pooled, or gets a gradient of means, in vain."""
    config = NSAConfig(q_tile=q_tile, block_counts=4)
    inputs = make_inputs(Case(T=500, D=64, dtype=torch.bfloat16, config=config, lengths=lengths, own_keys=own))
    with stubbed_layer():
        for policy, groups in ((MemoryPolicy(), 1), (MemoryPolicy(budget=0), 2)):
            LAUNCHED.clear()
            grads = run("cute", inputs, memory=policy).grads
            memory: dict[str, set[int]] = {}
            for at, args in LAUNCHED:
                launched = [x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
                memory.setdefault(str(at[0]), set()).update(launched)
            for name, grad in grads.items():
                assert grad.shape == inputs.tensors()[name].shape
                if groups == 1 or name in ("k", "v", "k_win", "v_win"):
                    assert any(grad.untyped_storage().data_ptr() in of for of in memory.values()), name
            for x, grad in (("k", "k_cmp"), ("v", "v_cmp")):
                pooled = inputs.tensors()[x].untyped_storage().data_ptr() in memory.get("mean_pool", ())
                unpooled = grads[x].untyped_storage().data_ptr() in memory.get("mean_pool_backward", ())
                assert pooled == unpooled == (grad not in own)


@pytest.mark.gpu
@pytest.mark.parametrize("Hkv", [2, 4])
@pytest.mark.parametrize("q_tile", [1, 128])
@pytest.mark.parametrize("own", SUBSETS, ids=str)
def test_kernels(own: tuple[str, ...], q_tile: int, Hkv: int) -> None:
    """Sequences with no complete block are among them, and the compression of what is not given is projected."""
    config = NSAConfig(q_tile=q_tile, block_counts=5, window_size=100)
    static = dict(Hq=4, Hkv=Hkv, D=64, dtype=torch.bfloat16, config=config, own_keys=own)
    for T, lengths in ((500, LENGTHS[0]), (500, LENGTHS[1]), (40, None)):
        case = Case(B=2, T=T, lengths=lengths, compress_weights=T == 500, **static)
        assert_close_to_reference(case, "cute", "cuda")


NO_WINDOW = NSAConfig(block_size=8, block_counts=4, window_size=0)
GATES = ["weight", "given", "none"]


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_without_a_window_its_gate_counts_nothing(backend: str) -> None:
    """It may be anything; equal shares are those of three branches."""
    inputs = make_inputs(Case(T=50, config=NO_WINDOW, gate="given"))
    want = run(backend, inputs).o
    inputs.gates[..., 2] = torch.nan
    got = run(backend, inputs)
    assert got.o.equal(want) and not got.grads["gates"][..., 2].any()
    assert (run(backend, replace(inputs, gates=None)).aux.gates == 1 / 3).all()


def launched(config: NSAConfig, T: int = 300, gate: str = "weight", G: int = 2) -> tuple[list, list, int]:
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
