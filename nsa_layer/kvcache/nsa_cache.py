"""`NSACache`: one layer's caches for `nsa_with_kvcache`, contiguous or paged, with lengths known on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import fields, replace
from itertools import accumulate

import torch

from nsa_layer.cached_call import CachedCall, check_call
from nsa_layer.checks import DTYPES, require_config
from nsa_layer.config import NSAConfig, require_bools, require_int
from nsa_layer.kvcache.api import cast_call, checked_step
from nsa_layer.kvcache.operator import CACHES, Lses

Tensor = torch.Tensor
Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Spans = Sequence[tuple[int, int]]  # the places of each sequence that are to be written
OF_THE_CACHE = ("config", "cache_seqlens", "page_table", "cmp_page_table", "cache_batch_idx", *CACHES, *"qkv")
OPTIONS = {field.name for field in fields(CachedCall)}.difference(OF_THE_CACHE)


class LastingTensors:
    """Holds tensors that are written to, and whose copies can be written to outside of inference mode."""

    def __deepcopy__(self, memo: dict) -> LastingTensors:
        memo[id(self)] = copied = copy(self)
        with torch.inference_mode(False):
            copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


class _Pages:
    """Pages of a pool, dealt out to sequences; one that several have is copied before one of them writes to it.

    Attributes:
        caches: [pages, page, H, D] each, of the same pages.
        table: int32 [batch, n], -1 where a sequence has no page.
        of: each sequence's pages in order.
        users: sequences that have a page.
        free: pages that none has.
        changed: the table does not show what sequences have.
    """

    def __init__(self, caches: list[Tensor], batch: int, width: int) -> None:
        self.caches, (pages, self.size) = caches, caches[0].shape[:2]
        self.table = torch.full((batch, width), -1, dtype=torch.int32, device=caches[0].device)
        self.of: list[list[int]] = [[] for _ in range(batch)]
        self.users, self.free, self.changed = [0] * pages, list(range(pages))[::-1], False

    def lacks(self, spans: Spans) -> int:
        """Pages beyond the free ones that `reserve` would take."""
        writers = Counter(page for own, span in zip(self.of, spans) for page in own[self._written(*span)])
        copies = sum(min(n, self.users[page] - 1) for page, n in writers.items())
        new = sum(max(0, -(-end // self.size) - len(own)) for own, (_, end) in zip(self.of, spans))
        return copies + new - len(self.free)

    def reserve(self, spans: Spans) -> None:
        """Give each sequence pages of its own for the places that it will write."""
        for own, (begin, end) in zip(self.of, spans):
            for at in range(len(own))[self._written(begin, end)]:
                if self.users[own[at]] > 1:
                    page, shared = self._take(), own[at]
                    for cache in self.caches:
                        cache[page] = cache[shared]
                    self._drop(shared)
                    own[at] = page
            own += [self._take() for _ in range(-(-end // self.size) - len(own))]
        self._show()

    def crop(self, ends: Sequence[int]) -> None:
        """Give back the pages behind each sequence's first ``end`` places."""
        for own, end in zip(self.of, ends):
            while len(own) > -(-end // self.size):
                self._drop(own.pop())
        self._show()

    def reorder(self, index: Sequence[int]) -> None:
        """Sequence b becomes what sequence ``index[b]`` was."""
        before, self.of = self.of, [list(self.of[i]) for i in index]
        for page in (page for own in self.of for page in own):
            self.users[page] += 1
        for page in (page for own in before for page in own):
            self._drop(page)
        self._show()

    def _written(self, begin: int, end: int) -> slice:
        return slice(begin // self.size, -(-end // self.size) if end > begin else 0)

    def _take(self) -> int:
        page, self.changed = self.free.pop(), True
        self.users[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.users[page], self.changed = self.users[page] - 1, True
        if not self.users[page]:
            self.free.append(page)

    def _show(self) -> None:
        if self.changed:
            width, self.changed = self.table.shape[1], False
            rows = [own + [-1] * (width - len(own)) for own in self.of]
            self.table.copy_(_sent(rows, self.table.device, torch.int32))


class NSACache(LastingTensors):
    """Keys and values of one layer's sequences, and their compressed keys and values.

    Tensors keep their addresses, unless the cache is told to grow. In pages, sequences with the same beginning share
    its pages until they write to them.

    Attributes:
        caches: ``k_cache``, ``v_cache``, ``k_cmp_cache``, ``v_cmp_cache`` and, with ``own_window``, ``k_win_cache`` and
            ``v_win_cache``, shaped as `nsa_with_kvcache` says.
        sources: with ``own_sources`` "k" and "v", like ``k_cache`` and ``v_cache``.
        cache_seqlens: int32 [batch] on the device, tokens of each sequence; the same as ``lengths``.

    Args:
        batch: sequences.
        max_seqlen: the most tokens of a sequence.
        num_kv_heads, head_dim, head_dim_v: Hkv, D and Dv; Dv is D unless given.
        config: as for the calls of `attend`.
        page_size: tokens in a page, a multiple of ``config.block_size``; None: contiguous.
        num_pages: pages of the pool; None: enough for ``max_seqlen`` tokens of every sequence.
        own_window: the sliding window has keys and values of its own.
        own_sources: compressed keys and values are made of tokens of their own, which the cache keeps beside k and v.
        dtype, device: of the tensors.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        batch: int,
        max_seqlen: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        config: NSAConfig,
        head_dim_v: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        own_window: bool = False,
        own_sources: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = dict(batch=batch, max_seqlen=max_seqlen, num_kv_heads=num_kv_heads, head_dim=head_dim)
        optional = dict(head_dim_v=head_dim_v, page_size=page_size, num_pages=num_pages)
        for name, size in (sizes | {name: size for name, size in optional.items() if size is not None}).items():
            require_int(name, size, least=1)
        require_config(config)
        require_bools(own_window=own_window, own_sources=own_sources)
        if own_window and not config.window_size:
            raise ValueError("own_window must be False where there is no window, got True with window_size=0")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype}")
        if page_size is None and num_pages is not None:
            raise ValueError(f"num_pages is for a paged cache, got {num_pages} without page_size")
        if page_size is not None and page_size % config.block_size:
            raise ValueError(f"page_size must be a multiple of block_size={config.block_size}, got {page_size}")
        self.config, self.max_seqlen = config, max_seqlen
        self._lengths = [0] * batch
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        width = 1 if page_size is None else -(-max_seqlen // page_size)
        if page_size is None:
            lead, compressed = (batch, max_seqlen), (batch, config.compressed_length(max_seqlen))
        else:
            lead = (batch * width if num_pages is None else num_pages, page_size)
            # A compressed key that reaches into the next page is each sequence's own, whoever shares its first tokens.
            compressed = (lead[0] + batch * (config.span > config.stride), page_size // config.stride)
        names = ("k", "v", "k_win", "v_win")[: 4 if own_window else 2]
        of_size = {"k": head_dim, "v": head_dim if head_dim_v is None else head_dim_v}
        self.caches = {
            f"{name}_cache": torch.empty(*places, num_kv_heads, of_size[name[0]], dtype=dtype, device=device)
            for places, own in ((lead, names), (compressed, ("k_cmp", "v_cmp")))
            for name in own
        }
        self.sources = {name: torch.empty_like(self.caches[f"{name}_cache"]) for name in "kv"[: 2 * own_sources]}
        self._pages: dict[str, _Pages] = {}
        if page_size is not None:
            tables = dict(page_table=names, cmp_page_table=("k_cmp", "v_cmp"))
            for table, own in tables.items():
                more = self.sources.values() if table == "page_table" else ()
                self._pages[table] = _Pages([*(self.caches[f"{name}_cache"] for name in own), *more], batch, width)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        kept = (*self.caches.values(), *self.sources.values())
        tensors = (*kept, self.cache_seqlens, *(pages.table for pages in self._pages.values()))
        return sum(x.numel() * x.element_size() for x in tensors)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        validate: bool = False,
        backend: str | None = None,
        compress: Compress | None = None,
        sources: tuple[Tensor, Tensor] | None = None,
        **options: object,
    ) -> Tensor | tuple[Tensor, Lses]:
        """Append the keys and values of q's tokens, and attend: `nsa_with_kvcache`, whose options these are.

        Args:
            q: [batch, T, Hq, D], or packed [total, Hq, D] with ``cu_seqlens_q``; k: [batch, T, Hkv, D] or
                [total, Hkv, D]; v: the same with Dv.
            return_lse, validate, backend, options: as in `nsa_with_kvcache`, but for caches, their lengths and tables.
            compress: makes compressed keys [blocks, Hkv, D] and values [blocks, Hkv, Dv] of the tokens [blocks,
                compress_size, Hkv, D] and [..., Dv] of the blocks that the call completes. None: means, or those given.
            sources: with ``own_sources`` these tokens' keys and values, shaped like k and v, which they are otherwise.

        Returns:
            As `nsa_with_kvcache`.

        Raises:
            ValueError: no room for the new tokens; nothing was written. What `nsa_with_kvcache` raises besides.
        """
        for name, x in (("k", k), ("v", v)):
            if x is None:
                raise TypeError(f"{name} must be a torch.Tensor, got None")
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"attend takes the options {', '.join(sorted(OPTIONS))}, got {', '.join(sorted(unknown))}")
        tables = {name: pages.table for name, pages in self._pages.items()}
        given = dict(q=q, k=k, v=v, config=self.config, cache_seqlens=self.cache_seqlens)
        call = CachedCall(**given, **self.caches, **tables, **options)
        if (sources is not None) != bool(self.sources) or (sources is not None and compress is None):
            raise ValueError("sources must be given to a cache with own_sources, with compress, and to no other")
        made = {}
        if compress is not None:
            lengths, _ = check_call(cast_call(call))
            made = {name: self._room_of_blocks(name, call, lengths) for name in ("k_cmp", "v_cmp")}
            call = replace(call, **made)
        ends: list[int] = []

        def reserve(counts: Sequence[int]) -> None:
            ends.extend(self._reserve(counts))
            if compress is not None:
                self._complete(compress, counts, (k, v) if sources is None else sources, made)

        try:
            found = checked_step(call, validate=validate, backend=backend, return_lse=return_lse, reserve=reserve)
        except BaseException:
            self._give_back(self._lengths)
            raise
        self._set(ends)
        return found

    def _room_of_blocks(self, name: str, call: CachedCall, lengths: Sequence[int]) -> Tensor:
        """Zeros for the compressed keys or values that a call may complete."""
        lead = (sum(map(call.filled, lengths)),) if call.packed else (len(lengths), call.filled(lengths[0]))
        cache = self.caches[f"{name}_cache"]
        return cache.new_zeros(*lead, *cache.shape[2:])

    def _complete(
        self, compress: Compress, counts: Sequence[int], new: tuple[Tensor, Tensor], made: dict[str, Tensor]
    ) -> None:
        """Fill ``made`` with the compressed keys and values of blocks that the new tokens complete, and keep those."""
        stride, span, rows, blocks, row = self.config.stride, self.config.span, [], [], 0
        starts = [0, *accumulate(counts)]
        for b, (length, count) in enumerate(zip(self._lengths, counts)):
            first, end = self._compressed((length, length + count))
            rows += range(row, row + end - first)
            row += -(-count // stride)
            blocks += [(b, length, starts[b], block * stride) for block in range(first, end)]
        new = tuple(x.flatten(0, -3) for x in new)
        kept = tuple(self.sources.get(name, self.caches[f"{name}_cache"]) for name in "kv")
        if blocks:
            b, length, start, token = _sent(blocks, new[0].device).T.unsqueeze(-1)
            token = token + torch.arange(span, device=token.device)
            old, row_of_new = (token < length)[..., None, None], (start + token - length).clamp(min=0)
            places = self._places(b.expand_as(token), token.minimum(length - 1).clamp(min=0))
            tokens = (torch.where(old, cache[places], x.to(cache.dtype)[row_of_new]) for cache, x in zip(kept, new))
            for into, x in zip(made.values(), compress(*tokens), strict=True):
                into.flatten(0, -3)[_sent(rows, into.device)] = x.to(into.dtype)
        if self.sources:
            spans = [(b, self._lengths[b] + i) for b, count in enumerate(counts) for i in range(count)]
            places = self._places(*_sent(spans, new[0].device).T)
            for cache, x in zip(kept, new):
                cache[places] = x.detach().to(cache.dtype)

    def _places(self, b: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Places in the caches of the tokens of sequences b."""
        if not self._pages:
            return b, token
        pages = self._pages["page_table"]
        return pages.table[b, token // pages.size].long(), token % pages.size

    def crop(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Go back to the first tokens of each sequence.

        Args:
            lengths: tokens that are kept: of each sequence, or an int, at most so many of all; 0 empties it.

        Raises:
            TypeError, ValueError: not so many numbers, or none that a sequence has; the cache is as it was.
        """
        if isinstance(lengths, int):
            require_int("lengths", lengths, least=0)
            lengths = [min(lengths, length) for length in self._lengths]
        lengths = _listed("lengths", lengths)
        fit = (isinstance(n, int) and 0 <= n <= most for n, most in zip(lengths, self._lengths))
        if len(lengths) != len(self._lengths) or not all(fit):
            raise ValueError(f"lengths must be at most {self.lengths}, and at least 0, got {lengths}")
        self._set(lengths)
        self._give_back(lengths)

    def _give_back(self, lengths: Sequence[int]) -> None:
        """Give back the pages behind each sequence's first tokens, and their compressed keys."""
        for pages, ends in zip(self._pages.values(), (lengths, self._compressed(lengths))):
            pages.crop(ends)

    @torch.inference_mode(False)
    def grow(self, max_seqlen: int) -> None:
        """Make room for longer sequences of a contiguous cache: its tensors are copied to larger ones.

        Args:
            max_seqlen: the most tokens of a sequence from now on.

        Raises:
            TypeError, ValueError: the cache has pages, or room for more tokens already.
        """
        require_int("max_seqlen", max_seqlen, least=self.max_seqlen)
        if self._pages:
            raise ValueError(f"a cache grows where it is contiguous, got one of pages and max_seqlen={max_seqlen}")
        for caches in (self.caches, self.sources):
            for name, cache in caches.items():
                room = self.config.compressed_length(max_seqlen) if "cmp" in name else max_seqlen
                caches[name] = cache.new_empty(cache.shape[0], room, *cache.shape[2:])
                caches[name][:, : cache.shape[1]] = cache
        self.max_seqlen = max_seqlen

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Sequence b becomes a copy of sequence ``index[b]``, as beam search asks for; pages are shared, not copied.

        Raises:
            TypeError, ValueError: index does not have a sequence's number for each sequence; the cache is as it was.
        """
        index = _listed("index", index)
        batch = len(self._lengths)
        if len(index) != batch or not all(isinstance(i, int) and 0 <= i < batch for i in index):
            raise ValueError(f"index must be {batch} numbers from 0 to {batch - 1}, got {index}")
        for pages in self._pages.values():
            pages.reorder(index)
        if not self._pages:
            for cache in (*self.caches.values(), *self.sources.values()):
                cache.copy_(cache[_sent(index, cache.device)])
        self._set([self._lengths[i] for i in index])

    def read_lengths(self) -> None:
        """Take ``lengths`` from ``cache_seqlens``, which calls of `nsa_with_kvcache` on ``caches`` have changed; waits.

        Raises:
            ValueError: the cache has pages, which such calls are not dealt, or a length is beyond its room.
        """
        lengths = self.cache_seqlens.tolist()
        if self._pages:
            raise ValueError("lengths of a cache of pages are those of its own calls")
        if not all(0 <= length <= self.max_seqlen for length in lengths):
            raise ValueError(f"cache_seqlens must be 0 to {self.max_seqlen}, the cache's room, got {lengths}")
        self._lengths = lengths

    def _reserve(self, counts: Sequence[int]) -> list[int]:
        """Places for so many more tokens; the lengths with them."""
        ends = [length + n for length, n in zip(self._lengths, counts)]
        for b, end in enumerate(ends):
            if end > self.max_seqlen:
                raise ValueError(f"sequence {b} would have {end} tokens, the cache has room for {self.max_seqlen}")
        both = zip((self._lengths, self._compressed(self._lengths)), (ends, self._compressed(ends)))
        wanted = [(pages, list(zip(*spans))) for pages, spans in zip(self._pages.values(), both)]
        for pages, spans in wanted:
            if (lacking := pages.lacks(spans)) > 0:
                raise ValueError(f"the pool of {len(pages.users)} pages has {lacking} too few for the new tokens")
        for pages, spans in wanted:
            pages.reserve(spans)
        return ends

    def _compressed(self, lengths: Sequence[int]) -> list[int]:
        return [self.config.compressed_length(length) for length in lengths]

    def _set(self, lengths: Sequence[int]) -> None:
        changes = {after - before for before, after in zip(self._lengths, lengths)}
        self._lengths = list(lengths)
        if len(changes) == 1:
            self.cache_seqlens += changes.pop()
        else:
            self.cache_seqlens.copy_(_sent(self._lengths, self.cache_seqlens.device, torch.int32))


def _sent(numbers: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers on a device, which the host does not wait for."""
    made = torch.tensor(numbers, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def _listed(name: str, given: object) -> list:
    """The numbers of a sequence, or of a tensor of one dimension."""
    numbers = given.tolist() if isinstance(given, torch.Tensor) else given
    if not isinstance(numbers, Sequence):
        raise TypeError(f"{name} must be a sequence of ints, got {given!r}")
    return list(numbers)
