"""Attention by chunks of queries in plain PyTorch: a plan says which keys a chunk reads, and the mask inside it.

Backward computes the probabilities again from the saved LSE. Chunks come in order and every key has one place in a
chunk, so that the same input gives the same bits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nsa_layer.call_spec import accumulation_dtype, mean_scale
from nsa_layer.profiler_ranges import component
from nsa_layer.token_attention import dot

# Scores held at once, over all heads. A CPU wants a chunk to stay in its cache, a GPU wants few launches.
CPU_CHUNK, GPU_CHUNK = 1 << 19, 1 << 24
# Queries of a chunk. A GPU sums a product one term after another: dk errs by the root of the rows of a chunk.
CHUNK_QUERIES = 256


@dataclass(frozen=True)
class KeyRun:
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
class KeyBlocks:
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


Chunk = tuple[int, int, KeyRun | KeyBlocks]


@dataclass(frozen=True)
class ChunkPlan:
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

    def scores(self, q: torch.Tensor, k: torch.Tensor, begin: int, end: int, keys: KeyRun | KeyBlocks) -> torch.Tensor:
        """Scaled and masked scores of a chunk, [B, Hkv, F, rows, keys] in the accumulation dtype."""
        scores = _dot(q, k.mT, self.softmax_scale)
        if self.visible is not None:
            t = torch.arange(begin, end, device=q.device)[:, None, None]
            hidden = ~self.visible(t, keys.positions(q.device))
            scores.unflatten(-2, (-1, self.heads)).masked_fill_(hidden, -torch.inf)
        return scores


class ChunkAttention:
    """Attention of q [B, Hkv, F, T * R, D] over k [B, Hkv, S, D] and v [B, Hkv, S, Dv] as a plan says.

    F * R = G: the query heads of a group are rows beside one another, so that keys are never expanded to Hq. Gives
    o [B, Hkv, F, T * R, Dv] in q's dtype and the LSE [B, Hkv, F, T * R]; a row that sees no key gives 0 and -inf.
    """

    @staticmethod
    def outputs(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: torch.Tensor | None, plan: ChunkPlan
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
    def gradients(
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        choice: torch.Tensor | None,
        plan: ChunkPlan,
        lse: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of ``weight * o``, and do . o of each row; sums are in the accumulation dtype.

        Args:
            weight: like the LSE, whose dtype it has; None: 1.
        """
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        do_o = torch.zeros_like(lse)
        with component(plan.branch):
            for begin, end, keys in plan.chunks(choice):
                rows = plan.rows(begin, end)
                q_i, do_i, k_i, v_i = q[rows], do[rows], keys.read(k), keys.read(v)
                lse_i = lse[rows].unsqueeze(-1)
                lse_i = lse_i.masked_fill(lse_i == -torch.inf, torch.inf)
                p = plan.scores(q_i, k_i, begin, end, keys).sub_(lse_i).exp_()
                dp = _dot(do_i, v_i.mT)
                # A chunk holds every key of its rows: delta needs no output; a row that sees one key gets exactly 0.
                delta = (p * dp).sum(-1, keepdim=True)
                do_o[rows] = delta.squeeze(-1)
                p = p if weight is None else p.mul_(weight[rows].unsqueeze(-1))
                keys.add(dv, _dot(p.to(q.dtype).mT, do_i))
                ds = dp.sub_(delta).mul_(p).mul_(plan.softmax_scale).to(q.dtype)
                dq[rows] = _dot(ds, k_i)
                keys.add(dk, _dot(ds.mT, q_i))
        return dq, dk, dv, do_o


def rows_that_fit(q: torch.Tensor, keys: int) -> int:
    """Queries of [B, T, Hq, D] in a chunk with ``keys`` keys."""
    budget = CPU_CHUNK if q.device.type == "cpu" else GPU_CHUNK
    return max(1, min(CHUNK_QUERIES, budget // max(1, q.shape[0] * q.shape[2] * keys)))


def _dot(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`dot` of [B, Hkv, F, I, K] and [B, Hkv, F, K, J]."""
    return dot(a.flatten(0, 2), b.flatten(0, 2), scale).unflatten(0, a.shape[:3])
