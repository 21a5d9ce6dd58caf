"""The operator at sampled rows and keys, for lengths at which neither dense attention nor the quadratic reference runs.

`rows` computes sampled queries of all branches and the gate from q, k, v and the choice of blocks alone, and
their dq. `keys` computes dk and dv of sampled tokens: each sums over all queries that see it, which takes one pass over
all queries with the LSE and the row sums of the call under test; `rows` checks these on its own sample.
`choice_scores` has the scores that tiles choose by. In fp64 all this is the truth; in the dtype of the inputs
it is the straight implementation, rounded where `reference` rounds, whose error sets the limits of `assertions`.

A `Call` here is of one causal sequence, [T, H, D], with its lists [M, Hkv, n], by the rules "nsa" and "index", with
gate_weight or equal shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from nsa_layer import reference
from nsa_layer.call import Call, accumulation_dtype
from nsa_layer.config import NSAConfig

ELEMENTS = 1 << 25  # of a chunk's largest matrix


class Rows(NamedTuple):
    """Sampled queries, in the order in which they were asked for; all but o and lse are None without do.

    Attributes:
        o: [R, Hq, Dv].
        lse: [R, Hq, branches], natural, -inf where a row sees no key.
        row_sums: [R, Hq, branches], ``do . o_i`` of each branch before its gate.
        dq: [R, Hq, D].
        noise: [R, Hkv], how far dq of a row moves for errors of ``do . o_i`` as large as its terms together, and for
            what `_of_lse` says; rounding of a stored o_i and LSE makes eps of that.
        terms: [R, Hkv], the largest ``norm(do * o_i)`` of a row.
    """

    o: torch.Tensor
    lse: torch.Tensor
    row_sums: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    terms: torch.Tensor | None = None


class Keys(NamedTuple):
    """Gradients of sampled tokens.

    Attributes:
        dk, dv: [K, Hkv, D], [K, Hkv, Dv].
        noise: [K, Hkv], of dk, as in `Rows`.
        d_gate_weight: [Hq, branches, D], the whole gradient; zeros without a weight.
    """

    dk: torch.Tensor
    dv: torch.Tensor
    noise: torch.Tensor
    d_gate_weight: torch.Tensor


def _of_lse(call: Call) -> float:
    """The rounding of a stored LSE over that of a stored output."""
    return torch.finfo(accumulation_dtype(call.q.dtype)).eps / torch.finfo(call.q.dtype).eps


def _queries(call: Call, head: int) -> slice:
    """The query heads of a key/value head."""
    group = call.q.shape[1] // call.k.shape[1]
    return slice(head * group, (head + 1) * group)


def _gates(call: Call, q: torch.Tensor, heads: slice) -> torch.Tensor:
    """[..., heads, branches] for q [..., heads, D]."""
    weight = None if call.gate_weight is None else call.gate_weight[heads].to(q.dtype)
    return reference.gate_values(q, weight, branches=len(call.config.branches))


def compressed(
    x: torch.Tensor, *, config: NSAConfig, dtype: torch.dtype, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference.compress` of one head, [T, D] -> [Tc, D], in chunks of tokens."""
    Tc, step = config.compressed_length(len(x)), max(1, ELEMENTS // (config.span * x.shape[1]))
    parts = []
    for begin in range(0, Tc, step):
        tokens = x[begin * config.stride : (min(begin + step, Tc) - 1) * config.stride + config.span]
        parts.append(reference.compress(tokens[:, None].to(dtype), weight, config=config)[:, 0])
    return torch.cat(parts) if parts else x[:0].to(accumulation_dtype(dtype))


def rows(call: Call, do: torch.Tensor | None, tokens: torch.Tensor, *, dtype: torch.dtype) -> Rows:
    """Every branch at the queries `tokens`, computed in dtype from all that they see; do: [T, Hq, Dv]."""
    by_head = (_joined(_rows_of_head(call, do, head, tokens, dtype), 0) for head in range(call.k.shape[1]))
    return _joined(by_head, 1)


def _joined(parts: Iterable[Rows], dim: int) -> Rows:
    return Rows(*(None if of_parts[0] is None else torch.cat(of_parts, dim) for of_parts in zip(*parts)))


def _rows_of_head(
    call: Call, do: torch.Tensor | None, head: int, tokens: torch.Tensor, dtype: torch.dtype
) -> Iterator[Rows]:
    config, heads, k_cmp = call.config, _queries(call, head), ()
    if "compressed" in config.branches:
        k_cmp, v_cmp = (compressed(x[:, head], config=config, dtype=dtype).to(dtype) for x in (call.k, call.v))
    group, Hkv = heads.stop - heads.start, call.k.shape[1]
    widest = max(group * len(k_cmp), call.block_indices.shape[2] * config.block_size * Hkv)
    for chunk in tokens.split(max(1, ELEMENTS // (2 * widest))):
        q, seen = call.q[chunk, heads].to(dtype).requires_grad_(do is not None), {}
        if "compressed" in config.branches:
            visible = torch.arange(len(k_cmp), device=chunk.device) * config.stride + config.offset <= chunk[:, None]
            seen["compressed"] = k_cmp[None], v_cmp[None], visible
        for branch, keys in (("selected", _selected_keys), ("window", _window_keys)):
            position, visible = keys(call, head, chunk)
            position = position.clamp(0, len(call.k) - 1)
            seen[branch] = *(x[position, head].to(dtype) for x in (call.k, call.v)), visible
        scale = call.spec.softmax_scale
        attended = [_attention(q, *seen[branch], softmax_scale=scale) for branch in config.branches]
        yield _row_results(call, q, attended, None if do is None else do[chunk, heads].to(dtype), heads)


def _row_results(call: Call, q: torch.Tensor, attended: list, do: torch.Tensor | None, heads: slice) -> Rows:
    g = _gates(call, q, heads)
    outputs, lses = (torch.stack(x, dim=2) for x in zip(*attended))  # [R, G, branches(, Dv)]
    o = (g[..., None] * outputs.to(g.dtype)).sum(2).to(q.dtype)
    lse = lses.detach()
    if do is None:
        return Rows(o, lse)
    (dq,) = torch.autograd.grad(o, q, do, retain_graph=True)
    products = do[:, :, None].to(g.dtype) * outputs.detach().to(g.dtype)
    # An error e of a row sum moves dq by the gradient of e * LSE.
    terms = products.norm(dim=-1)
    moved = (lses.masked_fill(lse == -torch.inf, 0) * terms * g.detach()).sum()
    noise = torch.autograd.grad(moved, q)[0].abs().amax((1, 2))
    largest = lse.masked_fill(lse == -torch.inf, 0).abs().amax((1, 2))
    noise += _of_lse(call) * largest * dq.to(noise.dtype).abs().amax((1, 2))  # all probabilities of a row by one factor
    return Rows(o.detach(), lse, products.sum(-1), dq, noise[:, None], terms.amax((1, 2))[:, None])


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, *, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` with keys of its own for each row.

    Args:
        q: [R, G, D]; k, v: [R or 1, S, D or Dv]; visible: bool [R, S].

    Returns:
        o [R, G, Dv] and the LSE [R, G].
    """
    scores = (q @ k.mT).to(accumulation_dtype(q.dtype)) * softmax_scale
    visible = visible[:, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    p = scores.softmax(-1).masked_fill(empty, 0)
    lse = (scores.logsumexp(-1) if scores.shape[-1] else scores.sum(-1)).masked_fill(empty[..., 0], -torch.inf)
    return p.to(v.dtype) @ v, lse


def _selected_keys(call: Call, head: int, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the keys in the lists of the queries t, and which of them they see: [R, keys]."""
    size = call.config.block_size
    blocks = call.block_indices[t // call.config.q_tile, head].long()  # [R, n]
    position = (blocks[..., None] * size + torch.arange(size, device=t.device)).flatten(1)
    return position, (blocks >= 0).repeat_interleave(size, dim=1) & (position <= t[:, None])


def _window_keys(call: Call, head: int, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    position = t[:, None] - torch.arange(call.config.window_size, device=t.device)
    return position, position >= 0


def choice_scores(call: Call, tiles: Sequence[int] | None = None) -> tuple[reference.SelectionScores, torch.Tensor]:
    """The scores in fp64 by which tiles (None: all) choose, and how far rounding of the call may move each of them.

    By any rule, causal or not, with compression weights or k_cmp.
    """
    T, size = len(call.q), call.config.q_tile
    # The query that chooses for a tile may be a mean with tokens of the tile before: both are scored, and one is kept.
    spans = [(0, T)] if tiles is None else [(max(0, i - (size > 1)) * size, min((i + 1) * size, T)) for i in tiles]
    kept = slice(None if tiles is None else -1, None)
    scores, allowed = zip(*(_head_scores(call, head, spans, kept) for head in range(call.k.shape[1])))
    values = torch.cat([of_head.values for of_head in scores], dim=1)
    return reference.SelectionScores(values, scores[0].candidates, scores[0].forced), torch.cat(allowed, dim=1)


def _head_scores(
    call: Call, head: int, spans: list[tuple[int, int]], kept: slice
) -> tuple[reference.SelectionScores, torch.Tensor]:
    """`choice_scores` of a key/value head: of the tiles `kept` of each span of queries."""
    spec, config, dtype = call.spec, call.config, call.q.dtype
    if config.rule == "index":
        asking, keys = call.q_index[:, head, None], call.k_index[:, head % call.k_index.shape[1], None].double()
        scale = spec.index_scale
    else:
        asking, scale, weight = call.q[:, _queries(call, head)], spec.softmax_scale, call.compress_k_weight
        if call.k_cmp is None:
            weight = None if weight is None else weight[head, None]
            keys = compressed(call.k[:, head], config=config, dtype=torch.float64, weight=weight)[:, None]
            keys = keys.to(dtype).double() if config.by_token else keys
        else:
            keys = call.k_cmp[:, head, None].double()
    score = partial(reference.selection_scores, k_cmp=keys, causal=spec.causal, S=len(call.q))
    asking = [asking[begin:end].double() for begin, end in spans]
    of_spans = [score(q, config=config, softmax_scale=scale, q_offset=i) for q, (i, _) in zip(asking, spans)]
    if not config.by_token:
        asking = [reference.tile_query(q, config=config, causal=spec.causal) for q in asking]
    values, *roles = (
        torch.cat([getattr(x, name)[kept] for x in of_spans]) for name in ("values", "candidates", "forced")
    )
    rounds_keys = config.by_token and config.rule == "nsa" and call.k_cmp is None
    error, eps = (
        _score_error(torch.cat(asking), keys, scale, dtype, rounds_keys),
        torch.finfo(accumulation_dtype(dtype)).eps,
    )
    if config.rule == "nsa":  # it moves by a part of itself: by its logits' errors, and rounding of its own
        allowed = (2 * error + 8 * eps) * values + torch.finfo(torch.float32).tiny
    else:
        allowed = torch.full_like(values, 2 * error)
    return reference.SelectionScores(values, *roles), allowed


def _score_error(q: torch.Tensor, keys: torch.Tensor, scale: float, dtype: torch.dtype, rounds_keys: bool) -> float:
    """The most that rounding of terms and sums, and of an element of a compressed key the other way, moves q . k.

    Means are taken in the accumulation dtype in any order, so that one near the middle of two numbers of `dtype` may
    become either.
    """
    if keys.numel() == 0:
        return 0.0
    eps = torch.finfo(accumulation_dtype(dtype)).eps
    error = 8 * eps * float(q.norm(dim=-1).max() * keys.norm(dim=-1).max())
    if rounds_keys and accumulation_dtype(dtype) != dtype:
        error += torch.finfo(dtype).eps * float(q.abs().max() * keys.abs().max())
    return scale * error


def keys(
    call: Call,
    do: torch.Tensor,
    tokens: torch.Tensor,
    *,
    lse: torch.Tensor,
    row_sums: torch.Tensor,
    dtype: torch.dtype,
) -> Keys:
    """dk and dv of the tokens `tokens`, and the gradient of gate_weight: one pass over all queries.

    Args:
        do: [T, Hq, Dv].
        lse: [T, Hq, branches], the call's own.
        row_sums: [T, Hq, branches], ``do . o_i`` with the call's own o_i.
    """
    heads = range(call.k.shape[1])
    *of_tokens, d_weight = zip(*(_KeyPass(call, do, head, tokens, dtype).run(lse, row_sums) for head in heads))
    return Keys(*(torch.stack(x, dim=1) for x in of_tokens), torch.cat(d_weight))


class _KeyPass:
    """All queries of one key/value head against the sampled tokens, and against the compressed keys that hold them."""

    def __init__(self, call: Call, do: torch.Tensor, head: int, tokens: torch.Tensor, dtype: torch.dtype) -> None:
        self.call, self.do, self.head, self.tokens, self.dtype = call, do, head, tokens, dtype
        self.acc, self.heads, self.config = accumulation_dtype(dtype), _queries(call, head), call.config
        config = self.config
        # Token t is in the compressed keys (t - l) // d + 1 .. t // d, as far as there are such.
        blocks = tokens[:, None] // config.stride - torch.arange(config.span // config.stride, device=tokens.device)
        self.held = (blocks >= 0) & (blocks < config.compressed_length(len(call.q)))
        self.blocks = blocks.clamp(min=0).flatten()
        self.of_branch = dict.fromkeys(("selected", "window"), [x[tokens, head].to(dtype) for x in (call.k, call.v)])
        self.of_branch["compressed"] = [self._compressed(x[:, head]) for x in (call.k, call.v)]

    def _compressed(self, x: torch.Tensor) -> torch.Tensor:
        """The sampled compressed keys [K * reach, D]."""
        inside = torch.arange(self.config.span, device=x.device)
        position = (self.blocks[:, None] * self.config.stride + inside).clamp(max=len(x) - 1)
        return reference.mean(x[position].to(self.acc), 1).to(self.dtype)

    def run(self, lse: torch.Tensor, row_sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dk, dv [K, D], the noise [K] of dk, and the head's d_gate_weight."""
        call, branches, D, device = self.call, self.config.branches, self.call.q.shape[2], self.call.q.device
        group, widest = self.heads.stop - self.heads.start, max(D, *(len(k) for k, _ in self.of_branch.values()))
        zeros = partial(torch.zeros, group, dtype=self.acc, device=device)
        total = {branch: [zeros(*self.of_branch[branch][i].shape) for i in (0, 1, 0)] for branch in branches}
        d_weight = zeros(len(branches), D)
        generator = torch.Generator(device).manual_seed(0)
        step = max(1, ELEMENTS // max(1, group * widest))
        for begin, end in ((begin, min(begin + step, len(call.q))) for begin in range(0, len(call.q), step)):
            q, do = (x[begin:end, self.heads].to(self.dtype) for x in (call.q, self.do))  # [rows, G, D]
            g, sums, lses = _gates(call, q, self.heads), *(x[begin:end, self.heads] for x in (row_sums, lse))
            g, sums, lses = (x.to(self.acc).movedim(0, 1) for x in (g, sums, lses))  # [G, rows, branches]
            q, do = q.movedim(0, 1), do.movedim(0, 1)
            if call.gate_weight is not None:
                d_weight += (sums * g * (1 - g)).mT @ q.to(self.acc)
            sign = torch.randint(0, 2, sums.shape[:2], generator=generator, device=device).to(self.acc) * 2 - 1
            seen = self._visible(torch.arange(begin, end, device=device))
            for i, branch in enumerate(branches):
                row = (x[..., i, None] for x in (g, lses, sums))
                self._add(total[branch], q, do, *row, *self.of_branch[branch], seen[branch], sign[..., None])
        dk, dv, noise = (self._gradient({branch: x[i] for branch, x in total.items()}) for i in range(3))
        return dk, dv, noise.abs().amax(1), d_weight.to(self.dtype)

    def _visible(self, t: torch.Tensor) -> dict[str, torch.Tensor]:
        """Visibility of the sampled keys of each branch from a chunk's queries, bool [rows, K]."""
        config, tile, later = self.config, self.config.q_tile, self.tokens <= t[:, None]
        tiles = self.call.block_indices[t[0] // tile : t[-1] // tile + 1, self.head]
        own = (self.tokens // config.block_size).to(tiles.dtype)
        listed = (tiles[..., None] == own).any(1)[t // tile - t[0] // tile]  # [rows, K]
        return dict(
            compressed=self.held.flatten() & (self.blocks * config.stride + config.offset <= t[:, None]),
            selected=listed & later,
            window=later & (t[:, None] - self.tokens < config.window_size),
        )

    def _add(self, total: list, q, do, gate, lse, row_sum, k, v, seen, sign) -> None:
        """One branch, one chunk: total = [dk, dv, noise], each [G, K, D]."""
        scale = self.call.spec.softmax_scale
        do = (gate * do.to(self.acc)).to(self.dtype)
        p = ((q @ k.mT).to(self.acc) * scale - lse).masked_fill(~seen, -torch.inf).exp()
        dp = (do @ v.mT).to(self.acc) - gate * row_sum
        moved = row_sum.abs() * gate + _of_lse(self.call) * lse.abs() * dp.abs()
        noise = p * sign * moved.masked_fill(~seen, 0) * scale
        products = ((p * dp * scale).to(self.dtype), q), (p.to(self.dtype), do), (noise, q)
        for x, (a, b) in zip(total, products):
            x += a.mT.to(self.acc) @ b.to(self.acc)  # as one long product would be summed

    def _gradient(self, of_branch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The branches' sums over the group, the compressed one's taken back to tokens: [K, D]."""
        of_branch = {name: x.to(self.dtype).to(self.acc).sum(0).to(self.dtype) for name, x in of_branch.items()}
        of_blocks, result = of_branch.pop("compressed", None), sum(of_branch.values())
        if of_blocks is None:
            return result
        each = of_blocks.to(self.acc).unflatten(0, self.held.shape).sum(1)
        return result + (each / self.config.span).to(self.dtype)
