"""One step on caches in plain PyTorch: write what is new, complete compressed keys, attend sequence by sequence.

Lengths and pages are read on the host. A sequence that its numbers send out of the caches is left alone: nothing of it
is written, and its rows are NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from nsa_layer import support
from nsa_layer.cached_call import COMPRESSED_CACHES, TOKEN_CACHES, CachedCall, refuse_places, refuse_shared
from nsa_layer.call_spec import Aux, CallSpec, CallTensors, accumulation_dtype
from nsa_layer.eager.pooling import mean_pool
from nsa_layer.projection import project

Tensor = torch.Tensor
LSES = ("lse_cmp", "lse_slc", "lse_swa")


@dataclass(frozen=True)
class Store:
    """A cache, [rows, S, H, D] or [pages, page, H, D], seen from one sequence.

    Attributes:
        cache: all sequences'.
        row: the sequence's, where it is contiguous.
        table: int32 [n], the sequence's pages in order; None: it is contiguous.
    """

    cache: Tensor
    row: int
    table: Tensor | None

    def holds(self, end: int) -> bool:
        """True if the sequence's first ``end`` places are there."""
        rows, size = self.cache.shape[:2]
        if self.table is None:
            return 0 <= self.row < rows and end <= size
        used = self.table[: -(-end // size)]
        return end <= len(self.table) * size and bool(((used >= 0) & (used < rows)).all())

    def read(self, begin: int, end: int) -> Tensor:
        """[end - begin, H, D]"""
        return self.cache[self._places(begin, end)]

    def write(self, begin: int, x: Tensor) -> None:
        """Put x [n, H, D] at the places from ``begin`` on, in the cache's dtype."""
        if len(x):
            self.cache[self._places(begin, begin + len(x))] = x.to(self.cache.dtype)

    def _places(self, begin: int, end: int) -> tuple:
        if self.table is None:
            return self.row, slice(begin, end)
        size, at = self.cache.shape[1], torch.arange(begin, end, device=self.cache.device)
        return self.table.long()[at // size], at % size


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a call: T queries, the last of S tokens, and what of the call is its own.

    Attributes:
        given: q, new keys and values, gates and lists, without a dimension of the batch.
        stores: caches by name.
    """

    T: int
    S: int
    given: dict[str, Tensor]
    stores: dict[str, Store]

    def is_there(self, call: CachedCall) -> bool:
        """True if the caches have a place for all of it."""
        places = dict.fromkeys(TOKEN_CACHES, self.S)
        places |= dict.fromkeys(COMPRESSED_CACHES, call.config.compressed_length(max(0, self.S)))
        return self.S >= self.T and all(store.holds(places[name]) for name, store in self.stores.items())

    def write(self, call: CachedCall, module: ModuleType) -> None:
        """New tokens, then the compressed keys that they complete."""
        for name in TOKEN_CACHES:
            if name in self.given:
                self.stores[name].write(self.S - self.T, self.given[name])
        config = call.config
        first, end = (config.compressed_length(n) for n in (self.S - self.T, self.S))
        for name in COMPRESSED_CACHES:
            if name not in self.stores or first == end:
                continue
            if name in self.given:
                made = self.given[name][: end - first]
            else:
                tokens = self.stores[name[0]].read(first * config.stride, (end - 1) * config.stride + config.span)
                made = compress(module, tokens, getattr(call, f"compress_{name[0]}_weight"), call)
            self.stores[name].write(first, made)

    def attend(self, call: CachedCall, module: ModuleType, spec: CallSpec) -> tuple[Tensor, Aux]:
        """The backend's result for queries that are the last of the cached tokens."""
        count = call.config.compressed_length(self.S)
        k, v, *window = (self.stores[name].read(0, self.S) if name in self.stores else None for name in TOKEN_CACHES)
        compressed = [self.stores[name].read(0, count) if name in self.stores else None for name in COMPRESSED_CACHES]
        owned = dict(zip(("k_win", "v_win", *COMPRESSED_CACHES), (*window, *compressed)))
        owned |= {name: self.given.get(name) for name in ("gates", "block_indices")}
        owned = {name: None if x is None else x.unsqueeze(0) for name, x in owned.items()}
        for name, x in zip("kv", compressed):
            owned[f"compress_{name}_weight"] = getattr(call, f"compress_{name}_weight") if x is None else None
        q, k, v = (x.unsqueeze(0) for x in (self.given["q"], k, v))
        offset = torch.tensor([self.S - self.T], dtype=torch.int32)
        tensors = CallTensors(q, k, v, gate_weight=call.gate_weight, q_offset=offset, **owned)
        return module.attend(tensors, spec=spec)


def compress(module: ModuleType, x: Tensor, weight: Tensor | None, call: CachedCall) -> Tensor:
    """Compressed keys of x [n, Hkv, D], by the backend's own means."""
    if module.__name__ == support.BACKENDS["reference"]:
        return module.compress(x, weight, config=call.config)
    x = x.to(accumulation_dtype(x.dtype)).unsqueeze(0)
    return project(mean_pool(x, config=call.config), weight)[0]


@torch.no_grad()
def attend(
    call: CachedCall, lengths: tuple[int, ...], softmax_scale: float, *, backend: str, validate: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], list[Aux | None]]:
    """The step, on caches that it changes in place.

    Args:
        lengths: queries of each sequence.
        validate: raise, before anything is written, where numbers lead out of the caches.

    Returns:
        o and the branches' log-sum-exps, shaped as `nsa_with_kvcache` says, and each sequence's `Aux` (None where
        there is nothing to attend).
    """
    module = import_module(support.BACKENDS[backend])
    sequences = _sequences(call, lengths)
    there = [sequence.is_there(call) for sequence in sequences]
    if validate:
        refuse_places(there, call, lengths)
        refuse_shared(call, lengths)
    attended = [inside and sequence.T > 0 for sequence, inside in zip(sequences, there)]
    for sequence in itertools.compress(sequences, attended):
        sequence.write(call, module)
    spec = CallSpec(call.config, True, softmax_scale, listed=call.block_indices is not None)
    q, shape = call.q, (*call.q.shape[:-1], call.v_cache.shape[-1])
    o = q.new_empty(shape) if call.out is None else call.out
    lses = [q.new_empty(shape[:-1], dtype=accumulation_dtype(q.dtype)) for _ in LSES]
    rows, auxes = [_parts(x, lengths, call.packed) for x in (o, *lses)], []
    for b, sequence in enumerate(sequences):
        values, aux = [torch.nan] * len(rows), None
        if attended[b]:
            made, aux = sequence.attend(call, module, spec)
            values = [made[0], *(getattr(aux, name)[0].mT for name in LSES)]
        for row, value in zip(rows, values):
            row[b][...] = value
        auxes.append(aux)
    return o, tuple(lse.mT for lse in lses), auxes


def _parts(x: Tensor, sizes: Sequence[int], packed: bool) -> Sequence[Tensor]:
    """Each sequence's part of x [B, ...], or of x [sum of sizes, ...]."""
    return x.split(list(sizes)) if packed else x.unbind()


def _sequences(call: CachedCall, lengths: tuple[int, ...]) -> list[_Sequence]:
    rows = {"block_indices": call.config.num_tiles, "k_cmp": call.filled, "v_cmp": call.filled}
    parts = {}
    for name in ("q", "gates", "block_indices", *TOKEN_CACHES, *COMPRESSED_CACHES):
        if (x := getattr(call, name)) is not None:
            parts[name] = _parts(x, [rows.get(name, int)(T) for T in lengths], call.packed)
    tokens = call.cache_seqlens
    tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else [tokens] * len(lengths)
    at = range(len(lengths)) if call.cache_batch_idx is None else call.cache_batch_idx.tolist()
    sequences = []
    for b, (T, S) in enumerate(zip(lengths, tokens, strict=True)):
        stores = {
            name: Store(cache, at[b], None if table is None else table[b])
            for names, table in ((TOKEN_CACHES, call.page_table), (COMPRESSED_CACHES, call.cmp_page_table))
            for name, cache in call.caches(names).items()
        }
        given = {name: part[b] for name, part in parts.items()}
        sequences.append(_Sequence(T, S if call.k is None else S + T, given, stores))
    return sequences
