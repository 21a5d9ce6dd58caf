"""The index of tokens in PyTorch: scores of blocks, what its loss saves, and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nsa_layer.call import Call
from nsa_layer.config import NSAConfig
from nsa_layer.eager.chunk_attention import by_head, by_token, to_compute_dtype
from nsa_layer.eager.list_attention import blocks_of, chunks_of_lists

Tensor = torch.Tensor


def score_blocks(q_index: Tensor, keys: Tensor, t: Tensor, *, config: NSAConfig, scale: float) -> Tensor:
    """The largest token score of each block, among tokens that a query sees: [B, Hs, m, N], -inf for later blocks.

    Args:
        q_index: [B, Hs, m, Di], some queries; t: int64 [m], their positions among the keys.
        keys: [B, Hs or 1, Di, S].
    """
    (S, size), N = (keys.shape[-1], config.block_size), config.num_blocks(keys.shape[-1])
    z = (q_index @ keys).mul_(scale)
    full = z[..., : S // size * size].unflatten(-1, (-1, size)).amax(-1)
    scores = F.pad(full, (0, N - S // size))  # a short last block is the own one of all queries that see it
    # Only a query's own block has tokens that it does not see.
    own_block, at = t // size, (t // size)[:, None] * size + torch.arange(size, device=t.device)
    seen = z.gather(-1, at.clamp(max=S - 1).expand(*z.shape[:2], -1, -1))
    seen = seen.masked_fill_(at > t[:, None], -torch.inf).amax(-1, keepdim=True)
    scores = scores.scatter(-1, own_block[:, None].expand(*z.shape[:2], -1, 1), seen)
    return scores.masked_fill_(torch.arange(N, device=t.device) > own_block[:, None], -torch.inf)


def is_free(lists: Tensor, t: Tensor, config: NSAConfig) -> Tensor:
    """True for chosen blocks that are not forced: lists [..., n] of the queries at positions t [...]; -1 is neither."""
    back = (t // config.block_size).unsqueeze(-1) - lists
    return (lists >= config.init_blocks) & (back >= config.local_blocks)


def saved_of_index(batch: Call, lists: Tensor, lse: Tensor, q_offset: int) -> dict[str, Tensor]:
    """Fields of `Saved` for the index' loss, of which `index_sums` are the batch's numerator and denominator.

    Args:
        lists: int32 [B, T, Hs, n], ascending, then -1, as they were chosen.
        lse: [B, T, Hq], of the selected branch.
    """
    free = is_free(lists, torch.arange(lists.shape[1], device=lists.device)[:, None] + q_offset, batch.config)
    mass, best = _free_mass(batch, lists, lse, free, q_offset)
    q_index, k_index = batch.index
    scores = torch.einsum("bthd,bthnd->bthn", q_index.to(mass.dtype), _keys(k_index, best).to(mass.dtype))
    scores, empty = scores * batch.spec.index_scale, ~free.any(-1, keepdim=True)
    log_pi = scores.masked_fill(~free, -torch.inf).masked_fill(empty, 0).log_softmax(-1).masked_fill(~free, 0)
    total = mass.sum(-1, keepdim=True)
    log_m = (mass / total.masked_fill(total == 0, 1)).masked_fill(mass == 0, 1).log()
    sums = torch.stack(((mass * (log_m - log_pi)).sum(), total.sum()))
    dz = (total * log_pi.exp() - mass).masked_fill_(~free, 0)
    return dict(index_dz=dz, index_tokens=best.int(), index_sums=sums)


def _free_mass(batch: Call, lists: Tensor, lse: Tensor, free: Tensor, q_offset: int) -> tuple[Tensor, Tensor]:
    """For the index' loss m [B, T, Hs, n], the selected branch's probability in each free block, a mean over the
    list's query heads, and 0 elsewhere; and int64 [B, T, Hs, n], the token of the block with the largest score."""
    (q, k), (q_index, k_index), spec = map(to_compute_dtype, batch[:2]), batch.index, batch.spec
    (B, S), Hs, size = k.shape[:2], lists.shape[2], min(spec.config.block_size, k.shape[1])
    q, q_index, lse = (by_head(x, Hs) for x in (q, q_index, lse))
    k, k_index = (blocks_of(x, Hs, size) for x in (k, k_index))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    mass = lse.new_zeros(*q.shape[:2], lists.shape[-1])
    best = torch.zeros_like(mass, dtype=torch.int64)
    for heads, rows, pairs in chunks_of_lists(q, lists, S, spec, q_offset):
        p = pairs.scores(pairs.of_queries(q[heads, rows]), pairs.of_blocks(k[heads]), spec.softmax_scale)
        p = p.sub_(pairs.of_queries(lse[heads, rows]).unsqueeze(-1)).exp_().sum(-1).mean(-1)
        z = pairs.scores(pairs.of_queries(q_index[heads, rows]), pairs.of_blocks(k_index[heads]), 1.0).squeeze(2)
        at = (z == z.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)  # the first of several
        mass[heads, rows], best[heads, rows] = pairs.of_pairs(p), pairs.of_pairs(at)
    # Pairs of a query are sorted: pairs of -1 come first.
    order = torch.arange(lists.shape[-1], device=lists.device) + (lists < 0).sum(-1, keepdim=True)
    order %= lists.shape[-1]
    mass, best = (by_token(x.unsqueeze(2), B).gather(-1, order) for x in (mass, best))
    return mass.masked_fill_(~free, 0), best.add_(lists.clamp(min=0) * spec.config.block_size)


def _keys(k_index: Tensor, best: Tensor) -> Tensor:
    """Rows [B, T, Hs, n, Di] of tokens [B, T, Hs, n]."""
    keys = k_index.expand(-1, -1, best.shape[2], -1).transpose(1, 2)  # [B, Hs, S, Di]
    index = best.transpose(1, 2).flatten(2).unsqueeze(-1)  # [B, Hs, T n, 1]
    return keys.gather(2, index.expand(-1, -1, -1, keys.shape[-1])).unflatten(2, best.shape[1::2]).transpose(1, 2)


def loss_backward(d: Tensor, q_index: Tensor, k_index: Tensor, dz: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``d`` times the numerator, without a scale, in q_index and k_index, in the accumulation dtype."""
    dz = dz * d
    dq = torch.einsum("bthn,bthnd->bthd", dz, _keys(k_index, best).to(dz.dtype))
    Hs, (B, S, heads, Di) = best.shape[2], k_index.shape
    head = torch.arange(Hs, device=best.device).expand(B, 1, Hs).unsqueeze(-1) % heads
    row = best * heads + head + torch.arange(0, B * S * heads, S * heads, device=best.device).view(-1, 1, 1, 1)
    terms = torch.einsum("bthn,bthd->bthnd", dz, q_index.to(dz.dtype))
    dk = dz.new_zeros(B * S * heads, Di)
    if dk.is_cuda:  # sorted there, and so in order
        dk.index_put_((row.flatten(),), terms.flatten(0, 3), accumulate=True)
    else:
        dk.index_add_(0, row.flatten(), terms.flatten(0, 3))
    return dq, dk.view(B, S, heads, Di)
