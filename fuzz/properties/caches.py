"""Attention to caches: however calls are cut, what must be refused, and what autograd's modes change."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import partial

import torch

from fuzz import strategies
from fuzz.case import Served
from fuzz.prop import Skip, holds, refused
from fuzz.serving import CAPACITY, PAGE, Calls, caches_of, check_pages, config_of, spoilt
from nsa_layer import NSACache, nsa, nsa_with_kvcache
from nsa_layer.checks import starts_of_lengths
from nsa_layer.kvcache import eager  # noqa: F401, a fault is planted in what has been imported


@holds("caches.any calls give the whole", strategies.served, pr=20)
def any_calls_give_the_whole(case: Served) -> None:
    """With `validate`, pages shared as they may be."""
    calls = Calls(case)
    for counts in case.counts:
        calls.give(counts)


@holds("caches.wrong ones are refused", partial(strategies.served, faults=True), pr=25)
def wrong_ones_are_refused(case: Served) -> None:
    """ValueError, before anything is written."""
    calls = Calls(case)
    arguments = spoilt(case, calls.all_but_the_last(), calls.lengths)
    if arguments is None:
        raise Skip
    before = {name: arguments[name].clone() for name in caches_of(arguments)}
    with refused("", ValueError):
        nsa_with_kvcache(**arguments)
    for name, x in before.items():
        assert torch.equal(x.nan_to_num(7), arguments[name].nan_to_num(7)), f"{name} was written to"


@holds("caches.no gradient is lost", strategies.served, pr=15)
def no_gradient_is_lost(case: Served) -> None:
    """Forward is as it is without one; backward raises where a tensor needs one, and otherwise there is none."""
    calls = Calls(case)
    arguments = calls.all_but_the_last()
    caches = {name: arguments[name].clone() for name in caches_of(arguments)}
    want = nsa_with_kvcache(**arguments | caches)
    needing = {name: arguments[name].clone().requires_grad_() for name in case.needs if name in arguments}
    o, lses = nsa_with_kvcache(**arguments | needing, return_lse=True)
    assert torch.equal(o.detach(), want), "forward is another one"
    for x in (o, *lses):
        assert x.requires_grad == bool(needing), "the graph is cut"
        with refused("no gradient", RuntimeError) if needing else nullcontext():
            torch.autograd.grad(x.sum(), list(needing.values()), retain_graph=True) if needing else None


@holds("caches.steps of NSACache", strategies.served, pr=20)
def steps_of_nsa_cache(case: Served) -> None:
    """Appended, cropped, reordered, grown and copied in and out of inference mode: `nsa`'s output for each sequence."""
    draw, B, calls = random.Random(case.seed), len(case.counts[0]), Calls(case)
    kept = dict(page_size=(PAGE, 4)[case.seed % 2], num_pages=None) if case.kept == "pages" else {}
    modes, config, names = [torch.no_grad, torch.inference_mode], config_of(case), ["q", "k", "v"]
    if case.index_heads:
        kept |= dict(index_dim=4, index_heads=case.index_heads)
        names += ["q_index", "k_index"]
    with draw.choice(modes)():
        cache = NSACache(B, CAPACITY, 2, 8, config=config, dtype=torch.float64, **kept)
    of, lengths = list(range(B)), [0] * B  # the sequence that each row is of
    for counts in case.counts:
        with draw.choice(modes)():
            cache = copy.deepcopy(cache) if draw.random() < 0.3 else cache
            if draw.random() < 0.3:
                index = [draw.randrange(B) for _ in range(B)]
                cache.reorder(index)
                of, lengths = [of[i] for i in index], [lengths[i] for i in index]
            if draw.random() < 0.3:
                lengths = [draw.randint(0, n) for n in lengths]
                cache.crop(lengths)
            if case.kept != "pages" and draw.random() < 0.3:
                cache.grow(CAPACITY + 8)
            counts = [min(n, CAPACITY - at) for n, at in zip(counts, lengths)]
            tokens = [calls.tokens[i] for i in of]
            parts = [[own[name][at : at + n] for own, at, n in zip(tokens, lengths, counts)] for name in names]
            q, k, v, *of_index = map(torch.cat, parts)
            starts = starts_of_lengths(counts)
            if not starts[-1]:
                continue
            validate = draw.random() < 0.5
            o = cache.attend(q, k, v, cu_seqlens_q=starts, validate=validate, **dict(zip(names[3:], of_index)))
        lengths = [at + n for at, n in zip(lengths, counts)]
        for own, part, n, end in zip(tokens, o.split(counts), counts, lengths):
            if n:
                want = nsa(**{name: own[name][None, :end] for name in names}, config=config)[0, end - n :]
                torch.testing.assert_close(part.clone(), want, rtol=1e-9, atol=1e-9)
        assert cache.lengths == tuple(lengths) == tuple(cache.cache_seqlens.tolist())
        held = [*cache.caches.values(), cache.cache_seqlens, *(pages.table for pages in cache._pages.values())]
        assert not any(x.is_inference() for x in held), "made under inference mode, where no other call may change it"
        check_pages(cache)
    cache.cache_seqlens += 2 * CAPACITY  # as calls outside of it may leave it
    with refused("", ValueError):
        cache.attend(**{name: torch.stack([calls.tokens[0][name][:1]] * B) for name in names}, validate=True)
