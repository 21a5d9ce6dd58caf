"""Attention of every query to the listed blocks of its tile: the selected branch.

A query with G heads makes few rows for a list of many keys, so keys are not gathered for queries, but queries for
blocks: the pairs (query, listed block) of a chunk of queries are sorted by block and split into tiles of `TILE` pairs
of one block, whose scores are one small product each. A query's scores lie in as many tiles as its list is long; maxima
and sums go from pairs to queries and back. Shapes depend on sizes alone, so nothing waits for a GPU, and every sum has
a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from nsa_layer.call import CallSpec, accumulation_dtype, mean_scale
from nsa_layer.eager.chunk_attention import by_head, by_token, dot

Tensor = torch.Tensor
TILE = 32  # pairs of a tile
CPU_PAIRS, GPU_PAIRS = 1 << 11, 1 << 18  # of a chunk


def attend_lists(
    q: Tensor, k: Tensor, v: Tensor, lists: Tensor, *, spec: CallSpec, q_offset: int
) -> tuple[Tensor, Tensor]:
    """Attention of every query to the keys of the blocks listed for its tile, causal up to its own position.

    Args:
        q, k, v: [B, T, Hq, D], [B, S, Hkv, D] and [B, S, Hkv, Dv].
        lists: int32 [B, M, Hs, n], Hs = Hkv or Hq, of M tiles; in any order, -1 and blocks that do not exist are
            padding, a block that is named twice counts once.
        q_offset: position of the first query among the keys.

    Returns:
        o [B, T, Hq, Dv] in q's dtype and the LSE [B, T, Hq]; a row that sees no key gives 0 and -inf.
    """
    B, S, Hs = len(q), k.shape[1], lists.shape[2]
    q, k, v = by_head(q, Hs), *(blocks_of(x, Hs, spec.config.block_size) for x in (k, v))
    o = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    # A sum of p * v is above its mean. fp16 has no range for smaller v, and no v that would need them.
    scale = 1 if v.dtype == torch.float16 else mean_scale(lists.shape[3] * v.shape[2])
    for heads, rows, pairs in chunks_of_lists(q, lists, S, spec, q_offset):
        scores = pairs.scores(pairs.of_queries(q[heads, rows]), pairs.of_blocks(k[heads]), spec.softmax_scale)
        top = pairs.largest(scores.amax(-1))
        top = top.masked_fill_(top == -torch.inf, 0)
        p = scores.sub_(pairs.of_queries(top).unsqueeze(-1)).exp_()
        total = pairs.total(p.sum(-1))
        weighted = pairs.total(_product(p.to(v.dtype), pairs.of_blocks(v[heads] / scale)))
        o[heads, rows] = weighted.div_(total.masked_fill(total == 0, 1).unsqueeze(-1) / scale)
        lse[heads, rows] = total.log_().add_(top)
    return by_token(o, B), by_token(lse, B)


def attend_lists_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    lse: Tensor,
    weight: Tensor,
    *,
    spec: CallSpec,
    q_offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk and dv of ``weight * o``, shaped like q, k and v, and do . o, all in the accumulation dtype; do . o, lse
    and weight are [B, T, Hq]."""
    B, (S, Hkv), Hs = len(q), k.shape[1:3], lists.shape[2]
    do, q, lse, weight = (by_head(x, Hs) for x in (do, q, lse, weight))
    k, v = (blocks_of(x, Hs, spec.config.block_size) for x in (k, v))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    lse, do_o = lse.masked_fill(lse == -torch.inf, torch.inf), torch.empty_like(lse)
    for heads, rows, pairs in chunks_of_lists(q, lists, S, spec, q_offset):
        q_i, do_i = pairs.of_queries(q[heads, rows]), pairs.of_queries(do[heads, rows])
        k_i, v_i = pairs.of_blocks(k[heads]), pairs.of_blocks(v[heads])
        p = pairs.scores(q_i, k_i, spec.softmax_scale)
        p = p.sub_(pairs.of_queries(lse[heads, rows]).unsqueeze(-1)).exp_()
        dp = _product(do_i, v_i.mT)
        do_o[heads, rows] = delta = pairs.total((p * dp).sum(-1))
        p = p.mul_(pairs.of_queries(weight[heads, rows]).unsqueeze(-1))
        pairs.add_to_blocks(dv[heads], p.to(q.dtype), do_i)
        ds = dp.sub_(pairs.of_queries(delta).unsqueeze(-1)).mul_(p).mul_(spec.softmax_scale).to(q.dtype)
        dq[heads, rows] = pairs.total(_product(ds, k_i))
        pairs.add_to_blocks(dk[heads], ds, q_i)
    dk, dv = (d.flatten(1, 2)[:, :S].unflatten(0, (B, Hkv, -1)).sum(2).transpose(1, 2) for d in (dk, dv))
    return by_token(dq, B), dk, dv, by_token(do_o, B)


