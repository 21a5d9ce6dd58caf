"""`nsa_with_kvcache` on the kernels: append, complete compressed keys, and attend as a stretch of a longer context.

Calls of few queries have kernels of their own, `nsa_layer.kernels.decode`; this is how the others are made.

The host reads no number of the GPU: grids and workspaces follow from the caches' room. Contiguous caches that a batch
appends to are read in place, after the rows behind each sequence's end are cleared, which attention multiplies by 0.
So are pages, rows by index, and rows of packed sequences, by the selected branch on Hopper; compressed keys and the
window are copied first. From any other cache (of tokens that are there already) all of each sequence's rows are copied
side by side. Copies are for as many sequences at once as `WORKSPACE` bytes hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from flash_attn.cute.runtime.own_device import on_own_device
from nsa_layer.cached_call import (
    COMPRESSED_CACHES,
    TOKEN_CACHES,
    CachedCall,
    refuse_places,
    refuse_shared,
)
from nsa_layer.call_spec import CallSpec, CallTensors, Signature
from nsa_layer.cute import head_groups
from nsa_layer.cute.forward import Pages
from nsa_layer.cute.host_numbers import numbers_on, starts_on
from nsa_layer.cute.memory_plan import MemoryPolicy
from nsa_layer.cute.selected_branch import takes_pages
from nsa_layer.cute.side_stream import SideStream, side_stream_for
from nsa_layer.cute.varlen import Varlen, starts_of
from nsa_layer.kernels.cache_rows.complete import can_complete, complete_blocks
from nsa_layer.kernels.cache_rows.invalidate import invalidate_rows
from nsa_layer.kernels.cache_rows.locate import CacheSlots, locate
from nsa_layer.kernels.cache_rows.move import Pair, append, clear, gather
from nsa_layer.kernels.decode.step import decode_step, takes
from nsa_layer.kernels.launch import readable
from nsa_layer.kernels.pooling.mean_pool import pool
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project
from nsa_layer.warm_up.api import compile_missing

Tensor = torch.Tensor
Lses = tuple[Tensor, Tensor, Tensor]
WORKSPACE = 1 << 31  # bytes of caches that are copied at a time; one sequence's may be more


@on_own_device
@torch.no_grad()
def attend(
    call: CachedCall, lengths: tuple[int, ...] | None, softmax_scale: float, *, validate: bool
) -> tuple[Tensor, Lses]:
    """The step, on caches that it changes in place.

    Args:
        call: as checked; ``cache_seqlens`` is a tensor.
        lengths: queries of each sequence; None: they are known on the GPU alone.
        validate: raise, before anything is written, where numbers lead out of the caches; waits for the GPU.

    Returns:
        o and the branches' log-sum-exps, shaped as `nsa_with_kvcache` says.
    """
    spec = CallSpec(call.config, True, softmax_scale, lengths)
    with compile_missing(lambda: Signature.of(vars(call), spec)):
        return step(call, lengths, softmax_scale, validate=validate)


def step(
    call: CachedCall,
    lengths: tuple[int, ...] | None,
    softmax_scale: float,
    *,
    validate: bool = False,
    memory: MemoryPolicy = MemoryPolicy(),
) -> tuple[Tensor, Lses]:
    """`attend`, its kernels compiled one after the other."""
    if call.packed and call.B == 1:
        o, lses = step(_unpacked(call), (len(call.q),), softmax_scale, validate=validate, memory=memory)
        return o[0], tuple(lse[0] for lse in lses)
    new = {name: getattr(call, name) for name in ("q", *TOKEN_CACHES, *COMPRESSED_CACHES)}
    read = {name: readable(x) for name, x in new.items() if x is not None}
    if any(x is not new[name] for name, x in read.items()):
        call = replace(call, **read)
    starts, on_gpu = None, call
    if call.packed:
        starts = starts_on(call.cu_seqlens_q, call.q.device)
        on_gpu = replace(call, cu_seqlens_q=starts)
    few = takes(on_gpu, lengths)
    if lengths is None and not few:
        starts = _in_order(starts, len(call.q))
    spec = CallSpec(call.config, True, softmax_scale, listed=call.block_indices is not None)
    found = None if few and not validate else _Step.of(call, lengths, starts, spec, memory)
    if validate:
        refuse_places([not blank for blank in found.slots[CacheSlots.INVALID].tolist()], call, lengths)
        refuse_shared(call, lengths)
    if few:
        with component("cache"):
            return decode_step(on_gpu, lengths, softmax_scale)
    with component("cache"):
        found.append()
    with component("compress"):
        found.complete()
    parts = [found.attend(bounds) for bounds in found.parts()]
    o, *lses = parts[0]
    if len(parts) > 1:
        o = torch.cat([part[0] for part in parts])
        lses = [torch.cat(part, dim=int(call.packed)) for part in list(zip(*parts))[1:]]
    with component("cache"):
        invalidate_rows(o, lses, found.slots, starts)
    return o, tuple(lses)


def goes_in_parts(call: CachedCall) -> bool:
    """True if a packed call attends to some sequences at a time, which the host has to know the queries of."""
    if call.B == 1 or call.B * call.bytes_of_room <= WORKSPACE or takes(call, None):
        return False
    return call.B * _bytes_copied(call, call.most_queries) > WORKSPACE


def _bytes_copied(call: CachedCall, most: int) -> int:
    """Bytes of a sequence's tokens that are copied, where not all is read in place, for at most so many queries."""
    copied = call.room
    if _reads_pages(call):
        window = most + call.config.window_size - 1 if call.config.window_size else 0
        copied = min(copied, window) + copied // call.config.stride
    return call.bytes_of_room // call.room * copied


