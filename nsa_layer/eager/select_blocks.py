"""Selection of blocks in PyTorch, for query tiles and for tokens; it carries no gradient.

A tile's pooled query makes scores of its own. A token selects by the probabilities of the compressed branch, which
therefore runs first and hands over its log-sum-exp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nsa_layer.call import CallSpec, accumulation_dtype, mean_scale
from nsa_layer.config import NSAConfig
from nsa_layer.eager.index import score_blocks

Tensor = torch.Tensor
# Elements of the score matrix held at once; scores are computed for as many query tiles as fit.
CPU_SCORE_BUDGET, GPU_SCORE_BUDGET = 1 << 19, 1 << 26


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse_cmp: Tensor | None,
    *,
    spec: CallSpec,
    q_offset: int = 0,
    S: int | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The blocks that each query tile lists, and with an index their scores.

    Args:
        q: [B, T, Hq, D]; of an index [B, T, Hkv, Di].
        k_cmp: [B, Tc, Hkv, D], compressed keys: by token as the compressed branch reads them, else not rounded; keys of
            an index [B, S, Hkv or 1, Di].
        lse_cmp: [B, T, Hq], the compressed branch's log-sum-exp, -inf where a row sees no key; read by token alone.
        q_offset: position of the first query, 0 except by token; S: tokens of the sequence, by default T.
        width: of a list, at least ``config.list_width(S)``, which is the default.

    Returns:
        int32 [B, M, Hs, width], ascending, padded with -1; Hs = Hkv, or Hq with ``rule="seed"``. Scores are in the
        accumulation dtype, -inf for padding.

    Source: equations 8 to 12 of arXiv:2502.11089; for tiles its section 3.3, per tile instead of per query.
    """
    config, causal, (B, T, Hq, _), Hkv = spec.config, spec.causal, q.shape, k_cmp.shape[2]
    by_index = config.rule == "index"
    S, acc = T if S is None else S, accumulation_dtype(q.dtype)
    M, N, Hs = config.num_tiles(T), config.num_blocks(S), Hkv if config.rule == "nsa" else Hq
    width = config.list_width(S) if width is None else width
    if not config.by_token:
        q = tile_queries(q, config=config, causal=causal)
        # Block j's only compressed key that lies wholly inside it starts where the block starts.
        k_cmp = k_cmp[:, :: config.block_size // config.stride]
    keys = k_cmp.to(acc).permute(0, 2, 3, 1)  # [B, Hkv, D, Tc]
    lists = torch.full((B, M, Hs, width), -1, dtype=torch.int32, device=q.device)
    values = keys.new_full(lists.shape, -torch.inf) if by_index else None
    budget = CPU_SCORE_BUDGET if q.device.type == "cpu" else GPU_SCORE_BUDGET
    step = max(1, budget // (B * Hq * (S if by_index else N)))
    for begin in range(0, M, step):
        rows = slice(begin, min(begin + step, M))
        tiles = torch.arange(rows.start, rows.stop, device=q.device) + q_offset
        forced, complete, candidate = block_roles(tiles, S, config=config, causal=causal)
        if by_index:
            asking = q[:, rows].to(acc).transpose(1, 2)
            scores = score_blocks(asking, keys, tiles, config=config, scale=spec.index_scale)
        else:
            asking = q[:, rows].to(acc).unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, m, D]
            scores = (asking.flatten(2, 3) @ keys).unflatten(2, asking.shape[2:4]).mul_(spec.softmax_scale)
            if config.by_token:
                lse = lse_cmp[:, rows].unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1)
                first_seen = torch.arange(keys.shape[-1], device=q.device) * config.stride + config.offset
                hidden = (first_seen > tiles[:, None]) & causal
                p = scores.sub_(lse.unsqueeze(-1)).exp_().masked_fill_(hidden, 0)
                scores = _in_blocks(p.sum(2), S, config)
            elif config.rule == "seed":
                scores = scores.flatten(1, 2)
            else:  # a tile without complete blocks divides 0 by 0
                hidden = ~complete[:, : keys.shape[-1]]
                scores = scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0).sum(2)
            scores = F.pad(scores, (0, N - scores.shape[-1]))
        selected = _list_blocks(scores, forced, candidate, config.list_width(S))
        lists[:, rows, :, : selected.shape[-1]] = selected.transpose(1, 2)
        if by_index:
            scores = scores.gather(-1, selected.clamp(min=0)).masked_fill_(selected < 0, -torch.inf)
            values[:, rows, :, : selected.shape[-1]] = scores.transpose(1, 2)
    return lists, values


def _in_blocks(p: Tensor, S: int, config: NSAConfig) -> Tensor:
    """Probabilities of compressed keys [..., Tc] -> importance of blocks [..., N]: a key counts once for each of its
    strides that lies in the block."""
    in_key, in_block = config.span // config.stride, config.block_size // config.stride
    strides = p.new_zeros(*p.shape[:-1], max(config.num_blocks(S) * in_block, p.shape[-1] + in_key - 1))
    for shift in range(in_key):
        strides[..., shift : shift + p.shape[-1]] += p
    end = config.num_blocks(S) * in_block
    return sum(strides[..., first:end:in_block] for first in range(in_block))


def tile_queries(q: Tensor, *, config: NSAConfig, causal: bool) -> Tensor:
    """The pooled query of each tile: [B, T, Hq, D] -> [B, M, Hq, D] in fp32 (fp64 for fp64)."""
    B, T, Hq, D = q.shape
    M, size = config.num_tiles(T), config.q_tile
    # Causal, the mean ends at the tile's first query, as if the sequence had started size - 1 tokens earlier.
    front = size - 1 if causal and config.rule == "nsa" else 0
    padded = q.new_zeros(B, M * size, Hq, D, dtype=accumulation_dtype(q.dtype))
    end = min(T, M * size - front)
    padded[:, front : front + end] = q[:, :end]
    total = padded.div_(mean_scale(size)).unflatten(1, (M, size)).sum(2)
    first = torch.arange(M, device=q.device) * size
    count = (first + 1 if front else T - first).clamp(max=size)
    return total / (count.to(total.dtype) / mean_scale(size)).view(1, M, 1, 1)


def block_roles(tiles: Tensor, T: int, *, config: NSAConfig, causal: bool) -> tuple[Tensor, ...]:
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


def _list_blocks(scores: Tensor, forced: Tensor, candidate: Tensor, n: int) -> Tensor:
    """Forced blocks and the best candidates, the earlier of equal ones: [B, Hs, m, N] -> int64 [B, Hs, m, n]."""
    N = scores.shape[-1]
    scores = scores.masked_fill(~candidate, -torch.inf).masked_fill_(forced, torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    listed = (forced | candidate).expand(scores.shape).gather(-1, best)
    best = best.where(listed, N).sort(-1).values
    return best.masked_fill(best == N, -1)
