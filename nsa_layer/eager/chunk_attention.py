"""Attention of every query to consecutive keys, by chunks of queries: the compressed branch and the sliding window.

Backward computes the probabilities again from the saved LSE. Chunks come in order, so that the same input gives the
same bits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_layer.call import CallSpec, accumulation_dtype, mean_scale

Tensor = torch.Tensor
# Query t (one, or a tensor of them) -> (begin, end): it sees the keys begin .. end - 1 that exist. Both rise with t.
Visible = Callable[[Any], tuple[Any, Any]]
# Scores held at once, over all heads. A CPU wants a chunk to stay in its cache, a GPU wants few launches.
CPU_CHUNK, GPU_CHUNK = 1 << 19, 1 << 24
# Queries of a chunk. A GPU sums a product one term after another: dk errs by the root of the rows of a chunk.
CHUNK_QUERIES = 256


def visible_compressed(spec: CallSpec, q_offset: int, Tc: int) -> Visible:
    """Compressed keys of queries, the first of which is at position `q_offset`."""
    config = spec.config
    if not spec.causal:
        return lambda t: (0, Tc)
    return lambda t: (0, (t + q_offset - config.offset) // config.stride + 1)


def visible_window(spec: CallSpec, q_offset: int) -> Visible:
    """Keys of the sliding window of queries, the first of which is at position `q_offset`."""
    back = spec.config.window_reach
    ahead = 0 if spec.causal else back
    return lambda t: (t + q_offset - back, t + q_offset + ahead + 1)


def attend_chunks(q: Tensor, k: Tensor, v: Tensor, visible: Visible, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [B, T, Hq, D] to the visible ones of k [B, S, Hkv, D] and v [B, S, Hkv, Dv].

    Returns:
        o [B, T, Hq, Dv] in q's dtype and the LSE [B, T, Hq]; a row that sees no key gives 0 and -inf.
    """
    B, Hkv = len(q), k.shape[2]
    q, k, v = by_head(q, Hkv), by_head(k, Hkv).squeeze(2), by_head(v, Hkv).squeeze(2)
    o = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
    for rows, keys in _chunks(q, k, visible):
        scores = _scores(q[:, rows], k[:, keys], rows, keys, visible, softmax_scale)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill_(top == -torch.inf, 0)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        # The sum of p * v is above its mean. fp16 has no range for smaller p, and no v that would need them.
        scale = 1 if v.dtype == torch.float16 else mean_scale(p.shape[-1])
        weighted = dot(p.div_(scale).to(v.dtype), v[:, keys]).div_(total.masked_fill(total == 0, 1) / scale)
        o[:, rows] = weighted.view_as(o[:, rows])
        lse[:, rows] = total.log_().add_(top).view_as(lse[:, rows])
    return by_token(o, B), by_token(lse, B)


def attend_chunks_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Visible, lse: Tensor, weight: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of ``weight * o``, shaped like q, k and v, and do . o, all in the accumulation dtype; do . o, lse
    and weight are [B, T, Hq]."""
    B, Hkv = len(q), k.shape[2]
    do, q, lse, weight = (by_head(x, Hkv) for x in (do, q, lse, weight))
    k, v = by_head(k, Hkv).squeeze(2), by_head(v, Hkv).squeeze(2)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    lse, do_o = lse.masked_fill(lse == -torch.inf, torch.inf), torch.zeros_like(lse)
    for rows, keys in _chunks(q, k, visible):
        q_i, do_i, k_i, v_i = q[:, rows], do[:, rows].flatten(1, 2), k[:, keys], v[:, keys]
        p = _scores(q_i, k_i, rows, keys, visible, softmax_scale)
        p = p.sub_(lse[:, rows].flatten(1).unsqueeze(-1)).exp_()
        dp = dot(do_i, v_i.mT)
        # A chunk holds every key of its rows: delta needs no output; a row that sees one key gets exactly 0.
        delta = (p * dp).sum(-1, keepdim=True)
        do_o[:, rows] = delta.view_as(do_o[:, rows])
        p = p.mul_(weight[:, rows].flatten(1).unsqueeze(-1))
        dv[:, keys] += dot(p.to(q.dtype).mT, do_i)
        ds = dp.sub_(delta).mul_(p).mul_(softmax_scale).to(q.dtype)
        dq[:, rows] = dot(ds, k_i).view_as(q_i)
        dk[:, keys] += dot(ds.mT, q_i.flatten(1, 2))
    return by_token(dq, B), by_token(dk.unsqueeze(2), B), by_token(dv.unsqueeze(2), B), by_token(do_o, B)


def _chunks(q: Tensor, k: Tensor, visible: Visible) -> Iterator[tuple[slice, slice]]:
    """Queries of q [N, T, G, D] that are computed together, and all keys that any of them sees; without keys none."""
    (N, T, G), S = q.shape[:3], k.shape[1]
    begin, end = visible(T - 1)
    longest = max(1, min(S, end - begin))
    budget = CPU_CHUNK if q.device.type == "cpu" else GPU_CHUNK
    # Chunks longer than a window would read mostly pairs that it excludes.
    step = min(CHUNK_QUERIES, max(64, longest), budget // (N * G * max(1, min(S, 2 * longest))))
    for first in range(0, T, max(1, step)):
        last = min(first + max(1, step), T)
        begin, end = max(0, visible(first)[0]), min(S, visible(last - 1)[1])
        if begin < end:
            yield slice(first, last), slice(begin, end)


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, visible: Visible, scale: float) -> Tensor:
    """Scaled scores of a chunk, -inf for hidden keys: [N, t, G, D] x [N, s, D] -> [N, t * G, s]."""
    t, s = (torch.arange(x.start, x.stop, device=q.device) for x in (rows, keys))
    begin, end = visible(t[:, None, None])
    scores = dot(q.flatten(1, 2), k.mT, scale)
    scores.unflatten(1, q.shape[1:3]).masked_fill_((s < begin) | (s >= end), -torch.inf)
    return scores


def by_head(x: Tensor, H: int) -> Tensor:
    """[B, T, H * G, ...] -> [B * H, T, G, ...]"""
    return x.unflatten(2, (H, -1)).transpose(1, 2).flatten(0, 1).contiguous()


def by_token(x: Tensor, B: int) -> Tensor:
    """[B * H, T, G, ...] -> [B, T, H * G, ...]"""
    return x.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)


def to_compute_dtype(x: Tensor) -> Tensor:
    """x as it enters products and sums: on a CPU in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)) if x.device.type == "cpu" else x


def dot(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` times [N, I, K] x [N, K, J] -> [N, I, J] in the accumulation dtype, without rounding to half precision
    on the way where the device can do so."""
    acc = accumulation_dtype(a.dtype)
    if a.dtype == acc:
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)
    return (torch.bmm(a, b, out_dtype=acc) if a.is_cuda else (a @ b).to(acc)).mul_(scale)
