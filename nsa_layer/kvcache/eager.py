"""`nsa_with_kvcache` in plain PyTorch: append, complete compressed keys, then attend sequence by sequence.

Lengths and pages are read on the host. A sequence that does not fit its caches is left alone: nothing of it is written,
and its rows are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch

from nsa_layer import support
from nsa_layer.cache_slots import check_slots
from nsa_layer.call import COMPRESSED_CACHES, LSES, TOKEN_CACHES, Aux, Call, accumulation_dtype
from nsa_layer.eager.pooling import compress
from nsa_layer.kvcache.fp8 import dequantise, in_cache_dtype

Tensor = torch.Tensor


@torch.no_grad()
def attend_cached(call: Call, *, validate: bool) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], list[Aux | None]]:
    """The step, on caches that it changes in place: o and log-sum-exps as of `nsa_with_kvcache`, and each sequence's
    `Aux`, None where there is nothing to attend.

    Args:
        validate: raise, before anything is written, where a sequence does not fit its caches, or shares slots.
    """
    module, q, lengths = support.backend_module(call.spec.backend), call.q, call.query_lengths
    caches = call.cache.named((*TOKEN_CACHES, *COMPRESSED_CACHES))
    pages, new = _pages(call, caches), list(call.sequences())
    ends = [S if call.k is None else S + T for S, T in zip(call.cache.cache_seqlens.tolist(), lengths)]
    spans = [{name: _span(call, name, S - T, S) for name in caches} for S, T in zip(ends, lengths)]
    inside = [
        S >= T and all(fits(cache, pages[name][b], spans[b][name][1]) for name, cache in caches.items())
        for b, (S, T) in enumerate(zip(ends, lengths))
    ]
    if validate:
        check_slots(inside, call)
    attended = [b for b, T in enumerate(lengths) if T and inside[b]]
    for b in attended:
        _write(call, module, caches, {name: pages[name][b] for name in caches}, new[b], spans[b])
    o = q.new_full((*q.shape[:-1], call.cache.v_cache.shape[-1]), torch.nan)
    lses = [q.new_full(o.shape[:-1], torch.nan, dtype=accumulation_dtype(q.dtype)) for _ in LSES]
    rows = [x.split(lengths) if call.packed else x.unbind() for x in (o, *lses)]
    spec, auxes = replace(call.spec, lengths=None), [None] * call.B
    fixed = dict(spec=spec, cache=None) | {f"compress_{x}_weight": None for x in "kv" if f"{x}_cmp" in caches}
    for b in attended:
        stored = {
            name: dequantise(x[slots_of(x, pages[name][b], 0, spans[b][name][1])], call.cache.scale(name), q.dtype)
            for name, x in caches.items()
        }
        offset = torch.tensor([ends[b] - lengths[b]], dtype=torch.int32)
        (values,), auxes[b], *_ = module.attend(new[b]._replace(**stored, **fixed, q_offset=offset).as_batch())
        row_o, *row_lses = (row[b] for row in rows)
        row_o.copy_(values)
        for row, lse in zip(row_lses, (getattr(auxes[b], name) for name in LSES.values())):
            row.fill_(-torch.inf) if lse is None else row.copy_(lse[0].mT)
    return o, tuple(lse.mT for lse in lses), auxes


def slots_of(cache: Tensor, pages: Sequence[int], first: int, end: int) -> tuple:
    """Index of a sequence's slots from first to end in a cache [pages, page, H, D]; a row of a contiguous one is a
    page."""
    if len(pages) == 1:
        return pages[0], slice(first, end)
    at, size = torch.arange(first, end, device=cache.device), cache.shape[1]
    return torch.tensor(pages, device=cache.device)[at // size], at % size


def _pages(call: Call, caches: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """The pages of each sequence in each cache."""
    cache = call.cache
    rows = range(call.B) if cache.cache_batch_idx is None else cache.cache_batch_idx.tolist()
    tables = cache.page_table, cache.cmp_page_table
    tokens, compressed = ([[row] for row in rows] if table is None else table.tolist() for table in tables)
    return {name: compressed if "cmp" in name else tokens for name in caches}


def _span(call: Call, name: str, first: int, end: int) -> tuple[int, int]:
    """The slots of a cache that tokens from first to end fill."""
    count = call.config.compressed_length
    return (count(max(0, first)), count(max(0, end))) if "cmp" in name else (first, end)


def fits(cache: Tensor, pages: Sequence[int], end: int) -> bool:
    """True if a sequence's first ``end`` slots are there."""
    count, size = cache.shape[:2]
    return end <= len(pages) * size and all(0 <= page < count for page in pages[: -(-end // size)])


def _write(
    call: Call,
    module: ModuleType,
    caches: dict[str, Tensor],
    pages: dict[str, Sequence[int]],
    new: Call,
    spans: dict[str, tuple[int, int]],
) -> None:
    """New tokens of a sequence, then the compressed keys that they complete; pages and spans are by cache."""
    config, exact = call.config, accumulation_dtype(call.q.dtype)
    for name, cache in caches.items():
        (first, end), x = spans[name], getattr(new, name)
        if "cmp" in name and x is None and first < end:
            of = name[0]
            tokens = slots_of(caches[of], pages[of], first * config.stride, (end - 1) * config.stride + config.span)
            x = dequantise(caches[of][tokens], call.cache.scale(of), exact)
            x = _compress(module, x, getattr(call, f"compress_{of}_weight"), call)
        if x is not None:
            x = in_cache_dtype(x[: end - first], call.cache.scale(name), cache.dtype)
            cache[slots_of(cache, pages[name], first, end)] = x


def _compress(module: ModuleType, x: Tensor, weight: Tensor | None, call: Call) -> Tensor:
    """Compressed keys of x [n, Hkv, D], by the backend's own means."""
    if module.__name__ == support.BACKENDS["reference"]:
        return module.compress(x, weight, config=call.config)
    return compress(x.to(accumulation_dtype(x.dtype)).unsqueeze(0), weight, config=call.config)[0]
