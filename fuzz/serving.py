"""Calls on caches from a drawn case: sequences, their caches and tables, and what can be wrong with them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from fuzz.case import Served
from nsa_layer import NSACache, NSAConfig, nsa
from nsa_layer.checks import starts_of_lengths

PAGE, CAPACITY = 16, 80
NEEDS = ("q", "k", "v", "k_cache", "v_cmp_cache", "gates", "q_index", "k_index_cache")
CACHE_FAULTS = (
    "a page twice", "a compressed page twice", "written and held", "a row twice", "expanded", "overlapping",
    "expanded output",
)  # fmt: skip


def config_of(case: Served) -> NSAConfig:
    sizes = dict(block_size=8, compress_size=8, compress_stride=case.stride, block_counts=3, local_blocks=1)
    config = NSAConfig(window_size=6, **sizes)
    return config.replace(rule="index", branches=("selected", "window")) if case.index_heads else config


def caches_of(given: dict) -> list[str]:
    """Names of the caches among arguments."""
    return [name for name in given if name.endswith("_cache")]


class Calls:
    """The calls of a case, in fp64, on caches that were full of NaN.

    Attributes:
        tokens: q, k, v, gates and what is of an index, of each sequence.
        lengths: tokens of each that are in the caches.
        kept: arguments that stay: caches, tables.
    """

    def __init__(self, case: Served) -> None:
        self.case, self.tokens, self.kept = case, [], {}
        generator = torch.Generator().manual_seed(case.seed)
        B, prefix, pages = len(case.counts[0]), case.shared * PAGE, CAPACITY // PAGE
        rows = dict(q=(4, 8), k=(2, 8), v=(2, 8), gates=(4, len(config_of(case).branches)))
        caches = dict(k=(CAPACITY, 2, 8), v=(CAPACITY, 2, 8))
        if case.index_heads:
            rows |= dict(q_index=(2, 4), k_index=(case.index_heads, 4))
            caches["k_index"] = (CAPACITY, *rows["k_index"])
        else:
            caches |= dict.fromkeys(("k_cmp", "v_cmp"), (CAPACITY // case.stride, 2, 8))
        for b in range(B):
            options = dict(dtype=torch.float64, generator=generator)
            own = {name: torch.randn(CAPACITY, *row, **options) for name, row in rows.items()}
            for name, x in own.items() if b else ():
                x[:prefix] = self.tokens[0][name][:prefix]
            self.tokens.append(own)
        paged, spare = case.kept == "pages", 2 * (case.kept != "batch")
        for name, (slots, *row) in caches.items():
            lead = (B * pages + spare, slots // pages) if paged else (B + spare, slots)
            self.kept[f"{name}_cache"] = torch.full((*lead, *row), torch.nan, dtype=torch.float64)
        if case.kept == "rows":
            self.kept["cache_batch_idx"] = torch.randperm(B + 2, generator=generator)[:B].int()
        for name in ("page_table", *["cmp_page_table"] * (case.index_heads == 0)) if paged else ():
            table = torch.randperm(B * pages + 2, generator=generator)[: B * pages].view(B, pages).int()
            table[:, : case.shared] = table[0, : case.shared]
            self.kept[name] = table
        self.lengths = [0] * B
        if case.shared:
            self.give([prefix, *[0] * (B - 1)])
            self.lengths = [prefix] * B

    def arguments(self, counts: tuple[int, ...] | list[int]) -> dict:
        """Of the call with so many new tokens of each sequence: packed, or a batch where they are as many."""
        spans = [(at, at + n) for at, n in zip(self.lengths, counts)]
        parts = {name: [own[name][i:j] for own, (i, j) in zip(self.tokens, spans)] for name in self.tokens[0]}
        given = self.kept | dict(cache_seqlens=torch.tensor(self.lengths).int(), config=config_of(self.case))
        if len(set(counts)) == 1 and self.case.seed % 2:
            return given | {name: torch.stack(each) for name, each in parts.items()}
        starts = starts_of_lengths(counts)
        return given | {name: torch.cat(each) for name, each in parts.items()} | dict(cu_seqlens_q=starts)

    def give(self, counts: tuple[int, ...] | list[int]) -> None:
        """A call that ought to be right, whose output is compared with the whole sequences'."""
        from nsa_layer import nsa_with_kvcache

        o = nsa_with_kvcache(**self.arguments(counts), validate=True)
        for b, (part, n) in enumerate(zip(o.flatten(0, -3).split(list(counts)), counts)):
            begin, self.lengths[b] = self.lengths[b], self.lengths[b] + n
            if n:
                torch.testing.assert_close(part, self.whole(b)[begin:], rtol=1e-9, atol=1e-9)

    def whole(self, b: int) -> torch.Tensor:
        """The output for all tokens of a sequence so far."""
        own = {name: x[None, : self.lengths[b]] for name, x in self.tokens[b].items()}
        return nsa(**own, config=config_of(self.case))[0]

    def all_but_the_last(self) -> dict:
        """Make these calls; the arguments of the last one."""
        for counts in self.case.counts[:-1]:
            self.give(counts)
        return self.arguments(self.case.counts[-1])


