"""Compressed keys and values, and those of the window, that the caller made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from stub_kernels import LAUNCHED, stubbed_layer
from torch.utils._pytree import tree_leaves

from nsa_layer import MemoryPolicy, NSAConfig, reference
from nsa_layer.operators import attend
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
                pooled = inputs.tensors()[x].untyped_storage().data_ptr() in memory.get("pool", ())
                unpooled = grads[x].untyped_storage().data_ptr() in memory.get("unpool", ())
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
