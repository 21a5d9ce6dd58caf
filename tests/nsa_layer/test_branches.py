"""Keys of a branch's own, and no window, in numbers, launches and saved tensors; caches: `test_kvcache`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer
from torch.utils._pytree import tree_leaves

from nsa_layer import MemoryPolicy, NSACache, NSAConfig, NSAttention, nsa, reference
from nsa_layer.cute.memory_plan import predict
from nsa_layer.operators import attend
from nsa_tools.shape import Shape
from nsa_tools.testing.assertions import assert_close_to_reference
from nsa_tools.testing.cases import OWN_KEYS, Case, make_inputs, run

SMALL = NSAConfig(block_size=8, block_counts=4, q_tile=1, window_size=8)
BACKENDS = ["eager", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [None, (40, 0, 3, 57)])
@pytest.mark.parametrize("config", [SMALL, SMALL.replace(q_tile=16), SMALL.replace(compress_size=4)], ids=str)
def test_those_made_of_k_and_v_change_nothing(config: NSAConfig, lengths: tuple[int, ...] | None, backend: str) -> None:
    """Given as the means of k and v, and as k and v, they give the output of a call without; each one alone too."""
    case = Case(B=2, T=70, D=8, Dv=6, dtype=torch.float64, config=config, lengths=lengths)
    inputs = make_inputs(case)
    expected = run(backend, inputs)

    def means(x: torch.Tensor) -> torch.Tensor:
        each = x.split(lengths) if lengths else x.unbind()
        return (torch.cat if lengths else torch.stack)([reference.compress(s, None, config=config) for s in each])

    same = dict(zip(OWN_KEYS, (means(inputs.k), means(inputs.v), inputs.k, inputs.v)))
    for names in (OWN_KEYS, *((name,) for name in OWN_KEYS)):
        got = run(backend, replace(inputs, **{name: same[name] for name in names}))
        torch.testing.assert_close(got.o, expected.o)
        assert torch.equal(got.aux.block_indices, expected.aux.block_indices)
        dk = got.grads["k"] + (got.grads["k_win"] if "k_win" in names else 0)
        if "k_cmp" not in names:
            torch.testing.assert_close(dk, expected.grads["k"])
        assert all(got.grads[name].any() for name in names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_reads_its_own_and_no_other(backend: str) -> None:
    """o of one branch moves with its own keys and values alone."""
    reads = {"cmp": {"k_cmp", "v_cmp"}, "slc": {"k", "v"}, "swa": {"k_win", "v_win"}}
    for gate, names in reads.items():
        case = Case(T=70, D=8, dtype=torch.float64, config=SMALL, own_keys=OWN_KEYS, gate=gate)
        grads = run(backend, make_inputs(case)).grads
        assert {name for name, x in grads.items() if x.any()} - {"gates"} == names | {"q"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_tile", [1, 8])
def test_given_compressed_keys_choose(backend: str, q_tile: int) -> None:
    """The block whose given key is most like the query is listed, whatever k holds."""
    config = SMALL.replace(q_tile=q_tile, init_blocks=0, local_blocks=0, block_counts=1)
    inputs = make_inputs(Case(T=64, Hq=1, Hkv=1, D=8, config=config, own_keys=OWN_KEYS))
    k_cmp = torch.zeros_like(inputs.k_cmp)
    k_cmp[:, 3] = 5.0
    chosen = run(backend, replace(inputs, q=torch.ones_like(inputs.q), k_cmp=k_cmp)).aux.block_indices
    assert (chosen[0, -(-31 // q_tile) :, 0, 0] == 3).all()


SUBSETS = [OWN_KEYS, OWN_KEYS[:2], OWN_KEYS[2:], ("k_cmp", "v_win"), ("v_cmp", "k_win"), OWN_KEYS[1:]]
LENGTHS = [None, (300, 0, 33, 513)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("q_tile", [1, 128])
@pytest.mark.parametrize("own", SUBSETS, ids=str)
def test_kernels_pool_what_is_not_given_and_write_every_gradient(
    own: tuple[str, ...], q_tile: int, lengths: tuple[int, ...] | None
) -> None:
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


@pytest.mark.gpu
@pytest.mark.parametrize("q_tile", [1, 128])
def test_kernels_in_groups_of_heads(q_tile: int) -> None:
    config = NSAConfig.paper() if q_tile == 1 else NSAConfig(q_tile=q_tile)
    case = Case(T=700, Hq=8, Hkv=2, D=128, dtype=torch.bfloat16, config=config, own_keys=OWN_KEYS)
    assert_close_to_reference(case, partial(attend, memory=MemoryPolicy(budget=0)), "cuda")


NO_WINDOW = NSAConfig(block_size=8, block_counts=4, window_size=0)
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
