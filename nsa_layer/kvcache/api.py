"""`nsa_with_kvcache`: attention of new queries to sequences whose keys and values are in caches."""

from __future__ import annotations

import torch

from nsa_layer import support
from nsa_layer.cached_call import check_call
from nsa_layer.call import Call, KVCache, Lses
from nsa_layer.config import NSAConfig, require_bools
from nsa_layer.kvcache import operator

Tensor = torch.Tensor


def nsa_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_cmp_cache: Tensor | None = None,
    v_cmp_cache: Tensor | None = None,
    cmp_page_table: Tensor | None = None,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    k_win_cache: Tensor | None = None,
    v_win_cache: Tensor | None = None,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    k_index_cache: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_win_scale: Tensor | None = None,
    v_win_scale: Tensor | None = None,
    k_index_scale: Tensor | None = None,
    k_cmp_scale: Tensor | None = None,
    v_cmp_scale: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gates: Tensor | None = None,
    compress_k_weight: Tensor | None = None,
    compress_v_weight: Tensor | None = None,
    config: NSAConfig,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    block_indices: Tensor | None = None,
    num_splits: int = 0,
    out: Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Lses]:
    """Native Sparse Attention of a sequence's last tokens to all of it, in the conventions of FlashAttention's caches.

    One token decodes, several prefill a chunk or verify a draft: together they give what `nsa` gives for the whole
    sequence. Causal. Nothing carries a gradient: backward raises RuntimeError where a tensor of the call needs one.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D] with ``cu_seqlens_q``: the last T tokens of each sequence.
        k_cache, v_cache: [B, S, Hkv, D or Dv], or with ``page_table`` [pages, page, Hkv, D or Dv], page a multiple or a
            divisor of the block. As of all caches, the last dimension is contiguous, and the others have any strides,
            as pages by head, [pages, Hkv, page, D], transposed. All have q's dtype, or all are in torch.float8_e4m3fn.
        k: [B, T, Hkv, D] or [total, Hkv, D], v: the same with Dv: the keys and values of q's tokens, written to the
            caches first. None: they are in the caches.
        cache_seqlens: int32 [B] or an int, tokens of each sequence in the caches: before k and v are added, or where
            there are none all of them, q's included.
        page_table, cmp_page_table: int32 [B, n], the pages of each sequence in order; what lies behind its last token
            is not read.
        cache_batch_idx: int32 [B], rows of contiguous caches of any batch; no two the same. None: row b for sequence b.
        cu_seqlens_q: int32 [B + 1], starts of the packed sequences' queries and their total; as in `nsa`, on q's device
            or on the CPU. On a GPU the kernels read them there, without ``validate`` and where copies of caches need
            at most 2 GiB; otherwise the host waits for them.
        max_seqlen_q: an upper bound of a packed sequence's queries: checked where their numbers are known.
        k_cmp_cache, v_cmp_cache: [B, Sc, Hkv, ..], Sc at least ``config.compressed_length(S)``, or with
            ``cmp_page_table`` [pages, any number, Hkv, ..]: compressed keys and values, made from the cached tokens by
            the call that completes their block. None: every call computes them again.
        k_cmp, v_cmp: [B, m, Hkv, ..] with m = ceil(T / compress_stride), packed [sum of m, Hkv, ..]: compressed keys
            and values of the caller's, written instead of means: first of the blocks that this call completes, the
            rest is not read.
        k_win, v_win: like k and v: keys and values of the sliding window's own, written to their caches.
        k_win_cache, v_win_cache: like k_cache and v_cache. None: the window reads k_cache and v_cache.
        q_index, k_index, index_scale: as in `nsa`, of q's tokens; k_index where k is, written to its cache.
        k_index_cache: [B, S, Hkv or 1, Di] or [pages, page, Hkv or 1, Di], which ``rule="index"`` needs.
        k_scale, v_scale, ...: fp32 [heads], of caches in float8_e4m3fn: x is stored as x * (1 / scale), rounded, at
            most 448 in magnitude, and read as that times the scale, by its own call too. Compressed keys are means of
            what is read, in fp32, stored by a scale of their own. None: 1.
        gate_weight, gates, compress_k_weight, compress_v_weight, softmax_scale: as in `nsa`.
        config: block sizes, window, the rule that chooses blocks: each token for itself.
        block_indices: as in `nsa`; tiles of ``config.q_tile`` queries count from the call's first.
        num_splits: splits (KV) of a sequence's keys in the kernels of few queries, at most 8, and 48 of compressed keys
            with their own launch; 0: chosen by the kernels. Other calls ignore it.
        out: like the output, to be written to, with an address for each element. What is returned is this tensor, or
            where a tensor of the call needs a gradient a copy, whose backward raises.
        return_lse: also return the branches' log-sum-exps.
        validate: look at ``cache_seqlens``, tables, indices and scales before anything is written, which waits for a
            GPU: they must lead to slots in the caches, name no page of a sequence twice, and let no sequence write
            where another one writes or has tokens. Caches that are written to must not be expanded, nor overlap others.
            Without, a sequence that does not fit its caches writes nothing, and its rows are NaN.
        backend: as in `nsa`.

    Returns:
        o, [B, T, Hq, Dv] or [total, Hq, Dv]; with ``return_lse`` a pair of o and the log-sum-exps of the compressed,
        the selected and the sliding window's branch, [B, Hq, T] or [Hq, total] each; -inf without the branch.

    Raises:
        TypeError, ValueError: an argument is bad; the message names it, and nothing was written.
        NotImplementedError: ``q_tile`` above 1 without ``block_indices`` (a choice belongs to a tile, and the tile's
            queries may come in other calls); keys that are visible before their block is complete; what the kernels
            lack.

    Source: arguments as of FlashAttention's `flash_attn_with_kvcache`.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 1, 512, 2, 64)
        >>> q, k, v = (torch.randn(1, 1, heads, 64) for heads in (8, 2, 2))  # behind 300 tokens
        >>> nsa_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=300, config=NSAConfig()).shape
        torch.Size([1, 1, 8, 64])
    """
    cache = KVCache(
        k_cache, v_cache, cache_seqlens, page_table, cache_batch_idx, k_cmp_cache, v_cmp_cache, cmp_page_table,
        k_win_cache, v_win_cache, k_index_cache, k_scale, v_scale, k_win_scale, v_win_scale, k_index_scale,
        k_cmp_scale, v_cmp_scale, num_splits,
    )  # fmt: skip
    weights = gate_weight, gates, compress_k_weight, compress_v_weight
    own = k_cmp, v_cmp, k_win, v_win, q_index, k_index
    call = Call(q, k, v, *weights, *own, cu_seqlens=cu_seqlens_q, block_indices=block_indices, cache=cache)
    require_bools(validate=validate, return_lse=return_lse)
    static = dict(config=config, softmax_scale=softmax_scale, index_scale=index_scale)
    static |= dict(max_seqlen_q=max_seqlen_q, out=out)
    call = support.on_backend(backend, check_call(call, **static, backend=backend, validate=validate))
    o, lses = operator.attend_cached(call, out=out, validate=validate)
    return (o, lses) if return_lse else o
