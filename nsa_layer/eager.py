"""The operator in plain PyTorch: memory linear in T, forward and backward, on any device, any dtype and head dimension.

The branches differ only in the keys that a chunk of queries reads and the mask inside it; `_SparseAttention` loops over
the chunks, and backward recomputes the probabilities from the saved LSE. Chunks come in order and every key has one
place in a chunk, so that the same input gives the same bits twice. Where each token has its own list of blocks,
`token_attention` takes the selected branch.

On a CPU, fp16 and bf16 are computed in fp32 and rounded at the end: CPUs multiply fp32 faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nsa_layer.call_spec import Aux, CallSpec, OwnKeys, accumulation_dtype, mean_scale, require_choice_by_token
from nsa_layer.choose import choose_blocks, choose_blocks_by_token, sorted_lists
from nsa_layer.compress import compress
from nsa_layer.derivatives import ReverseMode, attention, first_derivatives
from nsa_layer.gate import gate_values, weighted_sum
from nsa_layer.profiler_ranges import component
from nsa_layer.token_attention import attend_lists, dot

# Scores held at once, over all heads. A CPU wants a chunk to stay in its cache, a GPU wants few launches.
CPU_CHUNK, GPU_CHUNK = 1 << 19, 1 << 24
# Queries of a chunk. A GPU sums a product one term after another: dk errs by the root of the rows of a chunk.
CHUNK_QUERIES = 256


@dataclass(frozen=True)
class _Run:
    """Consecutive keys: tokens, or compressed keys, ``begin .. end - 1``."""

    begin: int
    end: int

    def positions(self, device: torch.device) -> torch.Tensor:
        """[keys]"""
        return torch.arange(self.begin, self.end, device=device)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, S, D] -> [B, Hkv, 1, keys, D]"""
        return x[:, :, None, self.begin : self.end]

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """The transpose of `read`, added to ``total``."""
        total[:, :, None, self.begin : self.end] += part


