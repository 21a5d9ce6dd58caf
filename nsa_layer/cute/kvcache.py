"""`nsa_with_kvcache` on the kernels: append, complete compressed keys, and attend with queries at an offset.

Calls of few queries have kernels of their own, `nsa_layer.kernels.decode`; the others attend in one of three ways:

- "rows": a batch appends to contiguous caches, and attention reads these, after the slots behind each sequence's end,
  which attention multiplies by 0, are cleared.
- "pages": new tokens come with compressed caches, and on Hopper the selected branch reads pages (rows by index, and
  those of packed sequences, are pages too). Compressed keys and the window are copied side by side.
- "copies": all slots of each sequence are copied side by side; from caches without new tokens, since nothing may be
  cleared there, where the branch reads no pages, and to rows of native head dimensions where the caches' are others.

The host reads no number of the GPU: grids and workspaces follow from the caches' capacity. Copies are for as many
sequences at once as `WORKSPACE` bytes hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate

import torch

from flash_attn.cute.runtime.own_device import on_own_device
from nsa_layer.cache_slots import check_slots
from nsa_layer.call import CACHES, COMPRESSED_CACHES, SCALES, TOKEN_CACHES, Call, Lses, Saved, lse_shape
from nsa_layer.cute.forward import forward
from nsa_layer.cute.host_constants import numbers_on, starts_on
from nsa_layer.cute.memory_plan import MemoryPolicy, Sizes, plan_memory
from nsa_layer.cute.padding import cut, padded, widened
from nsa_layer.cute.selected import reads_pages
from nsa_layer.cute.side_stream import SideStream, side_stream_for
from nsa_layer.cute.varlen import starts_of
from nsa_layer.kernels.cache_rows.complete import complete_blocks
from nsa_layer.kernels.cache_rows.invalidate import invalidate_rows
from nsa_layer.kernels.cache_rows.locate import CacheSlots, locate
from nsa_layer.kernels.cache_rows.move import Pair, append, clear, gather
from nsa_layer.kernels.decode.step import decode_step, supports
from nsa_layer.kernels.launch import aligned_rows, rows_aligned
from nsa_layer.kernels.pooling.mean_pool import mean_pool
from nsa_layer.profiler_ranges import component
from nsa_layer.projection import project
from nsa_layer.support import native_dims
from nsa_layer.warm_up.api import compile_missing

Tensor = torch.Tensor
WORKSPACE = 1 << 31  # bytes of caches that are copied at a time; one sequence's may be more
NEW_ROWS = ("q", "q_index", *TOKEN_CACHES, *COMPRESSED_CACHES)  # new rows, which are read 16 bytes at a time
# First slot and number of rows: of all tokens and compressed keys, of the sources of new ones, of windows.
KV_ROWS, CMP_ROWS = (CacheSlots.START, CacheSlots.END), (CacheSlots.START, CacheSlots.CMP_END)
SRC_ROWS, WIN_ROWS = (CacheSlots.SOURCE, CacheSlots.SOURCE_TOKENS), (CacheSlots.WINDOW, CacheSlots.WINDOW_TOKENS)


@on_own_device
@torch.no_grad()
def attend_cached(call: Call, *, validate: bool) -> tuple[Tensor, Lses]:
    """The step, on caches that it changes in place.

    Args:
        call: as checked; ``cache_seqlens`` is a tensor.
        validate: raise, before anything is written, where numbers lead out of the caches; waits for the GPU.

    Returns:
        o and the branches' log-sum-exps, shaped as `nsa_with_kvcache` says.
    """
    with compile_missing(call):
        return step(call, validate=validate)


def step(call: Call, *, validate: bool = False, memory: MemoryPolicy = MemoryPolicy()) -> tuple[Tensor, Lses]:
    """`attend`, its kernels compiled one after the other."""
    if call.packed and call.B == 1:
        o, lses = step(_unpacked(call), validate=validate, memory=memory)
        return o[0], tuple(lse[0] for lse in lses)
    rows = ((name, getattr(call, name)) for name in NEW_ROWS)
    changes = {name: read for name, x in rows if x is not None and (read := aligned_rows(x)) is not x}
    if call.packed and (starts := starts_on(call.cu_seqlens, call.q.device)) is not call.cu_seqlens:
        changes["cu_seqlens"] = starts
    call = call._replace(**changes) if changes else call
    few = supports(call)
    if not call.lengths_known and not few:  # starts are not checked: any values have to lead to rows of q
        call = call._replace(cu_seqlens=call.cu_seqlens.clamp(0, len(call.q)).cummax(0).values)
    chunk = None if few and not validate else _Chunk(call, memory)
    if validate:
        check_slots([not invalid for invalid in chunk.slots[CacheSlots.INVALID].tolist()], call)
    if few:
        with component("cache"):
            return decode_step(call)
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
        invalidate_rows(o, lses, chunk.slots, call.cu_seqlens)
    return o, tuple(lses)


def needs_host_lengths(call: Call) -> bool:
    """True if a packed call with this bound must be split over sequences, so that copies fit `WORKSPACE`."""
    if call.B == 1 or call.B * _bytes_of_tokens(call, call.cache.capacity) <= WORKSPACE:
        return False
    return call.B * _bytes_copied(call) > WORKSPACE and not supports(call)


def _how_read(call: Call) -> str:
    """The way that attention reads the caches: "rows", "pages" or "copies"."""
    if call.k is None or call.cache.in_fp8 or native_dims(*call.dims) != call.dims:
        return "copies"
    if call.cache.page_table is None and call.cache.cache_batch_idx is None and not call.packed:
        return "rows"
    listed, compressed = call.block_indices is not None, call.cache.named(COMPRESSED_CACHES)
    kept = len(compressed) == 2 or not call.config.computes("compressed")
    on_pages = kept and reads_pages(call.config, call.cache.k_cache, call.cache.v_cache, listed=listed)
    return "pages" if on_pages else "copies"


def _bytes_of_tokens(call: Call, tokens: int, names: Sequence[str] = TOKEN_CACHES) -> int:
    widths = {name: native_dims(*call.dims)[name[0] == "v"] for name in names if name != "k_index"}
    sizes = ((x, widths.get(name, x.shape[-1])) for name, x in call.cache.named(names).items())
    return sum(tokens * x.shape[2] * width * call.q.element_size() for x, width in sizes)


def _bytes_copied(call: Call) -> int:
    """Bytes that are copied of a sequence's caches."""
    how, config, tokens = _how_read(call), call.config, call.cache.capacity
    if how == "pages":
        window = call.longest + config.window_reach if config.computes("window") else 0
        copied = min(tokens, window) + config.compressed_capacity(tokens) * config.computes("compressed")
        return _bytes_of_tokens(call, copied, TOKEN_CACHES[:4]) + _bytes_of_tokens(call, tokens, ("k_index",))
    return 0 if how == "rows" else _bytes_of_tokens(call, tokens)


