"""The definition of the operator: dense masks and a softmax, quadratic in T, for tests to compare with.

Any device, dtype and head dimension; every step is a plain autograd operation. Run in fp64 it is the truth; run in the
dtype of the inputs it is the straightforward implementation whose error the other backends are measured by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nsa_layer.call import Aux, Call, accumulation_dtype, equal_gates, mean_scale
from nsa_layer.config import BRANCHES, NSAConfig

SELECTED = BRANCHES[1]
ByBranch = dict[str, tuple[torch.Tensor, torch.Tensor]]  # output and LSE


@dataclass(frozen=True)
class SelectionScores:
    """Scores and roles of the blocks of one sequence, from which blocks are selected.

    Attributes:
        values: [M, Hs, blocks] in the accumulation dtype, -inf where a block is no candidate; Hs = Hkv, Hq with
            ``rule="seed"``.
        candidates: [M, 1, blocks], blocks that a tile may select: complete ones, and its own where none is forced.
        forced: [M, 1, blocks], blocks that a tile lists in any case, ``block_counts`` at most.
    """

    values: torch.Tensor
    candidates: torch.Tensor
    forced: torch.Tensor


def compress(x: torch.Tensor, weight: torch.Tensor | None, *, config: NSAConfig) -> torch.Tensor:
    """Mean of each complete block of x [T, Hkv, D], then a projection by weight [Hkv, D, D], if any, per head.

    Returns:
        [Tc, Hkv, D] in the accumulation dtype, not rounded to the input's.
    """
    l = config.span
    x = x.to(accumulation_dtype(x.dtype)) / mean_scale(l)
    compressed = x.unfold(0, l, config.stride).sum(-1) / (l / mean_scale(l)) if x.shape[0] >= l else x[:0]
    return compressed if weight is None else torch.einsum("thd,hde->the", compressed, weight.to(compressed.dtype))


def tile_query(q: torch.Tensor, *, config: NSAConfig, causal: bool) -> torch.Tensor:
    """The query that selects for each tile: q [T, Hq, D] -> [M, Hq, D], in the accumulation dtype."""
    q = q.to(accumulation_dtype(q.dtype))
    before = causal and config.rule == "nsa"
    queries = []
    for start in range(0, q.shape[0], config.q_tile):
        tile = slice(start, start + config.q_tile)
        until_first = slice(max(0, start - config.q_tile + 1), start + 1)
        queries.append(mean(q[until_first if before else tile], 0))
    return torch.stack(queries)


def mean(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x.mean(dim)``, whatever the size of the sum."""
    n, scale = x.shape[dim], mean_scale(x.shape[dim])
    return (x / scale).sum(dim) / (n / scale)


