"""Block selection in PyTorch, for query tiles and for tokens; it carries no gradient.

A tile's pooled query makes scores of its own, before any attention. A token chooses by the probabilities of the
compressed branch, which therefore runs first and hands over its log-sum-exp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import accumulation_dtype, mean_scale
from nsa_layer.config import NSAConfig

# Elements of the score matrix held at once; scores are computed for as many query tiles as fit.
SCORE_BUDGET, CPU_SCORE_BUDGET = 1 << 26, 1 << 19
NO_BLOCK = (1 << 32) - (1 << 63)


@torch.no_grad()
def choose_blocks(
    q: torch.Tensor, k_cmp: torch.Tensor, *, config: NSAConfig, causal: bool, softmax_scale: float
) -> torch.Tensor:
    """The blocks listed for each query tile.

    Args:
        q: [B, T, Hq, D].
        k_cmp: [B, Tc, Hkv, D], compressed keys as `compress` gives them (fp32 or fp64).

    Returns:
        int32 [B, Hs, M, n], ascending, padded with -1; Hs = Hkv, or Hq with ``rule="seed"``; n =
        ``config.list_width(T)``.

    Source: section 3.3 of arXiv:2502.11089, per query tile instead of per query.
    """
    B, T, Hq, _ = q.shape
    Hs = Hq if config.rule == "seed" else k_cmp.shape[2]
    M, n, N = config.num_tiles(T), config.list_width(T), config.num_blocks(T)
    asking = tile_queries(q, config=config, causal=causal).movedim(1, 2)  # [B, Hq, M, D]
    asking = asking * softmax_scale
    # Block j's only compressed key that lies wholly inside it starts where the block starts.
    keys = k_cmp[:, :: config.block_size // config.stride].movedim(1, 2)  # [B, Hkv, Nc, D]
    chosen = torch.empty(B, Hs, M, n, dtype=torch.int32, device=q.device)
    step = max(1, SCORE_BUDGET // max(1, B * Hq * N))
    for begin in range(0, M, step):
        tiles = torch.arange(begin, min(begin + step, M), device=q.device)
        forced, complete, candidate = block_roles(tiles, T, config=config, causal=causal)
        scores = block_scores(asking[:, :, begin : begin + step], keys, complete, config=config)
        scores = F.pad(scores, (0, N - scores.shape[-1])) if config.chooses_own else scores
        chosen[:, :, begin : begin + step] = _list_blocks(scores, forced, candidate, n, config=config)
    return chosen


@torch.no_grad()
def choose_blocks_by_token(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    *,
    config: NSAConfig,
    causal: bool,
    softmax_scale: float,
    first: int | torch.Tensor = 0,
    S: int | None = None,
) -> torch.Tensor:
    """The blocks that each token lists.

    Args:
        q: [B, T, Hq, D].
        k_cmp: [B, Tc, Hkv, D], compressed keys as the compressed branch reads them: rounded.
        lse: [B, Hq, T], the branch's log-sum-exp, -inf where a row sees no key.
        first: position of the first query, an int64 [] if it is a tensor.
        S: tokens of the sequence; None: T.

    Returns:
        int32 [B, Hkv, T, n], ascending, padded with -1; n = ``config.list_width(S)``.

    Source: equations 8 to 12 of arXiv:2502.11089.
    """
    B, T, Hq, _ = q.shape
    Tc, Hkv = k_cmp.shape[1:3]
    S = T if S is None else S
    n, dtype = config.list_width(S), accumulation_dtype(q.dtype)
    keys = k_cmp.permute(0, 2, 3, 1).to(dtype)  # [B, Hkv, D, Tc]
    first_seen = torch.arange(Tc, device=q.device) * config.stride + config.offset
    chosen = torch.empty(B, Hkv, T, n, dtype=torch.int32, device=q.device)
    budget = CPU_SCORE_BUDGET if q.device.type == "cpu" else SCORE_BUDGET
    step = max(1, budget // max(1, B * Hq * config.num_blocks(S)))
    for begin in range(0, T, step):
        own = slice(begin, min(begin + step, T))
        tokens = torch.arange(own.start, own.stop, device=q.device) + first
        asking = q[:, own].to(dtype).unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, m, D]
        scores = (asking.flatten(2, 3) @ keys).unflatten(2, asking.shape[2:4]).mul_(softmax_scale)
        p = scores.sub_(lse[..., own].unflatten(1, (Hkv, -1)).unsqueeze(-1)).exp_()
        if causal:
            p = p.masked_fill_(first_seen > tokens[:, None], 0)
        forced, _, candidate = block_roles(tokens, S, config=config, causal=causal)
        chosen[:, :, own] = _list_blocks(_in_blocks(p.sum(2), S, config), forced, candidate, n, config=config)
    return chosen


def _in_blocks(p: torch.Tensor, S: int, config: NSAConfig) -> torch.Tensor:
    """Probabilities of compressed keys [..., Tc] -> importance of blocks [..., N].

    Key i covers the strides i to ``i + span // stride - 1`` of ``stride`` tokens each, and counts once for each of them
    that lies in the block.
    """
    in_key, in_block = config.span // config.stride, config.block_size // config.stride
    strides = p.new_zeros(*p.shape[:-1], max(config.num_blocks(S) * in_block, p.shape[-1] + in_key - 1))
    for shift in range(in_key):
        strides[..., shift : shift + p.shape[-1]] += p
    end = config.num_blocks(S) * in_block
    return sum(strides[..., first:end:in_block] for first in range(in_block))


def sorted_lists(index: torch.Tensor, N: int, end: torch.Tensor | None = None) -> torch.Tensor:
    """Lists of the caller's as `choose_blocks` would give them: ascending, each block once, padded with -1.

    Args:
        index: int32 [B, Hs, M, n], in any order.
        N: blocks of the sequence.
        end: int64 [M], one past the last block that a tile may list; None: N.
    """
    most = N if end is None else end[:, None].clamp(max=N)
    index = index.where((index >= 0) & (index < most), N).sort(-1).values
    index[..., 1:] = index[..., 1:].where(index.diff() > 0, N)
    index = index.sort(-1).values
    return index.where(index < N, -1)


def tile_queries(q: torch.Tensor, *, config: NSAConfig, causal: bool) -> torch.Tensor:
    """The pooled query of each tile: [B, T, Hq, D] -> [B, M, Hq, D] in fp32 (fp64 for fp64)."""
    B, T, Hq, D = q.shape
    M, size = config.num_tiles(T), config.q_tile
    own = config.rule == "seed" or not causal
    # Causal, the mean ends at the tile's first query, as if the sequence had started size - 1 tokens earlier.
    front = 0 if own else size - 1
    padded = q.new_zeros(B, M * size, Hq, D, dtype=accumulation_dtype(q.dtype))
    kept = min(T, M * size - front)
    padded[:, front : front + kept] = q[:, :kept]
    total = padded.div_(mean_scale(size)).unflatten(1, (M, size)).sum(2)
    first = torch.arange(M, device=q.device) * size
    count = (T - first).clamp(max=size) if own else (first + 1).clamp(max=size)
    return total / (count.to(total.dtype) / mean_scale(size)).view(1, M, 1, 1)


def block_roles(tiles: torch.Tensor, T: int, *, config: NSAConfig, causal: bool) -> tuple[torch.Tensor, ...]:
    """Masks of the forced, the complete and the candidate blocks of some tiles: three bool [tiles, N]."""
    l, size, N = config.block_size, config.q_tile, config.num_blocks(T)
    block = torch.arange(N, device=tiles.device)
    t0 = (tiles * size).unsqueeze(1)
    last = (t0 + size - 1).clamp(max=T - 1)
    ends, begun = block * l + l - 1, block <= last // l
    complete = (ends < T).expand(len(tiles), N)
    if causal:
        complete = complete & (begun if config.rule == "seed" else ends <= t0)
    candidate = begun if causal and config.chooses_own else complete
    forced = (block < config.init_blocks) & (begun | (not causal))
    if config.local_blocks:
        forced = forced | (begun & (block > t0 // l - config.local_blocks))
    if config.forces_too_many:  # the last ones up to the tile's end, then the first ones behind it
        count = forced.cumsum(1)
        dropped = (count.gather(1, last // l) - config.block_counts).clamp(min=0)
        forced = forced & (count > dropped) & (count <= dropped + config.block_counts)
    return forced, complete, candidate


def block_scores(
    asking: torch.Tensor, keys: torch.Tensor, complete: torch.Tensor, *, config: NSAConfig
) -> torch.Tensor:
    """Block importances: [B, Hq, m, D] x [B, Hkv, Nc, D] -> [B, Hs, m, Nc], 0 where a block is not complete."""
    B, Hq, m, D = asking.shape
    Hkv, Nc = keys.shape[1:3]
    G = Hq // Hkv
    scores = asking.reshape(B, Hkv, G * m, D) @ keys.mT
    scores = scores.view(B, Hkv, G, m, Nc)
    if config.rule == "seed":
        return scores.flatten(1, 2)
    visible = complete[:, :Nc]
    scores = scores.masked_fill_(~visible, float("-inf")).softmax(-1)
    # A tile without complete blocks divides 0 by 0.
    return scores.masked_fill_(~visible, 0.0).sum(2)


def _list_blocks(
    scores: torch.Tensor, forced: torch.Tensor, candidate: torch.Tensor, n: int, *, config: NSAConfig
) -> torch.Tensor:
    """Forced blocks and the best candidates, ascending: int32 [B, Hs, m, n]."""
    N, Nc = forced.shape[1], scores.shape[-1]
    listed = forced.expand(*scores.shape[:-1], N).clone()
    wanted = min(config.block_counts, Nc)
    if wanted:
        eligible = (candidate & ~forced)[:, :Nc]
        best, rank = torch.topk(_tie_broken(scores, eligible), wanted, dim=-1)
        room = (config.block_counts - forced.sum(1, keepdim=True)).clamp(min=0)
        taken = (best >= NO_BLOCK) & (torch.arange(wanted, device=scores.device) < room)
        listed.scatter_(-1, rank, taken | listed.gather(-1, rank))
    # Listed block j sorts as j, any other as N: the first n are the list, in order.
    order = torch.arange(N, dtype=torch.int32, device=scores.device).where(listed, N)
    order = torch.topk(order, n, dim=-1, largest=False, sorted=True).values
    return order.masked_fill(order == N, -1)


def _tie_broken(scores: torch.Tensor, eligible: torch.Tensor) -> torch.Tensor:
    """int64 keys that order as (score, earlier block first) and are all different; below `NO_BLOCK` if not eligible.

    `torch.topk` promises nothing about equal values. The score's bits, made monotone, go above the block number. fp64
    scores are compared as fp64 would be, by rank, since 64 bits leave no room for the block number.
    """
    Nc = scores.shape[-1]
    if scores.dtype == torch.float64:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        monotone = torch.empty_like(order).scatter_(
            -1, order, torch.arange(Nc, 0, -1, device=order.device).expand_as(order)
        )
        return monotone.masked_fill(~eligible, torch.iinfo(torch.int64).min)
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    high = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(~eligible, torch.iinfo(torch.int32).min)
    low = torch.arange(Nc - 1, -1, -1, dtype=torch.int32, device=scores.device)
    return torch.stack((low.expand_as(high), high), dim=-1).view(torch.int64).squeeze(-1)