@dataclass(frozen=True)
class _Blocks:
    """Blocks of ``size`` consecutive tokens, a list for each key/value head and each part F of its group.

    Attributes:
        index: int64 [B, Hkv, F, n]; a list names a block once, except that its padding names one that is all zeros.
    """

    index: torch.Tensor
    size: int

    def positions(self, device: torch.device) -> torch.Tensor:
        """[B, Hkv, F, 1, 1, keys]"""
        tokens = self.index[..., None] * self.size + torch.arange(self.size, device=device)
        return tokens.flatten(-2)[:, :, :, None, None]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, S, D] -> [B, Hkv, F, keys, D]"""
        listed = self._rows(x).index_select(0, self._row_index(x).flatten())
        return listed.view(*self.index.shape[:3], -1, x.shape[-1])

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """The transpose of `read`, added to ``total``."""
        rows, row_index = self._rows(total), self._row_index(total)
        for f in range(self.index.shape[2]):  # one at a time: two lists of a group may name the same block
            rows.index_add_(0, row_index[:, :, f].flatten(), part[:, :, f].reshape(-1, rows.shape[1]))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.size * x.shape[-1])

    def _row_index(self, x: torch.Tensor) -> torch.Tensor:
        B, Hkv, S, _ = x.shape
        first = torch.arange(0, B * Hkv * S, S, device=x.device) // self.size
        return self.index + first.view(B, Hkv, 1, 1)


Chunk = tuple[int, int, _Run | _Blocks]


@dataclass(frozen=True)
class _Plan:
    """A branch's chunks of queries, and their keys.

    Attributes:
        chunks: (first query, one past the last, all keys that any of them sees), in order, for a choice of blocks.
        visible: whether query t sees the key at a position; None where every query sees every key that its chunk reads.
        heads: query heads that lie beside one another in the rows, R.
        softmax_scale: factor of q . k.
        branch: whose plan it is, one of `profiler_ranges.COMPONENTS`.
    """

    chunks: Callable[[torch.Tensor | None], Iterator[Chunk]]
    visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    heads: int
    softmax_scale: float
    branch: str

    def rows(self, begin: int, end: int) -> tuple[slice, ...]:
        """The rows of queries ``begin .. end - 1`` in a tensor [B, Hkv, F, T * R, ...]."""
        return (slice(None),) * 3 + (slice(begin * self.heads, end * self.heads),)

    def scores(self, q: torch.Tensor, k: torch.Tensor, begin: int, end: int, keys: _Run | _Blocks) -> torch.Tensor:
        """Scaled and masked scores of a chunk, [B, Hkv, F, rows, keys] in the accumulation dtype."""
        scores = _dot(q, k.mT, self.softmax_scale)
        if self.visible is not None:
            t = torch.arange(begin, end, device=q.device)[:, None, None]
            hidden = ~self.visible(t, keys.positions(q.device))
            scores.unflatten(-2, (-1, self.heads)).masked_fill_(hidden, -torch.inf)
        return scores


class _SparseAttention(ReverseMode):
    """Attention of q [B, Hkv, F, T * R, D] over k [B, Hkv, S, D] and v [B, Hkv, S, Dv] as a plan says.

    F * R = G: the query heads of a group are rows beside one another, so that keys are never expanded to Hq. Gives
    o [B, Hkv, F, T * R, Dv] in q's dtype and the LSE [B, Hkv, F, T * R]; a row that sees no key gives 0 and -inf.
    """

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: torch.Tensor | None, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
        with component(plan.branch):
            for begin, end, keys in plan.chunks(choice):
                rows = plan.rows(begin, end)
                scores = plan.scores(q[rows], keys.read(k), begin, end, keys)
                top = scores.amax(-1, keepdim=True)
                top = top.masked_fill_(top == -torch.inf, 0)
                p = scores.sub_(top).exp_()
                total = p.sum(-1, keepdim=True)
                # The sum of p * v is above its mean. fp16 has no range for smaller p, and no v that would need them.
                scale = 1 if v.dtype == torch.float16 else mean_scale(p.shape[-1])
                o[rows] = _dot(p.div_(scale).to(v.dtype), keys.read(v)).div_(total.masked_fill(total == 0, 1) / scale)
                lse[rows] = total.log_().add_(top).squeeze(-1)
        return o, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        *tensors, ctx.plan = inputs
        lse = output[1]
        ctx.save_for_backward(*tensors, lse)
        ctx.mark_non_differentiable(lse)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
        gradients = first_derivatives("eager", _SparseAttention.gradients, do, *ctx.saved_tensors, ctx.plan)
        return *gradients, None, None

    @staticmethod
    def gradients(
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        choice: torch.Tensor | None,
        lse: torch.Tensor,
        plan: _Plan,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv; those of keys are summed in the accumulation dtype."""
        do, dq = do.contiguous(), torch.zeros_like(q)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        with component(plan.branch):
            for begin, end, keys in plan.chunks(choice):
                rows = plan.rows(begin, end)
                q_i, do_i, k_i, v_i = q[rows], do[rows], keys.read(k), keys.read(v)
                lse_i = lse[rows].unsqueeze(-1)
                lse_i = lse_i.masked_fill(lse_i == -torch.inf, torch.inf)
                p = plan.scores(q_i, k_i, begin, end, keys).sub_(lse_i).exp_()
                keys.add(dv, _dot(p.to(q.dtype).mT, do_i))
                dp = _dot(do_i, v_i.mT)
                # A chunk holds every key of its rows: delta needs no output; a row that sees one key gets exactly 0.
                delta = (p * dp).sum(-1, keepdim=True)
                ds = dp.sub_(delta).mul_(p).mul_(plan.softmax_scale).to(q.dtype)
                dq[rows] = _dot(ds, k_i)
                keys.add(dk, _dot(ds.mT, q_i))
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    spec: CallSpec,
    gate_weight: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    compress_k_weight: torch.Tensor | None = None,
    compress_v_weight: torch.Tensor | None = None,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    k_win: torch.Tensor | None = None,
    v_win: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    q_offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Aux]:
    """The operator; arguments as `nsa` has checked them.

    The lengths of packed sequences are read from ``spec``, not from ``cu_seqlens``. Returns o, in the dtype of q,
    and `Aux`.
    """
    weights, own = (compress_k_weight, compress_v_weight), (k_cmp, v_cmp, k_win, v_win)
    made = attend_branches(q, k, v, *weights, *own, block_indices, q_offset, spec=spec)
    return gated(q, gate_weight, gates, made)