class BlockPairs:
    """The pairs of some queries with the blocks of their lists, in tiles of one block each.

    Args:
        lists: int32 [R, queries, n] of R heads, each block once; padding is negative or at least N.
        limit: int64 [queries], one past the last key that a query sees.
        N, size: blocks of each head, and their keys; k and v have one block more, which no query sees.
    """

    def __init__(self, lists: Tensor, limit: Tensor, N: int, size: int) -> None:
        (R, _, n), device, self.shape, self.size = lists.shape, lists.device, lists.shape, size
        blocks, queries, pairs = R * (N + 1), lists.shape[:2].numel(), lists.numel()
        listed = lists.long().where((lists >= 0) & (lists < N), N)
        listed += torch.arange(0, blocks, N + 1, device=device).view(-1, 1, 1)
        block, order = listed.flatten().sort(stable=True)
        starts = torch.searchsorted(block, torch.arange(blocks + 1, device=device))
        ends = ((starts.diff() + (TILE - 1)) // TILE).cumsum(0)
        # On a device that would have to be waited for, as many tiles as there can be.
        count = int(ends[-1]) if device.type == "cpu" else min(pairs, pairs // TILE + blocks)
        # Tiles of block j are ends[j - 1] .. ends[j] - 1; tiles behind the last one hold no pair.
        self.block = torch.searchsorted(ends, torch.arange(count, device=device), right=True).clamp_(max=blocks - 1)
        first = ends * TILE
        first = torch.cat([first.new_zeros(1), first[:-1]]) - starts[:-1]
        slot = first[block] + torch.arange(pairs, device=device)
        self.slot = torch.empty_like(slot).scatter_(0, order, slot)  # of each pair, [queries * n]
        # Slots without a pair are of a query behind the last one.
        self.query = slot.new_full((count * TILE,), queries).scatter_(0, slot, order // n)
        # Keys of the block that a pair's query sees: all, where a slot has no pair.
        limit = torch.cat([limit.repeat(R), limit.new_full((1,), (N + 1) * size)])
        self.seen = limit[self.query] - (self.block % (N + 1) * size).repeat_interleave(TILE)
        self.edges = None
        if device.type == "cpu":  # few pairs hide a key; a GPU would have to be waited for to know which
            self.edges = (self.seen < size).nonzero().squeeze(1)
            self.seen = self.seen[self.edges]

    def of_queries(self, x: Tensor) -> Tensor:
        """[R, queries, G, ...] -> [tiles, TILE, G, ...], the rows of each pair's query."""
        x = x.flatten(0, 1)
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return _rows(x.flatten(1), self.query).view(-1, TILE, *x.shape[1:])

    def of_blocks(self, x: Tensor) -> Tensor:
        """[R, N + 1, size, D] -> [tiles, size, D]"""
        return _rows(x.flatten(0, 1).flatten(1), self.block).view(-1, *x.shape[2:])

    def add_to_blocks(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add the tiles' ``weights.mT @ rows`` to [R, N + 1, size, D], tiles of a block one after the other."""
        sums = dot(weights.flatten(1, 2).mT, rows.flatten(1, 2)).flatten(1)
        total = total.view(-1, sums.shape[1])
        if total.is_cuda:  # sorted there, and so in order
            total.index_put_((self.block,), sums, accumulate=True)
        else:
            total.index_add_(0, self.block, sums)

    def of_pairs(self, x: Tensor) -> Tensor:
        """[tiles, TILE] -> [R, queries, n], in the order of the lists."""
        return x.flatten()[self.slot].view(self.shape)

    def largest(self, x: Tensor) -> Tensor:
        """[tiles, TILE, G] -> [R, queries, G], the largest of a query's pairs."""
        return _rows(x.flatten(0, 1), self.slot).view(*self.shape, -1).amax(2)

    def total(self, x: Tensor) -> Tensor:
        """[tiles, TILE, G, ...] -> [R, queries, G, ...], the sum over a query's pairs."""
        summed = F.embedding_bag(self.slot.view(-1, self.shape[2]), x.flatten(0, 1).flatten(1), mode="sum")
        return summed.view(*self.shape[:2], *x.shape[2:])

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """[tiles, TILE, G, D] x [tiles, size, D] -> [tiles, TILE, G, size], -inf for hidden keys."""
        scores = _product(q, k.mT, scale)
        pairs, seen = scores.flatten(0, 1), self.seen[:, None, None]
        hidden = torch.arange(self.size, device=q.device) >= seen
        if self.edges is None:
            pairs.masked_fill_(hidden, -torch.inf)
        else:
            pairs[self.edges] = pairs[self.edges].masked_fill_(hidden, -torch.inf)
        return scores


def chunks_of_lists(
    q: Tensor, lists: Tensor, S: int, spec: CallSpec, q_offset: int
) -> Iterator[tuple[slice, slice, BlockPairs]]:
    """Slices of the heads and queries of q [R, T, G, D], each some heads with all queries or one with some of them."""
    (R, T), size = q.shape[:2], min(spec.config.block_size, S)
    N = -(-S // size)
    lists = lists.transpose(1, 2).flatten(0, 1).sort(-1).values
    lists[..., 1:].masked_fill_(lists.diff() == 0, -1)
    # Fewer pairs than a few tiles a block leave most slots empty; on a CPU a tile's queries share blocks.
    cpu = q.device.type == "cpu"
    count = max(CPU_PAIRS, 4 * TILE * N // spec.config.q_tile) if cpu else max(GPU_PAIRS, 4 * TILE * N)
    step = max(1, count // lists.shape[2])
    together = max(1, step // T)
    for head in range(0, R, together):
        for begin in range(0, T, step):
            heads, rows = slice(head, head + together), slice(begin, begin + step)
            t = torch.arange(begin, min(begin + step, T), device=q.device)
            limit = (t + q_offset + 1).clamp(max=S) if spec.causal else torch.full_like(t, S)
            yield heads, rows, BlockPairs(lists[heads][:, t // spec.config.q_tile], limit, N, size)


def blocks_of(x: Tensor, Hs: int, block_size: int) -> Tensor:
    """[B, S, H, D] -> [B * Hs, N + 1, size, D], a head for each list; behind the last block lies one of zeros."""
    S, H = x.shape[1:3]
    size = min(block_size, S)
    x = x.repeat_interleave(Hs // H, dim=2).transpose(1, 2).flatten(0, 1)
    return F.pad(x, (0, 0, 0, (-(-S // size) + 1) * size - S)).unflatten(1, (-1, size))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] of x [rows, columns], by the fastest of PyTorch's ways."""
    return x.gather(0, index[:, None].expand(-1, x.shape[1]))


def _product(rows: Tensor, matrix: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` times [tiles, TILE, G, D] x [tiles, D, E] -> [tiles, TILE, G, E] in the accumulation dtype."""
    return dot(rows.flatten(1, 2), matrix, scale).unflatten(1, rows.shape[1:3])
