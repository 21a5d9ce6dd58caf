"""`NSACache`: shared pages, room that ends, layers that append. Any steps: `fuzz/properties/caches.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fuzz.serving import check_pages
from nsa_layer import NSACache, NSAConfig, NSAttention, nsa, nsa_with_kvcache
from nsa_layer.rope import RotaryEmbedding

SMALL = NSAConfig(block_size=8, block_counts=3, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16)
BATCH, ROOM, VOCABULARY = 3, 48, 50
Q, K, V = (torch.randn(VOCABULARY, H, 4, dtype=torch.float64, generator=torch.manual_seed(H)) for H in (4, 2, 3))
V = V[:, :2]


class Checked:
    """A cache beside the tokens that its sequences are of; every step is compared with `nsa`."""

    def __init__(self, config: NSAConfig = SMALL, page_size: int | None = 16, **options: object) -> None:
        self.cache = NSACache(BATCH, ROOM, 2, 4, config=config, page_size=page_size, dtype=torch.float64, **options)
        self.tokens: list[list[int]] = [[] for _ in range(BATCH)]
        self.drawn = torch.Generator().manual_seed(0)
        for x in self.cache.caches.values():
            x.fill_(torch.nan)

    def append(self, counts: Sequence[int]) -> None:
        new = [torch.randint(VOCABULARY, (n,), generator=self.drawn).tolist() for n in counts]
        index = torch.tensor(sum(new, []))
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        o, lses = self.cache.attend(Q[index], K[index], V[index], cu_seqlens_q=starts, return_lse=True)
        parts = zip(*(x.split(tuple(counts)) for x in (o, lses[0].mT)))
        for own, more, part in zip(self.tokens, new, parts):
            own += more
            if more:
                qkv = (x[torch.tensor(own)][None] for x in (Q, K, V))
                want, aux = nsa(*qkv, config=self.cache.config, return_aux=True)
                want = want[0, -len(more) :], aux.lse_cmp[0].mT[-len(more) :]
                torch.testing.assert_close(part, want, rtol=1e-12, atol=1e-12)
        self.check()

    def crop(self, lengths: int | Sequence[int]) -> None:
        self.cache.crop(lengths if isinstance(lengths, int) else torch.tensor(lengths))
        each = [lengths] * BATCH if isinstance(lengths, int) else lengths
        self.tokens = [own[:n] for own, n in zip(self.tokens, each)]
        self.check()

    def reorder(self, index: Sequence[int]) -> None:
        self.cache.reorder(torch.tensor(index))
        self.tokens = [list(self.tokens[i]) for i in index]
        self.check()

    def check(self) -> None:
        """Lengths and pages."""
        lengths = tuple(map(len, self.tokens))
        assert self.cache.lengths == lengths == tuple(self.cache.cache_seqlens.tolist())
        assert {int} == {*map(type, self.cache.lengths)}
        check_pages(self.cache)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("config", [SMALL, OVERLAPPING], ids=["apart", "overlapping"])
def test_beams_go_on_from_one_prefix(config: NSAConfig, page_size: int | None) -> None:
    checked = Checked(config, page_size)
    checked.append([35, 0, 0])
    checked.reorder([0, 0, 0])
    for index in ([0, 0, 1], [2, 1, 0], [1, 1, 1]):
        checked.append([1, 1, 1])
        checked.reorder(index)
    checked.crop(20)
    checked.append([20, 1, 7])
    checked.crop(0)
    assert all(not own for pages in checked.cache._pages.values() for own in pages.of)


def test_a_shared_prefix_has_its_pages_once() -> None:
    """All share them but the compressed page with a key that reaches into the tokens behind the prefix."""
    checked = Checked(OVERLAPPING, num_pages=5)
    checked.append([32, 0, 0])
    checked.reorder([0, 0, 0])
    for count, own in ((1, {"page_table": [1, 1, 3], "cmp_page_table": [1, 1]}), (15, {"cmp_page_table": [1, 3, 3]})):
        checked.append([count] * 3)
        for name, expected in own.items():
            assert [len(set(at)) for at in zip(*checked.cache._pages[name].of)] == expected
    assert not checked.cache._pages["page_table"].free


def test_no_room_writes_nothing() -> None:
    checked = Checked(num_pages=4)
    checked.append([20, 16, 0])
    before = {name: x.clone() for name, x in checked.cache.caches.items()}
    for counts, message in (
        ([0, 33, 0], "sequence 1 would have 49 tokens, the capacity is 48"),
        ([1, 1, 1], "the pool of 4 pages has 1 too few"),
    ):
        with pytest.raises(ValueError, match=message):
            checked.append(counts)
        checked.check()
    with pytest.raises(ValueError, match="k must have shape"):
        checked.cache.attend(Q[None, :3].expand(3, -1, -1, -1), K[None, :2], V[None, :2])
    free = [list(pages.free) for pages in checked.cache._pages.values()]
    with pytest.raises(ZeroDivisionError):
        starts = torch.tensor([0, 0, 0, 9]).int()
        checked.cache.attend(Q[:9], K[:9], V[:9], cu_seqlens_q=starts, compress=lambda *_: 1 / 0)
    assert free == [pages.free for pages in checked.cache._pages.values()]
    for name, x in before.items():
        assert torch.equal(checked.cache.caches[name].nan_to_num(), x.nan_to_num())
    checked.append([12, 1, 0])


@pytest.mark.parametrize("config", [SMALL, OVERLAPPING], ids=["apart", "overlapping"])
def test_a_contiguous_cache_grows(config: NSAConfig) -> None:
    checked = Checked(config, page_size=None)
    checked.append([ROOM, 0, 17])
    checked.cache.grow(ROOM + 20)
    assert checked.cache.caches["k_cmp_cache"].shape[1] == config.compressed_length(ROOM + 20)
    checked.append([20, 3, 9])
    with pytest.raises(ValueError, match="at least 68"):
        checked.cache.grow(ROOM)
    with pytest.raises(ValueError, match="pages"):
        Checked(config).cache.grow(ROOM + 20)


def test_lengths_are_read_where_other_calls_have_appended() -> None:
    checked = Checked(page_size=None)
    checked.append([20, 0, 7])
    cache, new = checked.cache, torch.tensor([3, 1, 4])
    nsa_with_kvcache(
        Q[new, None], k=K[new, None], v=V[new, None], **cache.caches, cache_seqlens=cache.cache_seqlens, config=SMALL
    )
    cache.cache_seqlens += 1
    cache.read_lengths()
    for own, token in zip(checked.tokens, new.tolist()):
        own.append(token)
    checked.append([2, 3, 0])
    cache.cache_seqlens += ROOM
    with pytest.raises(ValueError, match=f"cache_seqlens must be 0 to {ROOM}, the capacity, got .71, "):
        cache.read_lengths()
    with pytest.raises(ValueError, match="cache of pages"):
        Checked().cache.read_lengths()


def test_bytes() -> None:
    """Beside keys and values of 48 tokens, compressed ones for every 8; 4-byte numbers of lengths and pages."""
    kv = 2 * 4 * 2 * 8
    assert NSACache(3, 48, 2, 4, config=SMALL, dtype=torch.float64).nbytes == 3 * (48 + 6) * kv + 3 * 4
    paged = NSACache(3, 48, 2, 4, config=SMALL, page_size=16, num_pages=7, dtype=torch.float64)
    assert paged.nbytes == 7 * (16 + 2) * kv + 3 * 4 + 2 * 3 * 3 * 4
    own = NSACache(3, 48, 2, 4, config=SMALL, own_window=True, dtype=torch.float64)
    assert own.nbytes == 3 * (2 * 48 + 6) * kv + 3 * 4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(compression="linear", rope=RotaryEmbedding(8)),
        dict(gate="input", compression="mlp", config=OVERLAPPING),
        dict(kv_per_branch=True, compression="mlp", rope=RotaryEmbedding(8), head_dim_v=6),
        dict(kv_per_branch=True, compression="linear", config=OVERLAPPING),
    ],
)
def test_a_layer_with_a_cache_gives_what_it_gives_for_all_tokens(options: dict, paged: bool, packed: bool) -> None:
    options = dict(config=SMALL) | options
    layer = NSAttention(32, num_heads=4, num_kv_heads=2, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    own = dict(own_window=layer.kv_per_branch, own_sources=layer.kv_per_branch, head_dim_v=layer.head_dim_v)
    own |= dict(config=layer.config, page_size=16 if paged else None)
    cache = NSACache(2, ROOM, 2, 8, **own, dtype=torch.float64)
    for tensor in (*cache.caches.values(), *cache.sources.values()):
        tensor.fill_(torch.nan)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    found = [[], []]
    for ends in ((30, 21), (31, 21), (40, 40)) if packed else ((30, 30), (31, 31), (40, 40)):
        new = [own[at:end] for own, at, end in zip(x, cache.lengths, ends)]
        starts = torch.tensor([0, *map(len, new)]).cumsum(0).int()
        before = cache.lengths
        layer(torch.randn(2, 5, 32, dtype=torch.float64), cache=cache)
        cache.crop(before)
        o = layer(torch.cat(new), cu_seqlens=starts, cache=cache) if packed else layer(torch.stack(new), cache=cache)
        for parts, part in zip(found, o.flatten(0, -2).split(list(map(len, new)))):
            parts.append(part)
    torch.testing.assert_close(torch.stack(list(map(torch.cat, found))), layer(x), rtol=1e-12, atol=1e-12)
