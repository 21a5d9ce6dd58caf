"""`nsa_with_kvcache` on the kernels: many queries at once, in caches that were full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kvcache import CASE, CUTS, OUT, OVERLAPPING, SMALL, VARIANTS, Caches, contiguous, every, on_kernels

from nsa_layer import NSACache, NSAConfig, NSAttention, cached_call, compress, eager, nsa
from nsa_layer.cached_call import CachedCall, check_call
from nsa_layer.call_spec import CallTensors
from nsa_tools.testing.cases import OWN_KEYS, Case, Inputs, make_inputs, run

BEHIND = 5


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch on the CPU in place of the kernels; what may be NaN, since nothing reads it, is anything."""
    pytest.importorskip("cutlass")
    from nsa_layer.cute import head_groups, kvcache

    monkeypatch.setattr(kvcache, "locate", locate)
    monkeypatch.setattr(kvcache, "append", append)
    monkeypatch.setattr(kvcache, "complete_blocks", complete_blocks)
    monkeypatch.setattr(kvcache, "takes_pages", lambda *_, **__: True)
    monkeypatch.setattr(kvcache, "gather", gather)
    monkeypatch.setattr(kvcache, "clear", clear)
    monkeypatch.setattr(kvcache, "pool", pool)
    monkeypatch.setattr(kvcache, "invalidate_rows", invalidate_rows)
    monkeypatch.setattr(head_groups, "infer", infer)
    monkeypatch.setattr(kvcache, "readable", lambda x: x)


