"""Calls on caches and autograd: backward says that there is no gradient, forward goes on as it does.

Caches of inference mode are in a property of `fuzz/properties/caches.py`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nsa_layer import NSACache, NSAConfig, NSAttention, nsa_with_kvcache
from nsa_layer.cute.host_constants import numbers_on, starts_on

SMALL = NSAConfig(block_size=8, block_counts=3, window_size=8)
B, T, S = 2, 20, 32
NEEDS = "q k v k_cache v_cache k_cmp_cache k_cmp v_cmp k_win v_win gates gate_weight compress_k_weight".split()
refused = partial(pytest.raises, RuntimeError, match="attention to cached tokens .* has no gradient")


def arguments(name: str = "q") -> dict:
    """Of a call on empty caches that has the argument, all without a gradient."""
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.manual_seed(0))
    given = dict(q=draw(B, T, 4, 8), k=draw(B, T, 2, 8), v=draw(B, T, 2, 8), config=SMALL)
    given |= dict(k_cache=torch.zeros(B, S, 2, 8).double(), k_cmp_cache=torch.zeros(B, S // 8, 2, 8).double())
    given |= {f"v{cache[1:]}": x.clone() for cache, x in given.items() if cache.endswith("cache")}
    given["cache_seqlens"] = torch.zeros(B, dtype=torch.int32)
    if "win" in name:
        given |= {f"{x}_win": draw(B, T, 2, 8) for x in "kv"}
        given |= {f"{x}_win_cache": given[f"{x}_cache"].clone() for x in "kv"}
    shapes = dict(k_cmp=(B, 3, 2, 8), v_cmp=(B, 3, 2, 8), gates=(B, T, 4, 3), gate_weight=(4, 3, 8))
    shapes["compress_k_weight"] = (2, 8, 8)
    return given | ({} if name in given else {name: draw(shapes[name])})


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
        assert given["cache_seqlens"].sum() == 0 and not given["v_cache"].detach()[:, T:].any()


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


def layer_and_cache(name: str) -> tuple[NSAttention, NSACache]:
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, config=SMALL, dtype=torch.float64, **LAYERS[name])
    own = dict(own_window=layer.kv_per_branch, own_sources=layer.kv_per_branch, dtype=torch.float64)
    return layer, NSACache(2, 48, 2, 8, config=SMALL, page_size=16 if name == "paged" else None, **own)


@pytest.mark.parametrize("name", LAYERS)
def test_a_loss_on_what_follows_a_cached_prefix_raises(name: str) -> None:
    layer, cache = layer_and_cache(name)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)
        layer(x[:, :30], cache=cache)
    o = layer(x[:, 30:], cache=cache)
    torch.testing.assert_close(o.detach(), want[:, 30:])
    with refused():
        o.sum().backward()
    assert cache.lengths == (40, 40)


@pytest.mark.parametrize("name", ["compress_k", "k_win", "k_cmp", "gate_mlp"])
def test_a_single_trained_part_is_enough(name: str) -> None:
    """Networks that compress are called by the cache, and the tokens that they are called with are its sources."""
    layer, cache = layer_and_cache("networks")
    layer.requires_grad_(False)
    part = layer.get_submodule(name if name in ("compress_k", "gate_mlp") else f"branch_proj.{name}")
    part.requires_grad_(True)
    o = layer(torch.randn(2, 30, 32, dtype=torch.float64), cache=cache)
    with refused():
        torch.autograd.grad(o.sum(), list(part.parameters()))
    assert not any(x.requires_grad for x in (*cache.caches.values(), *cache.sources.values()))


def test_numbers_that_are_kept_for_later_calls_are_none_of_inference_mode() -> None:
    """Those of a call under inference mode are saved for the backward of another."""
    with torch.inference_mode():
        made = [*numbers_on(((1, 2, 3), (7, 11)), torch.device("cpu"))]
        made.append(starts_on(torch.tensor([0, 5]), torch.device("meta")))
    assert not any(x.is_inference() for x in made)
