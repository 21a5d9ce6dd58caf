"""Compressed keys and values, and those of the window, that the caller made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, reference
from nsa_layer.call_spec import OwnKeys
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

    same = OwnKeys(means(inputs.k), means(inputs.v), inputs.k, inputs.v)._asdict()
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
        case = Case(T=70, D=8, dtype=torch.float64, config=SMALL, own_keys=True, gate=gate)
        grads = run(backend, make_inputs(case)).grads
        assert {name for name, x in grads.items() if x.any()} - {"gates"} == names | {"q"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_tile", [1, 8])
def test_given_compressed_keys_choose(backend: str, q_tile: int) -> None:
    """The block whose given key is most like the query is listed, whatever k holds."""
    config = SMALL.replace(q_tile=q_tile, force_blocks=False, block_counts=1)
    inputs = make_inputs(Case(T=64, Hq=1, Hkv=1, D=8, config=config, own_keys=True))
    k_cmp = torch.zeros_like(inputs.k_cmp)
    k_cmp[:, 3] = 5.0
    chosen = run(backend, replace(inputs, q=torch.ones_like(inputs.q), k_cmp=k_cmp)).aux.block_indices
    assert (chosen[0, -(-31 // q_tile) :, 0, 0] == 3).all()
