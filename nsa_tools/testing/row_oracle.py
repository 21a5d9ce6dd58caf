"""The operator at sampled rows and keys, for lengths at which neither dense attention nor the quadratic reference runs.

`rows` computes sampled queries of all branches and the gate from q, k, v and the choice of blocks alone, and
their dq. `keys` computes dk and dv of sampled tokens: each sums over all queries that see it, which takes one pass over
all queries with the LSE and the row sums of the call under test; `rows` checks these on its own sample.
`choice_scores` has the scores that sampled tiles choose by. In fp64 all this is the truth; in the dtype of the inputs
it is the straight implementation, rounded where `reference` rounds, whose error sets the limits of `assertions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nsa_layer import reference
from nsa_layer.call import accumulation_dtype
from nsa_layer.config import NSAConfig
from nsa_tools.testing.assertions import rounding_of_keys, rounding_of_scores

ELEMENTS = 1 << 25  # of a chunk's largest matrix


@dataclass(frozen=True)
class Sequence:
    """One causal sequence and what was chosen for it, by the rules "nsa" and "index".

    Attributes:
        q, k, v, do: [T, Hq, D], [T, Hkv, D], [T, Hkv, Dv], [T, Hq, Dv]; do is None where only forward is checked.
        block_indices: int32 [M, Hkv, n], as `Aux` has them.
        gate_weight: [Hq, branches, D], or None for equal shares.
        q_index, k_index: [T, Hkv, Di], [T, Hkv or 1, Di], for the rule "index", whose scale is Di ** -0.5.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_indices: torch.Tensor
    config: NSAConfig
    softmax_scale: float
    do: torch.Tensor | None = None
    gate_weight: torch.Tensor | None = None
    q_index: torch.Tensor | None = None
    k_index: torch.Tensor | None = None

    @property
    def of_lse(self) -> float:
        """The rounding of a stored LSE over that of a stored output."""
        return torch.finfo(accumulation_dtype(self.q.dtype)).eps / torch.finfo(self.q.dtype).eps

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def queries(self, head: int) -> slice:
        """The query heads of a key/value head."""
        return slice(head * self.group, (head + 1) * self.group)

    def gates(self, q: torch.Tensor, heads: slice) -> torch.Tensor:
        """[..., heads, branches] for q [..., heads, D]."""
        weight = None if self.gate_weight is None else self.gate_weight[heads].to(q.dtype)
        return reference.gate_values(q, weight, branches=len(self.config.branches))


@dataclass(frozen=True)
class Rows:
    """Sampled queries, in the order in which they were asked for.

    Attributes:
        o: [R, Hq, Dv].
        lse: [branches, R, Hq], natural, -inf where a row sees no key.
        row_sums: [branches, R, Hq], ``do . o_i`` of each branch before its gate; zeros without do.
        dq: [R, Hq, D], or None.
        noise: [R], how far dq of a row moves for errors of ``do . o_i`` as large as its terms together, and for what
            `of_lse` says; rounding of a stored o_i and LSE makes eps of that.
        terms: [R], the largest ``norm(do * o_i)`` of a row.
    """

    o: torch.Tensor
    lse: torch.Tensor
    row_sums: torch.Tensor
    dq: torch.Tensor | None
    noise: torch.Tensor
    terms: torch.Tensor


@dataclass(frozen=True)
class Keys:
    """Gradients of sampled tokens.

    Attributes:
        dk, dv: [K, Hkv, D], [K, Hkv, Dv].
        d_gate_weight: [Hq, branches, D], the whole gradient, or None.
        noise: [K], of dk, as in `Rows`.
    """

    dk: torch.Tensor
    dv: torch.Tensor
    d_gate_weight: torch.Tensor | None
    noise: torch.Tensor


