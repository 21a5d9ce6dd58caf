"""Whether deterministic backward in one pass would wait: what lists and the order of their adds say beforehand.

An add to a query block's dq waits for the one before it. If that one stands at a later place of its own walk than the
entry in its, the entry *lags* by the difference: CTAs that start together then are so many steps apart. Walks of
lists that keep their shape from one key block to the next (causal, windows, documents, a prefix, everything) do not
lag, and cost 1.00 to 1.06 times the default in the model of `list_schedule`; where blocks are listed at random every
walk lags by a part of its length, which costs 1.4 to 5 times, and two passes 1.1 to 1.31.

Cut walks lag where whole ones do not, because all stretches of a walk are launched together: a causal one, cut every
32 entries, takes 2.7 times as long in the model.

Reading the answer waits for the GPU. PyTorch only.
"""

from __future__ import annotations

from typing import Any

import torch

LONG_ROWS = 32  # blocks of a key block, on average, from which one pass that does not wait is faster than two
MOST_LAG = 0.005  # of a walk's length, on average: up to it the model finds no lists that cost more than 1.2
BLOCK_K = 128  # keys of a block; with blocks of 64 two passes are faster in any case
LEAST_WALKS = 3  # of the longest list, in a multiprocessor's share of the work: else it is better cut
SHARES = 132  # multiprocessors that take part in it


def whole_walks_pay(walk: Any, *, num_heads: int, num_q_blocks: int) -> bool:
    """Whether one pass over these walks, uncut, is the faster way to the same bits.

    Waits for the GPU. Where rows are short, or one is much longer than the others, or blocks have 64 keys, it is not.

    Args:
        walk: backward lists with one walk by rising lock value, as `plan_backward` makes them: padded, [B, H, N], or
            ragged ones of packed sequences, [H, rows].
        num_heads: query heads.
        num_q_blocks: query blocks of a head, in the longest sequence.
    """
    if (walk.block_size or (BLOCK_K, BLOCK_K))[1] != BLOCK_K or walk.mask_block_cnt.numel() == 0:
        return False
    counts, blocks, locks = _flat(walk, num_q_blocks)
    entries, shape = blocks.numel(), walk.mask_block_cnt.shape
    longest, lag = torch.stack([counts.max().double(), _mean_lag(counts.flatten(), blocks, locks)]).tolist()
    walkers = num_heads * (shape[0] if len(shape) == 3 else 1)  # heads of all batches, a list's share of them below
    share = entries * walkers * counts.shape[-1] / counts.numel() / SHARES
    return entries >= LONG_ROWS * counts.numel() and lag <= MOST_LAG and LEAST_WALKS * longest <= share


def _flat(walk: Any, M: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths of walks, [.., H, rows], each list once; and of all entries a number of their query block, and locks."""
    counts = _once(walk.mask_block_cnt)
    lists = torch.arange(counts.numel() // counts.shape[-1], device=counts.device).view(*counts.shape[:-1], 1)
    if counts.ndim == 3:
        used = torch.arange(walk.mask_block_idx.shape[-1], device=counts.device) < counts.unsqueeze(-1)
        entries, locks = (_once(t)[used] for t in (walk.mask_block_idx, walk.dq_write_order))
        owner = lists.expand(counts.shape)
    else:
        listed = int(counts.sum())
        entries, locks = (t[:listed] for t in (walk.mask_block_idx, walk.dq_write_order))
        starts = walk.cu_total_n_blocks
        row = torch.arange(counts.shape[1], device=counts.device, dtype=starts.dtype)
        sequence = (torch.searchsorted(starts, row, right=True) - 1).clamp(0, starts.numel() - 2)
        owner = lists * (starts.numel() - 1) + sequence
    owner = owner.flatten().repeat_interleave(counts.flatten().long(), output_size=entries.numel())
    return counts, torch.div(entries, 2, rounding_mode="floor") + owner * M, locks.long()


def _once(t: torch.Tensor) -> torch.Tensor:
    """Without what is repeated over batches and heads."""
    for d in range(t.ndim - 1):
        if t.stride(d) == 0:
            t = t.narrow(d, 0, 1)
    return t


def _mean_lag(counts: torch.Tensor, blocks: torch.Tensor, locks: torch.Tensor) -> torch.Tensor:
    """The largest lag of each walk, on average, over the average length. Walks one after the other; float64, 0-dim.

    Args:
        counts: [rows], entries of each walk.
        blocks, locks: [E]: which query block, of which head and sequence, and the adds to it that come first.
    """
    ends = counts.cumsum(0)
    at = torch.arange(blocks.numel(), device=blocks.device)
    row = torch.searchsorted(ends, at, right=True)
    place = at - (ends - counts).index_select(0, row)
    adds = torch.zeros(int(blocks.max()) + 1 if blocks.numel() else 1, dtype=torch.int64, device=blocks.device)
    adds.scatter_add_(0, blocks, torch.ones_like(blocks))
    slot = (adds.cumsum(0) - adds).index_select(0, blocks) + locks
    in_order = torch.empty_like(place).scatter_(0, slot, place)
    before = in_order.index_select(0, (slot - 1).clamp(min=0))
    lag = torch.where(locks > 0, before - place, 0).clamp(min=0).double()
    worst = torch.zeros(counts.numel(), dtype=torch.double, device=lag.device).scatter_reduce_(0, row, lag, "amax")
    return worst.sum() / max(blocks.numel(), 1)