def gated(
    q: torch.Tensor, gate_weight: torch.Tensor | None, gates: torch.Tensor | None, made: Branches
) -> tuple[torch.Tensor, Aux]:
    """The branches weighed and summed, in the dtype of q, and `Aux`."""
    with component("gate"):
        g = gate_values(q, gate_weight, gates)
        o = weighted_sum(g, *made.outputs).to(q.dtype)
    return o, Aux(made.choice, g.detach(), *made.lses)


class Branches(NamedTuple):
    """The branches' results, which the gates sum.

    Attributes:
        outputs: the three branches' o [B, T, Hq, Dv], packed [total, Hq, Dv].
        lses: fp32 or fp64 [B, Hq, T], packed [Hq, total].
        choice: int32 [B, M, Hs, n], packed [tiles, Hs, n].
    """

    outputs: list[torch.Tensor]
    lses: list[torch.Tensor]
    choice: torch.Tensor


def attend_branches(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    compress_k_weight: torch.Tensor | None,
    compress_v_weight: torch.Tensor | None,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    k_win: torch.Tensor | None,
    v_win: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    q_offset: torch.Tensor | None,
    *,
    spec: CallSpec,
) -> Branches:
    """The three branches, before they are weighed.

    Args:
        q_offset: int32 [B], packed [sequences]: the position of each sequence's first query among its keys, of which
            there are ``q_offset + T`` at least; read on the host. None: the queries are those of all keys.
    """
    weights, own = (compress_k_weight, compress_v_weight), OwnKeys(k_cmp, v_cmp, k_win, v_win)
    offsets = None if q_offset is None else q_offset.tolist()
    if offsets is not None and block_indices is None:
        require_choice_by_token(spec.config)
    if spec.lengths is None and (offsets is None or len(set(offsets)) == 1):
        first = 0 if offsets is None else offsets[0]
        branches, lses, choice = _attend_batch(q, k, v, own, spec, *weights, block_indices, first)
    elif spec.lengths is None:
        lists = [None] * len(offsets) if block_indices is None else block_indices.split(1)
        owned = [own.map(lambda x: x[b : b + 1]) for b in range(len(offsets))]
        sequences = zip(*(x.split(1) for x in (q, k, v)), owned, lists, offsets, strict=True)
        results = [_attend_batch(*x, mine, spec, *weights, given, at) for *x, mine, given, at in sequences]
        branches, lses = ([torch.cat(x) for x in zip(*(r[i] for r in results), strict=True)] for i in range(2))
        choice = torch.cat([r[2] for r in results])
    else:
        # split, not slices: the backward of a slice fills a gradient as long as the whole pack.
        lengths = (spec.lengths, spec.key_lengths, spec.key_lengths)
        sequences = zip(*(x.split(each) for x, each in zip((q, k, v), lengths, strict=True)), strict=True)
        given = [None] * len(spec.lengths)
        if block_indices is not None:
            given = block_indices.unsqueeze(0).split([spec.config.num_tiles(length) for length in spec.lengths], dim=1)
        owned, offsets = own.split(spec.key_lengths, config=spec.config), offsets or [0] * len(spec.lengths)
        results = [
            _attend_batch(*(x.unsqueeze(0) for x in sequence), mine.map(_alone), spec, *weights, lists, first)
            for sequence, mine, lists, first in zip(sequences, owned, given, offsets, strict=True)
            if len(sequence[0])
        ]
        branches = [torch.cat(parts, dim=1)[0] for parts in zip(*(r[0] for r in results), strict=True)]
        lses = [torch.cat(parts, dim=2)[0] for parts in zip(*(r[1] for r in results), strict=True)]
        width = spec.config.list_width(max(spec.key_lengths))
        if block_indices is None:
            choice = torch.cat([F.pad(r[2], (0, width - r[2].shape[-1]), value=-1) for r in results], dim=1)[0]
    if block_indices is not None:
        choice = block_indices
    return Branches(branches, lses, choice)