def compressed(x: torch.Tensor, *, config: NSAConfig, dtype: torch.dtype) -> torch.Tensor:
    """`reference.compress` of one head, [T, D] -> [Tc, D], in chunks of tokens."""
    Tc, step = config.compressed_length(len(x)), max(1, ELEMENTS // (config.span * x.shape[1]))
    parts = []
    for begin in range(0, Tc, step):
        tokens = x[begin * config.stride : (min(begin + step, Tc) - 1) * config.stride + config.span]
        parts.append(reference.compress(tokens[:, None].to(dtype), None, config=config)[:, 0])
    return torch.cat(parts) if parts else x[:0].to(accumulation_dtype(dtype))


def rows(sequence: Sequence, tokens: torch.Tensor, *, dtype: torch.dtype) -> Rows:
    """Every branch at the queries `tokens`, computed in dtype from all that they see."""
    of_heads = (_rows_of_head(sequence, head, tokens, dtype) for head in range(sequence.k.shape[1]))
    o, lse, row_sums, dq, *sizes = zip(*of_heads)
    dq = None if sequence.do is None else torch.cat(dq, dim=1)
    noise, terms = (torch.stack(x).amax(0) for x in sizes)
    return Rows(torch.cat(o, dim=1), torch.cat(lse, dim=2), torch.cat(row_sums, dim=2), dq, noise, terms)


def _rows_of_head(s: Sequence, head: int, tokens: torch.Tensor, dtype: torch.dtype) -> tuple:
    config, heads, k_cmp = s.config, s.queries(head), ()
    if "compressed" in config.branches:
        k_cmp, v_cmp = (compressed(x[:, head], config=config, dtype=dtype).to(dtype) for x in (s.k, s.v))
    widest = max(s.group * len(k_cmp), s.block_indices.shape[2] * config.block_size * s.k.shape[2])
    parts = []
    for chunk in tokens.split(max(1, ELEMENTS // (2 * widest))):
        q = s.q[chunk, heads].to(dtype).requires_grad_(s.do is not None)
        of_tokens, seen = (s, head, chunk, dtype), {}
        if "compressed" in config.branches:
            seen["compressed"] = (k_cmp[None], v_cmp[None], _compressed_visible(chunk, len(k_cmp), config))
        seen |= dict(selected=_selected_keys(*of_tokens), window=_window_keys(*of_tokens))
        attended = [_attention(q, *seen[branch], softmax_scale=s.softmax_scale) for branch in config.branches]
        parts.append(_row_results(s, q, attended, None if s.do is None else s.do[chunk, heads].to(dtype), heads))
    o, lse, row_sums, dq, noise, terms = zip(*parts)
    gradient = None if s.do is None else torch.cat(dq)
    return torch.cat(o), torch.cat(lse, dim=1), torch.cat(row_sums, dim=1), gradient, torch.cat(noise), torch.cat(terms)


def _row_results(s: Sequence, q: torch.Tensor, attended: list, do: torch.Tensor | None, heads: slice) -> tuple:
    g = s.gates(q, heads)
    outputs, lses = zip(*attended)
    o = sum(g[..., i, None] * o_i.to(g.dtype) for i, o_i in enumerate(outputs)).to(q.dtype)
    lse = torch.stack([x.detach() for x in lses])
    if do is None:
        return o.detach(), lse, torch.zeros_like(lse), None, lse.new_zeros(len(q)), lse.new_zeros(len(q))
    (dq,) = torch.autograd.grad(o, q, do, retain_graph=True)
    products = [do.to(g.dtype) * o_i.detach().to(g.dtype) for o_i in outputs]
    # An error e of a row sum moves dq by the gradient of e * LSE.
    terms = torch.stack([x.norm(dim=-1) for x in products])
    sizes = terms * g.detach().movedim(-1, 0)
    moved = sum((x.masked_fill(x == -torch.inf, 0) * size).sum() for x, size in zip(lses, sizes))
    noise = torch.autograd.grad(moved, q)[0].abs().amax((1, 2))
    largest = lse.masked_fill(lse == -torch.inf, 0).abs().amax((0, 2))
    noise += s.of_lse * largest * dq.to(noise.dtype).abs().amax((1, 2))  # all probabilities of a row by one factor
    return o.detach(), lse, torch.stack([x.sum(-1) for x in products]), dq, noise, terms.amax((0, 2))


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


def _compressed_visible(t: torch.Tensor, Tc: int, config: NSAConfig) -> torch.Tensor:
    return torch.arange(Tc, device=t.device) * config.stride + config.offset <= t[:, None]


def _selected_keys(s: Sequence, head: int, t: torch.Tensor, dtype: torch.dtype) -> tuple:
    blocks = s.block_indices[t // s.config.q_tile, head].long()  # [R, n]
    inside = torch.arange(s.config.block_size, device=t.device)
    position = (blocks[..., None] * s.config.block_size + inside).flatten(1)
    visible = (blocks >= 0).repeat_interleave(s.config.block_size, dim=1) & (position <= t[:, None])
    return *_gathered(s, head, position, dtype), visible


def _window_keys(s: Sequence, head: int, t: torch.Tensor, dtype: torch.dtype) -> tuple:
    back = torch.arange(s.config.window_size, device=t.device)
    position = t[:, None] - back
    return *_gathered(s, head, position, dtype), position >= 0


def _gathered(s: Sequence, head: int, position: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    position = position.clamp(0, len(s.k) - 1)
    return s.k[position, head].to(dtype), s.v[position, head].to(dtype)


def choice_scores(sequence: Sequence, tiles: torch.Tensor) -> tuple[reference.SelectionScores, torch.Tensor]:
    """The scores in fp64 by which some tiles choose their lists, and how far rounding to fp32 may move each of them."""
    s, config, by_index = sequence, sequence.config, sequence.config.rule == "index"
    T, l, N = len(s.q), config.block_size, config.num_blocks(len(s.q))
    first = tiles[:, None] * config.q_tile
    last = (first + config.q_tile - 1).clamp(max=T - 1)
    start = torch.arange(N, device=tiles.device) * l
    complete = start + l - 1 <= first
    candidates = start <= last if config.chooses_own or by_index else complete
    forced = torch.zeros_like(complete)
    for row, t0, end in zip(forced, first[:, 0].tolist(), last[:, 0].tolist()):
        row[forced_blocks(range(t0 // l, end // l + 1), N, config, causal=True)] = True
    candidates, forced = candidates.unsqueeze(1), forced.unsqueeze(1)
    if config.by_token:
        values, allowed = (_index_scores if by_index else _token_scores)(s, tiles, N)
        return reference.SelectionScores(values.masked_fill(~candidates, -torch.inf), candidates, forced), allowed
    asked = [slice(max(0, t - config.q_tile + 1), t + 1) for t in first[:, 0].tolist()]
    asking = torch.stack([s.q[queries].double().mean(0) for queries in asked])  # [m, Hq, D]
    values, allowed = [], []
    eps = torch.finfo(accumulation_dtype(s.q.dtype)).eps
    for head in range(s.k.shape[1]):
        keys = compressed(s.k[:, head], config=config, dtype=torch.float64)[:: l // config.stride]
        mine = asking[:, s.queries(head)]  # [m, G, D]
        score = torch.full((*mine.shape[:2], N), 0.0, dtype=torch.float64, device=keys.device)
        score[..., : len(keys)] = mine @ keys.mT * s.softmax_scale
        error = rounding_of_scores(mine, keys, s.softmax_scale, eps)
        hidden = ~complete.unsqueeze(1)
        score = score.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0).sum(1)
        values.append(score.masked_fill(~candidates[:, 0], -torch.inf))
        allowed.append((2 * error + 8 * eps) * score + torch.finfo(torch.float32).tiny)
    return reference.SelectionScores(torch.stack(values, dim=1), candidates, forced), torch.stack(allowed, dim=1)


def forced_blocks(own: range, blocks: int, config: NSAConfig, *, causal: bool) -> list[int]:
    """Blocks that a tile lists in any case, the first to be listed first; own: blocks of its tokens."""
    reach = range(own[0] - config.local_blocks + 1, own[-1] + 1) if config.local_blocks else ()
    first = range(min(config.init_blocks, blocks))
    before = {j for j in (*reach, *first) if 0 <= j <= own[-1]}
    behind = [] if causal else [j for j in first if j > own[-1]]
    return [*sorted(before, reverse=True), *behind][: config.block_counts]


def _token_scores(s: Sequence, tokens: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance [m, Hkv, blocks] of every block for some tokens, and how far rounding may move it."""
    config, dtype, values, allowed = s.config, s.q.dtype, [], []
    eps = torch.finfo(accumulation_dtype(dtype)).eps
    static = dict(blocks=blocks, config=config, causal=True, softmax_scale=s.softmax_scale)
    for head in range(s.k.shape[1]):
        keys = compressed(s.k[:, head], config=config, dtype=torch.float64).to(dtype).double()
        asking = s.q[tokens, s.queries(head)].double()
        values.append(reference.token_importance(asking, keys[:, None], tokens, **static)[:, 0])
        error = rounding_of_scores(asking, keys, s.softmax_scale, eps)
        error += rounding_of_keys(asking, keys, s.softmax_scale, dtype)
        allowed.append((2 * error + 8 * eps) * values[-1] + torch.finfo(torch.float32).tiny)
    return torch.stack(values, dim=1), torch.stack(allowed, dim=1)


def _index_scores(s: Sequence, tokens: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_token_scores`, by the index: the largest score of a block's tokens, which a rounding moves by itself."""
    config, scale, values, allowed = s.config, s.q_index.shape[-1] ** -0.5, [], []
    eps, size = torch.finfo(accumulation_dtype(s.q_index.dtype)).eps, config.block_size
    later = torch.arange(blocks * size, device=tokens.device) > tokens[:, None]
    for head in range(s.q_index.shape[1]):
        keys, asking = s.k_index[:, head % s.k_index.shape[1]].double(), s.q_index[tokens, head].double()
        score = torch.nn.functional.pad(asking @ keys.mT * scale, (0, blocks * size - len(keys)))
        values.append(score.masked_fill(later, -torch.inf).unflatten(-1, (blocks, size)).amax(-1))
        allowed.append(torch.full_like(values[-1], 2 * rounding_of_scores(asking, keys, scale, eps)))
    return torch.stack(values, dim=1), torch.stack(allowed, dim=1)


def keys(
    sequence: Sequence, tokens: torch.Tensor, *, lse: torch.Tensor, row_sums: torch.Tensor, dtype: torch.dtype
) -> Keys:
    """dk and dv of the tokens `tokens`, and the gradient of gate_weight: one pass over all queries.

    Args:
        lse: [branches, Hq, T], the call's own.
        row_sums: [branches, T, Hq], ``do . o_i`` with the call's own o_i.
    """
    s, heads = sequence, range(sequence.k.shape[1])
    dk, dv, d_weight, noise = zip(*(_KeyPass(s, head, tokens, dtype).run(lse, row_sums) for head in heads))
    weight = None if s.gate_weight is None else torch.cat(d_weight)
    return Keys(torch.stack(dk, dim=1), torch.stack(dv, dim=1), weight, torch.stack(noise).amax(0))


class _KeyPass:
    """All queries of one key/value head against the sampled tokens, and against the compressed keys that hold them."""

    def __init__(self, s: Sequence, head: int, tokens: torch.Tensor, dtype: torch.dtype) -> None:
        self.s, self.head, self.tokens, self.dtype = s, head, tokens, dtype
        self.acc, self.heads = accumulation_dtype(dtype), s.queries(head)
        config, device = s.config, tokens.device
        Tc = config.compressed_length(len(s.q)) if "compressed" in config.branches else 0
        # Token t is in the compressed keys (t - l) // d + 1 .. t // d, as far as there are such.
        reach = config.span // config.stride
        blocks = tokens[:, None] // config.stride - torch.arange(reach, device=device)
        self.held = (blocks >= 0) & (blocks < Tc)
        self.blocks = blocks.clamp(0, max(0, Tc - 1))
        self.of_tokens = [x[tokens, head].to(dtype) for x in (s.k, s.v)]
        self.of_blocks = [self._compressed(x[:, head]) for x in (s.k, s.v)] if Tc else None

    def _compressed(self, x: torch.Tensor) -> torch.Tensor:
        """The sampled compressed keys [K * reach, D]."""
        config = self.s.config
        inside = torch.arange(config.span, device=x.device)
        position = (self.blocks.flatten()[:, None] * config.stride + inside).clamp(max=len(x) - 1)
        return reference.mean(x[position].to(self.acc), 1).to(self.dtype)

    def run(self, lse: torch.Tensor, row_sums: torch.Tensor) -> tuple:
        """dk, dv [K, D], the head's share of d_gate_weight, and the noise of dk."""
        s, K, C = self.s, len(self.tokens), self.blocks.numel()
        widths = [dict(compressed=C if self.of_blocks else 0).get(branch, K) for branch in s.config.branches]
        total = [[self._zeros(width, x.shape[2]) for x in (s.k, s.v, s.k)] for width in widths]
        d_weight = torch.zeros(s.group, len(widths), s.q.shape[2], dtype=self.acc, device=s.q.device)
        generator = torch.Generator(s.q.device).manual_seed(0)
        for begin, end in _chunks(len(s.q), ELEMENTS // max(1, s.group * max(K, C, s.q.shape[2]))):
            q, do = (x[begin:end, self.heads].to(self.dtype).movedim(1, 0) for x in (s.q, s.do))  # [G, rows, D]
            g = s.gates(q.movedim(0, 1), self.heads).movedim(1, 0).to(self.acc)
            sums = row_sums[:, begin:end, self.heads].to(self.acc).mT  # [branches, G, rows]
            if s.gate_weight is not None:
                d_logit = sums.movedim(0, -1) * g * (1 - g)
                d_weight += d_logit.mT @ q.to(self.acc)
            sign = torch.randint(0, 2, sums.shape[1:], generator=generator, device=s.q.device).to(self.acc) * 2 - 1
            visible = dict(zip(("compressed", "selected", "window"), self._visible(begin, end)))
            for i, branch in enumerate(s.config.branches):
                mine, seen = visible[branch]
                if widths[i]:
                    row = (g[..., i, None], lse[i, self.heads, begin:end].to(self.acc), sums[i])
                    self._add(total[i], q, do, *row, mine, seen, sign)
        dk, dv, noise = (self._gradient([branch[i] for branch in total]) for i in range(3))
        return dk, dv, d_weight.to(self.dtype), noise.abs().amax(1)

    def _visible(self, begin: int, end: int) -> Iterator[tuple]:
        """The sampled (k, v) of each branch and which queries of a chunk see them, bool [rows, K]."""
        s, config, tile = self.s, self.s.config, self.s.config.q_tile
        t = torch.arange(begin, end, device=s.q.device)
        blocks = self.blocks.flatten()
        yield self.of_blocks, blocks * config.stride + config.offset <= t[:, None]
        later = self.tokens <= t[:, None]
        tiles = s.block_indices[begin // tile : (end - 1) // tile + 1, self.head]
        own = (self.tokens // config.block_size).to(tiles.dtype)
        listed = (tiles[..., None] == own).any(1)[t // tile - begin // tile]  # [rows, K]
        yield self.of_tokens, listed & later
        yield self.of_tokens, later & (t[:, None] - self.tokens < config.window_size)

    def _add(self, total: list, q, do, gate, lse, row_sum, mine, seen, sign) -> None:
        """One branch, one chunk: total = [dk, dv, noise], each [G, K, D]."""
        k, v = mine
        dk, dv, noise = total
        scale = self.s.softmax_scale
        do = (gate * do.to(self.acc)).to(self.dtype)
        p = ((q @ k.mT).to(self.acc) * scale - lse[..., None]).masked_fill(~seen, -torch.inf).exp()
        dv += _product(p.to(self.dtype), do)
        dp = (do @ v.mT).to(self.acc) - gate * row_sum[..., None]
        dk += _product((p * dp * scale).to(self.dtype), q)
        moved = row_sum.abs()[..., None] * gate + self.s.of_lse * lse.abs()[..., None] * dp.abs()
        noise += _product(p * sign[..., None] * moved.masked_fill(~seen, 0) * scale, q.to(self.acc))

    def _gradient(self, branches: list[torch.Tensor]) -> torch.Tensor:
        """The branches' sums over the group, the compressed one's taken back to tokens: [K, D]."""
        of_token = [x.to(self.dtype).to(self.acc).sum(0).to(self.dtype) for x in branches]
        of_block = of_token.pop(0) if "compressed" in self.s.config.branches else None
        result = sum(of_token[1:], of_token[0]) if of_token else torch.zeros_like(self.of_tokens[0])
        if self.of_blocks is None:
            return result
        each = of_block.to(self.acc).unflatten(0, self.blocks.shape).masked_fill(~self.held[..., None], 0)
        return result + (each.sum(1) / self.s.config.span).to(self.dtype)

    def _zeros(self, width: int, size: int) -> torch.Tensor:
        return torch.zeros(self.s.group, width, size, dtype=self.acc, device=self.s.q.device)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a.mT @ b in the accumulation dtype, as one long product would be summed."""
    return a.mT.to(accumulation_dtype(a.dtype)) @ b.to(accumulation_dtype(b.dtype))


def _chunks(T: int, step: int) -> Iterator[tuple[int, int]]:
    step = max(1, step)
    yield from ((begin, min(begin + step, T)) for begin in range(0, T, step))
