"""Checks of the arguments of `nsa_with_kvcache`: errors come before anything is written."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa_layer import autocast, checks
from nsa_layer.cache_slots import refuse_aliases, refuse_overlap
from nsa_layer.call import CACHES, COMPRESSED_CACHES, DIFFERENTIABLE, SCALES, TOKEN_CACHES, Call, CallSpec, KVCache
from nsa_layer.config import NSAConfig, require_int
from nsa_layer.derivatives import refuse_transforms

Tensor = torch.Tensor
TABLES = ("page_table", "cmp_page_table", "cache_batch_idx")


def check_call(
    call: Call,
    *,
    config: NSAConfig,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
    backend: str | None = "reference",
    validate: bool = True,
    read: bool = False,
) -> Call:
    """The call as autocast casts it, with lists in int32 and its spec; raises for a wrong argument.

    Args:
        validate: check scales, and that tensors that are written to overlap no others, too.
        read: read packed lengths, as ``validate`` does.
    """
    refuse_transforms(*call.tensors, *call.cache, out)
    call = Call(*autocast.cast(*call.differentiable), *call[len(DIFFERENTIABLE) :])
    call = call._replace(block_indices=checks.lists_in_int32(call.block_indices))
    q, cache, packed, paged = call.q, call.cache, call.cu_seqlens is not None, call.cache.page_table is not None
    _check_cache_options(call, config)
    layout = (checks.PACKED if packed else checks.BATCH) | dict(keys="total" if packed else "B T")
    tensors, tokens = call.by_name | dict(out=out), len(TOKEN_CACHES)

    def check(*names: str, sizes: dict[str, int]) -> None:
        for name in names:
            checks.check_tensor(name, tensors[name], q, sizes, layout)

    check("q", sizes=(sizes := dict(branches=len(config.branches))))
    if packed:
        checks.check_starts(call.cu_seqlens, "cu_seqlens_q")
    else:
        sizes["Tc"] = config.most_completed(q.shape[1])
    sizes["B"] = call.B
    if not paged and cache.cache_batch_idx is None:
        sizes["rows"] = call.B
    check(*CACHES[:tokens], sizes=sizes)
    checks.check_groups(sizes, "k_cache")
    S = sizes["S"]
    sizes |= {} if paged else {"rows_cmp": sizes["rows"]}  # compressed pages have a table, and any size
    for name in CACHES[tokens:]:
        check(name, sizes=sizes if paged else dict(sizes))
        x, least = tensors[name], 1 if paged else config.compressed_length(S)
        if x is not None and x.shape[1] < least:
            of = "a page" if paged else f"{S} tokens"
            raise ValueError(f"{name} must have slots for {least} keys of {of}, got {x.shape[1]}")
    check(*TABLES, *["cache_seqlens"] * isinstance(cache.cache_seqlens, Tensor), sizes=sizes)
    check(*SCALES, sizes=sizes)
    _check_dtypes(call)
    _check_tables(call, config, S)
    checks.check_exclusive(call)
    scale = checks.check_scale(softmax_scale, q.shape[-1])
    call = call._replace(spec=CallSpec(config, True, scale, listed=call.block_indices is not None))
    call = with_query_lengths(call, max_seqlen_q, backend=backend, validate=validate or read)
    lengths = call.spec.lengths
    if packed and lengths is not None:
        sizes["blocks"] = sum(map(config.most_completed, lengths))
    check("q_index", sizes=sizes)
    for name in (*DIFFERENTIABLE[1:], "out"):
        check(name, sizes=dict(sizes))
    call = call._replace(spec=replace(call.spec, index_scale=checks.check_rule(call, config, sizes, index_scale)))
    _check_new(call)
    if out is not None:
        refuse_overlap("out", out)
    checks.check_lists(call)
    if validate:
        check_scales(call.cache)
        refuse_aliases(call, out)
    return call


def with_query_lengths(call: Call, max_seqlen_q: int | None, *, backend: str | None, validate: bool) -> Call:
    """`checks.with_lengths`: read, unless the kernels leave starts on the GPU and attend to all sequences at once."""
    capacity = call.cache.capacity
    if not (validate or torch.compiler.is_compiling() or checks.host_reads(backend, call.q, call.cu_seqlens)):
        from nsa_layer.cute.kvcache import needs_host_lengths

        bounded = checks.with_lengths(call, max_seqlen_q, read=False, suffix="_q")
        bounded = bounded._replace(spec=replace(bounded.spec, bound=min(bounded.spec.bound, capacity)))
        if not needs_host_lengths(bounded):
            return bounded
    call = checks.with_lengths(call, max_seqlen_q, read=True, suffix="_q")
    longest = max(call.spec.lengths or (0,)) if call.packed else call.q.shape[1]
    if longest > capacity:
        raise ValueError(f"q must have at most {capacity} tokens a sequence, the caches' capacity, got {longest}")
    return call


def _check_cache_options(call: Call, config: NSAConfig) -> None:
    checks.require_config(config)
    if call.block_indices is None:
        config.require_choice_by_token("nsa_with_kvcache")
    if config.computes("compressed") and config.offset < config.span - 1:
        raise NotImplementedError(
            f"nsa_with_kvcache with compress_offset={config.offset}: it shows keys that are made of tokens which are "
            f"not there yet; use compress_offset >= compress_size - 1 = {config.span - 1}"
        )
    require_int("num_splits", call.cache.num_splits, least=0)
    if not isinstance(call.cache.cache_seqlens, Tensor):
        require_int("cache_seqlens", call.cache.cache_seqlens, least=0)


def _check_dtypes(call: Call) -> None:
    """All caches have q's dtype, or all are in FP8; these alone have scales."""
    cache = call.cache
    for name in (*TOKEN_CACHES, *COMPRESSED_CACHES):
        x = getattr(cache, f"{name}_cache")
        if x is not None and x.dtype != cache.k_cache.dtype:
            raise TypeError(f"{name}_cache must have k_cache's dtype {cache.k_cache.dtype}, got {x.dtype}")
        if cache.scale(name) is not None and (x is None or not cache.in_fp8):
            of = "none" if x is None else x.dtype
            raise ValueError(f"{name}_scale is for {name}_cache in float8_e4m3fn, got it with {of}")