def _attend_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: OwnKeys,
    spec: CallSpec,
    compress_k_weight: torch.Tensor | None,
    compress_v_weight: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    first: int,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """For sequences of one length: the branches' outputs [B, T, Hq, Dv], their LSEs [B, Hq, T], the chosen blocks.

    first: position of the first query among the keys.
    """
    config, dtype = spec.config, q.dtype
    if q.device.type == "cpu":
        q, k, v = (x.to(accumulation_dtype(dtype)) for x in (q, k, v))
    k_win, v_win = (x if given is None else given.to(x.dtype) for x, given in ((k, own.k_win), (v, own.v_win)))
    with component("compress"):
        k_cmp = compress(k, compress_k_weight, config=config) if own.k_cmp is None else own.k_cmp
        v_cmp = compress(v, compress_v_weight, config=config) if own.v_cmp is None else own.v_cmp
    # Attention reads them as the kernels do, rounded to the dtype of the inputs.
    unrounded, (k_cmp, v_cmp) = k_cmp, (x.to(dtype).to(q.dtype) for x in (k_cmp, v_cmp))
    (S, Hkv), T, G = k.shape[1:3], q.shape[1], q.shape[2] // k.shape[2]
    by_group, keys, values = _fold(q, Hkv, 1), _heads_first(k_cmp), _heads_first(v_cmp)
    cmp = attention(_SparseAttention, by_group, keys, values, None, _compressed_plan(q, k_cmp.shape[1], G, spec, first))
    static = dict(config=config, causal=spec.causal, softmax_scale=spec.softmax_scale)
    with component("choose"):
        if block_indices is not None:
            # By tile, no list is longer than the blocks up to the tile's end.
            last = torch.arange(1, config.num_tiles(T) + 1, device=q.device) * config.q_tile - 1 + first
            end = last // config.block_size + 1 if spec.causal else None
            choice = sorted_lists(block_indices.transpose(1, 2), config.num_blocks(S), end)
        elif config.by_token:
            choice = choose_blocks_by_token(q, k_cmp, _unfold(cmp[1], T).mT, **static, first=first, S=S)
        else:
            choice = choose_blocks(q, unrounded.to(accumulation_dtype(dtype)), **static)
    k, v, k_win, v_win = map(_heads_first, (k, v, k_win, v_win))
    slc = _attend_selected(q, k, v, choice, spec, first)
    swa = attention(_SparseAttention, by_group, k_win, v_win, None, _window_plan(q, S, G, spec, first))
    cmp, swa = ([_unfold(x, T) for x in branch] for branch in (cmp, swa))
    outputs, lses = zip(cmp, slc, swa)
    return list(outputs), [lse.mT.contiguous() for lse in lses], choice.transpose(1, 2)


