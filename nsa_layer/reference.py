"""The definition of the operator: dense masks and a softmax, quadratic in T, for tests to compare with.

Any device, dtype and head dimension; every step is a plain autograd operation. Run in fp64 it is the truth; run in the
dtype of the inputs it is the straightforward implementation whose error the other backends are measured by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nsa_layer.call import (
    Aux,
    Call,
    accumulation_dtype,
    mean_scale,
    require_choice_by_token,
)
from nsa_layer.config import NSAConfig


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
    """Mean of each complete block, then a projection per head.

    Args:
        x: [T, Hkv, D].
        weight: [Hkv, D, D] or None.

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
        q: [T, Hq, D]; by token any consecutive queries of a sequence of S tokens (None: T), from position q_offset on.
        k_cmp: [Tc, Hkv, D]; by token the keys of the compressed branch, rounded, otherwise as `compress` returns them:
            projected, not rounded.
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
    back = first // size - start // size  # blocks from a block to the tile's first one
    forced = (back < config.local_blocks) & (start <= last) if config.local_blocks else torch.zeros_like(in_tile)
    forced = forced | ((start // size < config.init_blocks) & ((start <= last) | (not causal)))
    # The own block goes first, then newer before older; without the causal mask those behind the own one last.
    order = start.where(start <= last, -start).masked_fill(~forced, -1 - S)
    forced = forced & (order.argsort(-1, descending=True).argsort(-1) < config.block_counts)
    complete, candidates, forced = (x.unsqueeze(1) for x in (complete, candidates, forced))
    if config.by_token:
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
    """Importance of every block for some tokens and each key/value head, equation 9 of arXiv:2502.11089.

    The probabilities of the compressed keys, each times the strides of ``config.stride`` tokens in which the key's
    tokens and the block's overlap, summed over the query heads of the group.

    Args:
        q: [R, Hq, D], the queries of the tokens t [R].
        k_cmp: [Tc, Hkv, D], as the compressed branch reads them.

    Returns:
        [R, Hkv, blocks] in the accumulation dtype.
    """
    group, dtype = q.shape[1] // k_cmp.shape[1], accumulation_dtype(q.dtype)
    keys = k_cmp.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,ihd->thi", q.to(dtype), keys) * softmax_scale
    start = torch.arange(len(k_cmp), device=q.device) * config.stride
    hidden = (start + config.offset > t[:, None, None]) & causal
    # A token that sees no compressed key has 0 / 0 in every place, all of which are hidden.
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0).unflatten(1, (-1, group)).sum(2)
    importance = p.new_zeros(*p.shape[:2], blocks)
    for covered in range(0, config.span, config.stride):
        importance = importance.index_add(-1, (start + covered) // config.block_size, p)
    return importance


def select_blocks(scores: SelectionScores, *, config: NSAConfig, width: int) -> torch.Tensor:
    """Forced blocks, then the best of the others while there is room: int32 [M, Hs, width], ascending, then -1."""
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
    """Attention under a mask; a row that sees no key gives 0, LSE -inf and zero gradients.

    Args:
        q: [T, Hq, D]; k: [S, Hkv, D]; v: [S, Hkv, Dv].
        visible: bool [T, S], or [Hs, T, S] with Hs dividing Hq.

    Returns:
        o [T, Hq, Dv] in the dtype of q, and its natural log-sum-exp [Hq, T] in the accumulation dtype.
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
    q: torch.Tensor, gate_weight: torch.Tensor | None = None, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """The weights of the branches: [..., T, Hq, 3] in the accumulation dtype, for q [..., T, Hq, D]."""
    dtype = accumulation_dtype(q.dtype)
    if gates is not None:
        return gates.to(dtype)
    if gate_weight is None:
        return torch.full((*q.shape[:-1], 3), 1 / 3, dtype=dtype, device=q.device)
    return torch.einsum("...hd,hid->...hi", q.to(dtype), gate_weight.to(dtype)).sigmoid()


def attend(call: Call) -> tuple[torch.Tensor, Aux]:
    """The whole operator.

    Args:
        call: shapes as in `nsa`, packed with ``spec.lengths``; ``cu_seqlens`` is not read. With ``q_offset`` keys
            have a length of their own, packed ``spec.lengths_k``. Lists of the caller replace the selection.

    Returns:
        o [B, T, Hq, Dv] (packed [total, Hq, Dv]) in the dtype of q, and `Aux`.
    """
    branches, lses, block_indices = attend_branches(call)
    g = gate_values(call.q, call.gate_weight, call.gates)
    o = sum(g[..., i, None] * o_i.to(g.dtype) for i, o_i in enumerate(branches))
    return o.to(call.q.dtype), Aux(block_indices, g.detach(), *(lse.detach() for lse in lses))


def attend_branches(
    call: Call,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The branches of ``spec`` before the gate; arguments as for `attend`, or as `selected_attention` has checked them.

    Returns:
        Their outputs, shaped like that of `attend`, without a window two; their LSEs, with one for no window, and the
        selected blocks, shaped as in `Aux`; the LSEs are differentiable here.
    """
    spec, packed, sequences = call.spec, call.spec.lengths is not None, list(call.sequences())
    width = spec.config.list_width(max(spec.key_lengths, default=0) if packed else call.k.shape[1])
    if call.q_offset is None:
        offsets = [len(x.k) - len(x.q) for x in sequences]
    else:
        offsets = call.q_offset.tolist()
        if call.block_indices is None:
            require_choice_by_token(spec.config)
    pairs = zip(sequences, offsets, strict=True)
    results = [_attend_sequence(x, width, q_offset) for x, q_offset in pairs if len(x.q)]
    branches, lses, lists = zip(*results, strict=True)
    branches = [(torch.cat if packed else torch.stack)(o) for o in zip(*branches, strict=True)]
    lses = [torch.cat(lse, dim=-1) if packed else torch.stack(lse) for lse in zip(*lses, strict=True)]
    return branches, lses, (torch.cat if packed else torch.stack)(lists)


def _attend_sequence(
    call: Call, width: int, q_offset: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The branches' outputs and LSEs, and the selected blocks [M, Hs, width], for one sequence [T, H, D]."""
    q, k, v, block_indices, k_cmp, v_cmp = *call[:3], call.block_indices, call.k_cmp, call.v_cmp
    spec, config, T, S = call.spec, call.config, q.shape[0], k.shape[0]
    scale = dict(softmax_scale=spec.softmax_scale)
    static = dict(config=config, causal=spec.causal, q_offset=q_offset)
    if call.alone:
        o, lse = attention(q, k, v, selected_mask(block_indices, T, **static, S=S), **scale)
        return [o], [lse], block_indices
    k_cmp = compress(k, call.compress_k_weight, config=config) if k_cmp is None else k_cmp
    v_cmp = compress(v, call.compress_v_weight, config=config) if v_cmp is None else v_cmp
    if block_indices is None:
        scored = k_cmp.to(k.dtype if config.by_token else accumulation_dtype(k.dtype))
        scores = selection_scores(q, scored, **static, S=S, **scale)
        block_indices = select_blocks(scores, config=config, width=width)
    masked = (
        (k_cmp.to(k.dtype), v_cmp.to(v.dtype), compressed_mask(T, k_cmp.shape[0], **static, device=q.device)),
        (k, v, selected_mask(block_indices, T, **static, S=S)),
        (*call.of_window, window_mask(T, **static, S=S, device=q.device)),
    )
    results = [attention(q, keys, values, mask, **scale) for keys, values, mask in masked]
    # A window of 0 tokens shows nothing: its log-sum-exp is that of such rows, and its output is left out.
    return [o for o, _ in results[: config.num_branches]], [lse for _, lse in results], block_indices


def attend_selected(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the differentiable LSE, shaped as of `attend`, of the selected branch alone."""
    (o,), (lse,), _ = attend_branches(call)
    return o, lse