def check_pages(cache: NSACache) -> None:
    """Each page is free or used as often as it is listed; free ones are filled with NaN."""
    for pages in cache._pages.values():
        listed = [page for own in pages.of for page in own]
        assert pages.users == [listed.count(page) for page in range(len(pages.users))], "pages are counted wrongly"
        assert sorted(pages.free) == [page for page, users in enumerate(pages.users) if not users], "free pages"
        for x in pages.caches:
            x[pages.free] = torch.nan


def spoilt(case: Served, given: dict, lengths: list[int]) -> dict | None:
    """The last call's arguments with the case's fault in them; None where they have no place for it."""
    draw, counts = random.Random(case.seed), case.counts[-1]
    ends = [at + n for at, n in zip(lengths, counts)]
    asked = [b for b, n in enumerate(counts) if n]
    if case.fault == "expanded output":
        shape = given["q"].shape
        return given | dict(out=torch.zeros(1, *shape[1:], dtype=torch.float64).expand(shape)) if shape[0] > 1 else None
    given = given | dict(validate=True)
    if case.fault == "expanded":
        name = draw.choice(caches_of(given))
        return given | {name: given[name][:1].expand_as(given[name])} if len(given[name]) > 1 else None
    if case.fault == "overlapping":
        kind, of = draw.choice(["", "_cmp"][: 1 + (case.index_heads == 0)]), draw.choice(["kv", "vk"])
        name, other = (f"{each}{kind}_cache" for each in of)
        return given | {name: given[other]}
    found = list(_shared(case, given, ends, asked))
    if not found:
        return None
    name, at, number = draw.choice(found)
    table = given[name].clone()
    table[at] = number
    return given | {name: table}


def _shared(case: Served, given: dict, ends: list[int], asked: list[int]) -> Iterator[tuple[str, tuple | int, int]]:
    """Changes of tables with the case's fault: name, place, number."""
    count, size = config_of(case).compressed_length, PAGE // case.stride
    twice = {
        "a page twice": ("page_table", ends, PAGE),
        "a compressed page twice": ("cmp_page_table", map(count, ends), size),
    }
    if case.kept == "pages" and case.fault in twice and twice[case.fault][0] in given:
        name, used, page = twice[case.fault]
        used = list(used)
        for b in asked:
            if used[b] > page:
                yield name, (b, 1), int(given[name][b, 0])
    for a in asked:
        for b in range(len(ends)):
            first = ends[a] - case.counts[-1][a]
            if a != b and case.fault == "written and held" and case.kept == "pages" and ends[b] > first % PAGE:
                yield "page_table", (b, 0), int(given["page_table"][a, first // PAGE])
            if a != b and case.fault == "a row twice" and case.kept == "rows" and ends[b] > first:
                yield "cache_batch_idx", b, int(given["cache_batch_idx"][a])