def _attend_selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: torch.Tensor, spec: CallSpec, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, T, Hq, D], k, v [B, Hkv, S, D or Dv], choice [B, Hs, M, n] -> o [B, T, Hq, Dv] and the LSE [B, T, Hq]."""
    config, (T, Hq), (Hkv, S) = spec.config, q.shape[1:3], k.shape[1:3]
    if config.q_tile == 1:
        ends = (first + 1, first + T + 1)
        limit = torch.arange(*ends, device=q.device) if spec.causal else torch.full((T,), S, device=q.device)
        limit, size = limit.expand(len(q), T), config.block_size
        return attend_lists(q, k, v, choice, limit, size=size, softmax_scale=spec.softmax_scale)
    parts = choice.shape[1] // Hkv
    # The padding of a list names the block of zeros behind the last one, which no query sees.
    spare = (config.num_blocks(S) + 1) * config.block_size - S
    k, v = (F.pad(x, (0, 0, 0, spare)) for x in (k, v))
    plan = _selected_plan(q, S, choice.shape[-1], Hq // (Hkv * parts), parts, spec, first)
    results = attention(_SparseAttention, _fold(q, Hkv, parts), k, v, choice, plan)
    return tuple(_unfold(x, T) for x in results)


def _compressed_plan(q: torch.Tensor, Tc: int, heads: int, spec: CallSpec, first: int) -> _Plan:
    T, config = q.shape[1], spec.config
    step = _rows_that_fit(q, Tc)

    def chunks(_: None) -> Iterator[Chunk]:
        for begin in range(0, T, step):
            end = min(begin + step, T)
            seen = min(Tc, (first + end - 1 - config.offset) // config.stride + 1) if spec.causal else Tc
            if seen > 0:
                yield begin, end, _Run(0, seen)

    def visible(t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return j * config.stride + config.offset <= t + first

    return _Plan(chunks, visible if spec.causal else None, heads, spec.softmax_scale, "cmp")


def _selected_plan(q: torch.Tensor, S: int, width: int, heads: int, parts: int, spec: CallSpec, first: int) -> _Plan:
    """Tile by tile; the padding of a list reads the block of zeros behind the last one, which no query sees."""
    T, config = q.shape[1], spec.config
    step = _rows_that_fit(q, width * config.block_size)

    def chunks(choice: torch.Tensor) -> Iterator[Chunk]:
        index = choice.long().remainder(config.num_blocks(S) + 1).unflatten(1, (-1, parts))
        for tile in range(config.num_tiles(T)):
            start, last = tile * config.q_tile, min((tile + 1) * config.q_tile, T)
            listed = index[:, :, :, tile]
            if spec.causal:  # a list is ascending, and none is longer than the blocks up to the tile's end
                listed = listed[..., : config.num_blocks(first + last)]
            keys = _Blocks(listed, config.block_size)
            yield from ((begin, min(begin + step, last), keys) for begin in range(start, last, step))

    def visible(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return s <= t + first if spec.causal else s < S

    return _Plan(chunks, visible, heads, spec.softmax_scale, "slc")


def _window_plan(q: torch.Tensor, S: int, heads: int, spec: CallSpec, first: int) -> _Plan:
    T, back = q.shape[1], spec.config.window_size - 1
    ahead = 0 if spec.causal else back
    # Chunks longer than the window would read mostly pairs that it excludes.
    step = min(max(back + 1, 64), _rows_that_fit(q, min(S, 2 * (back + 1) + ahead)))

    def chunks(_: None) -> Iterator[Chunk]:
        for begin in range(0, T, step):
            end = min(begin + step, T)
            yield begin, end, _Run(max(0, first + begin - back), min(S, first + end + ahead))

    def visible(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (s >= t + first - back) & (s <= t + first + ahead)

    return _Plan(chunks, visible, heads, spec.softmax_scale, "swa")


def _rows_that_fit(q: torch.Tensor, keys: int) -> int:
    """Queries of [B, T, Hq, D] in a chunk with ``keys`` keys."""
    budget = CPU_CHUNK if q.device.type == "cpu" else GPU_CHUNK
    return max(1, min(CHUNK_QUERIES, budget // max(1, q.shape[0] * q.shape[2] * keys)))


def _dot(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`dot` of [B, Hkv, F, I, K] and [B, Hkv, F, K, J]."""
    return dot(a.flatten(0, 2), b.flatten(0, 2), scale).unflatten(0, a.shape[:3])


def _alone(x: torch.Tensor) -> torch.Tensor:
    """[T, ...] -> [1, T, ...]"""
    return x.unsqueeze(0)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, T, D]"""
    return x.transpose(1, 2).contiguous()


def _fold(x: torch.Tensor, Hkv: int, parts: int) -> torch.Tensor:
    """[B, T, Hq, D] -> [B, Hkv, parts, T * heads, D]"""
    B, T, Hq, D = x.shape
    heads = Hq // (Hkv * parts)
    return x.view(B, T, Hkv, parts, heads, D).permute(0, 2, 3, 1, 4, 5).reshape(B, Hkv, parts, T * heads, D)


def _unfold(x: torch.Tensor, T: int) -> torch.Tensor:
    """[B, Hkv, parts, T * heads, ...] -> [B, T, Hq, ...]"""
    x = x.unflatten(3, (T, -1)).movedim(3, 1)
    return x.flatten(2, 4)
