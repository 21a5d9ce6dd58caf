"""Attention of every token to its own list of blocks, in plain PyTorch: exact pairs, grouped by key block.

A token with G query heads makes few rows for a list of many keys, so keys are not gathered for tokens, but tokens for
blocks: the pairs (token, listed block) of a chunk of tokens are sorted by block and dealt into items of `ITEM` pairs of
one block, whose scores are one small product each. A token's scores lie in as many items as its list is long; maxima
and sums go from pairs to tokens and back. Shapes depend on sizes alone, so nothing waits for a GPU, and every sum has a
fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import accumulation_dtype, mean_scale
from nsa_layer.profiler_ranges import component

ITEM = 32  # pairs of an item
CPU_PAIRS, GPU_PAIRS = 1 << 14, 1 << 18  # of a chunk


@dataclass(frozen=True)
class Static:
    """Tokens of a block, and the factor of q . k."""

    size: int
    softmax_scale: float


def attend_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    choice: torch.Tensor,
    limit: torch.Tensor,
    *,
    q_tile: int,
    size: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every token to the keys below its limit in the blocks of its tile's list.

    Args:
        q: [B, T, Hq, D].
        k: [B, Hkv, S, D]; v: [B, Hkv, S, Dv].
        choice: int32 [B, Hs, M, n], Hs = Hkv or Hq, of M tiles; in any order, each block once, -1 is padding.
        limit: int64 [B, T], one past the last key that a token may see, at most S.
        q_tile: tokens of a tile.
        size: tokens of a block.

    Returns:
        o [B, T, Hq, Dv] in q's dtype and the LSE [B, T, Hq]; a row that sees no key gives 0 and -inf.
    """
    rows, *keys, static = _rows_and_blocks(q, k, v, choice, limit, q_tile, size, softmax_scale)
    return tuple(_of_tokens(x, q) for x in TokenAttention.outputs(rows, *keys, static))


def attend_lists_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    choice: torch.Tensor,
    limit: torch.Tensor,
    lse: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    q_tile: int,
    size: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of ``weight * o``, shaped like q, k and v, and do . o [B, T, Hq]; sums in the accumulation dtype.

    Args:
        lse, weight: [B, T, Hq]; arguments else as for `attend_lists`.
    """
    Hs = choice.shape[1]
    rows, *keys, static = _rows_and_blocks(q, k, v, choice, limit, q_tile, size, softmax_scale)
    do, lse, weight = (None if x is None else _of_heads(x, Hs) for x in (do, lse, weight))
    dq, *of_keys, do_o = TokenAttention.gradients(do, rows, *keys, lse, weight, static)
    dk, dv = (d.view(len(q), k.shape[1], -1, *d.shape[1:]).sum(2).flatten(2, 3)[:, :, : k.shape[2]] for d in of_keys)
    return _of_tokens(dq, q), dk, dv, _of_tokens(do_o, q)


def _rows_and_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    choice: torch.Tensor,
    limit: torch.Tensor,
    q_tile: int,
    size: int,
    softmax_scale: float,
) -> tuple:
    """The arguments of `TokenAttention.outputs`."""
    T, (Hkv, S), Hs = q.shape[1], k.shape[1:3], choice.shape[1]
    choice, size = choice.repeat_interleave(q_tile, dim=2)[:, :, :T], min(size, S)
    # The padding of a list names the block of zeros behind the last one.
    spare = (-(-S // size) + 1) * size - S
    k, v = (F.pad(x, (0, 0, 0, spare)).unflatten(2, (-1, size)) for x in (k, v))
    k, v = (x.repeat_interleave(Hs // Hkv, dim=1).flatten(0, 1) for x in (k, v))
    limit = limit.repeat_interleave(Hs, dim=0)
    return _of_heads(q, Hs), k, v, choice.flatten(0, 1), limit, Static(size, softmax_scale)


def _of_heads(x: torch.Tensor, Hs: int) -> torch.Tensor:
    """[B, T, Hq, ...] -> [B * Hs, T, G, ...]"""
    return x.unflatten(2, (Hs, -1)).transpose(1, 2).flatten(0, 1)


def _of_tokens(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[B * Hs, T, G, ...] -> [B, T, Hq, ...]"""
    return x.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)


