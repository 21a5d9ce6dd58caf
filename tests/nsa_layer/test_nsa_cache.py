"""`NSACache`: shared pages, capacity that ends, layers that append. Any steps: `fuzz/properties/caches.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuzz.serving import check_pages
from nsa_layer import NSACache, NSAConfig, NSAttention, nsa_with_kvcache
from nsa_layer.checks import starts_of_lengths
from nsa_layer.rope import RotaryEmbedding

SMALL = NSAConfig(block_size=8, block_counts=3, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16)
BATCH, CAPACITY = 3, 48


def cache_of(config: NSAConfig = SMALL, page_size: int | None = 16, **options: object) -> NSACache:
    return NSACache(BATCH, CAPACITY, 2, 4, config=config, page_size=page_size, dtype=torch.float64, **options)


def tokens(count: int) -> list[torch.Tensor]:
    return [torch.randn(count, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]


def append(cache: NSACache, counts: Sequence[int], **options: object) -> None:
    lengths = [length + count for length, count in zip(cache.lengths, counts)]
    cache.attend(*tokens(sum(counts)), cu_seqlens_q=starts_of_lengths(counts), **options)
    assert cache.lengths == tuple(lengths) == tuple(cache.cache_seqlens.tolist())
    assert {int} == {*map(type, cache.lengths)}
    check_pages(cache)


def test_a_shared_prefix_has_its_pages_once() -> None:
    """All share them but the compressed page with a key that reaches into the tokens behind the prefix."""
    cache = cache_of(OVERLAPPING, num_pages=5)
    append(cache, [32, 0, 0])
    cache.reorder([0, 0, 0])
    for count, own in ((1, {"page_table": [1, 1, 3], "cmp_page_table": [1, 1]}), (15, {"cmp_page_table": [1, 3, 3]})):
        append(cache, [count] * 3)
        for name, expected in own.items():
            assert [len(set(at)) for at in zip(*cache._pages[name].of)] == expected
    assert not cache._pages["page_table"].free
    cache.crop(0)
    assert all(not own for pages in cache._pages.values() for own in pages.of)


def test_beyond_the_capacity_nothing_is_written() -> None:
    cache = cache_of(num_pages=4)
    append(cache, [20, 16, 0])
    before = {name: x.clone() for name, x in cache.caches.items()}
    free = [list(pages.free) for pages in cache._pages.values()]
    for counts, error, message, options in (
        ([0, 33, 0], ValueError, "sequence 1 must have at most 48 tokens, the capacity, got 49", {}),
        ([1, 1, 1], ValueError, "the pool must have pages for new tokens, got 4, 1 too few", {}),
        ([0, 0, 9], ZeroDivisionError, "division", dict(compress=lambda *_: 1 / 0)),
    ):
        with pytest.raises(error, match=message):
            append(cache, counts, **options)
        check_pages(cache)
    with pytest.raises(ValueError, match="k must have shape"):
        q, k, v = (x.expand(3, -1, -1, -1) for x in tokens(3))
        cache.attend(q, k[:, :2], v[:, :2])
    assert free == [pages.free for pages in cache._pages.values()]
    for name, x in before.items():
        assert torch.equal(cache.caches[name].nan_to_num(), x.nan_to_num())
    append(cache, [12, 1, 0])


def test_a_contiguous_cache_grows() -> None:
    cache = cache_of(OVERLAPPING, page_size=None)
    append(cache, [CAPACITY, 0, 17])
    cache.grow(CAPACITY + 20)
    assert cache.caches["k_cmp_cache"].shape[1] == OVERLAPPING.compressed_length(CAPACITY + 20)
    append(cache, [20, 3, 9])
    with pytest.raises(ValueError, match="at least 68"):
        cache.grow(CAPACITY)
    with pytest.raises(ValueError, match="pages"):
        cache_of().grow(CAPACITY + 20)


def test_lengths_are_read_where_other_calls_have_appended() -> None:
    cache = cache_of(page_size=None)
    append(cache, [20, 0, 7])
    q, k, v = (x[:, None] for x in tokens(3))
    nsa_with_kvcache(q, k=k, v=v, **cache.caches, cache_seqlens=cache.cache_seqlens, config=SMALL)
    cache.cache_seqlens += 1
    cache.read_lengths()
    assert cache.lengths == (21, 1, 8)
    append(cache, [2, 3, 0])
    cache.cache_seqlens += CAPACITY
    with pytest.raises(ValueError, match=f"cache_seqlens must be 0 to {CAPACITY}, the capacity, got .71, "):
        cache.read_lengths()
    with pytest.raises(ValueError, match="a contiguous cache, got one of pages"):
        cache_of().read_lengths()


def test_bytes() -> None:
    """Beside keys and values of 48 tokens, compressed ones for every 8; 4-byte numbers of lengths and pages."""
    kv = 2 * 4 * 2 * 8
    assert cache_of(page_size=None).nbytes == 3 * (48 + 6) * kv + 3 * 4
    assert cache_of(num_pages=7).nbytes == 7 * (16 + 2) * kv + 3 * 4 + 2 * 3 * 3 * 4
    assert cache_of(page_size=None, own_window=True).nbytes == 3 * (2 * 48 + 6) * kv + 3 * 4


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("page_size", [None, 16])
def test_scales_of_a_prompt_hold_twice_its_numbers(page_size: int | None) -> None:
    """The largest of each head; others may be given, and beams share what is stored."""
    q, k, v = tokens(40)
    k[7, 1, 2] = -30.0
    cache = NSACache(BATCH, CAPACITY, 2, 4, config=OVERLAPPING, page_size=page_size, own_window=True, dtype=FP8)
    before, scales = cache.nbytes, cache.scales
    cache.calibrate(k, v, v_cmp=3 * v, k_win=torch.zeros_like(k))
    for name, x in dict(k=k, v=v, k_cmp=k, v_cmp=3 * v, v_win=v).items():
        torch.testing.assert_close(scales[f"{name}_scale"], x.abs().amax((0, 2)).float() / 224)
    assert torch.equal(scales["k_win_scale"], torch.ones(2)) and cache.scales is scales and cache.nbytes == before
    append(cache, [40, 0, 0], k_win=k, v_win=v)
    cache.reorder([0, 0, 0])
    new = {name: torch.randn(1, 1, 2, 4).double().expand(3, -1, -1, -1) for name in ("k", "v", "k_win", "v_win")}
    o = cache.attend(torch.ones(3, 1, 4, 4).double(), **new)
    torch.testing.assert_close(o[1:], o[:1].expand(2, -1, -1, -1))
    for wrong, match in (
        (lambda: cache.calibrate(k, v), "an empty cache in float8_e4m3fn, got one of lengths .41, 41, 41"),
        (lambda: cache_of().calibrate(k, v), "an empty cache in float8_e4m3fn, got one of dtype torch.float64"),
        (lambda: cache.crop(0) or cache.calibrate(k[:, :1], v), r"k must have shape \[..., 2, 4\], got \(40, 1, 4\)"),
        (lambda: cache.calibrate(k, v, k_index=k), "k_index must be of one of the caches k_cache, v_cache, k_win_"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()


def test_a_stored_number_of_fp8_stays() -> None:
    """The error is that of rounding to three bits; what a layer appends is read as it is stored, compressed too."""
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, dtype=torch.float64, config=OVERLAPPING, compression="mlp")
    x, found = torch.randn(2, 40, 32, dtype=torch.float64), []
    with torch.no_grad():
        for ends in ((40,), (30, 31, 40), range(1, 41)):
            cache, parts = NSACache(2, CAPACITY, 2, 8, config=OVERLAPPING, page_size=16, dtype=FP8), []
            for name, scale in cache.scales.items():
                scale.fill_(0.01 if "cmp" in name else 0.02)
            for begin, end in zip((0, *ends), ends):
                parts.append(layer(x[:, begin:end], cache=cache))
            found.append(torch.cat(parts, 1))
        torch.testing.assert_close(found[1:], found[:1] * 2, **EXACT)
        error = (found[0] - (want := layer(x))).norm() / want.norm()
        assert 0.003 < error < 0.06


INDEX = SMALL.replace(rule="index", branches=("selected",))
LAYERS = [
    dict(compression="linear", rope=RotaryEmbedding(8)),
    dict(gate="input", compression="mlp", config=OVERLAPPING),
    dict(kv_per_branch=True, compression="mlp", rope=RotaryEmbedding(8), head_dim_v=6),
    dict(kv_per_branch=True, compression="linear", config=OVERLAPPING),
    dict(kv_per_branch=True, gate="input", config=SMALL.replace(window_size=0)),
    dict(config=INDEX, rope=RotaryEmbedding(8), index_dim=4),
    dict(kv_per_branch=True, config=INDEX.replace(branches=("selected", "window")), head_dim_v=6),
    dict(kv_per_branch=True, config=OVERLAPPING.replace(rule="index"), compression="mlp", index_dim=3),
]
EXACT, ROUNDED = dict(rtol=1e-12, atol=1e-12), dict(rtol=0.02, atol=0.01)


def assert_appends(
    layer: NSAttention,
    cache: NSACache,
    x: torch.Tensor,
    calls: Sequence[tuple[int, int]],
    *,
    packed: bool,
    **close: float,
) -> None:
    """A layer with a cache gives what it gives for all tokens; a draft is taken back before each call."""
    for tensor in (*cache.caches.values(), *cache.sources.values()):
        tensor.fill_(torch.nan)
    found, draft = [[], []], x.shape[1] // 8
    for ends in calls:
        new = [own[at:end] for own, at, end in zip(x, cache.lengths, ends)]
        before = cache.lengths
        layer(torch.randn_like(x[:, :draft]), cache=cache)
        cache.crop(before)
        starts = starts_of_lengths(map(len, new))
        o = layer(torch.cat(new), cu_seqlens=starts, cache=cache) if packed else layer(torch.stack(new), cache=cache)
        for parts, part in zip(found, o.flatten(0, -2).split(list(map(len, new)))):
            parts.append(part)
    torch.testing.assert_close(torch.stack(list(map(torch.cat, found))), layer(x), **close)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("options", LAYERS)
def test_a_layer_appends(options: dict, paged: bool, packed: bool) -> None:
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, dtype=torch.float64, **dict(config=SMALL) | options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    own_window, own_sources = (layer.kv_per_branch and layer.config.computes(name) for name in ("window", "compressed"))
    assert own_window or not any("win" in name for name in layer.branch_proj or ())
    own = dict(own_window=own_window, own_sources=own_sources, head_dim_v=layer.head_dim_v)
    own |= dict(index_dim=layer.index_dim) if layer.index_dim else {}
    own |= dict(config=layer.config, page_size=(4 if packed else 16) if paged else None, dtype=torch.float64)
    x, calls = torch.randn(2, 40, 32, dtype=torch.float64), ((30, 21), (31, 21), (40, 40))
    calls = calls if packed else ((30, 30), (31, 31), (40, 40))
    assert_appends(layer, NSACache(2, CAPACITY, 2, 8, **own), x, calls, packed=packed, **EXACT)


@pytest.mark.gpu
def test_the_papers_module_appends_on_the_kernels() -> None:
    """Networks compress what each branch projects."""
    config = NSAConfig(block_counts=5, window_size=100)
    paper = dict(compression="mlp", kv_per_branch=True, gate="input", device="cuda", dtype=torch.bfloat16)
    layer = NSAttention(256, num_heads=8, num_kv_heads=2, head_dim=64, config=config, **paper)
    cache = NSACache(2, 320, 2, 64, config=config, page_size=64, own_window=True, own_sources=True, device="cuda")
    x, calls = torch.randn(2, 300, 256, device="cuda").bfloat16(), ((150, 150), (170, 170), (300, 300))
    with torch.no_grad():
        assert_appends(layer, cache, x, calls, packed=False, **ROUNDED)
