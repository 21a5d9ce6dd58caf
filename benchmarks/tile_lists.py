"""Block lists for benchmarks, made on the device: random tiles, causal windows, and what sparse attention selects.

A `Case` says what lists look like; `Case.lists()` makes both directions. Whole tiles count: `tflop` is the arithmetic
of every listed tile, as the kernels do it, whether a mask then hides a part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

HQ, HKV, D, BLOCK = 32, 8, 128, 128

# Log-normal distribution of document lengths in bytes, tokens of a byte-level model: fitted to the 671 files of Python
# 3.11's standard library without its tests, which `python -m nsa_layer demo` trains on. Mean 22 thousand, median 6.
LOG_MEAN, LOG_SIGMA = 8.725, 1.591


@dataclass(frozen=True)
class Case:
    """A pattern of block lists.

    Attributes:
        kind: "random" (anywhere), "causal" (random, and the diagonal), "window", or "selected": the first block, the
            query block's own, the one before, and random earlier ones.
        listed: key blocks that a query block lists, at most; for "window" the tokens that a query sees, in blocks.
        heads: lists: `HKV`, one for the query heads of a group, or `HQ`.
        block_k: keys of a block.
        head_dim: of queries, keys and values.
    """

    kind: str
    T: int
    listed: int
    heads: int = HKV
    block_k: int = BLOCK
    head_dim: int = D

    @property
    def name(self) -> str:
        return self.kind

    @property
    def mask(self) -> dict[str, Any]:
        """Options of the call."""
        if self.kind == "window":
            return dict(window_size_left=self.listed * BLOCK - 1, window_size_right=0)
        return dict(causal=self.kind in ("causal", "selected"))

    def lists(self) -> tuple[Any, Any]:
        """Forward and backward lists, [1, heads, rows, width]."""
        from flash_attn.cute.block_lists import lists_from_blocks, lists_from_window, transpose_lists

        size, N = (BLOCK, self.block_k), self.T // self.block_k
        if self.kind == "window":
            forward = lists_from_window(self.T, self.T, self.listed * BLOCK - 1, 0, size, device="cuda")
        else:
            listed = self.table()
            full = listed
            if self.mask["causal"]:
                last_key = (torch.arange(N, device="cuda") + 1) * self.block_k - 1
                full = listed & (last_key <= torch.arange(0, self.T, BLOCK, device="cuda").view(-1, 1))
            forward = lists_from_blocks(listed[None], full[None], block_size=size)
        return forward, transpose_lists(forward, N)

    def table(self) -> torch.Tensor:
        """bool [heads, query blocks, key blocks]: what is listed."""
        M, N, ratio = self.T // BLOCK, self.T // self.block_k, BLOCK // self.block_k
        score = torch.rand(self.heads, M, N, device="cuda", generator=torch.Generator("cuda").manual_seed(self.T))
        if self.kind != "random":
            m, n = torch.arange(M, device="cuda").view(-1, 1), torch.arange(N, device="cuda") // ratio
            score.masked_fill_(n > m, -1.0)
            always = (n == m) if self.kind == "causal" else (n == m) | (n == m - 1) | (n == 0)
            score.masked_fill_(always, 2.0)
        chosen = score.topk(min(self.listed, N), dim=-1)
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen.indices, chosen.values >= 0)


def tiles(lists: Any) -> int:
    """Tiles listed for one query head, on average over heads."""
    counts = lists.mask_block_cnt if lists.full_block_cnt is None else lists.mask_block_cnt + lists.full_block_cnt
    return int(counts.sum()) // counts.shape[1]


def tflop(number: float, block_k: int = BLOCK, head_dim: int = D) -> dict[str, float]:
    """TFLOP of `number` tiles in every head: two products forward, five backward."""
    one = number * HQ * BLOCK * block_k * head_dim * 2 / 1e12
    return {"forward": 2 * one, "backward": 5 * one}


def drawn_lengths(number: int, longest: int) -> list[int]:
    """Evenly spaced quantiles of the distribution, the longest cut, in an order drawn once."""
    at = torch.special.ndtri((torch.arange(number, dtype=torch.float64) + 0.5) / number)
    lengths = [min(longest, max(1, round(math.exp(LOG_MEAN + LOG_SIGMA * z)))) for z in at.tolist()]
    return [lengths[i] for i in torch.randperm(number, generator=torch.Generator().manual_seed(0)).tolist()]


def selected_in_sequences(lengths: list[int], listed: int, *, packed: bool, cut: bool = True) -> tuple[Any, Any]:
    """Lists like those of "selected" for each sequence, all on their own: compact and packed, or padded to the longest.

    Args:
        cut: padded lists hold nothing past a sequence's end; without it, every sequence has the longest's lists.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.lists.formats import cu_total_blocks

    longest = max(lengths)
    of_longest = Case("selected", -(-longest // BLOCK) * BLOCK, listed)
    table = of_longest.table()
    sides: tuple[list, list] = ([], [])
    for length in lengths:
        M = -(-length // BLOCK) if cut or packed else table.shape[1]
        # Random earlier blocks are earlier blocks of a shorter sequence too.
        for side, own in zip(sides, (table[:, :M, :M], table[:, :M, :M].mT), strict=True):
            side.append(own)
    cu = torch.nn.functional.pad(torch.tensor(lengths, device="cuda").cumsum(0, dtype=torch.int32), (1, 0))
    results = []
    for side, field in zip(sides, ("cu_total_m_blocks", "cu_total_n_blocks"), strict=True):
        rows = table.shape[1]
        pieces = [
            torch.nn.functional.pad(own, (0, rows - own.shape[2], 0, 0 if packed else rows - own.shape[1]))
            for own in side
        ]
        kinds = _mask_and_full(pieces, packed)
        more = {field: cu_total_blocks(cu, BLOCK)} if packed else {}
        results.append(BlockSparseTensorsTorch(*kinds, block_size=(BLOCK, BLOCK), **more))
    return results[0], results[1]


def _mask_and_full(pieces: list[torch.Tensor], packed: bool) -> list[torch.Tensor]:
    """Counts and indices of the diagonal blocks and of the others, [H, rows, ...] or [B, H, rows, ...]."""
    tensors = []
    on_diagonal = [torch.eye(*own.shape[1:], dtype=torch.bool, device="cuda") for own in pieces]
    for diagonal in (True, False):
        kind = [own & (eye if diagonal else ~eye) for own, eye in zip(pieces, on_diagonal, strict=True)]
        listed = torch.cat(kind, dim=1) if packed else torch.stack(kind)
        count = listed.sum(-1, dtype=torch.int32)
        width = max(1, int(count.max()))
        # Listed blocks first, rising.
        tensors += [count, listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :width].int()]
    return [t.contiguous() for t in tensors]