def locate(cache_seqlens, *, T, cu_seqlens, cache, table, cmp_cache, cmp_table, span, stride, window, adds):
    def count(n: int) -> int:
        return max(0, (n - span) // stride + 1)

    def holds(cache: torch.Tensor, table: torch.Tensor | None, b: int, end: int) -> bool:
        if cache is None or table is None:
            return cache is None or end <= cache.shape[1]
        used = table[b, : -(-end // cache.shape[1])].tolist()
        return end <= table.shape[1] * cache.shape[1] and all(0 <= page < len(cache) for page in used)

    columns = []
    for b, S in enumerate(cache_seqlens.tolist()):
        n = T if cu_seqlens is None else int(cu_seqlens[b + 1] - cu_seqlens[b])
        S += n * adds
        inside = T >= n and S >= n and holds(cache, table, b, S) and holds(cmp_cache, cmp_table, b, count(S))
        made = count(S) - count(S - n)
        source = (made - 1) * stride + span if made else 0
        first = max(0, S - n - window + 1)
        column = [S - n, n, S, count(S - n), made, count(S), count(S - n) * stride, source, 0, 0]
        column += [first, S - first, S - n - first]
        columns.append(column if inside and n else [0] * 8 + [int(n > 0)] + [0] * 4)
    return torch.tensor(columns, dtype=torch.int32).T


def _rows(x: torch.Tensor, cu_seqlens: torch.Tensor | None, b: int) -> torch.Tensor:
    return x[b] if cu_seqlens is None else x[cu_seqlens[b] : cu_seqlens[b + 1]]


def _spots(cache: torch.Tensor, table: torch.Tensor | None, b: int, first: int, count: int) -> tuple:
    at = torch.arange(first, first + count)
    return (b, at) if table is None else (table[b].long()[at // cache.shape[1]], at % cache.shape[1])


def append(x, caches, tables, slots, starts=(None, None), *, behind=""):
    from nsa_layer.kernels.cache_rows.locate import CacheSlots

    for i, (own, cache) in enumerate(zip(x, caches)):
        fields = (
            (CacheSlots.CMP_FIRST, CacheSlots.CMP_NEW, CacheSlots.CMP_END)
            if i >= 4
            else (CacheSlots.FIRST, CacheSlots.NEW, CacheSlots.END)
        )
        for b, (first, count, end) in enumerate(zip(*(slots[field].tolist() for field in fields))):
            if cache is not None and own is not None:
                cache[_spots(cache, tables[i // 4], b, first, count)] = _rows(own, starts[i // 4], b)[:count]
            if cache is not None and behind and slots[CacheSlots.NEW, b]:
                rows = BEHIND if behind == "rows" else -end % cache.shape[1]
                rows = min(rows, cache.shape[1] - end) if tables[i // 4] is None else rows
                cache[_spots(cache, tables[i // 4], b, end, rows)] = 0


def complete_blocks(caches, compressed, tables, slots, *, block_size, stride, most):
    from nsa_layer.kernels.cache_rows.locate import CacheSlots

    config = SMALL.replace(compress_size=block_size, compress_stride=stride, block_size=block_size)
    for cache, to in zip(caches, compressed):
        if to is None:
            continue
        for b, (first, count, source) in enumerate(
            slots[[CacheSlots.CMP_FIRST, CacheSlots.CMP_NEW, CacheSlots.SOURCE]].T.tolist()
        ):
            assert count <= most
            if count:
                tokens = cache[_spots(cache, tables[0], b, source, (count - 1) * stride + block_size)]
                to[_spots(to, tables[1], b, first, count)] = compress.mean_pool(tokens[None], config=config)[0]


def gather(caches, x, table, slots, fields, cu_seqlens):
    for own, cache in zip(x, caches):
        for b, (first, count) in enumerate(zip(*(slots[field].tolist() for field in fields))):
            if cache is not None:
                rows = _rows(own, cu_seqlens, b)
                rows[...] = torch.nan
                rows[:count] = cache[_spots(cache, table, b, first, count)]
                rows[count : count + BEHIND] = 0


def clear(x, slots, first, cu_seqlens=None):
    from nsa_layer.kernels.cache_rows.locate import CacheSlots

    for own in x:
        for b, at in enumerate(slots[first].tolist()):
            if own is not None and slots[CacheSlots.NEW, b]:
                _rows(own, cu_seqlens, b)[at : at + BEHIND] = 0


def pool(k, v, *, block_size, stride, k_dtypes, v_dtype, cu_seqlens=None, cu_blocks=None, total_blocks=None):
    config = SMALL.replace(compress_size=block_size, compress_stride=stride, block_size=block_size)

    def means(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or cu_seqlens is None:
            return None if x is None else compress.mean_pool(x, config=config)
        parts = x[: cu_seqlens[-1]].split(cu_seqlens.diff().tolist())
        counts, made = cu_blocks.diff().tolist(), x.new_full((total_blocks, *x.shape[1:]), torch.nan)
        means = [compress.mean_pool(part[None], config=config)[0, :n] for part, n in zip(parts, counts)]
        made[: cu_blocks[-1]] = torch.cat(means)
        return made

    return () if k is None else (means(k),), means(v)


def invalidate_rows(o, lses, slots, cu_seqlens):
    from nsa_layer.kernels.cache_rows.locate import CacheSlots

    for b in slots[CacheSlots.INVALID].nonzero().flatten().tolist():
        _rows(o, cu_seqlens, b)[...] = torch.nan
        for lse in lses:
            _rows(lse.mT, cu_seqlens, b)[...] = torch.nan


def infer(tensors, packing, spec, memory, pages, side_stream):
    """Eager's, of keys of which those behind the last query's are finite for a while."""
    given = tensors._asdict()
    q, k, v, q_offset = (given.pop(name) for name in ("q", "k", "v", "q_offset"))
    if pages is not None:
        k, v = (torch.stack([x[row.long().clamp(0, len(x) - 1)].flatten(0, 1) for row in pages.table]) for x in (k, v))
        cu = pages.starts
        for name, whole in (("k_win", k), ("v_win", v)):
            given[name], stretch = torch.zeros_like(whole), given[name]
            for b, (first, at) in enumerate(zip(q_offset.tolist(), pages.in_window.tolist())):
                of_b = _rows(stretch, cu, b)[: k.shape[1] - first + at]
                given[name][b, first - at : first - at + len(of_b)] = of_b
        if cu is not None:
            rooms = spec.lengths_k
            k, v, given["k_win"], given["v_win"] = (
                torch.cat([x[b, :S] for b, S in enumerate(rooms)]) for x in (k, v, given["k_win"], given["v_win"])
            )
    if spec.bound is not None:
        lengths = packing.cu_seqlens.diff().tolist()
        assert max(lengths) <= spec.bound
        spec = replace(spec, lengths=tuple(lengths), bound=None)
    config, lengths = spec.config, spec.lengths or [q.shape[1]] * len(q)
    rooms = spec.key_lengths or [k.shape[1]] * len(k)
    own = {name: given[name] for name in ("k_win", "v_win", "k_cmp", "v_cmp")}
    counts = list(map(config.compressed_length, rooms))
    for name, x in dict(k=k, v=v, **own).items():
        if x is None or not x.numel():
            continue
        parts = x.unbind() if spec.lengths is None else x.split(counts if "cmp" in name else list(rooms))
        for part, first, T in zip(parts, q_offset.tolist(), lengths):
            end = first + T if "cmp" not in name else config.compressed_length(first + T)
            # Keys on pages are read by the block, those of the window are none behind the last.
            behind = BEHIND if pages is None or "cmp" in name else 0 if "win" in name else -end % tensors.k.shape[1]
            # A sequence without a place reads what lies in front, and its rows are blanked.
            assert T == 0 or part[:end].isnan().any() or part[: end + behind].isfinite().all(), name
    k, v = k.nan_to_num(), v.nan_to_num()
    given |= {name: x if x is None else x.nan_to_num() for name, x in own.items()}
    return eager.attend(CallTensors(q, k, v, q_offset=q_offset, **given), spec=spec)


@pytest.mark.parametrize("name", ["7", "64", "all at once", "ragged"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_any_cut_gives_the_whole(emulated: None, paged: bool, name: str) -> None:
    Caches(make_inputs(CASE), paged).finish(CUTS[name], "cute")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("compressed", [True, False], ids=["kept", "made anew"])
def test_variants(emulated: None, compressed: bool, name: str) -> None:
    if compressed or "own" not in name:
        Caches(make_inputs(VARIANTS[name]), True, compressed).finish(CUTS["ragged"], "cute")


def test_few_bytes_hold_a_sequence_at_a_time(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_layer.cute import kvcache

    monkeypatch.setattr(kvcache, "WORKSPACE", 1)
    Caches(make_inputs(VARIANTS["gates given"]), True).finish(CUTS["ragged"], "cute")


def in_rows(caches: Caches) -> Caches:
    """Contiguous caches, a row for each sequence in order."""
    del caches.given["cache_batch_idx"]
    caches.given = {name: x[: len(caches.length)] for name, x in caches.given.items()}
    return caches


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", ["overlapping, weights", "own keys"])
def test_lengths_that_are_on_the_gpu_alone(
    emulated: None, monkeypatch: pytest.MonkeyPatch, name: str, paged: bool
) -> None:
    """Nothing but what stands for kernels reads starts of queries."""
    monkeypatch.setattr(cached_call, "leaves_starts_on_gpu", lambda *_: True)
    caches = Caches(make_inputs(VARIANTS[name]), paged, check=dict(backend="cute", validate=False))
    (caches if paged else in_rows(caches)).finish(CUTS["ragged"], "cute")


def test_starts_on_a_gpu_are_read_where_copies_go_in_parts_alone(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_layer.cute import kvcache

    monkeypatch.setattr(cached_call, "leaves_starts_on_gpu", lambda *_: True)
    given = contiguous(S=512)
    given |= {name: given[name].flatten(0, 1) for name in "qkv"} | dict(cu_seqlens_q=torch.tensor([0, 20, 40]).int())
    anew, whole = dict(k_cmp_cache=None, v_cmp_cache=None), 2 * CachedCall(**given).bytes_of_room
    for workspace, more, read in ((whole, anew, False), (whole - 1, anew, True), (whole - 1, {}, False), (1, {}, True)):
        monkeypatch.setattr(kvcache, "WORKSPACE", workspace)
        lengths, _ = check_call(CachedCall(**given | more), backend="cute", validate=False)
        assert (lengths is not None) == read, (workspace, more)
    monkeypatch.setattr(kvcache, "takes", lambda *_: True)  # decode's kernels copy nothing
    assert check_call(CachedCall(**given), backend="cute", validate=False)[0] is None


def test_starts_that_nobody_has_checked_lead_to_queries_alone(emulated: None) -> None:
    from nsa_layer.cute import kvcache

    given, packed = contiguous(), {name: contiguous()[name].flatten(0, 1) for name in "qkv"}
    want = nsa(**{name: given[name] for name in "qkv"}, config=SMALL).flatten(0, 1)
    given |= packed | dict(cu_seqlens_q=torch.tensor([-5, 20, 99]).int(), max_seqlen_q=20)
    o, _ = kvcache.attend(CachedCall(**given), None, 8**-0.5, validate=False)
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed, indexed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("config", [SMALL, OVERLAPPING], ids=["blocks", "overlapping"])
def test_a_batch_is_read_in_place(emulated: None, config: NSAConfig, packed: bool, indexed: bool) -> None:
    """A batch of one length; a pack of one sequence is one too. A row by index is a page, here with a window's own."""
    given = contiguous(Case(B=1 if packed else 2, T=20, D=8, dtype=torch.float64, config=config), S=24)
    for name in ("k_cmp_cache", "v_cmp_cache"):
        given[name] = given[name].new_full((len(given["q"]), 5, *given[name].shape[2:]), torch.nan)
    names = ("q", "k", "v", *("k_win", "v_win")[: 2 * indexed])
    for name in names[3:]:
        given |= {name: torch.randn_like(given[name[0]]), f"{name}_cache": given[f"{name[0]}_cache"].clone()}
    want, aux = nsa(**{name: given[name] for name in names}, config=config, return_aux=True)
    found = []
    for begin, end in ((0, 9), (9, 10), (10, 20)):
        new = {name: given[name][:, begin:end] for name in names}
        starts = torch.tensor([0, end - begin]).int() if packed else None
        new = {name: x[0] for name, x in new.items()} if packed else new
        more = dict(cache_seqlens=torch.full((len(given["q"]),), begin).int(), cu_seqlens_q=starts)
        more |= dict(cache_batch_idx=torch.tensor([1, 0]).int()) if indexed else {}
        o, lses, _ = on_kernels(CachedCall(**given | new | more))
        found.append((o, *lses))
    for i, x in enumerate((want, aux.lse_cmp, aux.lse_slc, aux.lse_swa)):
        got = torch.cat([part[i] for part in found], dim=0 if packed and not i else -1 if i else 1)
        torch.testing.assert_close(got, x[0] if packed else x, rtol=1e-12, atol=1e-12)


def in_parts_with_lists(given: dict, lists: torch.Tensor, cut: int, *, packed: bool) -> torch.Tensor:
    """o [B, T, Hq, Dv] of two calls, of which each has its tiles' lists."""
    B, T, q_tile, found = *given["q"].shape[:2], given["config"].q_tile, []
    for begin, end in ((0, cut), (cut, T)):
        new = {name: given[name][:, begin:end] for name in "qkv"}
        new |= dict(block_indices=lists[:, begin // q_tile : -(-end // q_tile)])
        if packed:
            starts = torch.arange(B + 1).int() * (end - begin)
            new = {name: x.flatten(0, 1) for name, x in new.items()} | dict(cu_seqlens_q=starts)
        o = attended(given | new | dict(cache_seqlens=torch.full_like(given["cache_seqlens"], begin)))
        found.append(o.view(B, end - begin, *o.shape[-2:]))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("packed", [False, True])
def test_lists_of_tiles_may_be_given(emulated: None, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """To packed sequences that are attended to one after the other too."""
    from nsa_layer.cute import kvcache

    monkeypatch.setattr(kvcache, "WORKSPACE", 1)
    given = contiguous() | dict(config=SMALL.replace(q_tile=4))
    want, aux = nsa(**{name: given[name] for name in ("q", "k", "v", "config")}, return_aux=True)
    got = in_parts_with_lists(given, aux.block_indices, 8, packed=packed)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_tokens_that_are_there_are_not_touched(emulated: None) -> None:
    """The kernels neither write to tokens of earlier calls nor read what lies behind them."""
    given = contiguous()
    nsa_whole = nsa(*(given[name] for name in "qkv"), config=SMALL)
    on_kernels(CachedCall(**given))
    for name in ("k_cache", "v_cache"):
        given[name][:, 20:] = torch.nan
    before = given["v_cache"].clone()
    more = dict(k=None, v=None, cache_seqlens=torch.full((2,), 20).int(), q=given["q"][:, 5:])
    o, _, _ = on_kernels(CachedCall(**given | more))
    torch.testing.assert_close(o, nsa_whole[:, 5:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(given["v_cache"], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OUT)
def test_numbers_that_lead_out_of_the_caches(emulated: None, name: str) -> None:
    from nsa_layer.cute import kvcache

    given = contiguous() | OUT[name]
    want = nsa(**{name: contiguous()[name] for name in "qkv"}, config=SMALL)
    with pytest.raises(ValueError, match="must lead to places in the caches; sequence 0 has 20 queries"):
        kvcache.attend(CachedCall(**given), (20, 20), 8**-0.5, validate=True)
    o, lses = kvcache.attend(CachedCall(**given), (20, 20), 8**-0.5, validate=False)
    assert o[0].isnan().all() and all(lse[0].isnan().all() for lse in lses)
    if given["k"] is not None:
        torch.testing.assert_close(o[1], want[1], rtol=1e-12, atol=1e-12)
        assert all(x[0].isnan().all() and not x[1, :2].isnan().any() for x in (given["k_cache"], given["v_cmp_cache"]))


KERNELS = dict(Hq=8, Hkv=2, D=64, dtype=torch.bfloat16, config=NSAConfig(block_counts=5, window_size=100))
PACK = Case(lengths=(500, 0, 3, 261), **KERNELS)
ON_GPU = {
    "default": PACK,
    "paper, weights": replace(PACK, config=NSAConfig.paper(block_counts=5, window_size=100), compress_weights=True),
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
    Caches(inputs, paged, name != "paper, weights", page=64, room=576).finish(cuts, "cute", **ROUNDING)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["pages", "rows", "pages of much room"])
@pytest.mark.parametrize("name", ON_GPU)
def test_lengths_that_are_on_the_gpu_alone_on_the_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, kept: str
) -> None:
    """They stay there too where a copy of all the caches that there is room for would take 4 GiB or more."""

    def unread(*_: object, read: bool) -> None:
        assert not read

    monkeypatch.setattr(cached_call, "check_lengths", unread)
    inputs, check = make_inputs(ON_GPU[name], "cuda"), dict(backend="cute", validate=False)
    caches = Caches(inputs, kept != "rows", page=64, room=576, check=check)
    if kept == "rows":
        caches = in_rows(caches)
    if "much" in kept:
        for table in ("page_table", "cmp_page_table"):
            caches.given[table] = torch.nn.functional.pad(caches.given[table], (0, 1 << 15), value=-1)
    caches.finish([(90, 91, 410), (), (1,), (64, 128)], "cute", **ROUNDING)


@pytest.mark.gpu
@pytest.mark.parametrize("beside, page", [(0, None), (1, None), (0, 64), (0, 192)])
@pytest.mark.parametrize("step", [64, 100, 500])
def test_a_batch_is_read_in_place_on_the_kernels(step: int, beside: int, page: int | None) -> None:
    """Caches are full of NaN, longer than any tile; rows may start anywhere, and pages may lie so."""
    case = Case(B=2, T=500, **KERNELS)
    inputs, want = make_inputs(case, "cuda"), run("cute", make_inputs(case, "cuda"))
    caches = batch_caches(inputs, 1344, beside)
    if page is not None:
        caches = in_pages(caches, page)
    seqlens, found = torch.zeros(2, dtype=torch.int32, device="cuda"), []
    for begin in range(0, 500, step):
        new = {name: getattr(inputs, name)[:, begin : begin + step] for name in "qkv"}
        given = caches | new | dict(cache_seqlens=seqlens, config=case.config, gate_weight=inputs.gate_weight)
        found.append(attended(given))
        seqlens += found[-1].shape[1]
    torch.testing.assert_close(torch.cat(found, dim=1), want.o, **ROUNDING)


def attended(given: dict) -> torch.Tensor:
    from nsa_layer.cute import kvcache

    call = CachedCall(**given)
    return kvcache.attend(call, *check_call(call), validate=False)[0]


def batch_caches(inputs: Inputs, S: int, beside: int = 0) -> dict[str, torch.Tensor]:
    caches = {}
    for name in "kv":
        B, _, H, D = getattr(inputs, name).shape
        for kind, rows in (("", S), ("_cmp", S // 64)):
            cache = torch.full((B, rows, H, beside + D), torch.nan, dtype=inputs.q.dtype, device="cuda")
            caches[f"{name}{kind}_cache"] = cache[..., beside:]
    return caches


def in_pages(caches: dict[str, torch.Tensor], page: int) -> dict[str, torch.Tensor]:
    """The same caches as pages in any order, and their tables; those of keys lie by head."""
    parts = {name: page // (64 if "cmp" in name else 1) for name in caches}
    paged = {name: x.flatten(0, 1).unflatten(0, (-1, parts[name])) for name, x in caches.items()}
    paged |= {name: paged[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "k_cmp_cache")}
    table = torch.randperm(len(paged["k_cache"]), device="cuda").int().view(len(caches["k_cache"]), -1)
    return paged | dict(page_table=table, cmp_page_table=table)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 64])
def test_a_graph_of_a_chunk_is_replayed_with_other_lengths(page: int | None) -> None:
    """Sequences end up outside of the caches: their rows are NaN, and no place is written."""
    case = Case(B=2, T=320, **KERNELS)
    inputs, want = make_inputs(case, "cuda"), run("cute", make_inputs(case, "cuda"))
    caches, seqlens = batch_caches(inputs, 320), torch.zeros(2, dtype=torch.int32, device="cuda")
    given = caches if page is None else in_pages(caches, page)
    caches = {name: given[name] for name in caches}
    new = {name: getattr(inputs, name)[:, :64].clone() for name in "qkv"}
    given = given | new | dict(cache_seqlens=seqlens, config=case.config, gate_weight=inputs.gate_weight)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attended(given)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attended(given)
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
    inputs = make_inputs(case, "cuda")
    want, given = run("cute", inputs), {name: getattr(inputs, name) for name in "qkv"}
    given |= in_pages(batch_caches(inputs, 512), 64) | dict(config=case.config)
    given["cache_seqlens"] = torch.zeros(2, dtype=torch.int32, device="cuda")
    got = in_parts_with_lists(given, want.aux.block_indices, 256, packed=packed)
    torch.testing.assert_close(got, want.o, **ROUNDING)


@pytest.mark.gpu
def test_a_cache_of_pages_does_not_wait_for_the_gpu() -> None:
    """Sequences grow unequally, and get new pages."""
    case = Case(lengths=(200, 3, 150), **KERNELS)
    inputs, want = make_inputs(case, "cuda"), run("cute", make_inputs(case, "cuda"))
    tokens = [getattr(inputs, name).split(case.lengths) for name in "qkv"]
    for mode in ("default", "error"):  # the first compiles
        cache = NSACache(3, 256, 2, 64, config=case.config, page_size=64, device="cuda")
        found: list[list[torch.Tensor]] = [[], [], []]
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for counts in ((120, 2, 30), (80, 1, 120)):
                spans = [slice(at, at + n) for at, n in zip(cache.lengths, counts)]
                q, k, v = (torch.cat([x[span] for x, span in zip(own, spans)]) for own in tokens)
                starts = torch.tensor([0, *counts]).cumsum(0).int()
                o = cache.attend(q, k, v, cu_seqlens_q=starts, gate_weight=inputs.gate_weight)
                for own, part in zip(found, o.split(counts)):
                    own.append(part)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(torch.cat([part for own in found for part in own]), want.o, **ROUNDING)


@pytest.mark.gpu
def test_the_papers_module_appends_to_a_cache_on_the_kernels() -> None:
    """Networks compress what each branch projects; a draft is taken back in between."""
    config = NSAConfig(block_counts=5, window_size=100)
    made = dict(compression="mlp", kv_per_branch=True, gate="input", device="cuda", dtype=torch.bfloat16)
    layer = NSAttention(256, num_heads=8, num_kv_heads=2, head_dim=64, config=config, **made)
    cache = NSACache(2, 320, 2, 64, config=config, page_size=64, own_window=True, own_sources=True, device="cuda")
    for tensor in (*cache.caches.values(), *cache.sources.values()):
        tensor.fill_(torch.nan)
    x, found = torch.randn(2, 300, 256, device="cuda").bfloat16(), []
    with torch.no_grad():
        for begin, end in ((0, 150), (150, 170), (170, 300)):
            layer(torch.randn(2, 20, 256, device="cuda").bfloat16(), cache=cache)
            cache.crop(begin)
            found.append(layer(x[:, begin:end], cache=cache))
        torch.testing.assert_close(torch.cat(found, dim=1), layer(x), **ROUNDING)
