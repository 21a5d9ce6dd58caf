"""Calls on caches and autograd: backward says that there is no gradient, forward goes on as it does.

Caches of inference mode are in a property of `fuzz/properties/caches.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from layer_calls import CACHED, cached_arguments
from torch._dynamo.testing import CompileCounterWithBackend

from nsa_layer import NSACache, NSAConfig, NSAttention, nsa_with_kvcache
from nsa_layer.call import OWN_KEYS

SMALL = NSAConfig(block_size=8, block_counts=3, window_size=8)
NEEDS = "q k v k_cache v_cache k_cmp_cache k_cmp v_cmp k_win v_win gates gate_weight compress_k_weight".split()
refused = partial(pytest.raises, RuntimeError, match="attention to cached tokens .* has no gradient")


def arguments(name: str = "q") -> dict:
    """Of a call on empty caches that has the argument, all without a gradient."""
    own = OWN_KEYS[2:] if "win" in name else (name,) if name in OWN_KEYS else ()
    gate = {"gates": "given", "gate_weight": "weight"}.get(name, "none")
    return cached_arguments(replace(CACHED, own_keys=own, gate=gate, compress_weights="compress" in name))


@pytest.mark.parametrize("name", NEEDS)
def test_backward_says_that_there_is_no_gradient(name: str) -> None:
    """A leaf, such as a parameter, and what is computed from one; all outputs. The numbers are those without."""
    want, lses = nsa_with_kvcache(**arguments(name), return_lse=True)
    assert not want.requires_grad
    for change in (lambda x: x, lambda x: x * 1):
        given = arguments(name)
        given[name] = change(given[name].requires_grad_())
        found = nsa_with_kvcache(**given, return_lse=True)
        for x, expected in zip((found[0], *found[1]), (want, *lses)):
            assert torch.equal(x.detach(), expected)
            with refused():
                x.sum().backward()
        assert given["cache_seqlens"].sum() == 0 and given["v_cache"].detach()[:, CACHED.T :].isnan().all()


def test_what_needs_no_gradient_is_as_it_was() -> None:
    given = arguments()
    out = torch.empty_like(given["q"])
    given["q"].requires_grad_()
    with torch.no_grad():
        assert nsa_with_kvcache(**given, out=out) is out and not out.requires_grad
    copied = nsa_with_kvcache(**given, out=out)
    assert torch.equal(copied, out) and copied is not out and not out.requires_grad
    copied.mul_(2)  # allowed
    trained = torch.ones(8, dtype=torch.float64, requires_grad=True)
    (nsa_with_kvcache(**arguments()) * trained).sum().backward()
    assert trained.grad is not None


def test_transforms_of_functions_do_not_get_zeros() -> None:
    given = arguments()
    with refused():
        torch.func.grad(lambda q: nsa_with_kvcache(**given | dict(q=q)).sum())(given["q"])


@pytest.mark.parametrize("name, dynamic", [("k_cache", False), ("gate_weight", True)])
def test_compiled_calls_raise_in_backward_too(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    counter, want = CompileCounterWithBackend("aot_eager"), nsa_with_kvcache(**arguments(name))
    call = torch.compile(lambda given: nsa_with_kvcache(**given) * 1, fullgraph=True, backend=counter, dynamic=dynamic)
    given = arguments(name)
    given[name].requires_grad_()
    o = call(given)
    torch.testing.assert_close(o.detach(), want)
    with refused():
        o.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(call(arguments(name) | {name: given[name]}), want)
    assert counter.frame_count == 2


LAYERS = {
    "mean": dict(),
    "networks": dict(compression="mlp", kv_per_branch=True, gate="input"),
    "paged": dict(compression="linear"),
}


@pytest.mark.parametrize(
    "name, part",
    [
        *((name, "") for name in LAYERS),
        *(("networks", part) for part in ("compress_k", "gate_mlp", "branch_proj.k_win", "branch_proj.k_cmp")),
    ],
)
def test_a_loss_on_what_follows_a_cached_prefix_raises(name: str, part: str) -> None:
    """A single trained part is enough. Networks that compress are called by the cache, with tokens of its sources."""
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=SMALL, dtype=torch.float64, **LAYERS[name])
    own = dict(own_window=layer.kv_per_branch, own_sources=layer.kv_per_branch, dtype=torch.float64)
    cache = NSACache(2, 48, 2, 8, config=SMALL, page_size=16 if name == "paged" else None, **own)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)
        layer(x[:, :30], cache=cache)
    trained = layer.requires_grad_(False).get_submodule(part).requires_grad_(True)
    o = layer(x[:, 30:], cache=cache)
    torch.testing.assert_close(o.detach(), want[:, 30:])
    with refused():
        torch.autograd.grad(o.sum(), list(trained.parameters()))
    assert cache.lengths == (40, 40)
    assert not any(x.requires_grad for x in (*cache.caches.values(), *cache.sources.values()))