def _check_tables(call: Call, config: NSAConfig, S: int) -> None:
    """Tables belong to caches of pages, whose size is S."""
    cache, paged = call.cache, call.cache.page_table is not None
    if paged and cache.cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and page_table exclude each other, got both; permute the table's rows")
    if paged:
        require_page_size("k_cache's pages", S, config)
    if (paged and bool(cache.named(COMPRESSED_CACHES))) != (cache.cmp_page_table is not None):
        had = "none" if cache.cmp_page_table is None else "one"
        raise ValueError(f"cmp_page_table must be given with compressed caches on pages, and only then, got {had}")


def require_page_size(name: str, page: int, config: NSAConfig) -> None:
    """Raise ValueError for a page that is neither some blocks nor a part of one."""
    if page % config.block_size and config.block_size % page:
        raise ValueError(f"{name} must be a multiple or a divisor of block_size={config.block_size}, got {page}")


def _check_new(call: Call) -> None:
    """New keys and values have caches to be written to."""
    for name, x in call.by_name.items():
        if "win" in name and x is not None and not call.config.window_size:
            raise ValueError(f"{name} must be None where there is no window, got one with window_size=0")
    if (call.k is None) != (call.v is None):
        raise ValueError(f"k and v must be given together, or neither, got {'k' if call.v is None else 'v'} alone")
    for name in (*TOKEN_CACHES, *COMPRESSED_CACHES):
        x, cache = getattr(call, name), getattr(call.cache, f"{name}_cache")
        if x is not None and cache is None:
            raise ValueError(f"{name} needs {name}_cache to be written to, got none")
        if name in TOKEN_CACHES[2:] and cache is not None and (x is None) != (call.k is None):
            raise ValueError(f"{name} must be given with k, and only then, beside a {name}_cache, got one alone")


def check_scales(cache: KVCache) -> None:
    """Raise ValueError unless the scales of caches in FP8 are positive and finite; reads them."""
    for name in SCALES:
        x = getattr(cache, name)
        if x is not None and not ((x > 0) & x.isfinite()).all():
            raise ValueError(f"{name} must be positive and finite, got {x.tolist()}")
