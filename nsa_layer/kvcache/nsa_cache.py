"""`NSACache`: one layer's caches for `nsa_with_kvcache`, contiguous or paged, with lengths known on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from itertools import accumulate, chain

import torch

from nsa_layer import support
from nsa_layer.cached_call import check_call, require_page_size
from nsa_layer.call import COMPRESSED_CACHES, FP8, OWN_KEYS, TOKEN_CACHES, Call, Lses
from nsa_layer.checks import DTYPES, require_config
from nsa_layer.config import NSAConfig, require_bools, require_int, require_sizes
from nsa_layer.kvcache import operator
from nsa_layer.kvcache.fp8 import MOST, dequantise, in_cache_dtype
from nsa_layer.kvcache.page_allocator import PageAllocator, sent

Tensor = torch.Tensor
Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
WITHOUT_COMPRESS = (*COMPRESSED_CACHES, "compress_k_weight", "compress_v_weight")
CHECKED = ("softmax_scale", "index_scale", "max_seqlen_q", "out")
OPTIONS = {*CHECKED, *OWN_KEYS, *WITHOUT_COMPRESS, "q_index", "k_index", "gate_weight", "gates", "cu_seqlens_q"}
OPTIONS |= {"block_indices", "num_splits"}


class LastingTensors:
    """Holds tensors that are written to, and whose copies can be written to outside of inference mode."""

    def __deepcopy__(self, memo: dict) -> LastingTensors:
        memo[id(self)] = copied = copy(self)
        with torch.inference_mode(False):
            copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied


class NSACache(LastingTensors):
    """Keys and values of one layer's sequences, and their compressed keys and values.

    Tensors keep their addresses, unless the cache is told to grow. In pages, sequences with the same beginning share
    its pages until they write to them.

    Attributes:
        caches: ``k_cache`` and ``v_cache``; with the compressed branch ``k_cmp_cache`` and ``v_cmp_cache``, with
            ``own_window`` ``k_win_cache`` and ``v_win_cache``, with ``rule="index"`` ``k_index_cache``; shaped as
            `nsa_with_kvcache` says.
        sources: with ``own_sources`` "k" and "v", like ``k_cache`` and ``v_cache``.
        scales: with ``dtype=torch.float8_e4m3fn`` ``k_scale`` and so on, fp32 [heads], of each of the caches: 1 until
            `calibrate`.
        cache_seqlens: int32 [batch] on the device, tokens of each sequence; the same as ``lengths``.

    Args:
        batch: sequences.
        max_seqlen: the most tokens of a sequence.
        num_kv_heads, head_dim, head_dim_v: Hkv, D and Dv; Dv is D by default.
        config: as for the calls of `attend`.
        page_size: tokens in a page, a multiple or a divisor of ``config.block_size``; None: contiguous.
        num_pages: pages of the pool; None: enough for ``max_seqlen`` tokens of every sequence.
        own_window: the sliding window has keys and values of its own.
        own_sources: compressed keys and values come from tokens of their own, which the cache keeps beside k and v.
        index_dim, index_heads: Di and heads of the index' keys with ``rule="index"``, Hkv (default) or 1.
        dtype, device: of the tensors; float8_e4m3fn for calls in any dtype.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it.
        NotImplementedError: ``own_sources`` in float8_e4m3fn.

    Example:
        >>> cache = NSACache(1, 1024, num_kv_heads=2, head_dim=64, config=NSAConfig(), dtype=torch.float32)
        >>> q, k, v = (torch.randn(1, 256, heads, 64) for heads in (8, 2, 2))
        >>> o = cache.attend(q, k, v)
        >>> cache.lengths
        (256,)
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
        index_dim: int = 32,
        index_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = dict(batch=batch, max_seqlen=max_seqlen, num_kv_heads=num_kv_heads, head_dim=head_dim)
        optional = dict(head_dim_v=head_dim_v, page_size=page_size, num_pages=num_pages, index_heads=index_heads)
        sizes |= {name: size for name, size in optional.items() if size is not None}
        require_sizes(**sizes, index_dim=index_dim)
        require_config(config)
        require_bools(own_window=own_window, own_sources=own_sources)
        if own_window and not config.computes("window"):
            raise ValueError(
                f"own_window must be False where there is no window, got True with window_size={config.window_size}, "
                f"branches={config.branches}"
            )
        if own_sources and not config.computes("compressed"):
            raise ValueError(f"own_sources is of the compressed branch, got True with branches={config.branches}")
        if index_heads not in (None, 1, num_kv_heads):
            raise ValueError(f"index_heads must be {num_kv_heads} or 1, got {index_heads}")
        if dtype not in (*DTYPES, FP8):
            raise TypeError(f"dtype must be float16, bfloat16, float32, float64 or float8_e4m3fn, got {dtype}")
        if dtype == FP8 and own_sources:
            raise NotImplementedError("own_sources with dtype=float8_e4m3fn: use dtype=torch.bfloat16")
        if page_size is None and num_pages is not None:
            raise ValueError(f"num_pages is for a paged cache, got {num_pages} without page_size")
        if page_size is not None:
            require_page_size("page_size", page_size, config)
        self.config, self.max_seqlen = config, max_seqlen
        self._lengths = [0] * batch
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        width = 1 if page_size is None else -(-max_seqlen // page_size)
        if page_size is None:
            lead, compressed = (batch, max_seqlen), (batch, config.compressed_length(max_seqlen))
        else:
            lead = (batch * width if num_pages is None else num_pages, page_size)
            # A compressed key that reaches into the next page is never shared, even where its first tokens are.
            compressed = (lead[0] + batch * (config.span > config.stride), max(1, page_size // config.stride))
        names = TOKEN_CACHES[: 4 if own_window else 2] + ("k_index",) * (config.rule == "index")
        names += COMPRESSED_CACHES if config.computes("compressed") else ()
        rows = dict.fromkeys(names, (num_kv_heads, head_dim))
        rows |= {name: (num_kv_heads, head_dim_v or head_dim) for name in names if name[0] == "v"}
        if config.rule == "index":
            rows["k_index"] = (index_heads or num_kv_heads, index_dim)
        self.caches, self.sources = {}, {}
        for name, row in rows.items():
            size = (*(compressed if "cmp" in name else lead), *row)
            self.caches[f"{name}_cache"] = torch.empty(size, dtype=dtype, device=device)
        heads = {name: size for name, (size, _) in rows.items() if dtype == FP8}
        self.scales = {f"{name}_scale": torch.ones(size, device=device) for name, size in heads.items()}
        for name in "kv" if own_sources else ():
            self.sources[name] = torch.empty_like(self.caches[f"{name}_cache"])
        self._pages: dict[str, PageAllocator] = {}
        if page_size is not None:
            of_blocks = [x for name, x in self.caches.items() if "cmp" in name]
            of_tokens = [x for name, x in self.caches.items() if "cmp" not in name]
            self._pages["page_table"] = PageAllocator([*of_tokens, *self.sources.values()], batch, width)
            if of_blocks:
                self._pages["cmp_page_table"] = PageAllocator(of_blocks, batch, width)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tables = (pages.table for pages in self._pages.values())
        own = (self.caches, self.sources, self.scales)
        tensors = chain(*(each.values() for each in own), tables, [self.cache_seqlens])
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
                compress_size, Hkv, D] and [..., Dv] of the blocks that the call completes. None: means, or
                ``k_cmp`` and ``v_cmp``.
            sources: with ``own_sources`` the keys and values to compress, shaped like k and v; else k and v are.

        Returns:
            As `nsa_with_kvcache`.

        Raises:
            ValueError: the new tokens exceed the capacity; nothing was written. What `nsa_with_kvcache` raises besides.
        """
        for name, x in (("k", k), ("v", v)):
            if x is None:
                raise TypeError(f"{name} must be a torch.Tensor, got None")
        if unknown := options.keys() - OPTIONS:
            raise TypeError(f"attend has the options {', '.join(sorted(OPTIONS))}, got {', '.join(sorted(unknown))}")
        if (sources is not None) != bool(self.sources) or (sources is not None and compress is None):
            had = "none" if sources is None else "some"
            raise ValueError(f"sources must be given with compress to a cache with own_sources, to no other, got {had}")
        if compress is not None and not self.config.computes("compressed"):
            raise ValueError(f"compress is of the compressed branch, got it with branches={self.config.branches}")
        if compress is not None and (both := [name for name in WITHOUT_COMPRESS if options.get(name) is not None]):
            raise ValueError(f"compress and {both[0]} exclude each other, got both; pass one or neither")
        require_bools(validate=validate, return_lse=return_lse)
        tables = {name: pages.table for name, pages in self._pages.items()}
        static = {name: options.pop(name) for name in CHECKED if name in options}
        new = dict(q=q, k=k, v=v, cu_seqlens=options.pop("cu_seqlens_q", None), cache_seqlens=self.cache_seqlens)
        call = Call.of(options | new | self.caches | self.scales | tables)
        checked = check_call(call, config=self.config, **static, backend=backend, validate=validate, read=True)
        call = support.on_backend(backend, checked)
        counts = call.query_lengths
        try:
            ends = self._reserve(counts)
            if compress is not None:
                call = call._replace(**self._compress(compress, counts, (k, v) if sources is None else sources, call))
            o, lses = operator.attend_cached(call, out=static.get("out"), validate=validate)
        except BaseException:
            self._give_back(self._lengths)
            raise
        self._set(ends)
        return (o, lses) if return_lse else o

    def _compress(
        self, compress: Compress, counts: Sequence[int], new: tuple[Tensor, Tensor], call: Call
    ) -> dict[str, Tensor]:
        """k_cmp and v_cmp of the blocks that new tokens complete, then zeros; sources are kept."""
        stride, blocks, rows, row = self.config.stride, [], [], 0
        starts = [0, *accumulate(counts)]
        for b, (length, count) in enumerate(zip(self._lengths, counts)):
            first, end = self._compressed((length, length + count))
            rows += range(row, row + end - first)
            row += self.config.most_completed(count)
            blocks += [(b, length, starts[b], block * stride) for block in range(first, end)]
        new = tuple(x.flatten(0, -3) for x in new)
        kept = tuple(self.sources.get(name, self.caches[f"{name}_cache"]) for name in "kv")
        results = [call.q.new_zeros(row, *x.shape[2:]) for x in kept]
        if blocks:
            b, length, start, token = sent(blocks, new[0].device).T.unsqueeze(-1)
            token = token + torch.arange(self.config.span, device=token.device)
            old, row_of_new = (token < length)[..., None, None], (start + token - length).clamp(min=0)
            slots = self._slots(b.expand_as(token), token.minimum(length - 1).clamp(min=0))
            tokens = []
            for cache, x, scale in zip(kept, new, map(call.cache.scale, "kv")):
                stored = cache[slots], in_cache_dtype(x, scale, cache.dtype)[row_of_new]
                tokens.append(torch.where(old, *(dequantise(x, scale, call.q.dtype) for x in stored)))
            for into, x in zip(results, compress(*tokens), strict=True):
                into[sent(rows, into.device)] = x.to(into.dtype)
        if self.sources:
            spans = [(b, self._lengths[b] + i) for b, count in enumerate(counts) for i in range(count)]
            slots = self._slots(*sent(spans, new[0].device).T)
            for cache, x in zip(kept, new):
                cache[slots] = x.detach().to(cache.dtype)
        return {name: x if call.packed else x.unflatten(0, (call.B, -1)) for name, x in zip(COMPRESSED_CACHES, results)}

    def _slots(self, b: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Index of the tokens of sequences b in the caches."""
        if not self._pages:
            return b, token
        pages = self._pages["page_table"]
        return pages.table[b, token // pages.size].long(), token % pages.size

    @torch.no_grad()
    def calibrate(self, k: Tensor, v: Tensor, **others: Tensor) -> None:
        """Set the scales of an empty cache in float8_e4m3fn by a prompt: its largest magnitude is half of the range.

        Args:
            k, v: [..., Hkv, D] and [..., Hkv, Dv], such as all tokens of a prompt.
            others: the same of further caches: k_win, v_win, k_index, k_cmp, v_cmp. Without, compressed keys and those
                of the window have the scales of k and v, which means do not exceed; the index keeps its own.

        Raises:
            TypeError, ValueError: another dtype, a cache with tokens, whose meaning would change, or a wrong tensor.
        """
        if not self.scales or any(self._lengths):
            of = f"lengths {self.lengths}" if self.scales else f"dtype {self.caches['k_cache'].dtype}"
            raise ValueError(f"calibrate is for an empty cache in float8_e4m3fn, got one of {of}")
        prompt = dict(k=k, v=v) | others
        for name, x in prompt.items():
            if f"{name}_cache" not in self.caches:
                raise ValueError(f"{name} must be of one of the caches {', '.join(self.caches)}, got none")
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise TypeError(f"{name} must be a tensor of floating point, got {getattr(x, 'dtype', x)!r}")
            row = self.caches[f"{name}_cache"].shape[2:]
            if x.shape[-2:] != row or not x.numel():
                raise ValueError(f"{name} must have shape [..., {row[0]}, {row[1]}], got {tuple(x.shape)}")
        for name, scale in self.scales.items():
            name = name.removesuffix("_scale")
            x = prompt.get(name, None if name == "k_index" else prompt[name[0]])
            if x is not None:
                most = x.abs().amax(-1).reshape(-1, len(scale)).amax(0).float()
                scale.copy_(torch.where(most > 0, most * 2 / MOST, 1))

    def crop(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Go back to the first tokens of each sequence.

        Args:
            lengths: tokens to keep: of each sequence, or an int, at most this many of each; 0 empties it.

        Raises:
            TypeError, ValueError: another number of lengths, or one out of range; the cache is unchanged.
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
        """Raise the capacity of a contiguous cache: its tensors are copied to larger ones.

        Args:
            max_seqlen: the most tokens of a sequence from now on.

        Raises:
            TypeError, ValueError: the cache has pages, or a larger capacity already.
        """
        require_int("max_seqlen", max_seqlen, least=self.max_seqlen)
        if self._pages:
            raise ValueError(f"grow is for a contiguous cache, got one of pages and max_seqlen={max_seqlen}")
        for caches in (self.caches, self.sources):
            for name, cache in caches.items():
                S = self.config.compressed_length(max_seqlen) if "cmp" in name else max_seqlen
                caches[name] = cache.new_empty(cache.shape[0], S, *cache.shape[2:])
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
                cache.copy_(cache[sent(index, cache.device)])
        self._set([self._lengths[i] for i in index])

    def read_lengths(self) -> None:
        """Read ``lengths`` from ``cache_seqlens``, which calls of `nsa_with_kvcache` on ``caches`` have changed; waits.

        Raises:
            ValueError: the cache has pages, which such calls do not get, or a length is beyond its capacity.
        """
        lengths = self.cache_seqlens.tolist()
        if self._pages:
            raise ValueError("read_lengths is for a contiguous cache, got one of pages, whose calls count")
        if not all(0 <= length <= self.max_seqlen for length in lengths):
            raise ValueError(f"cache_seqlens must be 0 to {self.max_seqlen}, the capacity, got {lengths}")
        self._lengths = lengths

    def _reserve(self, counts: Sequence[int]) -> list[int]:
        """The new lengths, with pages reserved for this many more tokens of each sequence; or raise before any is."""
        ends = [length + n for length, n in zip(self._lengths, counts)]
        for b, end in enumerate(ends):
            if end > self.max_seqlen:
                raise ValueError(f"sequence {b} must have at most {self.max_seqlen} tokens, the capacity, got {end}")
        both = zip((self._lengths, self._compressed(self._lengths)), (ends, self._compressed(ends)))
        wanted = [(pages, list(zip(*spans))) for pages, spans in zip(self._pages.values(), both)]
        for pages, spans in wanted:
            if (lacking := pages.lacking(spans)) > 0:
                raise ValueError(f"the pool must have pages for new tokens, got {len(pages.users)}, {lacking} too few")
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
            self.cache_seqlens.copy_(sent(self._lengths, self.cache_seqlens.device, torch.int32))


def _listed(name: str, numbers: object) -> list:
    """The numbers of a sequence, or of a tensor of one dimension."""
    numbers = numbers.tolist() if isinstance(numbers, Tensor) else numbers
    if not isinstance(numbers, Sequence):
        raise TypeError(f"{name} must be a sequence of ints, got {numbers!r}")
    return list(numbers)
