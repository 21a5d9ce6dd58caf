"""`nsa_with_kvcache` on the kernels: append, complete compressed keys, and attend with queries at an offset.

Calls of few queries have kernels of their own, `nsa_layer.kernels.decode`; the others attend in one of three ways:

- "rows": a batch appends to contiguous caches, and attention reads these, after the slots behind each sequence's end,
  which attention multiplies by 0, are cleared.
- "pages": new tokens come with compressed caches, and on Hopper the selected branch reads pages (rows by index, and
  those of packed sequences, are pages too). Compressed keys and the window are copied side by side.
- "copies": all slots of each sequence are copied side by side; from caches without new tokens, since nothing may be
  cleared there, and where the branch reads no pages.

The host reads no number of the GPU: grids and workspaces follow from the caches' capacity. Copies are for as many
sequences at once as `WORKSPACE` bytes hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from flash_attn.cute.runtime.own_device import on_own_device
from nsa_layer.cached_call import COMPRESSED_CACHES, TOKEN_CACHES, CachedCall, check_slots
from nsa_layer.call_spec import CallSpec, CallTensors, Saved, Signature
from nsa_layer.cute.forward import Pages, forward
from nsa_layer.cute.host_numbers import numbers_on, starts_on
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory
from nsa_layer.cute.selected import reads_pages
from nsa_layer.cute.side_stream import SideStream, side_stream_for
from nsa_layer.cute.varlen import Varlen, starts_of
from nsa_layer.kernels.cache_rows.complete import complete_blocks
from nsa_layer.kernels.cache_rows.invalidate import invalidate_rows
from nsa_layer.kernels.cache_rows.locate import CacheSlots, locate
from nsa_layer.kernels.cache_rows.move import Pair, append, clear, gather
from nsa_layer.kernels.decode.step import decode_step, supports
from nsa_layer.kernels.launch import are_aligned, readable
from nsa_layer.kernels.pooling.mean_pool import pool
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project
from nsa_layer.warm_up.api import compile_missing

Tensor = torch.Tensor
Lses = tuple[Tensor, Tensor, Tensor]
WORKSPACE = 1 << 31  # bytes of caches that are copied at a time; one sequence's may be more
READ = ("q", *TOKEN_CACHES, *COMPRESSED_CACHES)  # new rows, which are read 16 bytes at a time


@on_own_device
@torch.no_grad()
def attend(call: CachedCall, spec: CallSpec, *, validate: bool) -> tuple[Tensor, Lses]:
    """The step, on caches that it changes in place.

    Args:
        call: as checked; ``cache_seqlens`` is a tensor.
        validate: raise, before anything is written, where numbers lead out of the caches; waits for the GPU.

    Returns:
        o and the branches' log-sum-exps, shaped as `nsa_with_kvcache` says.
    """
    with compile_missing(lambda: Signature.of(vars(call), spec)):
        return step(call, spec, validate=validate)


def step(
    call: CachedCall, spec: CallSpec, *, validate: bool = False, memory: MemoryPolicy = MemoryPolicy()
) -> tuple[Tensor, Lses]:
    """`attend`, its kernels compiled one after the other."""
    if call.packed and call.B == 1:
        o, lses = step(_unpacked(call), replace(spec, lengths=None, bound=None), validate=validate, memory=memory)
        return o[0], tuple(lse[0] for lse in lses)
    rows = ((name, getattr(call, name)) for name in READ)
    changes = {name: read for name, x in rows if x is not None and (read := readable(x)) is not x}
    if call.packed and (starts := starts_on(call.cu_seqlens_q, call.q.device)) is not call.cu_seqlens_q:
        changes["cu_seqlens_q"] = starts
    call = replace(call, **changes) if changes else call
    few = supports(call, spec)
    if few and not validate:
        with component("cache"):
            return decode_step(call, spec)
    if spec.bound is not None:  # nobody has checked starts: they lead to rows of q, whatever they are
        call = replace(call, cu_seqlens_q=call.cu_seqlens_q.clamp(0, len(call.q)).cummax(0).values)
    chunk = _Chunk.of(call, spec, memory)
    if validate:
        check_slots([not invalid for invalid in chunk.slots[CacheSlots.INVALID].tolist()], call, call.lengths(spec))
    if few:
        with component("cache"):
            return decode_step(call, spec)
    with component("cache"):
        chunk.append()
    with component("compress"):
        chunk.complete()
    parts = [chunk.attend(part) for part in chunk.parts()]
    o, *lses = parts[0]
    if len(parts) > 1:
        o = torch.cat([part[0] for part in parts])
        lses = [torch.cat(part, dim=int(call.packed)) for part in list(zip(*parts))[1:]]
    with component("cache"):
        invalidate_rows(o, lses, chunk.slots, call.cu_seqlens_q)
    return o, tuple(lses)


def needs_host_lengths(call: CachedCall, spec: CallSpec) -> bool:
    """True if a packed call with this bound must be split over sequences, so that copies fit `WORKSPACE`."""
    if call.B == 1 or call.B * _bytes_of_tokens(call, call.capacity) <= WORKSPACE:
        return False
    return call.B * _bytes_copied(call, spec) > WORKSPACE and not supports(call, spec)


def _how_read(call: CachedCall) -> str:
    """How attention reads the caches: as "rows", on "pages", or from "copies"."""
    if call.k is None:
        return "copies"
    if call.page_table is None and call.cache_batch_idx is None and not call.packed:
        return "rows"
    listed, compressed = call.block_indices is not None, call.caches(COMPRESSED_CACHES)
    on_pages = len(compressed) == 2 and reads_pages(call.config, call.k_cache, call.v_cache, listed=listed)
    return "pages" if on_pages else "copies"


def _bytes_of_tokens(call: CachedCall, tokens: int) -> int:
    return sum(tokens * x.shape[2:].numel() * x.element_size() for x in call.caches(TOKEN_CACHES).values())


def _bytes_copied(call: CachedCall, spec: CallSpec) -> int:
    """Bytes that are copied of a sequence's caches."""
    how, config, tokens = _how_read(call), call.config, call.capacity
    if how == "pages":
        window = call.longest(spec) + config.window_size - 1 if config.window_size else 0
        tokens = min(tokens, window) + tokens // config.stride
    return 0 if how == "rows" else _bytes_of_tokens(call, tokens)