def _reads_pages(call: CachedCall) -> bool:
    """True if the selected branch can read the caches: all behind a sequence's last token is cleared by then."""
    if call.k is None or len(call.caches(COMPRESSED_CACHES)) < 2:
        return False
    return takes_pages(call.config, call.k_cache, call.v_cache, listed=call.block_indices is not None)


def _in_order(starts: Tensor, total: int) -> Tensor:
    """Starts that nobody has checked, so that they lead to no place outside of so many rows."""
    return starts.clamp(0, total).cummax(0).values


def _unpacked(call: CachedCall) -> CachedCall:
    """A pack of one sequence as a batch."""
    names = ("q", *TOKEN_CACHES, *COMPRESSED_CACHES, "gates", "block_indices")
    alone = {name: x.unsqueeze(0) for name in names if (x := getattr(call, name)) is not None}
    return replace(call, cu_seqlens_q=None, max_seqlen_q=None, **alone)


@dataclass(frozen=True)
class _Step:
    """A call, and where it finds its sequences.

    Attributes:
        lengths: queries of each sequence, or None.
        slots: int32 [fields, B], see `CacheSlots`.
        table, cmp_table: int32 [B, n], pages of each sequence, of tokens and of compressed keys, a row of contiguous
            caches being a page too; None: row b.
        starts: int32 [B + 1] of packed queries, on the GPU.
        in_place: attention reads the caches themselves.
        on_pages: the selected branch does.
    """

    call: CachedCall
    lengths: tuple[int, ...] | None
    slots: Tensor
    table: Tensor | None
    cmp_table: Tensor | None
    starts: Tensor | None
    spec: CallSpec
    memory: MemoryPolicy
    in_place: bool
    on_pages: bool

    @classmethod
    def of(
        cls,
        call: CachedCall,
        lengths: tuple[int, ...] | None,
        starts: Tensor | None,
        spec: CallSpec,
        memory: MemoryPolicy,
    ) -> _Step:
        tables = call.page_table, call.cmp_page_table
        if call.cache_batch_idx is not None:
            tables = (call.cache_batch_idx.unsqueeze(1),) * 2
        compressed = next(iter(call.caches(COMPRESSED_CACHES).values()), None)
        caches = dict(cache=call.k_cache, table=tables[0], cmp_cache=compressed, cmp_table=tables[1])
        config, adds = call.config, call.k is not None
        blocks = dict(span=config.span, stride=config.stride, window=config.window_size, adds=adds)
        with component("cache"):
            most = call.most_queries if lengths is None else max(lengths)
            slots = locate(call.cache_seqlens, T=most, cu_seqlens=starts, **caches, **blocks)
        in_place = adds and tables[0] is None and not call.packed
        on_pages = not in_place and _reads_pages(call)
        if on_pages and tables[0] is None:  # a sequence's row is its page
            (rows,) = numbers_on(((*range(call.B),),), call.q.device)
            tables = (rows.unsqueeze(1),) * 2
        return cls(call, lengths, slots, *tables, starts, spec, memory, in_place, on_pages)

    def append(self) -> None:
        """Write new tokens; clear what attention may read behind them."""
        compressed = self._caches(COMPRESSED_CACHES) if self.in_place else (None, None)
        new, caches = (*self._new(TOKEN_CACHES), None, None), (*self._caches(TOKEN_CACHES), *compressed)
        behind = "rows" if self.in_place else "block" if self.on_pages else ""
        append(new, caches, (self.table, self.cmp_table), self.slots, (self.starts, None), behind=behind)

    def complete(self) -> None:
        """Write the compressed keys and values of blocks that the call completes: given, or made of cached tokens."""
        call = self.call
        if not call.caches(COMPRESSED_CACHES):
            return
        caches, given = self._caches(COMPRESSED_CACHES), self._new(COMPRESSED_CACHES)
        wanted = tuple(cache is not None and x is None for cache, x in zip(caches, given))
        sources, filled = (
            tuple(cache if make else None for cache, make in zip(of, wanted))
            for of in (self._caches(TOKEN_CACHES[:2]), caches)
        )
        tables, starts = (self.table, self.cmp_table), _Rows(None, None)
        projected = call.compress_k_weight is not None or call.compress_v_weight is not None
        if any(wanted) and not projected and can_complete(sources, filled):
            config, T = call.config, call.most_queries if self.lengths is None else max(self.lengths)
            sizes = dict(block_size=config.span, stride=config.stride, most=call.filled(T))
            complete_blocks(sources, filled, tables, self.slots, **sizes)
            wanted = ()
        if any(wanted) or any(x is not None for x in given):
            starts, lead = self._sources()
        if any(wanted):
            tokens = _empty(sources, lead)
            fields = (CacheSlots.SOURCE, CacheSlots.SOURCE_TOKENS)
            gather(sources, tokens, self.table, self.slots, fields, starts.tokens)
            given = tuple(made if x is None else x for made, x in zip(self._compress(tokens, starts), given))
        given = tuple(x if cache is not None else None for cache, x in zip(caches, given))
        append((*[None] * 4, *given), (*[None] * 4, *caches), tables, self.slots, (None, starts.blocks))

    def _sources(self) -> tuple[_Rows, tuple[int, ...]]:
        """Starts of the tokens that compressed keys are made of, and of the most of these that the call can complete;
        leading dimensions of the tokens."""
        call, stride, span = self.call, self.call.config.stride, self.call.config.span
        if self.lengths is None:
            (blocks,) = starts_of(self.starts, ((1, stride - 1, stride),))
            more = torch.arange(len(blocks), device=blocks.device, dtype=torch.int32) * (span - stride)
            total = len(call.q) // stride + call.B
            return _Rows(blocks * stride + more, blocks, total), (total * stride + call.B * (span - stride),)
        counts = tuple(map(call.filled, self.lengths))
        spans = tuple((count - 1) * stride + span if count else 0 for count in counts)
        return _Rows.of(call, spans, counts), (sum(spans),) if call.packed else (len(spans), spans[0])

    def parts(self) -> Iterator[tuple[int, int]]:
        """(first, end) of sequences that are attended to together."""
        call, first, taken, most = self.call, 0, 0, self.call.B
        if not self.in_place:
            longest = call.most_queries if self.lengths is None else max(self.lengths)
            most = max(1, WORKSPACE // _bytes_copied(call, longest))
        for b, T in enumerate(self.lengths or ()):
            if T and taken == most:
                yield first, b
                first, taken = b, 0
            taken += T > 0
        yield first, call.B

    def attend(self, bounds: tuple[int, int]) -> tuple[Tensor, ...]:
        """o and the log-sum-exps of the part's sequences."""
        call, spec, part, window = self.call, self.spec, slice(*bounds), None
        rows = tiles = part
        if call.packed:
            spec = replace(spec, lengths_k=self._rooms(call.room, bounds))
            if self.lengths is None:
                rows = tiles = slice(None)
                spec = replace(spec, bound=call.most_queries)
            else:
                spec = replace(spec, lengths=self.lengths[part])
                rows, tiles = (
                    slice(*(sum(map(count, self.lengths[:at])) for at in bounds))
                    for count in (int, call.config.num_tiles)
                )
        lists = call.block_indices if call.block_indices is None else call.block_indices[tiles]
        heads = call.k_cache.shape[2] if lists is None else lists.shape[-2]
        given = dict(gate_weight=call.gate_weight, gates=call.gates if call.gates is None else call.gates[rows])
        given |= dict(q=call.q[rows], block_indices=lists, q_offset=self.slots[CacheSlots.FIRST, part])
        bounded = dict(cu_seqlens=self.starts, total=len(call.q))
        varlen = Varlen.of(spec, call.q.device, call.q.shape[-2] // heads, **bounded)
        pages = None
        has_window = call.config.window_size > 0
        with (side_stream_for(given["q"]) if has_window else None) or nullcontext() as side_stream:
            with component("cache"):
                window = self._window(bounds) if self.on_pages and has_window else None
                keys = self._keys(bounds, window, side_stream)
            given |= dict(zip((*TOKEN_CACHES, *COMPRESSED_CACHES), keys))
            if self.on_pages:
                of_window = (window.starts, window.longest) if has_window else (None, 0)
                pages = Pages(self.table[part], call.room, self.slots[CacheSlots.IN_WINDOW, part], *of_window)
            o, saved = head_groups.infer(CallTensors(**given), varlen, spec, self.memory, pages, side_stream)
        lse_swa = torch.full_like(saved.lse_cmp, -torch.inf) if saved.lse_swa is None else saved.lse_swa
        return o, saved.lse_cmp, saved.lse_slc, lse_swa

    def _keys(
        self, bounds: tuple[int, int], window: _Window | None, side_stream: SideStream | None
    ) -> list[Tensor | None]:
        """k, v, k_win, v_win, k_cmp and v_cmp, as `attend` takes them: room of the caches for each sequence.

        A window's keys are copied on the second stream, where its attention is.
        """
        call, part, slots = self.call, slice(*bounds), self.slots[:, slice(*bounds)]
        count = call.config.compressed_length(call.room)
        starts = _Rows(None, None)
        if self.in_place:
            keys = [*self._caches(TOKEN_CACHES), *_narrowed(self._caches(COMPRESSED_CACHES), count)]
            keys = [x if x is None else readable(x) for x in keys]
        else:
            leads = (bounds[1] - bounds[0], call.room), (bounds[1] - bounds[0], count)
            if call.packed:
                sizes = [self._rooms(size, bounds) for size in (call.room, count)]
                starts, leads = _Rows.of(call, *sizes), [(sum(size),) for size in sizes]
            of_tokens = (self.table, leads[0], (CacheSlots.START, CacheSlots.END), starts.tokens)
            of_blocks = (self.cmp_table, leads[1], (CacheSlots.START, CacheSlots.CMP_END), starts.blocks)
            tokens, own, keys = self._caches(TOKEN_CACHES[:2]), self._caches(TOKEN_CACHES[2:]), []
            copied = (tokens, of_tokens), (own, of_tokens), (self._caches(COMPRESSED_CACHES), of_blocks)
            beside = nullcontext() if side_stream is None or window is None else side_stream.launches()
            if self.on_pages:
                keys, copied = [*tokens, *([] if window else own)], copied[-1:]
            if window is not None:
                own = tuple(x if cache is None else cache for cache, x in zip(own, tokens))
                of_window = (self.table, window.lead, (CacheSlots.WINDOW, CacheSlots.WINDOW_TOKENS), window.starts)
                copied = (own, of_window), *copied
            for caches, (table, lead, fields, cu) in copied:
                if table is None:
                    caches = tuple(cache if cache is None else cache[part] for cache in caches)
                else:
                    table = table[part]
                keys += _empty(caches, lead)
                with beside:
                    gather(caches, tuple(keys[-2:]), table, slots, fields, cu)
                beside = nullcontext()
        missing = [x is None for x in keys[-2:]]
        if any(missing) and count:
            sources = tuple(x if lacks else None for x, lacks in zip(keys, missing))
            with component("compress"):
                made = self._compress(sources, starts)
            clear(made, slots, CacheSlots.CMP_END, starts.blocks)
            keys[-2:] = (x if x is not None else y for x, y in zip(keys[-2:], made))
        return keys

    def _window(self, bounds: tuple[int, int]) -> _Window:
        """Room for the tokens in the windows of the part's queries."""
        call, before = self.call, self.call.config.window_size - 1
        if self.lengths is None:
            (starts,) = starts_of(self.starts, ((1, before, 1),))
            return _Window((len(call.q) + before * call.B,), starts, call.most_queries + before)
        rooms = tuple(min(call.room, T + before) if T else 0 for T in self.lengths[slice(*bounds)])
        if not call.packed:
            return _Window((len(rooms), rooms[0]), None, rooms[0])
        (starts,) = numbers_on(((*accumulate(rooms, initial=0),),), call.q.device)
        return _Window((sum(rooms),), starts, max(rooms))

    def _rooms(self, size: int, bounds: tuple[int, int]) -> tuple[int, ...]:
        """The size for each of the part's sequences, 0 for those that are known to have no query."""
        lengths = (1,) * self.call.B if self.lengths is None else self.lengths
        return tuple(size if T else 0 for T in lengths[slice(*bounds)])

    def _caches(self, names: Sequence[str]) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self.call, f"{name}_cache") for name in names)

    def _new(self, names: Sequence[str]) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self.call, name) for name in names)

    def _compress(self, tokens: Pair, starts: _Rows) -> Pair:
        """Compressed keys of k and values of v, as the layer makes and rounds them."""
        call, exact = self.call, torch.float32
        weights = call.compress_k_weight, call.compress_v_weight
        k_dtype, v_dtype = (call.q.dtype if weight is None else exact for weight in weights)
        options = dict(block_size=call.config.span, stride=call.config.stride, k_dtypes=(k_dtype,), v_dtype=v_dtype)
        if starts.tokens is not None:
            options |= dict(cu_seqlens=starts.tokens, cu_blocks=starts.blocks, total_blocks=starts.total)
        k_means, v_mean = pool(*tokens, **options)
        means = k_means[0] if k_means else None, v_mean
        made = (x if x is None else project(x, weight).to(call.q.dtype) for x, weight in zip(means, weights))
        return tuple(x if x is None else readable(x) for x in made)


class _Window(NamedTuple):
    """Leading dimensions of a part's keys of the window; starts of packed ones, int32 [sequences + 1] on the GPU, and
    the most of a sequence."""

    lead: tuple[int, ...]
    starts: Tensor | None
    longest: int


@dataclass(frozen=True)
class _Rows:
    """Starts of packed sequences in tokens and in compressed keys, int32 [B + 1] on the GPU; None for a batch."""

    tokens: Tensor | None
    blocks: Tensor | None
    total: int = 0

    @classmethod
    def of(cls, call: CachedCall, tokens: Sequence[int], blocks: Sequence[int]) -> _Rows:
        """Starts of so many tokens and compressed keys of each sequence."""
        if not call.packed:
            return cls(None, None)
        starts = tuple((*accumulate(counts, initial=0),) for counts in (tokens, blocks))
        return cls(*numbers_on(starts, call.q.device), sum(blocks))


def _empty(like: Sequence[Tensor | None], lead: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    """Dense tensors for rows of caches."""
    return tuple(x if x is None else x.new_empty(*lead, *x.shape[2:]) for x in like)


def _narrowed(caches: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
    return tuple(x if x is None else x[:, :count] for x in caches)