def _unpacked(call: Call) -> Call:
    """A pack of one sequence as a batch."""
    tensors = {name: getattr(call, name) for name in (*NEW_ROWS, "gates", "block_indices")}
    tensors = {name: x if x is None else x.unsqueeze(0) for name, x in tensors.items()}
    return call._replace(cu_seqlens=None, spec=replace(call.spec, lengths=None, bound=None), **tensors)


class _Chunk:
    """A call of many queries.

    Attributes:
        slots: int32 [fields, B], see `CacheSlots`.
        tables: int32 [B, n] each, pages of each sequence, of tokens and of compressed keys, a row of contiguous caches
            being a page too; None: row b.
        how: the caches are read, see `_how_read`.
    """

    def __init__(self, call: Call, memory: MemoryPolicy) -> None:
        self.call, self.memory, self.how = call, memory, _how_read(call)
        config, tables = call.config, (call.cache.page_table, call.cache.cmp_page_table)
        if call.cache.cache_batch_idx is not None:
            tables = (call.cache.cache_batch_idx.unsqueeze(1),) * 2
        compressed = next(iter(call.cache.named(COMPRESSED_CACHES).values()), None)
        caches = dict(cache=call.cache.k_cache, table=tables[0], cmp_cache=compressed, cmp_table=tables[1])
        blocks = dict(span=config.span, stride=config.stride, window=config.window_size, adds=call.k is not None)
        starts = dict(T=call.longest, cu_seqlens=call.cu_seqlens)
        with component("cache"):
            self.slots = locate(call.cache.cache_seqlens, **starts, **caches, **blocks)
        if self.how == "pages" and tables[0] is None:
            (rows,) = numbers_on(((*range(call.B),),), call.q.device)
            tables = (rows.unsqueeze(1),) * 2
        self.tables = tables

    def append(self) -> None:
        """Write new tokens; clear the slots behind them that attention may read."""
        compressed = self._tensors("k_cmp_cache", "v_cmp_cache") if self.how == "rows" else (None, None)
        *new, k_index = self._tensors(*TOKEN_CACHES)
        *caches, index_cache = self._tensors(*CACHES[: len(TOKEN_CACHES)])
        *scales, index_scale = self._tensors(*SCALES[: len(TOKEN_CACHES)])
        behind, starts = {"rows": "rows", "pages": "block", "copies": ""}[self.how], (self.call.cu_seqlens, None)
        where, none = (self.tables, self.slots, starts), [None] * 5
        append((*new, None, None), (*caches, *compressed), *where, behind=behind, scales=(*scales, None, None))
        if k_index is not None:
            append((k_index, *none), (index_cache, *none), *where, scales=(index_scale, *none))

    def complete(self) -> None:
        """Write the compressed keys and values of blocks that the call completes: the caller's, or of cached tokens."""
        call, span, stride = self.call, self.call.config.span, self.call.config.stride
        new, caches = self._tensors(*COMPRESSED_CACHES), self._tensors("k_cmp_cache", "v_cmp_cache")
        lacking = tuple(cache if x is None else None for cache, x in zip(caches, new))
        sources = tuple(None if cache is None else x for x, cache in zip(self._tensors(*CACHES[:2]), lacking))
        in_place = call.compress_k_weight is None and call.compress_v_weight is None
        in_place &= call.cache.page_table is None or not call.cache.k_cache.shape[1] % span  # sums are of one page
        if in_place and all(x is None or rows_aligned(x) for x in (*sources, *lacking)):
            sizes = dict(block_size=span, stride=stride, most=call.config.most_completed(call.longest))
            sizes |= dict(scales=self._tensors(*SCALES[:2]), compressed_scales=self._tensors(*SCALES[-2:]))
            complete_blocks(sources, lacking, self.tables, self.slots, **sizes)
            sources = None, None
        if all(x is None for x in (*sources, *new)):
            return
        part = slice(0, call.B)
        blocks = self._layout(part, 1, stride - 1, stride)
        if any(x is not None for x in sources):
            exact = torch.float32 if call.cache.in_fp8 else call.q.dtype
            tokens, starts = self._copied(sources, part, SRC_ROWS, 1, span - 1, self._tensors(*SCALES[:2]), dtype=exact)
            means = self._compress(tokens, starts, *blocks, dtype=exact)
            new = tuple(x if y is None else y for x, y in zip(new, means))
        none, scales = [None] * 4, self._tensors(*SCALES[-2:])
        where = self.tables, self.slots, (None, blocks[0])
        append((*none, *new), (*none, *caches), *where, scales=(*none, *scales))

    def parts(self) -> list[slice]:
        """Sequences that attend together: as many with queries as `WORKSPACE` holds copies of."""
        call, parts, first, attended = self.call, [], 0, 0
        if call.lengths_known and (copied := _bytes_copied(call)):
            for b, T in enumerate(call.query_lengths):
                if T and attended == max(1, WORKSPACE // copied):
                    parts.append(slice(first, b))
                    first, attended = b, 0
                attended += T > 0
        return [*parts, slice(first, call.B)]

    def attend(self, part: slice) -> tuple[Tensor, ...]:
        """o and the log-sum-exps of the part's sequences."""
        call, spec, rows, tiles = self.call, self.call.spec, part, part
        if call.packed:
            rows = tiles = slice(None)
            lengths_k = tuple(call.cache.capacity if T else 0 for T in (spec.lengths or (1,) * call.B)[part])
            lengths = spec.lengths and spec.lengths[part]
            longest_win = (spec.bound or max(lengths)) + call.config.window_reach
            spec = replace(spec, lengths_k=lengths_k, lengths=lengths, longest_win=longest_win)
            if spec.lengths is not None:
                counted = (list(map(count, call.spec.lengths)) for count in (int, call.config.num_tiles))
                rows, tiles = (slice(sum(each[: part.start]), sum(each[: part.stop])) for each in counted)
        own = dict(q=rows, gates=rows, q_index=rows, block_indices=tiles)
        own = {name: x[at] for name, at in own.items() if (x := getattr(call, name)) is not None}
        more = dict(gate_weight=call.gate_weight, cu_seqlens=call.cu_seqlens, spec=spec)
        slides = call.config.computes("window")
        with (side_stream_for(own["q"]) if slides else None) or nullcontext() as side_stream:
            with component("cache"):
                more |= self._keys(part, side_stream)
            tensors = Call(**own, **more, q_offset=self.slots[CacheSlots.FIRST, part])
            o, saved = infer(padded(tensors, needs_grad=False), self.memory, side_stream)
        o = cut(o, call.dims[1])
        q, lses = own["q"], (saved.lse_cmp, saved.lse_slc, saved.lse_swa)
        return o, *(q.new_full(lse_shape(q), -torch.inf, dtype=torch.float32) if x is None else x for x in lses)

    def _keys(self, part: slice, side_stream: SideStream | None) -> dict[str, Tensor | None]:
        """Keys and values of all branches by name, with slots for the caches' capacity of each sequence, and how they
        lie; those of a window on pages are copied on the stream of its attention."""
        call, starts, more, config = self.call, None, {}, self.call.config
        capacity, dims = call.cache.capacity, native_dims(*call.dims)
        count = config.compressed_length(capacity) if config.computes("compressed") else 0
        caches, scales = self._tensors(*CACHES), self._tensors(*SCALES)
        kv, of_window, index, compressed = caches[:2], caches[2:4], (caches[4], None), caches[5:]
        if self.how == "rows":
            kv, of_window, index = (_map_pair(aligned_rows, pair) for pair in (kv, of_window, index))
            compressed = _map_pair(lambda x: aligned_rows(x[:, :count]), compressed)
        elif self.how == "copies":
            pairs = ((kv, scales[:2]), (of_window, scales[2:4]))
            copies = [self._copied(pair, part, KV_ROWS, 0, capacity, of_pair, dims=dims) for pair, of_pair in pairs]
            (kv, starts), (of_window, _) = copies
        else:
            if config.computes("window"):
                of_window = tuple(shared if x is None else x for x, shared in zip(of_window, kv))
                side = dict(side_stream=side_stream)
                of_window, starts = self._copied(of_window, part, WIN_ROWS, 1, config.window_reach, **side)
                more = dict(win_offset=self.slots[CacheSlots.IN_WINDOW, part], cu_seqlens_win=starts)
            more["pages"] = self.tables[0][part]
        if self.how != "rows":
            compressed, _ = self._copied(compressed, part, CMP_ROWS, 0, count, scales[5:], dims=dims)
            index, _ = self._copied(index, part, KV_ROWS, 0, capacity, (scales[4], None))
        sources = tuple(x if y is None else None for x, y in zip(kv, compressed))
        if count and any(x is not None for x in sources):
            blocks = self._layout(part, 0, count)
            with component("compress"):
                means = self._compress(sources, starts, *blocks)
            clear(means, self.slots[:, part], CacheSlots.CMP_END, blocks[0])
            compressed = tuple(y if x is None else x for x, y in zip(compressed, means))
        return more | dict(zip((*TOKEN_CACHES, *COMPRESSED_CACHES), (*kv, *of_window, index[0], *compressed)))

    def _copied(
        self,
        caches: Pair,
        part: slice,
        fields: tuple[int, int],
        factor: int,
        more: int,
        scales: Pair = (None, None),
        *,
        dtype: torch.dtype | None = None,
        side_stream: SideStream | None = None,
        dims: tuple[int, int] | None = None,
    ) -> tuple[Pair, Tensor | None]:
        """Rows of the part's sequences in two caches, side by side, and their starts.

        Args:
            fields: of the first slot, and of the number of rows.
            factor, more: rows of a sequence, as for `_layout`.
            scales: of the caches, in FP8.
            dtype: of the copies; None: q's.
            side_stream: that copies, if there is one.
            dims: elements of the copies' rows, zeros behind the caches'; None: as many.
        """
        if all(x is None for x in caches):
            return caches, None
        starts, lead = self._layout(part, factor, more)
        table = self.tables[int(fields == CMP_ROWS)]
        caches, table = (_map_pair(lambda x: x[part], caches), None) if table is None else (caches, table[part])
        widths = dims or tuple(x if x is None else x.shape[-1] for x in caches)
        sizes, dtype = zip(caches, widths), self.call.q.dtype if dtype is None else dtype
        copies = tuple(x if x is None else x.new_empty(*lead, x.shape[2], D, dtype=dtype) for x, D in sizes)
        rows = tuple(x if x is None else copy[..., : x.shape[-1]] for x, copy in zip(caches, copies))
        with nullcontext() if side_stream is None else side_stream.launches():
            gather(caches, rows, table, self.slots[:, part], fields, starts, scales)
        for copy, x in zip(copies, rows):
            if x is not None and x.shape != copy.shape:
                copy[..., x.shape[-1] :].zero_()
        return copies, starts

    def _layout(self, part: slice, factor: int, more: int, size: int = 1) -> tuple[Tensor | None, tuple[int, ...]]:
        """Starts on the GPU (None for a batch), and leading dimensions, of a tensor with (T * factor + more) // size
        rows for each of the part's sequences of T queries; none where T is known to be 0."""
        call, lengths = self.call, self.call.query_lengths
        if lengths is None and factor:
            (starts,) = starts_of(call.cu_seqlens, ((factor, more, size),))
            return starts, ((len(call.q) * factor + call.B * more) // size,)
        sizes = [(T * factor + more) // size if T else 0 for T in (lengths or (1,) * call.B)[part]]
        if not call.packed:
            return None, (len(sizes), sizes[0])
        starts = (*accumulate(sizes, initial=0),)
        return numbers_on((starts,), call.q.device)[0], starts[-1:]

    def _compress(
        self,
        tokens: Pair,
        starts: Tensor | None,
        cmp_starts: Tensor | None,
        lead: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> Pair:
        """Compressed keys of k and values of v, as the layer makes and rounds them; lead: their leading dimensions;
        dtype: None for q's."""
        call, exact, dtype = self.call, torch.float32, self.call.q.dtype if dtype is None else dtype
        weights = tuple(
            w if x is None else widened(w, x.shape[-1], square=True)
            for x, w in zip(tokens, (call.compress_k_weight, call.compress_v_weight))
        )
        k_dtype, v_dtype = (dtype if weight is None else exact for weight in weights)
        options = dict(block_size=call.config.span, stride=call.config.stride, k_dtypes=(k_dtype,), v_dtype=v_dtype)
        if starts is not None:
            options |= dict(cu_seqlens=starts, cu_blocks=cmp_starts, total_blocks=lead[0])
        k_means, v_mean = mean_pool(*tokens, **options)
        means = k_means[0] if k_means else None, v_mean
        return tuple(x if x is None else aligned_rows(project(x, w).to(dtype)) for x, w in zip(means, weights))

    def _tensors(self, *names: str) -> tuple[Tensor | None, ...]:
        of_cache = {*CACHES, *SCALES}
        return tuple(getattr(self.call.cache if name in of_cache else self.call, name) for name in names)


def _map_pair(change: Callable[[Tensor], Tensor], pair: Pair) -> Pair:
    return tuple(x if x is None else change(x) for x in pair)


def infer(call: Call, memory: MemoryPolicy, side_stream: SideStream | None) -> tuple[Tensor, Saved]:
    """Forward without a backward."""
    plan = plan_memory(Sizes.of(call, needs_grad=False), memory, call.q.device)
    return forward(call, plan=plan, backward=False, side_stream=side_stream)