@torch.no_grad()
def selection_scores(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    *,
    config: NSAConfig,
    causal: bool,
    softmax_scale: float,
    q_offset: int = 0,
    S: int | None = None,
) -> SelectionScores:
    """Scores every block of one sequence for every tile of its queries.

    Args:
        q: [T, Hq, D]; by token any consecutive queries of a sequence of S tokens (None: T), from position q_offset on;
            of an index [T, Hs, Di].
        k_cmp: [Tc, Hkv, D]; by token the keys of the compressed branch, rounded, otherwise as `compress` returns them:
            projected, not rounded; of an index as for `index_scores`.
    """
    S, size = q.shape[0] if S is None else S, config.block_size
    start = torch.arange(config.num_blocks(S), device=q.device) * size
    first = torch.arange(config.num_tiles(q.shape[0]), device=q.device)[:, None] * config.q_tile + q_offset
    last = (first + config.q_tile - 1).clamp(max=S - 1)
    complete = (start + size <= S).expand(len(first), -1)
    if causal:
        complete = complete & (start <= last if config.rule == "seed" else start + size - 1 <= first)
    in_tile = (start + size > first) & (start <= last)
    candidates = complete | in_tile if causal and config.chooses_own else complete
    forced = forced_blocks(first, last, start, S, config=config, causal=causal)
    complete, candidates, forced = (x.unsqueeze(1) for x in (complete, candidates, forced))
    if config.by_token:
        if config.rule == "index":
            values, _ = index_scores(q, k_cmp, config=config, softmax_scale=softmax_scale, q_offset=q_offset)
        else:
            static = dict(blocks=len(start), config=config, causal=causal, softmax_scale=softmax_scale)
            values = token_importance(q, k_cmp, first[:, 0], **static)
        return SelectionScores(values.masked_fill(~candidates, -torch.inf), candidates, forced)

    group = q.shape[1] // k_cmp.shape[1]
    # The one compressed key that lies wholly inside a block starts where the block does; a short last one has none.
    keys = k_cmp[:: size // config.stride].repeat_interleave(group, dim=1)
    dots = torch.einsum("mhd,nhd->mhn", tile_query(q, config=config, causal=causal), keys) * softmax_scale
    values = F.pad(dots, (0, len(start) - len(keys)))
    if config.rule == "nsa":
        p = values.masked_fill(~complete, -torch.inf).softmax(-1).masked_fill(~complete, 0)
        values = p.unflatten(1, (-1, group)).sum(2)
    return SelectionScores(values.masked_fill(~candidates, -torch.inf), candidates, forced)


def forced_blocks(
    first: torch.Tensor, last: torch.Tensor, start: torch.Tensor, S: int, *, config: NSAConfig, causal: bool
) -> torch.Tensor:
    """Blocks that are listed in any case, ``block_counts`` at most: bool [M, N].

    Args:
        first, last: [M, 1], tokens of each tile; start: [N], of each block.
    """
    size = config.block_size
    back = first // size - start // size  # blocks from a block to the tile's first one
    forced = (back < config.local_blocks) & (start <= last) & (config.local_blocks > 0)
    forced = forced | ((start // size < config.init_blocks) & ((start <= last) | (not causal)))
    # The own block goes first, then newer before older; without the causal mask later ones last.
    order = start.where(start <= last, -start).masked_fill(~forced, -1 - S)
    return forced & (order.argsort(-1, descending=True).argsort(-1) < config.block_counts)


def token_importance(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    t: torch.Tensor,
    *,
    blocks: int,
    config: NSAConfig,
    causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    """Importance [R, Hkv, blocks] of every block for the tokens t [R] with queries q [R, Hq, D], equation 9 of
    arXiv:2502.11089.

    The probabilities of the compressed keys, each times the strides of ``config.stride`` tokens in which the key's
    tokens and the block's overlap, summed over the query heads of the group.

    Args:
        k_cmp: [Tc, Hkv, D], as the compressed branch reads them.
    """
    group, dtype = q.shape[1] // k_cmp.shape[1], accumulation_dtype(q.dtype)
    keys = k_cmp.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,ihd->thi", q.to(dtype), keys) * softmax_scale
    start = torch.arange(len(k_cmp), device=q.device) * config.stride
    hidden = (start + config.offset > t[:, None, None]) & causal
    # A token that sees no compressed key has 0 / 0 for every key, and all of them are hidden.
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0).unflatten(1, (-1, group)).sum(2)
    importance = p.new_zeros(*p.shape[:2], blocks)
    for covered in range(0, config.span, config.stride):
        importance = importance.index_add(-1, (start + covered) // config.block_size, p)
    return importance


def index_scores(
    q_index: torch.Tensor, k_index: torch.Tensor, *, config: NSAConfig, softmax_scale: float, q_offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The index' score of every block for every query: its largest token score, among tokens that the query sees.

    Args:
        q_index: [T, Hs, Di]; k_index: [S, Hs, Di], or one key for all lists [S, 1, Di].

    Returns:
        [T, Hs, blocks] in the accumulation dtype, differentiable, -inf where a query sees no token of the block; and
        the token that has it, the first of several.
    """
    dtype, S, size = accumulation_dtype(q_index.dtype), k_index.shape[0], config.block_size
    keys = k_index.to(dtype).expand(-1, q_index.shape[1], -1)
    z = torch.einsum("thd,shd->ths", q_index.to(dtype), keys) * softmax_scale
    t, s = torch.arange(z.shape[0], device=z.device) + q_offset, torch.arange(S, device=z.device)
    z = z.masked_fill(s > t[:, None, None], -torch.inf)
    z = F.pad(z, (0, config.num_blocks(S) * size - S), value=-torch.inf).unflatten(-1, (-1, size))
    best = (z == z.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True)
    first = torch.arange(z.shape[-2], device=z.device) * size
    return z.gather(-1, best).squeeze(-1), best.squeeze(-1) + first


def index_loss_sums(scores: torch.Tensor, mass: torch.Tensor, free: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator and denominator of the index' loss: KL(m / M | softmax of the scores over free chosen blocks), times M.

    Args:
        scores: [T, Hs, blocks], of `index_scores`.
        mass: the selected branch's probability in each block, the mean over a list's query heads: a constant, m.
        free: bool [T, Hs, blocks], chosen blocks that are not forced.
    """
    m = mass.detach().masked_fill(~free, 0)
    total = m.sum(-1, keepdim=True)
    counts = free & (m > 0)  # log 0 would stand beside m = 0
    empty = ~free.any(-1, keepdim=True)
    log_pi = scores.masked_fill(~free, -torch.inf).masked_fill(empty, 0).log_softmax(-1).masked_fill(~counts, 0)
    log_m = (m / total.masked_fill(total == 0, 1)).masked_fill(~counts, 1).log()
    return (m * (log_m - log_pi)).sum(), total.sum()


@torch.no_grad()
def block_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    visible: torch.Tensor,
    lse: torch.Tensor,
    Hs: int,
    *,
    config: NSAConfig,
    softmax_scale: float,
) -> torch.Tensor:
    """The selected branch's probability in each block, the mean over a list's query heads: [T, Hs, blocks].

    Args:
        q: [T, Hq, D]; k: [S, Hkv, D]; visible: bool [Hs, T, S]; lse: [Hq, T], of the branch.
    """
    keys, S, N = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1), k.shape[0], config.num_blocks(k.shape[0])
    p = torch.einsum("thd,shd->hts", q, keys).to(lse.dtype) * softmax_scale - lse.unsqueeze(-1)
    p = p.exp().masked_fill(~visible.repeat_interleave(q.shape[1] // Hs, dim=0), 0)
    p = F.pad(p, (0, N * config.block_size - S)).unflatten(-1, (N, -1)).sum(-1)
    return p.unflatten(0, (Hs, -1)).mean(1).transpose(0, 1)


def select_blocks(scores: SelectionScores, *, config: NSAConfig, width: int) -> torch.Tensor:
    """Forced blocks, then the best of the others up to the width: int32 [M, Hs, width], ascending, then -1."""
    forced = scores.forced.expand(scores.values.shape)
    eligible = forced | scores.candidates
    rank = scores.values.masked_fill(forced, torch.inf).sort(dim=-1, descending=True, stable=True).indices
    taken = (torch.arange(rank.shape[-1], device=rank.device) < config.block_counts).expand_as(rank)
    listed = torch.zeros_like(eligible).scatter(-1, rank, taken) & eligible
    no_block = listed.shape[-1]
    blocks = torch.arange(no_block, device=rank.device).where(listed, no_block).sort(dim=-1).values[..., :width]
    blocks = blocks.masked_fill(blocks == no_block, -1).to(torch.int32)
    return F.pad(blocks, (0, width - blocks.shape[-1]), value=-1)


def compressed_mask(
    T: int, Tc: int, *, config: NSAConfig, causal: bool, device: torch.device, q_offset: int = 0
) -> torch.Tensor:
    """Mask of the compressed keys that each query sees: bool [T, Tc]."""
    t, j = torch.arange(T, device=device)[:, None] + q_offset, torch.arange(Tc, device=device)
    return (j * config.stride + config.offset <= t) | (not causal)


def selected_mask(
    block_indices: torch.Tensor, T: int, *, config: NSAConfig, causal: bool, q_offset: int = 0, S: int | None = None
) -> torch.Tensor:
    """Mask of the keys that each query sees through its tile's list [M, Hs, n]: bool [Hs, T, S].

    Entries that are no block of the sequence are padding.
    """
    S = T if S is None else S
    N = config.num_blocks(S)
    inside = (block_indices >= 0) & (block_indices < N)
    listed = block_indices.new_zeros(*block_indices.shape[:2], N + 1, dtype=torch.bool)
    listed = listed.scatter(-1, block_indices.long().where(inside, N), True)
    query, key = (torch.arange(length, device=listed.device) for length in (T, S))
    visible = listed[query // config.q_tile].transpose(0, 1)[:, :, key // config.block_size]
    return visible.tril(q_offset) if causal else visible


def window_mask(
    T: int, *, config: NSAConfig, causal: bool, device: torch.device, q_offset: int = 0, S: int | None = None
) -> torch.Tensor:
    """Mask of the keys that each query sees through the sliding window: bool [T, S]."""
    query, key = (torch.arange(length, device=device) for length in (T, T if S is None else S))
    back = query[:, None] + q_offset - key
    return (back < config.window_size) & (back >= (0 if causal else 1 - config.window_size))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, *, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [T, Hq, D] to k [S, Hkv, D] and v [S, Hkv, Dv] under a mask, bool [T, S], or [Hs, T, S].

    Returns:
        o [T, Hq, Dv] in the dtype of q, and its natural log-sum-exp [Hq, T] in the accumulation dtype; a row that sees
        no key gives 0, -inf and zero gradients.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if visible.dim() == 3:
        visible = visible.repeat_interleave(q.shape[1] // visible.shape[0], dim=0)
    scores = torch.einsum("thd,shd->hts", q, k).to(accumulation_dtype(q.dtype)) * softmax_scale
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = ~visible.any(-1, keepdim=True)
    # A softmax over nothing has no gradient but NaN: such a row gets any scores, and is blanked afterwards.
    scores = scores.masked_fill(empty, 0)
    p = scores.softmax(-1).masked_fill(empty, 0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return torch.einsum("hts,shd->thd", p.to(v.dtype), v), lse


def gate_values(
    q: torch.Tensor, gate_weight: torch.Tensor | None = None, gates: torch.Tensor | None = None, branches: int = 3
) -> torch.Tensor:
    """The weights of the branches: [..., T, Hq, branches] in the accumulation dtype, for q [..., T, Hq, D]."""
    dtype = accumulation_dtype(q.dtype)
    if gates is not None:
        return gates.to(dtype)
    if gate_weight is None:
        return equal_gates(q, branches)
    return torch.einsum("...hd,hid->...hi", q.to(dtype), gate_weight.to(dtype)).sigmoid()


def attend(call: Call) -> tuple[torch.Tensor, Aux, torch.Tensor | None]:
    """The whole operator.

    Args:
        call: shapes as in `nsa`, packed with ``spec.lengths``; ``cu_seqlens`` is not read. With ``q_offset`` keys
            have a length of their own, packed ``spec.lengths_k``. Lists of the caller replace the selection.

    Returns:
        o [B, T, Hq, Dv] (packed [total, Hq, Dv]) in the dtype of q, `Aux`, and the sums of an index' loss, or None.
    """
    branches, block_indices, scores, sums = attend_branches(call)
    g = gate_values(call.q, call.gate_weight, call.gates, len(branches))
    # A window of 0 tokens shows nothing, and its gate is not read.
    gated = ((g_i, *branches[name]) for name, g_i in zip(branches, g.unbind(-1)) if call.config.computes(name))
    o = sum(g_i.unsqueeze(-1) * o_i.to(g.dtype) for g_i, o_i, _ in gated)
    lses = (branches[name][1].detach() if name in branches else None for name in BRANCHES)
    return o.to(call.q.dtype), Aux(block_indices, g.detach(), *lses, scores), sums


def attend_branches(call: Call) -> tuple[ByBranch, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The branches before the gate; arguments as for `attend`.

    Returns:
        Their outputs and differentiable LSEs by name, shaped as of `attend`; the selected blocks and, with an
        index, their scores, as in `Aux`; and the sums of its loss.
    """
    spec, packed, sequences = call.spec, call.spec.lengths is not None, list(call.sequences())
    width = spec.config.list_width(max(spec.key_lengths, default=0) if packed else call.k.shape[1])
    if call.q_offset is None:
        offsets = [len(x.k) - len(x.q) for x in sequences]
    else:
        offsets = call.q_offset.tolist()
        if call.block_indices is None:
            spec.config.require_choice_by_token()
    pairs = zip(sequences, offsets, strict=True)
    results = [_attend_sequence(x, width, q_offset) for x, q_offset in pairs if len(x.q)]
    branches, lists, scores, sums = zip(*results, strict=True)

    def joined(parts: Any, dim: int = 0) -> torch.Tensor | None:
        return None if parts[0] is None else torch.cat(parts, dim) if packed else torch.stack(parts)

    by_branch = {name: tuple(map(joined, zip(*(of[name] for of in branches)), (0, -1))) for name in branches[0]}
    return by_branch, joined(lists), joined(scores), None if sums[0] is None else torch.stack(sums).sum(0)


def _attend_sequence(call: Call, width: int, q_offset: int) -> tuple[Any, ...]:
    """`attend_branches` for one sequence [T, H, D]: the selected blocks are [M, Hs, width]."""
    q, k, v, block_indices, k_cmp, v_cmp = *call[:3], call.block_indices, call.k_cmp, call.v_cmp
    spec, config, T, S = call.spec, call.config, q.shape[0], k.shape[0]
    scale = dict(softmax_scale=spec.softmax_scale)
    static = dict(config=config, causal=spec.causal, q_offset=q_offset)
    by_branch, listed_scores, sums = {}, None, None
    if "compressed" in config.branches:
        k_cmp = compress(k, call.compress_k_weight, config=config) if k_cmp is None else k_cmp
        v_cmp = compress(v, call.compress_v_weight, config=config) if v_cmp is None else v_cmp
        visible = compressed_mask(T, k_cmp.shape[0], **static, device=q.device)
        by_branch["compressed"] = attention(q, k_cmp.to(k.dtype), v_cmp.to(v.dtype), visible, **scale)
    if SELECTED in config.branches:
        by_index = dict(config=config, softmax_scale=spec.index_scale, q_offset=q_offset)
        if config.rule == "index":
            scores = selection_scores(call.q_index, call.k_index, **by_index, causal=True, S=S)
        elif block_indices is None:
            scored = k_cmp.to(k.dtype if config.by_token else accumulation_dtype(k.dtype))
            scores = selection_scores(q, scored, **static, S=S, **scale)
        if block_indices is None:
            block_indices = select_blocks(scores, config=config, width=width)
        if config.rule == "index":
            of_lists = scores.values.gather(-1, block_indices.clamp(min=0).long())
            listed_scores = of_lists.masked_fill(block_indices < 0, -torch.inf)
        visible = selected_mask(block_indices, T, **static, S=S)
        by_branch[SELECTED] = attention(q, k, v, visible, **scale)
        if spec.index_loss:
            mass = block_mass(q, k, visible, by_branch[SELECTED][1], len(scores.values[0]), config=config, **scale)
            listed = (block_indices.unsqueeze(-1) == torch.arange(mass.shape[-1], device=q.device)).any(-2)
            z, _ = index_scores(call.q_index, call.k_index, **by_index)
            sums = torch.stack(index_loss_sums(z, mass, listed & ~scores.forced))
    if "window" in config.branches:
        visible = window_mask(T, **static, S=S, device=q.device)
        by_branch["window"] = attention(q, *call.of_window, visible, **scale)
    return by_branch, block_indices, listed_scores, sums
