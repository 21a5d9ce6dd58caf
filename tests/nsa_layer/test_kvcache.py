"""`nsa_with_kvcache`: however a sequence is cut into calls, they give what `nsa` gives for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from nsa_layer import NSAConfig, nsa, nsa_with_kvcache
from nsa_layer.cached_call import COMPRESSED_CACHES, TOKEN_CACHES, CachedCall, check_call
from nsa_layer.call_spec import CallSpec, CallTensors, Saved
from nsa_layer.kvcache import eager
from nsa_layer.kvcache.operator import CACHES, TENSORS
from nsa_layer.operators import static_arguments
from nsa_tools.testing.cases import LSES, OWN_KEYS, Case, Inputs, make_inputs, run

SMALL = NSAConfig(block_size=8, block_counts=4, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16, block_counts=5)
CASE = Case(lengths=(100, 0, 3, 57), D=8, Dv=6, dtype=torch.float64, config=SMALL)
PAGE, ROOM = 16, 112


@dataclass
class Caches:
    """Caches full of NaN for the sequences of a case, contiguous or in pages of a random order; keys lie by head.

    Attributes:
        check: options of `check_call` on the kernels, and of the call.
        given: arguments of `nsa_with_kvcache`.
        length: tokens of each sequence that are there.
    """

    inputs: Inputs
    paged: bool = False
    compressed: bool = True
    seed: int = 0
    page: int = PAGE
    room: int = ROOM
    check: dict[str, object] = field(default_factory=dict)
    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, stride = self.inputs.case, self.inputs.case.config.stride
        B, (Hkv, D), Dv = len(case.lengths), self.inputs.k.shape[1:], self.inputs.v.shape[-1]
        names = [name for name in (*TOKEN_CACHES, *COMPRESSED_CACHES) if self.is_kept(name)]
        pages, generator = self.room // self.page, torch.Generator().manual_seed(self.seed)
        for name in names:
            step = stride if "cmp" in name else 1
            places = (B * pages + 3, self.page // step) if self.paged else (B + 1, self.room // step)
            size = (*places, Hkv, D if name[0] == "k" else Dv)
            cache = torch.full(size, torch.nan, dtype=case.dtype)
            self.given[f"{name}_cache"] = cache.transpose(1, 2).contiguous().transpose(1, 2) if name == "k" else cache
        for table in ("page_table", "cmp_page_table") if self.paged else ():
            shuffled = torch.randperm(B * pages + 3, generator=generator)[: B * pages]
            self.given[table] = shuffled.view(B, pages).int()
        if self.paged and not self.compressed:
            del self.given["cmp_page_table"]
        if not self.paged:
            self.given["cache_batch_idx"] = torch.randperm(B + 1, generator=generator)[:B].int()
        self.given = {name: x.to(self.inputs.q.device) for name, x in self.given.items()}
        self.length = [0] * B

    def is_kept(self, name: str) -> bool:
        return name in "kv" or getattr(self.inputs, name) is not None or ("cmp" in name and self.compressed)

    def step(self, counts: Sequence[int], backend: str = "eager", **more: object) -> list[tuple]:
        """The next tokens of each sequence in one packed call: o, LSEs and lists of each, None where there are none."""
        case, config = self.inputs.case, self.inputs.case.config
        bounds = [(at, at + n) for at, n in zip(self.length, counts)]

        def cut(x: torch.Tensor | None, sizes: Sequence[int] = case.lengths) -> torch.Tensor | None:
            return x if x is None else torch.cat([p[i:j] for p, (i, j) in zip(x.split(sizes), bounds)])

        tensors = {name: cut(getattr(self.inputs, name)) for name in ("q", "k", "v", "gates", "k_win", "v_win")}
        for name in COMPRESSED_CACHES:
            if (own := getattr(self.inputs, name)) is not None:
                tensors[name] = torch.cat([self.completed(p, *b) for p, b in zip(self.split(own), bounds)])
        for name in ("gate_weight", "compress_k_weight", "compress_v_weight"):
            tensors[name] = getattr(self.inputs, name)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        seqlens = torch.tensor(self.length).int().to(self.inputs.q.device)
        more = dict(cache_seqlens=seqlens, cu_seqlens_q=starts, config=config) | more
        if self.check and self.inputs.q.is_cuda:
            more["cu_seqlens_q"] = more["cu_seqlens_q"].cuda()
        call = CachedCall(**self.given | tensors | more)
        if backend == "cute":
            o, lses, lists = on_kernels(call, **self.check)
            lists = lists.split(tuple(counts))
        else:
            o, lses, auxes = eager.attend(call, *check_call(call), backend=backend, validate=True)
            lists = [None if aux is None else aux.block_indices[0] for aux in auxes]
        self.length = [end for _, end in bounds]
        return list(zip(o.split(tuple(counts)), *(lse.split(tuple(counts), dim=1) for lse in lses), lists))

    def split(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.split(list(map(self.inputs.case.config.compressed_length, self.inputs.case.lengths)))

    def completed(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The compressed keys of the blocks that a step completes, and NaN up to the number that it could."""
        config = self.inputs.case.config
        made = x[config.compressed_length(begin) : config.compressed_length(end)]
        return F.pad(made, (0, 0, 0, 0, 0, -(-(end - begin) // config.stride) - len(made)), value=torch.nan)

    def finish(self, cuts: Sequence[Sequence[int]], backend: str = "eager", **close: float) -> None:
        """Cut each sequence at ``cuts``, a call for the next part of each, and compare with the whole."""
        lengths = self.inputs.case.lengths
        bounds = [sorted({0, *(c for c in own if c < n), n}) for own, n in zip(cuts, lengths)]
        counts = [[j - i for i, j in zip(at, at[1:])] for at in bounds]
        steps = range(max(map(len, counts)))
        found = [self.step([own[i] if i < len(own) else 0 for own in counts], backend) for i in steps]
        assert_whole(self.inputs, [[step[b] for step in found] for b in range(len(lengths))], **close)


def on_kernels(call: CachedCall, *, validate: bool = True, **check: object) -> tuple[torch.Tensor, tuple, torch.Tensor]:
    """o, log-sum-exps, and the lists of all parts."""
    from nsa_layer.cute import kvcache

    infer, decode_step, lists = kvcache.head_groups.infer, kvcache.decode_step, []

    def few(call: CachedCall, lengths: tuple[int, ...], softmax_scale: float) -> tuple:
        size = (call.B, max(lengths), call.k_cache.shape[2], max(call.config.block_counts, 3))
        own = torch.empty(size, dtype=torch.int32, device=call.q.device)
        made = decode_step(call, lengths, softmax_scale, lists=own)
        lists.append(torch.cat([x[:T] for x, T in zip(own, lengths)]))
        return made

    def noted(tensors: CallTensors, *given: object) -> tuple[torch.Tensor, Saved]:
        o, saved = infer(tensors, *given)
        lists.append(saved.block_indices if tensors.block_indices is None else tensors.block_indices)
        return o, saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache.head_groups, "infer", noted)
        patch.setattr(kvcache, "decode_step", few)
        o, lses = kvcache.attend(call, *check_call(call, validate=validate, **check), validate=validate)
    return o, lses, torch.cat(lists).flatten(0, -3)


def assert_whole(inputs: Inputs, found: Sequence[Sequence[tuple]], *, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Each sequence's parts are `nsa`'s result for it, the lists exactly."""
    want, lengths = run("eager" if inputs.q.device.type == "cpu" else "cute", inputs), inputs.case.lengths
    for b, parts in enumerate(found):
        tensors = [want.o, *(getattr(want.aux, name) for name in LSES), want.aux.block_indices]
        o, *lses, lists = (x.split(lengths, dim=int(x.dim() == 2))[b] for x in tensors)
        for i, expected in enumerate((o, *lses)):
            got = torch.cat([part[i] for part in parts], dim=int(i > 0))
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
        width = lists.shape[-1]
        own = [part[-1] for part in parts if part[-1] is not None]
        for x, expected in zip(own, lists.split(list(map(len, own)))):
            n = min(width, x.shape[-1])  # those of the kernels have room for as many blocks as the caches
            assert (x[..., n:] == -1).all()
            assert torch.equal(F.pad(x[..., :n], (0, width - n), value=-1), expected)


def every(step: int, most: int = 100) -> list[range]:
    return [range(0, most, step)] * 4


CUTS = {
    "one at a time": every(1),
    "7": every(7),
    "64": every(64),
    "all at once": every(100),
    "ragged": [(1, 9, 50, 90), (), (1, 2), (24, 25, 26)],
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_any_cut_gives_the_whole(paged: bool, name: str) -> None:
    Caches(make_inputs(CASE), paged).finish(CUTS[name])


VARIANTS = {
    "overlapping, weights": replace(CASE, config=OVERLAPPING, compress_weights=True),
    "gates given": replace(CASE, gate="given"),
    "own keys": replace(CASE, own_keys=OWN_KEYS),
    "own keys, overlapping": replace(CASE, own_keys=("k_cmp", "v_win"), config=OVERLAPPING),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_variants(paged: bool, name: str) -> None:
    Caches(make_inputs(VARIANTS[name]), paged).finish(CUTS["ragged"])


@pytest.mark.parametrize("name", ["overlapping, weights", "gates given"])
def test_without_compressed_caches_they_are_made_anew(name: str) -> None:
    Caches(make_inputs(VARIANTS[name]), True, compressed=False).finish(CUTS["ragged"])


@pytest.mark.parametrize("name", ["overlapping, weights", "own keys"])
def test_reference(name: str) -> None:
    Caches(make_inputs(VARIANTS[name]), True).finish(CUTS["ragged"], "reference")


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 99), max_size=5), min_size=4, max_size=4),
    st.sampled_from([SMALL, OVERLAPPING]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_drawn_cuts(cuts: list[list[int]], config: NSAConfig, paged: bool, compressed: bool, seed: int) -> None:
    inputs = make_inputs(replace(CASE, config=config, seed=seed, gate="none"))
    Caches(inputs, paged, compressed, seed).finish(cuts)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_going_back_leaves_no_trace(paged: bool) -> None:
    """Tokens that are taken back by their number alone, with the compressed keys that they completed."""
    caches = Caches(make_inputs(replace(CASE, config=OVERLAPPING)), paged)
    other = make_inputs(replace(CASE, seed=1))
    first = caches.step([30, 0, 1, 20])
    mine, caches.inputs = caches.inputs, replace(other, case=caches.inputs.case)
    caches.step([40, 0, 2, 37])
    caches.inputs, caches.length = mine, [30, 0, 1, 20]
    assert_whole(mine, [list(parts) for parts in zip(first, caches.step([70, 0, 2, 37]))])


def contiguous(case: Case = Case(B=2, T=20, D=8, dtype=torch.float64, config=SMALL), S: int = 32) -> dict:
    """Arguments of a call on contiguous caches that hold nothing yet."""
    inputs = make_inputs(case)
    caches = {
        name: x.new_full((case.B, S, *x.shape[2:]), torch.nan) for name, x in dict(k=inputs.k, v=inputs.v).items()
    }
    compressed = {f"{name}_cmp_cache": x[:, : S // 8].clone() for name, x in caches.items()}
    return dict(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        k_cache=caches["k"],
        v_cache=caches["v"],
        **compressed,
        cache_seqlens=torch.zeros(case.B, dtype=torch.int32),
        config=case.config,
    )


def test_a_batch_of_one_length() -> None:
    given = contiguous()
    want, aux = nsa(given["q"], given["k"], given["v"], config=SMALL, return_aux=True)
    out = torch.empty_like(given["q"])
    o, lses = nsa_with_kvcache(**given, out=out, return_lse=True)
    assert o is out
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    for lse, name in zip(lses, LSES):
        torch.testing.assert_close(lse, getattr(aux, name), rtol=1e-12, atol=1e-12)
    # The same tokens once more, now that they are in the caches; an int is a length for all.
    again = nsa_with_kvcache(**given | dict(k=None, v=None, cache_seqlens=20, q=given["q"][:, 15:]))
    torch.testing.assert_close(again, want[:, 15:], rtol=1e-12, atol=1e-12)


def test_lists_of_tiles_may_be_given() -> None:
    """Tiles count from the call's first query."""
    config = SMALL.replace(q_tile=4)
    given = contiguous() | dict(config=config)
    want, aux = nsa(given["q"], given["k"], given["v"], config=config, return_aux=True)
    lists = aux.block_indices
    parts = [
        nsa_with_kvcache(
            **given
            | {name: given[name][:, begin:end] for name in "qkv"}
            | dict(cache_seqlens=begin, block_indices=lists[:, begin // 4 : -(-end // 4)])
        )
        for begin, end in ((0, 8), (8, 20))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=1e-12, atol=1e-12)


def is_blank(given: dict) -> bool:
    return all(x.isnan().all() for name, x in given.items() if name.endswith("_cache"))


OUT = {
    "longer than the cache": dict(cache_seqlens=torch.tensor([13, 0]).int()),
    "negative": dict(cache_seqlens=torch.tensor([-1, 0]).int()),
    "fewer tokens than queries": dict(k=None, v=None, cache_seqlens=torch.tensor([19, 19]).int()),
    "no such row": dict(cache_batch_idx=torch.tensor([2, 1]).int()),
    "no such page": dict(page_table=torch.tensor([[2], [1]]).int(), cmp_page_table=torch.tensor([[0], [1]]).int()),
    "no such compressed page": dict(
        page_table=torch.tensor([[0], [1]]).int(), cmp_page_table=torch.tensor([[-1], [1]]).int()
    ),
}


@pytest.mark.parametrize("name", OUT)
def test_numbers_that_lead_out_of_the_caches(name: str) -> None:
    """Nothing of such a sequence is written and its rows are NaN; the others are as they were."""
    given = contiguous() | OUT[name]
    want = nsa(**{name: contiguous()[name] for name in "qkv"}, config=SMALL)
    with pytest.raises(ValueError, match="cache_seqlens, page tables and cache_batch_idx must lead .*; sequence 0"):
        nsa_with_kvcache(**given, validate=True)
    assert is_blank(given)
    o, lses = nsa_with_kvcache(**given, return_lse=True)
    assert o[0].isnan().all() and all(lse[0].isnan().all() for lse in lses)
    if given["k"] is None:
        assert o.isnan().all() and is_blank(given)
        return
    torch.testing.assert_close(o[1], want[1], rtol=1e-12, atol=1e-12)
    assert all(x[0].isnan().all() and not x[1, :2].isnan().any() for x in (given["k_cache"], given["v_cmp_cache"]))


SHARED = {
    "cache_batch_idx": dict(cache_batch_idx=torch.tensor([1, 1]).int()),
    "page_table": dict(page_table=torch.tensor([[1], [1]]).int(), cmp_page_table=torch.tensor([[0], [1]]).int()),
    "cmp_page_table": dict(page_table=torch.tensor([[0], [1]]).int(), cmp_page_table=torch.tensor([[1], [1]]).int()),
}


@pytest.mark.parametrize("name", SHARED)
def test_two_sequences_that_write_to_one_place_are_refused(name: str) -> None:
    given = contiguous() | SHARED[name]
    with pytest.raises(ValueError, match=f"^{name} must let no two sequences write .* got 1 for sequences 0 and 1"):
        nsa_with_kvcache(**given, validate=True)
    assert is_blank(given)
    # What they only read, or do not use, they may share.
    compressed = dict.fromkeys(("k_cmp_cache", "v_cmp_cache", "cmp_page_table"))
    alone = {name: given[name].nan_to_num() for name in ("k_cache", "v_cache")} | dict(k=None, v=None)
    if name == "page_table":
        nsa_with_kvcache(**given | compressed | alone | dict(cache_seqlens=20), validate=True)


def in_pages(lengths: tuple[int, ...], pages: list[list[int]], **more: object) -> dict:
    """Arguments of a packed call on 10 pages of 8 tokens, of each sequence's next tokens."""
    case = Case(lengths=lengths, D=8, dtype=torch.float64, config=SMALL)
    inputs = make_inputs(case)
    given = {name: getattr(inputs, name) for name in "qkv"} | dict(cu_seqlens_q=inputs.cu_seqlens, config=SMALL)
    given |= {f"{name}_cache": torch.zeros(10, 8, 2, 8).double() for name in "kv"}
    given |= {f"{name}_cmp_cache": torch.zeros(20, 1, 2, 8).double() for name in "kv"}
    own = torch.arange(20).view(len(lengths), -1)[:, : len(pages[0])].int()
    return given | dict(page_table=torch.tensor(pages).int(), cmp_page_table=own) | more


SEQLENS = torch.tensor([10, 10]).int()
HELD = {  # lengths, pages, cached tokens: the message, or None where numbers are right
    "a page twice": ((3, 3), [[0, 0], [2, 3]], SEQLENS, "name no page of a sequence twice, got 0 twice for sequence 0"),
    "twice behind the last token": ((3, 3), [[0, 1, 1], [2, 3, 3]], SEQLENS, None),
    "twice where nothing is asked": ((3, 0), [[0, 1], [2, 2]], SEQLENS, None),
    "shared and whole": ((3, 3), [[0, 1], [0, 3]], SEQLENS, None),
    "written and read": (
        (3, 3),
        [[0, 1], [1, 3]],
        SEQLENS,
        "where another has tokens, got 1 for sequences 0 and 1",
    ),
    "written and held": ((3, 0), [[0, 1], [0, 1]], torch.tensor([10, 11]).int(), "got 1 for sequences 0 and 1"),
    "written behind what is held": ((3, 0), [[0, 1], [0, 1]], SEQLENS, None),
    "given up": ((3, 0), [[0, 1], [1, 0]], torch.tensor([10, 0]).int(), None),
}


@pytest.mark.parametrize("name", HELD)
def test_pages_are_each_sequences_own_where_they_are_written(name: str) -> None:
    """Whole pages may be shared; one that is written to is copied before. Numbers are those of pages of their own."""
    lengths, pages, seqlens, message = HELD[name]
    given = in_pages(lengths, pages, cache_seqlens=seqlens)
    if message is None:
        want = nsa_with_kvcache(**in_pages(lengths, [[0, 1, 6], [2, 3, 7]], cache_seqlens=seqlens))
        torch.testing.assert_close(nsa_with_kvcache(**given, validate=True), want)
        return
    with pytest.raises(ValueError, match=f"^page_table must .*{message}"):
        nsa_with_kvcache(**given, validate=True)
    assert not given["k_cache"].any()


def test_compressed_pages_are_each_sequences_own_where_they_are_written() -> None:
    own = dict(page_table=torch.arange(6).view(2, 3).int())
    wrong = {"twice, got 4 twice for sequence 1": [[0, 1], [4, 4]], "got 1 for sequences 0 and 1": [[0, 1], [1, 3]]}
    for message, pages in wrong.items():
        given = in_pages((13, 13), [[0, 1], [2, 3]], cache_seqlens=0 * SEQLENS + 4) | own
        with pytest.raises(ValueError, match=f"^cmp_page_table must .* {message}"):
            nsa_with_kvcache(**given | dict(cmp_page_table=torch.tensor(pages).int()), validate=True)


def test_rows_are_each_sequences_own_where_they_are_written() -> None:
    given = in_pages((3, 0), [[0, 1], [2, 3]], cache_seqlens=torch.tensor([1, 3]).int())
    given |= dict(page_table=None, cmp_page_table=None, cache_batch_idx=torch.tensor([4, 4]).int())
    given |= {name: x[:10] for name, x in given.items() if name.endswith("cmp_cache")}
    with pytest.raises(ValueError, match="^cache_batch_idx must .* another has tokens, got 4 for sequences 0 and 1"):
        nsa_with_kvcache(**given, validate=True)
    nsa_with_kvcache(**given | dict(cache_seqlens=torch.tensor([3, 2]).int()), validate=True)


CACHES_OF = ("k_cache", "v_cache", "k_cmp_cache", "v_cmp_cache")


@pytest.mark.parametrize("name", CACHES_OF)
def test_caches_that_are_written_are_not_expanded(name: str) -> None:
    given = contiguous()
    given[name] = given[name][:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=rf"^{name} is written to, must not be expanded, .* got strides \(0, "):
        nsa_with_kvcache(**given, validate=True)
    assert is_blank(given)
    rows = contiguous()
    rows[name] = rows[name].new_full((2, 40, 2, 8), torch.nan).as_strided(rows[name].shape, (8, 16, 8, 1))
    with pytest.raises(ValueError, match=f"^{name} is written to, must not be .* overlap itself"):
        nsa_with_kvcache(**rows, validate=True)


def test_what_is_only_read_may_be_expanded() -> None:
    given = contiguous() | dict(k_cmp_cache=None, v_cmp_cache=None, k=None, v=None, cache_seqlens=20)
    for name in CACHES_OF[:2]:
        given[name] = torch.randn_like(given[name])[:1].expand(2, -1, -1, -1)
    want = nsa_with_kvcache(**given | {name: given[name].contiguous() for name in CACHES_OF[:2]})
    assert torch.equal(nsa_with_kvcache(**given, validate=True), want)
    given["v_cache"] = given["k_cache"]
    nsa_with_kvcache(**given, validate=True)


@pytest.mark.parametrize("name, other", [("v_cache", "k_cache"), ("k_cmp_cache", "v_cache"), ("out", "v_cache")])
def test_caches_do_not_overlap(name: str, other: str) -> None:
    """But keys may lie beside values."""
    given = contiguous() | dict(out=torch.empty(2, 20, 4, 8).double())
    both = torch.full((2, 70, 2, 8), torch.nan, dtype=torch.float64)
    given |= dict(k_cache=both[:, 0:64:2], v_cache=both[:, 1:64:2])
    want = nsa(**{name: given[name] for name in "qkv"}, config=SMALL)
    torch.testing.assert_close(nsa_with_kvcache(**given, validate=True), want)
    both.fill_(torch.nan)
    size = given[name].shape[1]
    given |= {name: given[other] if name[0] == "v" else given[other][:, -size:]}
    if name == "out":
        given |= dict(q=given["q"][:, :, :2], out=given["out"])
    with pytest.raises(ValueError, match=f"^({name}|{other}) must have memory of its own, got .* overlaps"):
        nsa_with_kvcache(**given, validate=True)
    assert both.isnan().all()


def test_an_expanded_output_is_refused_before_the_caches_are_written() -> None:
    given = contiguous()
    with pytest.raises(ValueError, match="^out is written to, must not be expanded"):
        nsa_with_kvcache(**given, out=torch.empty(1, 20, 4, 8).double().expand(2, -1, -1, -1))
    assert is_blank(given)


@pytest.mark.parametrize("packed", [False, True])
def test_pytorch_finds_nothing_wrong_with_the_operator(packed: bool) -> None:
    given = contiguous()
    for name in ("q", "k", "v") if packed else ():
        given[name] = given[name].flatten(0, 1)
    call = CachedCall(**given, cu_seqlens_q=torch.tensor([0, 20, 40]).int() if packed else None)
    _, softmax_scale = check_call(call)
    static = static_arguments(CallSpec(SMALL, True, softmax_scale)) | dict(backend="eager", validate=False)
    for name in CACHES:  # NaN is not equal to itself
        if getattr(call, name) is not None:
            getattr(call, name).zero_()
    op, (q, *rest) = torch.ops.nsa_layer.with_kvcache.default, [getattr(call, name) for name in TENSORS]
    opcheck(op, (q, *rest), static)
    with pytest.raises(RuntimeError, match="with_kvcache has no derivatives of its own"):
        op(q.clone().requires_grad_(), *rest, **static)
    with pytest.raises(NotImplementedError, match="nsa: forward mode"):
        torch.func.jvp(lambda q: op(q, *rest, **static)[0], (q,), (q,))


def test_one_graph_decodes() -> None:
    """With lengths on the device as an input, and parameters that would have a gradient elsewhere."""
    torch._dynamo.reset()
    counter, given = CompileCounterWithBackend("aot_eager"), contiguous()
    weight = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    want = nsa(**{name: given[name] for name in "qkv"}, config=SMALL, gate_weight=weight)
    tokens, seqlens = {name: given.pop(name) for name in "qkv"}, given.pop("cache_seqlens")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def step(new: dict[str, torch.Tensor], seqlens: torch.Tensor) -> torch.Tensor:
        return nsa_with_kvcache(**new, **given, cache_seqlens=seqlens, gate_weight=weight) * 1

    found = []
    for t in range(20):
        found.append(step({name: x[:, t : t + 1].contiguous() for name, x in tokens.items()}, seqlens))
        seqlens += 1
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


def test_autocast_is_as_if_cast_by_hand() -> None:
    given = {name: x.bfloat16() if name[0] in "kv" else x for name, x in contiguous().items()}
    cast = given | {name: given[name].bfloat16() for name in "qkv"}
    want = nsa_with_kvcache(**cast | dict(gate_weight=torch.ones(4, 3, 8).bfloat16()))
    float32 = given | {name: given[name].float() for name in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nsa_with_kvcache(**float32, gate_weight=torch.ones(4, 3, 8)), want)
