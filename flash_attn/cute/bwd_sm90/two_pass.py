"""Rules for SM90 backward: query heads of a CTA under a window, and one pass or two over block lists.

Under a window (`gqa_loop`) a CTA that loops over more heads loads k and v, and stores dk and dv, less often. But there
are fewer CTAs, and the last of them leave multiprocessors idle for longer.

Block-sparse backward in one pass adds its parts of dq to fp32 memory, which bounds it where lists are sparse and has to
be ordered where bits have to repeat. In two passes the first is that kernel without dq, and the second
(`bwd_dq/interface`) stays on a block of queries, reads the lists of forward and stores dq in its own dtype: no
order of adds, no semaphore values. docs/block_sparsity.md has the times behind the rule.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Optional, Tuple

import torch

from flash_attn.cute.bwd_dq import spec as dq_spec
from flash_attn.cute.bwd_dq.interface import ACCUM_TILE, backward_dq, lists_of_queries  # noqa: F401 - callers'
from flash_attn.cute.fwd_sm90.persistence import capacity
from flash_attn.cute.lists import tiling
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.shared_backward import BackwardLayout

# Fixed cost of a CTA, in units of one query tile: loading k and v, storing dk and dv.
AROUND_TILES = 2.9
# Of the time, that looping over several heads has to save.
LEAST_SAVING = 0.02


@lru_cache(maxsize=1024)
def window_heads_per_cta(
    window: Tuple[Optional[int], Optional[int]],
    tokens: Tuple[int, int],
    *,
    batch: int,
    heads: Tuple[int, int],
    tile: Tuple[int, int],
    sms: int,
) -> int:
    """Query heads of one key/value head that a CTA loops over, in a call without lists.

    window: (left, right); None: without an end on this side. tokens: (queries, keys) of a sequence, packed: of all.
    batch: how many sequences of as many tokens there are, packed: 1. heads: (Hq, Hkv). tile: queries and keys of the
    kernel's.
    """
    if window == (None, None):
        return 1
    (tile_m, tile_n), (Hq, Hkv) = tile, heads
    reached = tokens[0] if None in window else max(1, min(tokens[0], tile_n + sum(window)))
    ctas = -(-tokens[1] // tile_n) * Hq * batch
    group = Hq // Hkv
    times = {n: window_time(ctas // n, n * -(-reached // tile_m), sms) for n in range(1, group + 1) if group % n == 0}
    best = min(times, key=lambda n: (times[n], n))
    return best if times[best] <= (1 - LEAST_SAVING) * times[1] else 1


def window_time(ctas: int, tiles: int, sms: int) -> float:
    """Time of `ctas` CTAs of `tiles` query tiles each, in query tiles."""
    return -(-ctas // sms) * (AROUND_TILES + tiles)


SM90 = 9  # arch // 10
OTHER_TILES = 96  # up to this head dimension forward may choose tiles of 192 queries by itself
LOOPS_OVER_GROUP: Optional[bool] = None  # what `loops_over_group` says; None: by its rule. For tests and measurements
MOST_BLOCKS = 24  # capacity of a row of forward lists, up to which two passes by groups are faster than one
FEW_BLOCKS = 8  # the same, up to which they are faster head by head too: with a plan, or with lists per query head
LEAST_LOOPS = 3  # of the longest list by all heads of a group, in a multiprocessor's share of the work


def loops_over_group(forward: Any, backward: Any, q: torch.Tensor, v: torch.Tensor) -> bool:
    """True if a CTA loops over a key block's list for all query heads of a key/value head, in a call without a plan.

    k and v are then loaded once, and dk and dv stored without accumulators. But the longest list is one CTA's for the
    whole group. How long it is, and how much work there is, follows from the shapes of the lists alone. Lists without
    tensors, of which only the block size is known yet, say neither.
    """
    Hq, Hkv = q.shape[-2], v.shape[-2]
    if backward.mask_block_cnt is None:
        return False
    if backward.plan is not None or Hq == Hkv or not ListHeads.of(backward, Hq, Hkv).packable:
        return False
    if LOOPS_OVER_GROUP is not None:
        return LOOPS_OVER_GROUP
    if forward is None or capacity(forward) == math.inf:
        return False
    counts = forward.mask_block_cnt
    sequences = q.shape[0] if q.ndim == 4 else counts.shape[0] if counts.ndim == 3 else 1
    all_heads = counts.shape[-1] * capacity(forward) * Hq * sequences
    return LEAST_LOOPS * capacity(backward) * (Hq // Hkv) * target_sm_count() <= all_heads


def use_split_dq(
    passes: Optional[int],
    *,
    arch: int,
    q: torch.Tensor,
    v: torch.Tensor,
    forward: Any,
    backward: Any,
    deterministic: bool,
    **alone: Any,
) -> bool:
    """True if a call of backward computes dq in a pass of its own.

    passes: 1 or 2 where the caller says so; None for what the backward lists say in their field of that name, or the
    faster way if they do not. forward, backward: the block lists of both directions. alone: arguments that one pass
    alone can do with, where they are given.
    """
    if passes is None and backward is not None:
        passes = backward.passes
    if passes is not None and (type(passes) is not int or passes not in (1, 2)):
        raise ValueError(f"passes is {passes!r}, expected 1, 2 or None")
    if passes == 1 or (passes is None and (forward is None or backward is None)):
        return False
    given = [name for name, value in alone.items() if value is not None]
    reason = _unsupported(arch, q, v, forward, backward)
    if passes is None:
        if given or reason is not None:
            return False
        if deterministic or backward.plan_per_group or (backward.block_size or tiling.DENSE_BLOCK)[1] == 64:
            return True
        rows = capacity(forward)
        return rows <= FEW_BLOCKS or (rows <= MOST_BLOCKS and loops_over_group(forward, backward, q, v))
    if given:
        raise ValueError(f"{given[0]} cannot be given together with passes=2")
    if reason is not None:
        raise NotImplementedError(f"passes=2: {reason}")
    return True


def _unsupported(arch: int, q: torch.Tensor, v: torch.Tensor, forward: Any, backward: Any) -> Optional[str]:
    """Why the kernels of the two passes cannot do a call, or None."""
    if forward is None or backward is None:
        return "two passes loop over block lists of both directions"
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    reason = dq_spec.unsupported(arch, q.dtype, head_dim, head_dim_v, forward)
    if reason is not None:
        return reason
    if forward.block_size is None and head_dim <= OTHER_TILES:
        return f"lists without block_size at head dimension {head_dim}, where forward's tiles may be others"
    tile = tiling.backward_tile(head_dim, head_dim_v, 0, 0, backward, without_dq=True)
    if tile is None or tile.m_block_size % tiling.ROWS:
        return f"no tile for backward lists of blocks {backward.block_size}"
    return None


def lists_of_keys(arch: int, lists: Any, **alone: Any) -> Any:
    """The lists of a backward pass that leaves dq out: nothing in them is ordered by what is added to dq.

    lists: backward lists, the call's `block_sparse_tensors`. alone: arguments that come with dq only.
    """
    if arch // 10 != SM90 or lists is None:
        given = "without block lists" if lists is None else f"on sm_{arch}"
        raise NotImplementedError(f"without_dq=True {given}: only block-sparse backward on SM90 leaves dq out")
    for name, value in alone.items():
        if value is not None:
            raise ValueError(f"{name} cannot be given together with without_dq=True")
    if lists.plan is not None:  # its entries may say by themselves whether they are full: the order is their mark
        return lists
    return lists._replace(dq_write_order=None, dq_write_order_full=None, spt=None)


def heads_per_cta(forward: Any, backward: Any, q: torch.Tensor, v: torch.Tensor, *, without_dq: bool) -> int:
    """Query heads of one key/value head that a CTA of backward with block lists loops over: one, or all there are."""
    Hq, Hkv = q.shape[-2], v.shape[-2]
    if not backward.plan_per_group:
        return Hq // Hkv if without_dq and loops_over_group(forward, backward, q, v) else 1
    if not without_dq:
        raise NotImplementedError("a plan made with per_group=True: one pass loops over query heads one by one")
    if not ListHeads.of(backward, Hq, Hkv).packable and Hq > Hkv:
        raise ValueError(f"plan_per_group with lists for each of {Hq} query heads")
    return Hq // Hkv


@lru_cache(maxsize=1024)
def rows_for_both(layout: BackwardLayout) -> BackwardLayout:
    """The layout of a pass without dq, with rows and accumulator of the queries as both passes can do with them.

    Sequences start at multiples of the first pass's tile and of the second one's 64 rows, and dq lies as the second
    pass keeps it.
    """
    return replace(layout, dq=replace(layout.dq, start=math.lcm(layout.dq.start, tiling.ROWS), tile=ACCUM_TILE))
