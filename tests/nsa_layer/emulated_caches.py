"""The kernels of attention to caches, in PyTorch on a CPU; what may be NaN, since nothing reads it, is anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nsa_layer import NSAConfig, support
from nsa_layer.call import Call
from nsa_layer.cute import kvcache
from nsa_layer.eager import pooling
from nsa_layer.eager.forward import attend
from nsa_layer.kernels.cache_rows.locate import CacheSlots as At
from nsa_layer.kvcache.fp8 import dequantise, in_cache_dtype

Tensor = torch.Tensor
BEHIND = 5


@contextmanager
def emulated(dims: tuple[tuple[int, int], ...] = ((8, 6), (8, 8))) -> Iterator[None]:
    """Within, these functions stand for kernels, whose native head dimensions are `dims`."""
    with pytest.MonkeyPatch.context() as patch:
        for stand_in in (locate, append, complete_blocks, gather, clear, mean_pool, invalidate_rows):
            patch.setattr(kvcache, stand_in.__name__, stand_in)
        patch.setattr(kvcache, "reads_pages", lambda *_, **__: True)
        patch.setattr(kvcache, "aligned_rows", lambda x: x)
        patch.setattr(kvcache, "infer", infer)
        patch.setattr(support, "NATIVE_DIMS", dims)
        yield


def locate(cache_seqlens, *, T, cu_seqlens, cache, table, cmp_cache, cmp_table, span, stride, window, adds):
    def count(n: int) -> int:
        return max(0, (n - span) // stride + 1)

    def holds(cache: Tensor, table: Tensor | None, b: int, end: int) -> bool:
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


def _rows(x: Tensor, cu_seqlens: Tensor | None, b: int) -> Tensor:
    return x[b] if cu_seqlens is None else x[cu_seqlens[b] : cu_seqlens[b + 1]]


def _spots(cache: Tensor, table: Tensor | None, b: int, first: int, count: int) -> tuple:
    at = torch.arange(first, first + count)
    return (b, at) if table is None else (table[b].long()[at // cache.shape[1]], at % cache.shape[1])


def append(x, caches, tables, slots, starts=(None, None), *, behind="", scales=(None,) * 6):
    for i, (new, cache) in enumerate(zip(x, caches)):
        if cache is not None and new is not None:
            new = in_cache_dtype(new, scales[i], cache.dtype)
        fields = (At.CMP_FIRST, At.CMP_NEW, At.CMP_END) if i >= 4 else (At.FIRST, At.NEW, At.END)
        for b, (first, count, end) in enumerate(zip(*(slots[field].tolist() for field in fields))):
            if cache is not None and new is not None:
                cache[_spots(cache, tables[i // 4], b, first, count)] = _rows(new, starts[i // 4], b)[:count]
            if cache is not None and behind and slots[At.NEW, b]:
                rows = BEHIND if behind == "rows" else -end % cache.shape[1]
                rows = min(rows, cache.shape[1] - end) if tables[i // 4] is None else rows
                cache[_spots(cache, tables[i // 4], b, end, rows)] = 0


def complete_blocks(
    caches, compressed, tables, slots, *, block_size, stride, most, scales=(None, None), compressed_scales=(None, None)
):
    config = NSAConfig(compress_stride=stride, block_size=block_size)
    for cache, to, scale, cmp_scale in zip(caches, compressed, scales, compressed_scales):
        if to is None:
            continue
        for b, (first, count, source) in enumerate(slots[[At.CMP_FIRST, At.CMP_NEW, At.SOURCE]].T.tolist()):
            assert count <= most and (tables[0] is None or tables[0].shape[1] == 1 or not cache.shape[1] % block_size)
            if count:
                tokens = cache[_spots(cache, tables[0], b, source, (count - 1) * stride + block_size)]
                means = pooling.mean_pool(dequantise(tokens, scale, torch.float32)[None], config=config)[0]
                to[_spots(to, tables[1], b, first, count)] = in_cache_dtype(means, cmp_scale, to.dtype)


def gather(caches, x, table, slots, fields, cu_seqlens, scales=(None, None)):
    for own, cache, scale in zip(x, caches, scales):
        for b, (first, count) in enumerate(zip(*(slots[field].tolist() for field in fields))):
            if cache is not None:
                rows = _rows(own, cu_seqlens, b)
                rows[...] = torch.nan
                rows[:count] = dequantise(cache[_spots(cache, table, b, first, count)], scale, rows.dtype)
                rows[count : count + BEHIND] = 0


def clear(x, slots, first, cu_seqlens=None):
    for own in x:
        for b, at in enumerate(slots[first].tolist()):
            if own is not None and slots[At.NEW, b]:
                _rows(own, cu_seqlens, b)[at : at + BEHIND] = 0


def mean_pool(k, v, *, block_size, stride, k_dtypes, v_dtype, cu_seqlens=None, cu_blocks=None, total_blocks=None):
    config = NSAConfig(compress_stride=stride, block_size=block_size)

    def means(x: Tensor | None) -> Tensor | None:
        if x is None or cu_seqlens is None:
            return None if x is None else pooling.mean_pool(x, config=config)
        parts = x[: cu_seqlens[-1]].split(cu_seqlens.diff().tolist())
        counts, made = cu_blocks.diff().tolist(), x.new_full((total_blocks, *x.shape[1:]), torch.nan)
        means = [pooling.mean_pool(part[None], config=config)[0, :n] for part, n in zip(parts, counts)]
        made[: cu_blocks[-1]] = torch.cat(means)
        return made

    return () if k is None else (means(k),), means(v)


def invalidate_rows(o, lses, slots, cu_seqlens):
    for b in slots[At.INVALID].nonzero().flatten().tolist():
        _rows(o, cu_seqlens, b)[...] = torch.nan
        for lse in lses:
            _rows(lse.mT, cu_seqlens, b)[...] = torch.nan


def infer(call, memory, side_stream):
    """Eager's, of keys of which those behind the last query's are finite for a while."""
    assert (call.q.shape[-1], call.v.shape[-1]) in support.NATIVE_DIMS
    given = call._asdict()
    spec = given.pop("spec")
    q, k, v, q_offset = (given.pop(name) for name in ("q", "k", "v", "q_offset"))
    pages, win_offset, cu = (given.pop(name) for name in ("pages", "win_offset", "cu_seqlens_win"))
    if pages is not None:
        k, v = (torch.stack([x[row.long().clamp(0, len(x) - 1)].flatten(0, 1) for row in pages]) for x in (k, v))
        for name, whole in (("k_win", k), ("v_win", v)):
            if (window := given[name]) is None:
                continue
            given[name] = torch.zeros_like(whole)
            for b, (first, at) in enumerate(zip(q_offset.tolist(), win_offset.tolist())):
                of_b = _rows(window, cu, b)[: k.shape[1] - first + at]
                given[name][b, first - at : first - at + len(of_b)] = of_b
        if (lengths_k := spec.lengths_k) is not None:
            k, v, given["k_win"], given["v_win"] = (
                x if x is None else torch.cat([x[b, :S] for b, S in enumerate(lengths_k)])
                for x in (k, v, given["k_win"], given["v_win"])
            )
    if spec.bound is not None:
        lengths = call.cu_seqlens.diff().tolist()
        assert max(lengths) <= spec.bound
        spec = replace(spec, lengths=tuple(lengths), bound=None)
    config, lengths = spec.config, spec.lengths or [q.shape[1]] * len(q)
    lengths_k = spec.key_lengths or [k.shape[1]] * len(k)
    own = {name: given[name] for name in ("k_win", "v_win", "k_cmp", "v_cmp")}
    counts = list(map(config.compressed_length, lengths_k))
    for name, x in dict(k=k, v=v, **own).items():
        if x is None or not x.numel():
            continue
        parts = x.unbind() if spec.lengths is None else x.split(counts if "cmp" in name else list(lengths_k))
        for part, first, T in zip(parts, q_offset.tolist(), lengths):
            end = first + T if "cmp" not in name else config.compressed_length(first + T)
            # Keys on pages are read by the block, those of the window are none behind the last.
            behind = BEHIND if pages is None or "cmp" in name else 0 if "win" in name else -end % call.k.shape[1]
            # A sequence without a place reads what lies in front, and its rows are blanked.
            assert T == 0 or part[:end].isnan().any() or part[: end + behind].isfinite().all(), name
    k, v = k.nan_to_num(), v.nan_to_num()
    given |= {name: x if x is None else x.nan_to_num() for name, x in own.items()}
    return attend(Call(q, k, v, q_offset=q_offset, **given, spec=spec))