class _Items:
    """The pairs of some tokens with the blocks of their lists, in items of one block each.

    Args:
        choice: int32 [R, tokens, n], blocks in 0 .. N - 1, -1 for none.
        limit: [R, tokens], one past the last key that a token sees.
        N: blocks of each of the R; k and v have one more, which no token sees.
    """

    def __init__(self, choice: torch.Tensor, limit: torch.Tensor, N: int, static: Static) -> None:
        (R, _, n), device = choice.shape, choice.device
        blocks, tokens, pairs = R * (N + 1), limit.numel(), choice.numel()
        self.shape = choice.shape
        listed = choice.long().where(choice >= 0, N) + torch.arange(0, blocks, N + 1, device=device).view(-1, 1, 1)
        block, order = listed.flatten().sort(stable=True)
        starts = torch.searchsorted(block, torch.arange(blocks + 1, device=device))
        ends = ((starts.diff() + (ITEM - 1)) // ITEM).cumsum(0)
        # On a device that would have to be waited for, as many items as there can be.
        count = int(ends[-1]) if device.type == "cpu" else min(pairs, pairs // ITEM + blocks)
        # Items of block j are ends[j - 1] .. ends[j] - 1; those behind the last one hold no pair.
        self.block = torch.searchsorted(ends, torch.arange(count, device=device), right=True).clamp_(max=blocks - 1)
        first = ends * ITEM
        first = torch.cat([first.new_zeros(1), first[:-1]]) - starts[:-1]
        place = first[block] + torch.arange(pairs, device=device)
        self.place = torch.empty_like(place).scatter_(0, order, place)  # of each pair, [tokens * n]
        # Places without a pair are of a token behind the last one.
        self.token = place.new_full((count * ITEM,), tokens).scatter_(0, place, order // n)
        # Keys of the block that a pair's token sees: all, where a place has no pair.
        limit = torch.cat([limit.flatten(), limit.new_full((1,), (N + 1) * static.size)])
        self.seen = limit[self.token] - (self.block % (N + 1) * static.size).repeat_interleave(ITEM)
        self.size, self.edges = static.size, None
        if device.type == "cpu":  # few pairs hide a key; a GPU would have to be waited for to know which
            self.edges = (self.seen < self.size).nonzero().squeeze(1)
            self.seen = self.seen[self.edges]

    def of_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[R, tokens, G, ...] -> [items, ITEM, G, ...], the rows of each pair's token."""
        x = x.flatten(0, 1)
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return _rows(x.flatten(1), self.token).view(-1, ITEM, *x.shape[1:])

    def of_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """[R, N + 1, size, D] -> [items, size, D]"""
        return _rows(x.flatten(0, 1).flatten(1), self.block).view(-1, *x.shape[2:])

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """[items, ITEM, G] -> [R, tokens, G], the largest of a token's pairs."""
        return _rows(x.flatten(0, 1), self.place).view(*self.shape, -1).amax(2)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """[items, ITEM, G, ...] -> [R, tokens, G, ...], the sum over a token's pairs."""
        summed = F.embedding_bag(self.place.view(-1, self.shape[2]), x.flatten(0, 1).flatten(1), mode="sum")
        return summed.view(*self.shape[:2], *x.shape[2:])

    def scores(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        """[items, ITEM, G, D] x [items, size, D] -> [items, ITEM, G, size], -inf for hidden keys."""
        scores = _product(q, k.mT, scale)
        pairs, seen = scores.flatten(0, 1), self.seen[:, None, None]
        hidden = torch.arange(self.size, device=q.device) >= seen
        if self.edges is None:
            pairs.masked_fill_(hidden, -torch.inf)
        else:
            pairs[self.edges] = pairs[self.edges].masked_fill_(hidden, -torch.inf)
        return scores


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index] of x [rows, columns], by the fastest of PyTorch's ways."""
    return x.gather(0, index[:, None].expand(-1, x.shape[1]))


def _product(rows: torch.Tensor, matrix: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale`` times [items, ITEM, G, D] x [items, D, E] -> [items, ITEM, G, E] in the accumulation dtype."""
    return dot(rows.flatten(1, 2), matrix, scale).unflatten(1, rows.shape[1:3])


def dot(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale`` times [N, I, K] x [N, K, J] -> [N, I, J] in the accumulation dtype, without rounding to half precision
    on the way where the device can do so."""
    acc = accumulation_dtype(a.dtype)
    if a.dtype == acc:
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)
    return (torch.bmm(a, b, out_dtype=acc) if a.is_cuda else (a @ b).to(acc)).mul_(scale)


class TokenAttention:
    """Attention of q [R, T, G, D] over the blocks that choice [R, T, n] lists of k [R, N + 1, size, D] and v, to keys
    below limit [R, T].

    R are batch and key/value heads. Gives o [R, T, G, Dv] in q's dtype and the LSE [R, T, G]; a row that sees no key
    gives 0 and -inf.
    """

    @staticmethod
    def outputs(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: torch.Tensor, limit: torch.Tensor, static: Static
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
        # A sum of p * v is above its mean. fp16 has no range for smaller v, and no v that would need them.
        scale = 1 if v.dtype == torch.float16 else mean_scale(choice.shape[-1] * static.size)
        with component("slc"):
            for own, items in _chunks(choice, limit, k.shape[1] - 1, static):
                scores = items.scores(items.of_tokens(q[own]), items.of_blocks(k[own[0]]), static.softmax_scale)
                top = items.largest(scores.amax(-1))
                top = top.masked_fill_(top == -torch.inf, 0)
                p = scores.sub_(items.of_tokens(top).unsqueeze(-1)).exp_()
                total = items.total(p.sum(-1))
                weighted = items.total(_product(p.to(v.dtype), items.of_blocks(v[own[0]] / scale)))
                o[own] = weighted.div_(total.masked_fill(total == 0, 1).unsqueeze(-1) / scale)
                lse[own] = total.log_().add_(top)
        return o, lse

    @staticmethod
    def gradients(
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        choice: torch.Tensor,
        limit: torch.Tensor,
        lse: torch.Tensor,
        weight: torch.Tensor | None,
        static: Static,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of ``weight * o``, and do . o of each row; sums are in the accumulation dtype.

        Args:
            weight: like the LSE, whose dtype it has; None: 1.
        """
        dq = torch.empty_like(q, dtype=lse.dtype)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        lse, do_o = lse.masked_fill(lse == -torch.inf, torch.inf), torch.empty_like(lse)
        with component("slc"):
            for own, items in _chunks(choice, limit, k.shape[1] - 1, static):
                q_i, do_i, k_i, v_i = (
                    *map(items.of_tokens, (q[own], do[own])),
                    *map(items.of_blocks, (k[own[0]], v[own[0]])),
                )
                p = items.scores(q_i, k_i, static.softmax_scale)
                p = p.sub_(items.of_tokens(lse[own]).unsqueeze(-1)).exp_()
                dp = _product(do_i, v_i.mT)
                do_o[own] = delta = items.total((p * dp).sum(-1))
                p = p if weight is None else p.mul_(items.of_tokens(weight[own]).unsqueeze(-1))
                _add(dv[own[0]], items.block, p.to(q.dtype), do_i)
                ds = dp.sub_(items.of_tokens(delta).unsqueeze(-1)).mul_(p).mul_(static.softmax_scale).to(q.dtype)
                dq[own] = items.total(_product(ds, k_i))
                _add(dk[own[0]], items.block, ds, q_i)
        return dq, dk, dv, do_o


def _add(total: torch.Tensor, block: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the items' ``weights.mT @ rows`` to [R, N + 1, size, D], items of a block one after the other."""
    made = dot(weights.flatten(1, 2).mT, rows.flatten(1, 2)).flatten(1)
    total = total.view(-1, made.shape[1])
    if total.is_cuda:  # sorted there, and so in order
        total.index_put_((block,), made, accumulate=True)
    else:
        total.index_add_(0, block, made)


def _chunks(
    choice: torch.Tensor, limit: torch.Tensor, N: int, static: Static
) -> Iterator[tuple[tuple[slice, slice], _Items]]:
    """Slices of rows, each a head of a sequence, with all tokens, or of one row with some of them; and their items."""
    R, T, n = choice.shape
    # With fewer pairs than a few items for each block most places were empty.
    pairs = max(CPU_PAIRS if choice.device.type == "cpu" else GPU_PAIRS, 4 * ITEM * N)
    step = max(1, pairs // n)
    together = max(1, step // T)
    for r in range(0, R, together):
        for begin in range(0, T, step):
            own = slice(r, r + together), slice(begin, begin + step)
            yield own, _Items(choice[own], limit[own], N, static)