def _unpacked(call: CachedCall) -> CachedCall:
    """A pack of one sequence as a batch."""
    alone = {
        name: x.unsqueeze(0) for name in (*READ, "gates", "block_indices") if (x := getattr(call, name)) is not None
    }
    return replace(call, cu_seqlens_q=None, max_seqlen_q=None, **alone)


@dataclass(frozen=True)
class _Chunk:
    """A call of many queries.

    Attributes:
        slots: int32 [fields, B], see `CacheSlots`.
        tables: int32 [B, n] each, pages of each sequence, of tokens and of compressed keys, a row of contiguous caches
            being a page too; None: row b.
        how: the caches are read, see `_how_read`.
    """

    call: CachedCall
    spec: CallSpec
    memory: MemoryPolicy
    slots: Tensor
    tables: Pair
    how: str

    @classmethod
    def of(cls, call: CachedCall, spec: CallSpec, memory: MemoryPolicy) -> _Chunk:
        config, how, tables = call.config, _how_read(call), (call.page_table, call.cmp_page_table)
        if call.cache_batch_idx is not None:
            tables = (call.cache_batch_idx.unsqueeze(1),) * 2
        compressed = next(iter(call.caches(COMPRESSED_CACHES).values()), None)
        caches = dict(cache=call.k_cache, table=tables[0], cmp_cache=compressed, cmp_table=tables[1])
        blocks = dict(span=config.span, stride=config.stride, window=config.window_size, adds=call.k is not None)
        with component("cache"):
            slots = locate(call.cache_seqlens, T=call.longest(spec), cu_seqlens=call.cu_seqlens_q, **caches, **blocks)
        if how == "pages" and tables[0] is None:
            (rows,) = numbers_on(((*range(call.B),),), call.q.device)
            tables = (rows.unsqueeze(1),) * 2
        return cls(call, spec, memory, slots, tables, how)

    def append(self) -> None:
        """Write new tokens; clear what attention may read behind them."""
        compressed = self._caches(COMPRESSED_CACHES) if self.how == "rows" else (None, None)
        new, caches = (*self._new(TOKEN_CACHES), None, None), (*self._caches(TOKEN_CACHES), *compressed)
        behind = {"rows": "rows", "pages": "block", "copies": ""}[self.how]
        append(new, caches, self.tables, self.slots, (self.call.cu_seqlens_q, None), behind=behind)

    def complete(self) -> None:
        """Write the compressed keys and values of blocks that the call completes: the caller's, or of cached tokens."""
        call, config = self.call, self.call.config
        caches, new = self._caches(COMPRESSED_CACHES), self._new(COMPRESSED_CACHES)
        lacking = tuple(cache if x is None else None for cache, x in zip(caches, new))
        sources = tuple(x if cache is not None else None for x, cache in zip(self._caches("kv"), lacking))
        made = [x for x in (*sources, *lacking) if x is not None]
        if made and call.compress_k_weight is None and call.compress_v_weight is None and all(map(are_aligned, made)):
            sizes = dict(block_size=config.span, stride=config.stride)
            most = call.most_completed(call.longest(self.spec))
            complete_blocks(sources, lacking, self.tables, self.slots, **sizes, most=most)
            made = []
        if not made and all(x is None for x in new):
            return
        starts, lead = self._sources()
        if made:
            tokens, fields = _empty(sources, lead), (CacheSlots.SOURCE, CacheSlots.SOURCE_TOKENS)
            gather(sources, tokens, self.tables[0], self.slots, fields, starts[0])
            new = tuple(x if x is not None else y for x, y in zip(new, self._compress(tokens, *starts)))
        append((*[None] * 4, *new), (*[None] * 4, *caches), self.tables, self.slots, (None, starts[1]))

    def _sources(self) -> tuple[tuple[Tensor | None, Tensor | None, int], tuple[int, ...]]:
        """Starts of the tokens that compressed keys are made of and of as many keys as the call can complete, and the
        number of these; leading dimensions of the tokens."""
        call, stride, span = self.call, self.call.config.stride, self.call.config.span
        if self.spec.bound is not None:
            (blocks,) = starts_of(call.cu_seqlens_q, ((1, stride - 1, stride),))
            overlaps = torch.arange(len(blocks), device=blocks.device, dtype=torch.int32) * (span - stride)
            total = len(call.q) // stride + call.B
            return (blocks * stride + overlaps, blocks, total), (total * stride + call.B * (span - stride),)
        counts = tuple(map(call.most_completed, call.lengths(self.spec)))
        starts, (lead, blocks) = self._layout([(n - 1) * stride + span if n else 0 for n in counts], counts)
        return (*starts, blocks[0]), lead

    def parts(self) -> list[slice]:
        """Sequences that are attended to together: as many with queries as `WORKSPACE` has room for copies of."""
        call, spec, parts, first, attended = self.call, self.spec, [], 0, 0
        if spec.bound is None and (copied := _bytes_copied(call, spec)):
            most = max(1, WORKSPACE // copied)
            for b, T in enumerate(call.lengths(spec)):
                if T and attended == most:
                    parts.append(slice(first, b))
                    first, attended = b, 0
                attended += T > 0
        return [*parts, slice(first, call.B)]

    def attend(self, part: slice) -> tuple[Tensor, ...]:
        """o and the log-sum-exps of the part's sequences."""
        call, spec, rows, tiles = self.call, self.spec, part, part
        if call.packed:
            rows = tiles = slice(None)
            if spec.bound is None:
                counted = (list(map(count, spec.lengths)) for count in (int, call.config.num_tiles))
                rows, tiles = (slice(sum(each[: part.start]), sum(each[: part.stop])) for each in counted)
                spec = replace(spec, lengths=spec.lengths[part])
            spec = replace(spec, lengths_k=self._sizes(call.capacity, part))
        q, gates, lists = call.q[rows], call.gates, call.block_indices
        starts = dict(cu_seqlens=call.cu_seqlens_q, total=len(call.q))
        varlen = Varlen.of(spec, q.device, call.q_heads_per_list, **starts)
        with (side_stream_for(q) if call.config.window_size else None) or nullcontext() as side_stream:
            with component("cache"):
                keys, window = self._keys(part, varlen, side_stream)
            tensors = CallTensors(
                q,
                **keys,
                gate_weight=call.gate_weight,
                gates=None if gates is None else gates[rows],
                block_indices=None if lists is None else lists[tiles],
                q_offset=self.slots[CacheSlots.FIRST, part],
                cu_seqlens=call.cu_seqlens_q,
            )
            pages = None if self.how != "pages" else Pages(self.tables[0][part], call.capacity, window)
            o, saved = infer(tensors, spec, self.memory, pages, side_stream)
        lse_swa = torch.full_like(saved.lse_cmp, -torch.inf) if saved.lse_swa is None else saved.lse_swa
        return o, saved.lse_cmp, saved.lse_slc, lse_swa

    def _keys(
        self, part: slice, varlen: Varlen | None, side_stream: SideStream | None
    ) -> tuple[dict[str, Tensor | None], dict]:
        """Keys and values of all branches by name, with slots for the caches' capacity of each sequence; and options of
        the window's attention where it reads copies of its own."""
        call, sizes = self.call, (self.call.capacity, self.call.config.compressed_length(self.call.capacity))
        kv, own, compressed = (self._caches(names) for names in ("kv", TOKEN_CACHES[2:], COMPRESSED_CACHES))
        window, starts, leads = {}, [None, None], [(0,), (0,)]
        if self.how == "rows":
            kv, own = _each(readable, kv), _each(readable, own)
            compressed = _each(lambda x: readable(x[:, : sizes[1]]), compressed)
        else:
            starts, leads = self._layout(*(self._sizes(size, part) for size in sizes))
            if self.how == "copies":
                fields = CacheSlots.START, CacheSlots.END
                kv, own = (self._copied(pair, part, leads[0], fields, starts[0]) for pair in (kv, own))
            elif call.config.window_size:
                own, window = self._window(part, varlen, side_stream)
            fields = CacheSlots.START, CacheSlots.CMP_END
            compressed = self._copied(compressed, part, leads[1], fields, starts[1], of_tokens=False)
        sources = tuple(x if y is None else None for x, y in zip(kv, compressed))
        if sizes[1] and any(x is not None for x in sources):
            with component("compress"):
                made = self._compress(sources, *starts, leads[1][0])
            clear(made, self.slots[:, part], CacheSlots.CMP_END, starts[1])
            compressed = tuple(y if x is None else x for x, y in zip(compressed, made))
        return dict(zip((*TOKEN_CACHES, *COMPRESSED_CACHES), (*kv, *own, *compressed))), window

    def _window(self, part: slice, varlen: Varlen | None, side_stream: SideStream | None) -> tuple[Pair, dict]:
        """Copies of the tokens in the windows of the part's queries, made on the stream of their attention; options of
        this."""
        call, before = self.call, self.call.config.window_size - 1
        if self.spec.bound is not None:
            starts, lead = starts_of(call.cu_seqlens_q, ((1, before, 1),)), (len(call.q) + before * call.B,)
            longest = self.spec.bound + before
        else:
            sizes = tuple(min(call.capacity, T + before) if T else 0 for T in call.lengths(self.spec)[part])
            (starts, (lead,)), longest = self._layout(sizes), max(sizes)
        pairs = zip(self._caches(TOKEN_CACHES[2:]), self._caches("kv"))
        caches = tuple(shared if own is None else own for own, shared in pairs)
        fields = CacheSlots.WINDOW, CacheSlots.WINDOW_TOKENS
        copies = self._copied(caches, part, lead, fields, starts[0], side_stream)
        if varlen is not None:
            varlen = varlen._replace(cu_seqlens_k=starts[0], longest_k=longest)
        return copies, dict(q_offset=self.slots[CacheSlots.IN_WINDOW, part], varlen=varlen)

    def _copied(
        self,
        caches: Pair,
        part: slice,
        lead: tuple[int, ...],
        fields: tuple[int, int],
        starts: Tensor | None,
        side_stream: SideStream | None = None,
        *,
        of_tokens: bool = True,
    ) -> Pair:
        """Rows of the part's sequences in two caches, side by side; copied on the second stream, if there is one."""
        table = self.tables[0 if of_tokens else 1]
        if table is None:
            caches = _each(lambda x: x[part], caches)
        else:
            table = table[part]
        copies = _empty(caches, lead)
        with nullcontext() if side_stream is None else side_stream.launches():
            gather(caches, copies, table, self.slots[:, part], fields, starts)
        return copies

    def _compress(self, tokens: Pair, starts: Tensor | None, cmp_starts: Tensor | None, total: int) -> Pair:
        """Compressed keys of k and values of v, as the layer makes and rounds them."""
        call, exact = self.call, torch.float32
        weights = call.compress_k_weight, call.compress_v_weight
        k_dtype, v_dtype = (call.q.dtype if weight is None else exact for weight in weights)
        options = dict(block_size=call.config.span, stride=call.config.stride, k_dtypes=(k_dtype,), v_dtype=v_dtype)
        if starts is not None:
            options |= dict(cu_seqlens=starts, cu_blocks=cmp_starts, total_blocks=total)
        k_means, v_mean = pool(*tokens, **options)
        means = k_means[0] if k_means else None, v_mean
        return tuple(x if x is None else readable(project(x, w).to(call.q.dtype)) for x, w in zip(means, weights))

    def _layout(self, *sizes: Sequence[int]) -> tuple[list[Tensor | None], list[tuple[int, ...]]]:
        """Starts on the GPU, and leading dimensions, of tensors with so many rows of each sequence."""
        if not self.call.packed:
            return [None] * len(sizes), [(len(each), each[0]) for each in sizes]
        starts = tuple((*accumulate(each, initial=0),) for each in sizes)
        return numbers_on(starts, self.call.q.device), [(each[-1],) for each in starts]

    def _sizes(self, size: int, part: slice) -> tuple[int, ...]:
        """The size for each of the part's sequences, 0 for those that are known to have no query."""
        lengths = self.call.lengths(self.spec) or (1,) * self.call.B
        return tuple(size if T else 0 for T in lengths[part])

    def _caches(self, names: Sequence[str]) -> Pair | tuple[Tensor | None, ...]:
        return tuple(getattr(self.call, f"{name}_cache") for name in names)

    def _new(self, names: Sequence[str]) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self.call, name) for name in names)


def _each(change: Callable[[Tensor], Tensor], pair: Pair) -> Pair:
    return tuple(x if x is None else change(x) for x in pair)


def _empty(like: Pair, lead: tuple[int, ...]) -> Pair:
    """Dense tensors for rows of caches."""
    return _each(lambda x: x.new_empty(*lead, *x.shape[2:]), like)


def infer(
    tensors: CallTensors, spec: CallSpec, memory: MemoryPolicy, pages: Pages | None, side_stream: SideStream | None
) -> tuple[Tensor, Saved]:
    """Forward without a backward; kernels that are missing have been asked for by the caller."""
    sizes = Sizes.of(tensors, spec=spec, needs_grad=False)
    if pages is not None:
        sizes = sizes._replace(longest=pages.capacity)
    plan = plan_memory(sizes, memory, tensors.q.device)
    more = dict(pages=pages, side_stream=side_stream, together=False)
    return forward(tensors, spec=spec, plan=plan, backward=False, **more)
