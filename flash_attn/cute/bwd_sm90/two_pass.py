"""Rules for SM90 backward: query heads of a CTA under a window, and one pass or two over block lists.

Under a window (`gqa_loop`) a CTA that loops over more heads loads k and v, and stores dk and dv, less often. But there
are fewer CTAs, and the last of them leave multiprocessors idle for longer.

Block-sparse backward in one pass reduces dq in fp32 global memory, which bounds it where lists are sparse and takes an
ordered reduction where bits have to repeat. In two passes the first is that kernel without dq, and the second
(`bwd_dq/interface`) is query-stationary, reads forward lists and stores dq in its own dtype: no ordered reduction, no
semaphore values. docs/block_sparsity.md has the times behind the rule.
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
from flash_attn.cute.lists.deterministic_lists import SM90
from flash_attn.cute.lists.rows import ListHeads
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.shared_backward import BackwardLayout

# Fixed cost of a CTA, in units of one query tile: loading k and v, storing dk and dv.
AROUND_TILES = 2.9
# Least fraction of the time that looping over several heads has to save.
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
    batch: sequences, all of that length; packed: 1. heads: (Hq, Hkv). tile: the kernel's (tile_m, tile_n).
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


OTHER_TILES = 96  # up to this head dimension forward may choose tiles of 192 queries by itself
LOOPS_OVER_GROUP: Optional[bool] = None  # what `loops_over_group` says; None: by its rule. For tests and measurements
MOST_GROUP_ENTRIES = 24  # capacity of a forward row up to which two passes with loops over groups are faster than one
MOST_HEAD_ENTRIES = 8  # capacity up to which two passes are faster head by head (with a plan, or lists per query head)
LEAST_LOOPS = 3  # least ratio of the work per multiprocessor to that of a group's longest list


def loops_over_group(forward: Any, backward: Any, q: torch.Tensor, v: torch.Tensor) -> bool:
    """True if a CTA loops over a key block's list for all query heads of a key/value head, in a call without a plan.

    k and v are then loaded once, and dk and dv stored without accumulators. But one CTA then loops over the longest
    list for the whole group. Its length and the total work are estimated from the lists' shapes. False for lists
    without tensors, of which only the block size is known yet.
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

    passes: 1 or 2; None: `passes` of the backward lists, or the faster number if that is None too. forward, backward:
    block lists of both directions. alone: arguments that only one pass supports, None where they are not given.
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
        return rows <= MOST_HEAD_ENTRIES or (rows <= MOST_GROUP_ENTRIES and loops_over_group(forward, backward, q, v))
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
    """Backward lists for a pass that leaves dq out: without semaphore values, unless a plan was made of them.

    lists: backward lists, the call's `block_sparse_tensors`. alone: arguments that only calls with dq may have.
    """
    if arch // 10 != SM90 or lists is None:
        given = "without block lists" if lists is None else f"on sm_{arch}"
        raise NotImplementedError(f"without_dq=True {given}: only block-sparse backward on SM90 leaves dq out")
    for name, value in alone.items():
        if value is not None:
            raise ValueError(f"{name} cannot be given together with without_dq=True")
    if lists.plan is not None:  # its dq_write_order says that entries are 2 * block + is_full
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
    """The layout of a pass without dq, with row sums and a dq accumulator that both passes can read.

    Packed sequences start at a common multiple of the first pass's tile and the second one's 64 rows; dq has the second
    pass's tile layout.
    """
    return replace(layout, dq=replace(layout.dq, start=math.lcm(layout.dq.start, tiling.ROWS), tile=ACCUM_TILE))
