"""`nsa_with_kvcache`: however a sequence is cut into calls, they give what `nsa` gives for all of it.

In caches that were full of NaN, by PyTorch and by the kernels' host code, with PyTorch in the kernels' place on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product, zip_longest

import pytest
import torch
import torch.nn.functional as F
from layer_calls import CACHED, cached_arguments, checked_call, no_waits
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from nsa_layer import NSACache, NSAConfig, checks, nsa, nsa_with_kvcache
from nsa_layer.call import CACHES, COMPRESSED_CACHES, FP8, TOKEN_CACHES, Call, CallSpec, accumulation_dtype
from nsa_layer.checks import starts_of_lengths
from nsa_layer.config import BRANCHES
from nsa_layer.kvcache.fp8 import dequantise, quantise
from nsa_layer.operators import static_arguments
from nsa_layer.reference import compress
from nsa_tools.measure.timing import capture
from nsa_tools.testing.cases import LSES, OWN_KEYS, Case, Inputs, make_inputs, run

SMALL = NSAConfig(block_size=8, block_counts=4, window_size=8)
OVERLAPPING = SMALL.replace(compress_size=8, compress_stride=4, block_size=16, block_counts=5)
INDEX = SMALL.replace(rule="index", branches=("selected",))
WINDOWED = INDEX.replace(branches=("selected", "window"))
CASE = Case(lengths=(100, 0, 3, 57), D=8, Dv=6, dtype=torch.float64, config=SMALL, index_loss=False)
EXACT, CLOSE = dict(rtol=1e-12, atol=1e-12), dict(rtol=1e-6, atol=1e-6)


@dataclass
class Caches:
    """Caches full of NaN for the sequences of a case, contiguous or in pages of a random order.

    Attributes:
        layout: slots before heads in memory, "NHD"; heads before slots, "HND"; "keys HND" and values NHD; or "both":
            keys and values of a page beside each other, in one tensor.
        unread: the host leaves starts of queries on the GPU.
        fp8: caches are in FP8, with scales by which some numbers saturate.
        given: arguments of `nsa_with_kvcache`. Pages behind a sequence's last token are all one.
        length: tokens of each sequence that are there.
    """

    inputs: Inputs
    paged: bool = False
    compressed: bool = True
    seed: int = 0
    page: int = 16
    capacity: int = 112
    layout: str = "keys HND"
    unread: bool = False
    fp8: bool = False
    given: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case, device = self.inputs.case, self.inputs.q.device
        B, compressed = len(case.lengths), self.compressed and case.config.computes("compressed")
        pages, generator = self.capacity // self.page, torch.Generator().manual_seed(self.seed)
        for name in (*TOKEN_CACHES, *COMPRESSED_CACHES):
            if (x := getattr(self.inputs, name)) is not None or ("cmp" in name and compressed):
                step, x = case.config.stride if "cmp" in name else 1, getattr(self.inputs, name[0]) if x is None else x
                slots = (B * pages + 3, max(1, self.page // step)) if self.paged else (B + 1, self.capacity // step)
                dtype, both = FP8 if self.fp8 else case.dtype, self.layout == "both"
                cache = torch.full((slots[0], 1 + both, *slots[1:], *x.shape[1:]), torch.nan, dtype=dtype)[:, -1]
                if self.fp8:
                    # Powers of two for keys, so that scores of what is kept are the same in 16 bits.
                    scale = (torch.rand(x.shape[-2], generator=generator) + 1) / 224
                    self.given[f"{name}_scale"] = scale.log2().floor().exp2() if name[0] == "k" else scale
                by_head = self.layout == "HND" or self.layout == "keys HND" and name == "k"
                cache = cache.transpose(1, 2).contiguous().transpose(1, 2) if by_head else cache
                self.given[f"{name}_cache"] = cache
        for table in ("page_table", *["cmp_page_table"] * compressed) if self.paged else ():
            shuffled = torch.randperm(B * pages + 3, generator=generator).int()
            self.given[table] = shuffled[: B * pages].view(B, pages)
            for row, T in zip(self.given[table], case.lengths):
                row[-(-T // self.page) :] = shuffled[-1]
        if not self.paged:
            self.given["cache_batch_idx"] = torch.randperm(B + 1, generator=generator)[:B].int()
        self.given = {name: x.to(device) for name, x in self.given.items()}
        self.length = [0] * B

    def step(self, counts: Sequence[int], backend: str = "eager") -> list[tuple]:
        """The next tokens of each sequence in one packed call: o and log-sum-exps of each."""
        case, device = self.inputs.case, self.inputs.q.device
        bounds = [(at, at + n) for at, n in zip(self.length, counts)]
        given = self.given | dict(config=case.config, cache_seqlens=torch.tensor(self.length).int().to(device))
        given["cu_seqlens_q"] = starts_of_lengths(counts, device if self.unread else "cpu")
        for name, x in self.inputs.tensors().items():
            if name in COMPRESSED_CACHES:
                parts = x.split(list(map(case.config.compressed_length, case.lengths)))
                x = torch.cat([self.completed(part, *bound) for part, bound in zip(parts, bounds)])
            elif "weight" not in name:
                x = torch.cat([part[i:j] for part, (i, j) in zip(x.split(case.lengths), bounds)])
            given[name] = x
        o, lses = attended(given, backend, validate=not self.unread, unread=self.unread)
        self.length = [end for _, end in bounds]
        return list(zip(o.split(tuple(counts)), *(lse.split(tuple(counts), dim=1) for lse in lses)))

    def counted(self) -> Inputs:
        """The inputs as the caches keep them: tokens rounded to FP8, and compressed keys of these."""
        if not self.fp8:
            return self.inputs
        inputs, case, kept, exact = self.inputs, self.inputs.case, {}, accumulation_dtype(self.inputs.case.dtype)
        for name in (*TOKEN_CACHES, *COMPRESSED_CACHES):
            if (scale := self.given.get(f"{name}_scale")) is None:
                continue
            if (x := getattr(inputs, name)) is None:
                weight = getattr(inputs, f"compress_{name[0]}_weight")
                x = torch.cat([compress(x, weight, config=case.config) for x in kept[name[0]].split(case.lengths)])
                kept[f"compress_{name[0]}_weight"] = None
            kept[name] = dequantise(quantise(x, scale), scale, exact)
        return replace(inputs, **{name: x if x is None else x.to(case.dtype) for name, x in kept.items()})

    def completed(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The compressed keys of the blocks that a step completes, and NaN up to the number that it could."""
        config = self.inputs.case.config
        new = x[config.compressed_length(begin) : config.compressed_length(end)]
        return F.pad(new, (0, 0, 0, 0, 0, -(-(end - begin) // config.stride) - len(new)), value=torch.nan)

    def finish(self, cuts: Sequence[Sequence[int]], backend: str = "eager", **close: float) -> None:
        """Cut each sequence at ``cuts``, a call for the next part of each, and compare with the whole."""
        bounds = [sorted({0, *(c for c in own if c < n), n}) for own, n in zip(cuts, self.inputs.case.lengths)]
        calls = zip_longest(*([j - i for i, j in pairwise(at)] for at in bounds), fillvalue=0)
        assert_whole(self.counted(), [self.step(counts, backend) for counts in calls], **close)


def assert_whole(inputs: Inputs, steps: Sequence[Sequence[tuple]], **close: float) -> None:
    """The steps of each sequence, one after the other, are `nsa`'s result for it."""
    want = run("eager" if inputs.q.device.type == "cpu" else "cute", inputs)
    for i, expected in enumerate((want.o, *(getattr(want.aux, name) for name in LSES))):
        parts = [step[b][i] for b in range(len(inputs.case.lengths)) for step in steps]
        expected = torch.full_like(torch.cat(parts, dim=1), -torch.inf) if expected is None else expected
        torch.testing.assert_close(torch.cat(parts, dim=int(i > 0)), expected, **EXACT | close)


@pytest.fixture(params=["eager", "cute"])
def backend(request: pytest.FixtureRequest) -> str:
    """Eager, and the kernels' host code."""
    if request.param == "cute":
        request.getfixturevalue("emulation")
    return request.param


@pytest.fixture
def emulation() -> Iterator[None]:
    """PyTorch stands for the kernels."""
    pytest.importorskip("cutlass")
    from emulated_caches import emulated

    with emulated():
        yield


def attended(given: dict, backend: str = "cute", *, validate: bool = False, unread: bool = False) -> tuple:
    """o and log-sum-exps of a call."""
    if backend != "cute":
        return nsa_with_kvcache(**given, return_lse=True, validate=validate, backend=backend)
    from nsa_layer.cute import kvcache

    call = checked_call(given, backend="cute" if unread else "reference", validate=validate)
    return kvcache.attend_cached(call, validate=validate)


def every(step: int, most: int = 100) -> list[range]:
    return [range(0, most, step)] * 4


CUTS = {
    "one at a time": every(1),
    "7": every(7),
    "64": every(64),
    "all at once": every(100),
    "ragged": [(1, 9, 50, 90), (), (1, 2), (24, 25, 26)],
}


VARIANTS = {
    "plain": CASE,
    "overlapping, weights": replace(CASE, config=OVERLAPPING, compress_weights=True),
    "gates given": replace(CASE, gate="given"),
    "own keys": replace(CASE, own_keys=OWN_KEYS),
    "no window": replace(CASE, config=SMALL.replace(window_size=0)),
    "own keys, overlapping": replace(CASE, own_keys=("k_cmp", "v_win"), config=OVERLAPPING),
    "index": replace(CASE, config=INDEX, gate="none", index_dim=4),
    "index, one key": replace(CASE, config=WINDOWED, gate="given", index_dim=2, one_key=True),
    "index, all branches": replace(CASE, config=OVERLAPPING.replace(rule="index"), own_keys=("v_win",), index_dim=3),
    "compressed and window": replace(CASE, config=SMALL.replace(branches=BRANCHES[::2])),
}
KEPT = {"contiguous": (False, True), "paged": (True, True), "made anew": (True, False)}  # paged, with compressed caches
RUNS = [*product(["plain"], ("contiguous", "paged"), CUTS), *product([*VARIANTS][1:], KEPT, ["ragged"])]


@pytest.mark.parametrize("name, kept, cut", [run for run in RUNS if "own" not in run[0] or run[1] != "made anew"])
def test_any_cut_gives_the_whole(backend: str, name: str, kept: str, cut: str) -> None:
    Caches(make_inputs(VARIANTS[name]), *KEPT[kept]).finish(CUTS[cut], backend)


SMALL_PAGES = [("plain", 4), ("overlapping, weights", 8), ("overlapping, weights", 2), ("own keys", 4), ("index", 4)]


@pytest.mark.parametrize("name, page", SMALL_PAGES)
def test_a_block_may_have_several_pages(backend: str, name: str, page: int) -> None:
    """A page of compressed keys has one at least."""
    Caches(make_inputs(VARIANTS[name]), True, page=page, layout="NHD").finish(CUTS["ragged"], backend)


@pytest.mark.parametrize("layout", ["HND", "both"])
@pytest.mark.parametrize("name", ["own keys, overlapping", "index, all branches"])
def test_layouts_of_pages(backend: str, name: str, layout: str) -> None:
    Caches(make_inputs(VARIANTS[name]), True, layout=layout).finish(CUTS["ragged"], backend)


@pytest.mark.parametrize("config", [SMALL, OVERLAPPING], ids=str)
def test_compressed_keys_may_lie_with_their_last_tokens(backend: str, config: NSAConfig) -> None:
    """On pages of one key each, so that one table leads to tokens and to their compressed keys."""
    for page in (4, 16):
        caches = Caches(make_inputs(replace(CASE, config=config)), True, page=page)
        last = torch.arange(config.compressed_length(112)) * config.stride + config.span - 1
        each, table = max(1, page // config.stride), caches.given["page_table"]
        caches.given["cmp_page_table"] = table[:, last // page] * each + (last % page // config.stride).int()
        for name in COMPRESSED_CACHES:
            cache = caches.given[f"{name}_cache"]
            caches.given[f"{name}_cache"] = torch.full_like(cache.flatten(0, 1).unsqueeze(1), torch.nan)
        caches.finish(CUTS["ragged"], backend)


OTHER_DIMS = product(["plain", "overlapping, weights", "own keys", "index, all branches"], KEPT)


@pytest.mark.parametrize("name, kept", [run for run in OTHER_DIMS if run != ("own keys", "made anew")])
def test_caches_of_other_head_dimensions_are_copied_to_native_rows(name: str, kept: str) -> None:
    pytest.importorskip("cutlass")
    from emulated_caches import emulated

    with emulated(dims=((16, 12),)):
        for fp8, tolerance in ((False, EXACT), (True, CLOSE)):
            caches = Caches(make_inputs(VARIANTS[name]), *KEPT[kept], fp8=fp8)
            caches.finish(CUTS["ragged"], "cute", **tolerance)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["overlapping, weights", "own keys", "no window", "index, one key"])
def test_reference(name: str, fp8: bool) -> None:
    Caches(make_inputs(VARIANTS[name]), True, fp8=fp8).finish(CUTS["ragged"], "reference")


IN_FP8 = [*product(["plain", "overlapping, weights"], KEPT), ("own keys", "paged"), ("index, all branches", "paged")]


@pytest.mark.parametrize("name, kept", IN_FP8)
def test_any_cut_of_fp8_gives_the_whole_of_what_is_kept(backend: str, name: str, kept: str) -> None:
    Caches(make_inputs(VARIANTS[name]), *KEPT[kept], fp8=True).finish(CUTS["ragged"], backend, **CLOSE)


def test_few_bytes_hold_a_sequence_at_a_time(emulation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_layer.cute.kvcache.WORKSPACE", 1)
    Caches(make_inputs(VARIANTS["gates given"]), True).finish(CUTS["ragged"], "cute")


def in_rows(caches: Caches) -> Caches:
    """Contiguous caches, a row for each sequence in order."""
    del caches.given["cache_batch_idx"]
    caches.given = {name: x[: len(caches.length)] for name, x in caches.given.items()}
    return caches


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", ["overlapping, weights", "own keys"])
def test_lengths_on_the_gpu_alone(emulation: None, monkeypatch: pytest.MonkeyPatch, name: str, paged: bool) -> None:
    """Nothing but what stands for kernels reads starts of queries."""
    monkeypatch.setattr(checks, "is_on_gpu", lambda starts: True)
    caches = Caches(make_inputs(VARIANTS[name]), paged, unread=True)
    (caches if paged else in_rows(caches)).finish(CUTS["ragged"], "cute")


def test_starts_on_a_gpu_are_read_for_copies_in_parts_alone(emulation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_layer.cute import kvcache

    monkeypatch.setattr(checks, "is_on_gpu", lambda starts: True)
    given = cached_arguments(S=512)
    given |= {name: given[name].flatten(0, 1) for name in "qkv"} | dict(cu_seqlens_q=starts_of_lengths((20, 20)))
    anew, whole = dict(k_cmp_cache=None, v_cmp_cache=None), 2 * sum(given[f"{name}_cache"][0].nbytes for name in "kv")
    for workspace, more, read in ((whole, anew, False), (whole - 1, anew, True), (whole - 1, {}, False), (1, {}, True)):
        monkeypatch.setattr(kvcache, "WORKSPACE", workspace)
        spec = checked_call(given | more, backend="cute", validate=False).spec
        assert (spec.lengths is not None) == read, (workspace, more)
    monkeypatch.setattr(kvcache, "supports", lambda *_: True)  # decode's kernels copy nothing
    assert checked_call(given, backend="cute", validate=False).spec.lengths is None


def test_starts_that_nobody_has_checked_lead_to_queries_alone(emulation: None) -> None:
    from nsa_layer.cute import kvcache

    given, packed = cached_arguments(), {name: cached_arguments()[name].flatten(0, 1) for name in "qkv"}
    want = nsa(**{name: given[name] for name in "qkv"}, config=SMALL).flatten(0, 1)
    given |= packed | dict(cu_seqlens_q=torch.tensor([-5, 20, 99]).int(), max_seqlen_q=20)
    call = Call.of(given | dict(cu_seqlens=given["cu_seqlens_q"]))
    o, _ = kvcache.attend_cached(call._replace(spec=CallSpec(SMALL, True, 8**-0.5, bound=20)), validate=False)
    torch.testing.assert_close(o, want, **EXACT)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_going_back_leaves_no_trace(backend: str, paged: bool, fp8: bool) -> None:
    """Tokens that are taken back by their number alone, with the compressed keys that they completed."""
    caches = Caches(make_inputs(replace(CASE, config=OVERLAPPING)), paged, fp8=fp8)
    other = make_inputs(replace(CASE, seed=1))
    first = caches.step([30, 0, 1, 20], backend)
    mine, caches.inputs = caches.inputs, replace(other, case=caches.inputs.case)
    caches.step([40, 0, 2, 37], backend)
    caches.inputs, caches.length = mine, [30, 0, 1, 20]
    assert_whole(caches.counted(), [first, caches.step([70, 0, 2, 37], backend)], **CLOSE if fp8 else EXACT)


def whole(given: dict) -> tuple[torch.Tensor, ...]:
    """o and log-sum-exps of all tokens at once, and lists."""
    names = ("q", "q_index", *TOKEN_CACHES, "config")
    o, aux = nsa(**{name: given[name] for name in names if name in given}, return_aux=True)
    return o, *(getattr(aux, name) for name in LSES), aux.block_indices


def in_calls(
    given: dict, ends: Iterable[int], backend: str = "cute", *, packed: bool = False, lists: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """o [B, T, Hq, Dv] and log-sum-exps [B, Hq, T] of a batch whose tokens come in calls, up to each of `ends`.

    lists: of the whole batch's tiles; each call has its own, which count from its first query.
    """
    B, q_tile, found = len(given["q"]), given["config"].q_tile, []
    for begin, end in pairwise((0, *ends)):
        new = {name: given[name][:, begin:end] for name in ("q", "q_index", *TOKEN_CACHES) if name in given}
        if lists is not None:
            new["block_indices"] = lists[:, begin // q_tile : -(-end // q_tile)]
        if packed:
            starts = starts_of_lengths([end - begin] * B)
            new = {name: x.flatten(0, 1) for name, x in new.items()} | dict(cu_seqlens_q=starts)
        o, lses = attended(given | new | dict(cache_seqlens=torch.full_like(given["cache_seqlens"], begin)), backend)
        lses = [lse.unflatten(1, (B, -1)).transpose(0, 1) if packed else lse for lse in lses]
        found.append((o.view(B, end - begin, *o.shape[-2:]), *lses))
    return [torch.cat(parts, dim) for parts, dim in zip(zip(*found), (1, -1, -1, -1))]


@pytest.mark.parametrize("packed, indexed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("config", [SMALL, OVERLAPPING, SMALL.replace(rule="index", local_blocks=1)], ids=str)
def test_a_batch_is_read_in_place(backend: str, config: NSAConfig, packed: bool, indexed: bool) -> None:
    """A batch of one length; a pack of one sequence is one too. A row by index is a page, here with a window's own."""
    of_index = dict(index_dim=4, one_key=packed) if config.rule == "index" else {}
    own_keys = OWN_KEYS[2:] if indexed else ()
    case = replace(CACHED, B=1 if packed else 2, config=config, own_keys=own_keys, index_loss=False, **of_index)
    given = cached_arguments(case, S=24)
    given |= dict(cache_batch_idx=torch.tensor([1, 0]).int()) if indexed else {}
    *want, _ = whole(given)
    torch.testing.assert_close(in_calls(given, (9, 10, 20), backend, packed=packed), want, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_lists_of_tiles_may_be_given(backend: str, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """To packed sequences that are attended to one after the other too."""
    if backend == "cute":
        monkeypatch.setattr("nsa_layer.cute.kvcache.WORKSPACE", 1)
    given = cached_arguments() | dict(config=SMALL.replace(q_tile=4))
    *want, lists = whole(given)
    torch.testing.assert_close(in_calls(given, (8, 20), backend, packed=packed, lists=lists), want, **EXACT)


def test_tokens_that_are_there_are_not_touched(backend: str) -> None:
    """Nothing writes to tokens of earlier calls, nor reads what lies behind them."""
    given = cached_arguments()
    want = whole(given)[0]
    attended(given, backend)
    for name in ("k_cache", "v_cache"):
        given[name][:, 20:] = torch.nan
    before = given["v_cache"].clone()
    given |= dict(k=None, v=None, q=given["q"][:, 5:], cache_seqlens=torch.full((2,), 20).int())
    torch.testing.assert_close(attended(given, backend)[0], want[:, 5:], **EXACT)
    torch.testing.assert_close(given["v_cache"], before, rtol=0, atol=0, equal_nan=True)
    if backend == "eager":  # an int is a length for all, and the output may be the caller's
        out = torch.empty_like(given["q"])
        assert nsa_with_kvcache(**given | dict(cache_seqlens=20), out=out) is out
        torch.testing.assert_close(out, want[:, 5:], **EXACT)


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
def test_numbers_that_lead_out_of_the_caches(backend: str, name: str) -> None:
    """Nothing of such a sequence is written and its rows are NaN; the others are as they were."""
    given, want = cached_arguments() | OUT[name], whole(cached_arguments())[0]
    caches = [x for name, x in given.items() if name.endswith("_cache")]
    o, lses = attended(given, backend)
    assert o[0].isnan().all() and all(lse[0].isnan().all() for lse in lses)
    if given["k"] is None:
        assert o.isnan().all() and all(x.isnan().all() for x in caches)
        return
    torch.testing.assert_close(o[1], want[1], **EXACT)
    assert all(x[0].isnan().all() and not x[1, :2].isnan().any() for x in (given["k_cache"], given["v_cmp_cache"]))


SEQLENS = torch.tensor([10, 10]).int()
RIGHT = {  # lengths, pages, cached tokens
    "twice where nothing is asked": ((3, 0), [[0, 1], [2, 2]], SEQLENS),
    "shared and whole": ((3, 3), [[0, 1], [0, 3]], SEQLENS),
    "written behind what is held": ((3, 0), [[0, 1], [0, 1]], SEQLENS),
    "given up": ((3, 0), [[0, 1], [1, 0]], torch.tensor([10, 0]).int()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_pages_may_be_shared_where_nobody_writes(name: str) -> None:
    """As pages of each sequence's own, [0, 1] and [2, 3]; refused ones: `fuzz/wrong_calls/layer.py`."""
    lengths, pages, seqlens = RIGHT[name]
    inputs, found = make_inputs(Case(lengths=lengths, D=8, dtype=torch.float64, config=SMALL)), []
    for table in (pages, [[0, 1], [2, 3]]):
        given = {f"{name}_cache": torch.zeros(10, 8, 2, 8).double() for name in "kv"}
        given |= {f"{name}_cmp_cache": torch.zeros(20, 1, 2, 8).double() for name in "kv"}
        given |= dict(page_table=torch.tensor(table).int(), cmp_page_table=torch.arange(4).view(2, 2).int())
        given |= {name: getattr(inputs, name) for name in "qkv"} | dict(cu_seqlens_q=inputs.cu_seqlens, config=SMALL)
        found.append(nsa_with_kvcache(**given, cache_seqlens=seqlens, validate=True))
    torch.testing.assert_close(*found)


def test_memory_that_is_only_read_may_be_shared() -> None:
    """By sequences, and by keys and values, which may lie beside each other too."""
    given = cached_arguments() | dict(k_cmp_cache=None, v_cmp_cache=None, k=None, v=None, cache_seqlens=20)
    names = ("k_cache", "v_cache")
    given |= {name: torch.randn_like(given[name])[:1].expand(2, -1, -1, -1) for name in names}
    want = nsa_with_kvcache(**given | {name: given[name].contiguous() for name in names})
    assert torch.equal(nsa_with_kvcache(**given, validate=True), want)
    pages = dict(page_table=torch.tensor([[1], [1]]).int()) | {name: given[name].contiguous() for name in names}
    assert torch.equal(nsa_with_kvcache(**given | pages, validate=True), want)
    nsa_with_kvcache(**given | dict(v_cache=given["k_cache"]), validate=True)
    given, both = cached_arguments(), torch.full((2, 70, 2, 8), torch.nan, dtype=torch.float64)
    given |= dict(k_cache=both[:, 0:64:2], v_cache=both[:, 1:64:2])
    torch.testing.assert_close(nsa_with_kvcache(**given, validate=True), whole(given)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_pytorch_finds_nothing_wrong_with_the_operator(packed: bool) -> None:
    given = cached_arguments()
    for name in ("q", "k", "v") if packed else ():
        given[name] = given[name].flatten(0, 1)
    call = checked_call(given | dict(cu_seqlens_q=starts_of_lengths((20, 20)) if packed else None))
    static = static_arguments(replace(call.spec, backend="eager")) | dict(validate=False)
    for name in CACHES:  # NaN is not equal to itself
        if (cache := getattr(call.cache, name)) is not None:
            cache.zero_()
    op, given = torch.ops.nsa_layer.with_kvcache.default, call._asdict() | call.cache._asdict()
    q, *rest = (given[argument.name] for argument in op._schema.arguments if not argument.kwarg_only)
    opcheck(op, (q, *rest), static)
    with pytest.raises(RuntimeError, match="with_kvcache has no derivatives of its own"):
        op(q.clone().requires_grad_(), *rest, **static)
    with pytest.raises(NotImplementedError, match="nsa: forward mode"):
        torch.func.jvp(lambda q: op(q, *rest, **static)[0], (q,), (q,))


def test_one_graph_decodes() -> None:
    """With lengths on the device as an input, and parameters that would have a gradient elsewhere."""
    torch._dynamo.reset()
    counter, given = CompileCounterWithBackend("aot_eager"), cached_arguments()
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
    torch.testing.assert_close(torch.cat(found, dim=1), want, **EXACT)
    assert counter.frame_count == 1


def test_autocast_is_as_if_cast_by_hand() -> None:
    given = {name: x.bfloat16() if name[0] in "kv" else x for name, x in cached_arguments().items()}
    cast = given | {name: given[name].bfloat16() for name in "qkv"}
    want = nsa_with_kvcache(**cast | dict(gate_weight=torch.ones(4, 3, 8).bfloat16()))
    float32 = given | {name: given[name].float() for name in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nsa_with_kvcache(**float32, gate_weight=torch.ones(4, 3, 8)), want)


KERNELS = dict(Hq=8, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=5, window_size=100))
PACK = Case(lengths=(500, 0, 3, 261), **KERNELS)
BY_INDEX = NSAConfig(rule="index", branches=("selected",), block_counts=5, local_blocks=1, window_size=100)
ON_GPU = {
    "default": PACK,
    "paper, weights": replace(PACK, config=NSAConfig.paper(block_counts=5, window_size=100), compress_weights=True),
    "index": replace(PACK, config=BY_INDEX, gate="none", index_dim=32, index_loss=False),
    "index, one key, gates": replace(
        PACK, config=BY_INDEX.replace(branches=BRANCHES[1:]), D=128, index_dim=16, one_key=True, index_loss=False
    ),
    "own keys, D 128, one head": replace(PACK, Hq=2, D=128, own_keys=OWN_KEYS, dtype=torch.float16),
}
ROUNDING = dict(rtol=0.02, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", ["7", "64", "100", "all at once", "ragged"])
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_any_cut_gives_the_whole_on_the_kernels(paged: bool, name: str, cut: str) -> None:
    cuts = [(90, 91, 410), (), (1,), (64, 128)] if cut == "ragged" else every(int(cut) if cut.isdigit() else 500, 500)
    inputs = make_inputs(ON_GPU[name], "cuda")
    Caches(inputs, paged, name != "paper, weights", page=64, capacity=576).finish(cuts, "cute", **ROUNDING)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "paper, weights", "index", "own keys, D 128, one head"])
def test_any_cut_of_fp8_gives_the_whole_on_the_kernels(name: str) -> None:
    """Steps of one token, decode steps of several, and chunks equal `nsa` of the quantised tokens."""
    caches = Caches(make_inputs(ON_GPU[name], "cuda"), "own" not in name, page=64, capacity=576, fp8=True)
    caches.finish([(90, 91, 410), (), (1,), (64, 128)], "cute", rtol=0.03, atol=0.015)


@pytest.mark.gpu
@pytest.mark.parametrize("page, layout", [(16, "HND"), (32, "both"), (128, "NHD"), (256, "HND")])
@pytest.mark.parametrize("name, fp8", [("default", False), ("default", True), ("index", False)])
def test_pages_of_any_size_and_layout_on_the_kernels(name: str, fp8: bool, page: int, layout: str) -> None:
    """A block of 64 tokens has four pages, or a page four blocks; steps of a token, of a few, and chunks."""
    where = dict(page=page, capacity=768, layout=layout, unread=True)
    caches = Caches(make_inputs(ON_GPU[name], "cuda"), True, fp8=fp8, **where)
    close = dict(rtol=0.03, atol=0.015) if fp8 else ROUNDING
    caches.finish([(90, 91, 410), (), (1,), (64, 128)], "cute", **close)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64])
def test_a_graph_of_a_mixed_batch_is_replayed_with_other_starts(page: int) -> None:
    """One sequence's chunk and single tokens of the others in one call, whose lengths the host never reads."""
    case = Case(lengths=(100, 130, 66), **KERNELS)
    inputs, want = make_inputs(case, "cuda"), run("cute", make_inputs(case, "cuda")).o.split(case.lengths)
    caches = Caches(inputs, True, page=page, capacity=256)
    tokens = {name: getattr(inputs, name).split(case.lengths) for name in "qkv"}
    new = {name: torch.zeros_like(getattr(inputs, name)[:66]) for name in "qkv"}
    starts, seqlens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 3))
    given = caches.given | new | dict(config=case.config, cu_seqlens_q=starts, cache_seqlens=seqlens, max_seqlen_q=64)
    given["gate_weight"] = inputs.gate_weight
    graph, o = capture(lambda: attended(given, unread=True)[0], warm_ups=3)
    for counts in ((64, 1, 1), (1, 64, 1), (1, 1, 64), (34, 0, 0), (0, 64, 0)):
        spans = [slice(at, at + n) for at, n in zip(caches.length, counts)]
        for name, own in tokens.items():
            new[name][: sum(counts)] = torch.cat([x[span] for x, span in zip(own, spans)])
        starts.copy_(starts_of_lengths(counts))
        seqlens.copy_(torch.tensor(caches.length))
        graph.replay()
        expected = torch.cat([x[span] for x, span in zip(want, spans)])
        torch.testing.assert_close(o[: sum(counts)], expected, **ROUNDING)
        caches.length = [span.stop for span in spans]


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["pages", "rows", "pages of much capacity"])
@pytest.mark.parametrize("name", ON_GPU)
def test_lengths_on_the_gpu_alone_on_the_kernels(monkeypatch: pytest.MonkeyPatch, name: str, kept: str) -> None:
    """They stay there too where a copy of all the caches' capacity would take 4 GiB or more."""

    def unread(*_: object, read: bool) -> None:
        assert not read

    monkeypatch.setattr(checks, "check_lengths", unread)
    caches = Caches(make_inputs(ON_GPU[name], "cuda"), kept != "rows", page=64, capacity=576, unread=True)
    if kept == "rows":
        caches = in_rows(caches)
    if "much" in kept:
        for table in [table for table in caches.given if table.endswith("page_table")]:
            caches.given[table] = torch.nn.functional.pad(caches.given[table], (0, 1 << 15), value=-1)
    caches.finish([(90, 91, 410), (), (1,), (64, 128)], "cute", **ROUNDING)


@pytest.mark.gpu
@pytest.mark.parametrize("beside, page", [(0, None), (1, None), (0, 64), (0, 192)])
@pytest.mark.parametrize("step", [64, 100, 500])
def test_a_batch_is_read_in_place_on_the_kernels(step: int, beside: int, page: int | None) -> None:
    """Caches are full of NaN, longer than any tile; rows may start anywhere, and pages may lie so."""
    case = Case(B=2, T=500, **KERNELS)
    want = run("cute", make_inputs(case, "cuda"))
    given = in_pages(cached_arguments(case, 1344, "cuda", beside), page)
    torch.testing.assert_close(in_calls(given, [*range(step, 500, step), 500])[0], want.o, **ROUNDING)


def in_pages(given: dict, page: int | None) -> dict:
    """The same on caches of pages in any order, with their tables; keys lie by head. None: as they are."""
    if page is None:
        return given
    paged = {name: x for name, x in given.items() if name.endswith("_cache")}
    for name, x in paged.items():
        x = x.flatten(0, 1).unflatten(0, (-1, page // (64 if "cmp" in name else 1)))
        paged[name] = x.transpose(1, 2).contiguous().transpose(1, 2) if name[0] == "k" else x
    table = torch.randperm(len(paged["k_cache"]), device="cuda").int().view(len(given["q"]), -1)
    return given | paged | dict(page_table=table, cmp_page_table=table)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 64])
def test_a_graph_of_a_chunk_is_replayed_with_other_lengths(page: int | None) -> None:
    """Sequences end up outside of the caches: their rows are NaN, and no place is written."""
    case = Case(B=2, T=320, **KERNELS)
    inputs, want = make_inputs(case, "cuda"), run("cute", make_inputs(case, "cuda"))
    given = in_pages(cached_arguments(case, 320, "cuda"), page)
    caches, seqlens = {name: x for name, x in given.items() if name.endswith("_cache")}, given["cache_seqlens"]
    new = {name: getattr(inputs, name)[:, :64].clone() for name in "qkv"}
    given |= new
    graph, o = capture(lambda: attended(given)[0], warm_ups=3)
    for cache in caches.values():
        cache.fill_(torch.nan)
    for begin in range(0, 320, 64):
        for name, x in new.items():
            x.copy_(getattr(inputs, name)[:, begin : begin + 64])
        graph.replay()
        torch.testing.assert_close(o, want.o[:, begin : begin + 64], **ROUNDING)
        seqlens += 64
    before = {name: x.clone() for name, x in caches.items()}
    seqlens.copy_(torch.tensor([300, -1]))
    graph.replay()
    assert o.isnan().all()
    if page is not None:
        seqlens.copy_(torch.tensor([0, 64]))
        given["page_table"][:, 0] = torch.tensor([-5, 2**31 - 1])
        graph.replay()
        assert o.isnan().all()
    assert all(torch.equal(before[name], x) for name, x in caches.items())


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("q_tile", [1, 128])
def test_lists_may_be_given_on_the_kernels(q_tile: int, packed: bool) -> None:
    case = Case(B=2, T=500, **KERNELS | dict(config=KERNELS["config"].replace(q_tile=q_tile), gate="none"))
    want = run("cute", make_inputs(case, "cuda"))
    given, lists = in_pages(cached_arguments(case, 512, "cuda"), 64), want.aux.block_indices
    torch.testing.assert_close(in_calls(given, (256, 500), packed=packed, lists=lists)[0], want.o, **ROUNDING)


@pytest.mark.gpu
def test_a_cache_of_pages_does_not_wait_for_the_gpu() -> None:
    """Sequences grow unequally, and get new pages."""
    case = Case(lengths=(200, 3, 150), **KERNELS)
    inputs, want = make_inputs(case, "cuda"), run("cute", make_inputs(case, "cuda"))
    tokens = [getattr(inputs, name).split(case.lengths) for name in "qkv"]
    for within in (nullcontext(), no_waits()):  # the first compiles
        cache = NSACache(3, 256, 2, 64, config=case.config, page_size=64, device="cuda")
        found: list[list[torch.Tensor]] = [[], [], []]
        with within:
            for counts in ((120, 2, 30), (80, 1, 120)):
                spans = [slice(at, at + n) for at, n in zip(cache.lengths, counts)]
                q, k, v = (torch.cat([x[span] for x, span in zip(own, spans)]) for own in tokens)
                o = cache.attend(q, k, v, cu_seqlens_q=starts_of_lengths(counts), gate_weight=inputs.gate_weight)
                for own, part in zip(found, o.split(counts)):
                    own.append(part)
        torch.testing.assert_close(torch.cat([part for own in found for part in own]), want.o, **ROUNDING)
