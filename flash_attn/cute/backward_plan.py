"""How block-sparse backward on SM90 deals out its work: items of about equal length, in an order of one's choice.

Without a plan there is a CTA for each key block and query head. That waits where lists are uneven: a key block that all
queries list, as the first one often is, keeps one CTA busy long after all others have finished. A plan's items are
stretches of at most `longest` entries of one key block's walk, so many CTAs share a long one. They lie in one row for
all heads and batches, head by head: what the CTAs in flight read and add to then stays in the L2. PyTorch only; the
kernel's side is `query_walk`.

In deterministic mode every wait points to an item launched earlier: an item adds to a query block's dq after those of
the key blocks that come earlier in the schedule, and to dk and dv after the items of the same key block before it.
"""

from typing import Any, Optional

import torch

from flash_attn.cute.write_order import deterministic_walk

LEFT_TO_RIGHT, RIGHT_TO_LEFT, LONGEST_FIRST = "left to right", "right to left", "longest first"
LONGEST = 32


def plan_backward(
    lists: Any,
    *,
    num_heads: int,
    num_heads_kv: int,
    num_q_blocks: int,
    deterministic: bool = False,
    schedule: str | torch.Tensor = LEFT_TO_RIGHT,
    longest: int = LONGEST,
    listed: Optional[int] = None,
) -> Any:
    """Backward lists with a plan, and with lock values where `deterministic`, ready for SM90 backward.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`, [B or 1, H, N, width], where H is 1,
            `num_heads_kv` (one list for the query heads of a group) or `num_heads`.
        num_q_blocks: query blocks of a head.
        deterministic: also merge mask and full blocks into one walk by rising lock value. Lock values that `lists`
            hold already are ignored.
        schedule: which key blocks of a head are launched, and added to dq, first: "left to right", "right to left",
            "longest first", or a permutation of the key blocks, integers [N].
        longest: entries of an item at most; an entry is a block of queries.
        listed: upper bound of the entries of one list head, mask and full together. With it nothing waits for the
            GPU; without it the number of items is read back, once.

    Returns:
        The lists with `plan`, int32 [items, 6]: batch, query head, key block, first entry, end, and how many items
        add to the same dk and dv before.

    Raises:
        ValueError: a head count, schedule or length that does not fit.
    """
    heads = lists.mask_block_cnt.shape[1]
    if num_heads % num_heads_kv or heads not in (1, num_heads_kv, num_heads):
        raise ValueError(
            f"lists have {heads} heads, expected 1, num_heads_kv={num_heads_kv} or num_heads={num_heads}, a multiple "
            "of num_heads_kv"
        )
    if longest < 1:
        raise ValueError(f"longest has to be at least 1, got {longest}")
    if lists.mask_block_cnt.ndim != 3:
        raise ValueError(
            f"mask_block_cnt has shape {tuple(lists.mask_block_cnt.shape)}, expected [B, H, N]: plans are for padded "
            "lists"
        )
    counts = lists.mask_block_cnt if lists.full_block_cnt is None else lists.mask_block_cnt + lists.full_block_cnt
    order = _order(schedule, counts, max(1, heads // num_heads_kv))
    if deterministic:
        lists = _merged(lists, order, num_q_blocks, listed)
    else:
        lists = lists._replace(dq_write_order=None, dq_write_order_full=None, spt=None)
    counts = counts.long().repeat_interleave(num_heads // heads, dim=1)
    order = order.expand(counts.shape[0], heads, -1).repeat_interleave(num_heads // heads, dim=1)
    if num_heads > num_heads_kv:
        pieces = torch.div(counts + longest - 1, longest, rounding_mode="floor")
    else:  # dk and dv are stored, not added: one item each, and zeros come from it too
        pieces = torch.ones_like(counts)
    most = None
    if listed is not None:
        most = pieces.numel() + counts.shape[0] * num_heads * listed // longest * (num_heads > num_heads_kv)
    return lists._replace(plan=_items(counts, pieces, order, num_heads // num_heads_kv, most))


def _items(
    counts: torch.Tensor, pieces: torch.Tensor, order: torch.Tensor, group: int, most: Optional[int]
) -> torch.Tensor:
    """counts, pieces, order: [B, H, N]; `group` heads in a row add to the same dk and dv."""
    B, H, N = counts.shape
    by_group = pieces.view(B, H // group, group, N)
    turns = by_group.cumsum(2) - by_group
    rows = (torch.arange(B * H, device=counts.device).view(B, H, 1) * N + order).flatten()
    in_order = pieces.flatten().index_select(0, rows)
    ends = in_order.cumsum(0)
    most = int(ends[-1]) if most is None else most
    at = torch.arange(max(most, 1), device=counts.device)
    row = torch.searchsorted(ends, at, right=True)
    real = row < ends.numel()
    row = row.clamp(max=ends.numel() - 1)
    piece = at - (ends - in_order).index_select(0, row)
    row = rows.index_select(0, row)
    steps, of, turn = (t.flatten().index_select(0, row) for t in (counts, pieces, turns))
    begin, end = (torch.div(steps * p, of.clamp(min=1), rounding_mode="floor") for p in (piece, piece + 1))
    head = torch.div(row, N, rounding_mode="floor")
    plan = torch.stack([torch.div(head, H, rounding_mode="floor"), head % H, row % N, begin, end, turn + piece], dim=-1)
    return torch.where(real.unsqueeze(-1), plan, 0).int()


def _merged(lists: Any, order: torch.Tensor, num_q_blocks: int, listed: Optional[int]) -> Any:
    B, heads, _ = lists.mask_block_cnt.shape
    widths = [idx.shape[-1] for idx in (lists.mask_block_idx, lists.full_block_idx) if idx is not None]
    walk = deterministic_walk(
        lists,
        order=order,
        width=min(sum(widths), num_q_blocks),
        num_q_blocks=num_q_blocks,
        listed=None if listed is None else listed * B * heads,
    )
    return walk.in_place_of(lists)._replace(spt=False)


def _order(schedule: str | torch.Tensor, counts: torch.Tensor, sharing: int) -> torch.Tensor:
    """The key blocks in the order of their launch, [1 or B, 1 or H, N]; one order for heads that add to the same dk."""
    B, H, N = counts.shape
    if isinstance(schedule, torch.Tensor):
        if schedule.shape != (N,) or schedule.is_floating_point() or schedule.device != counts.device:
            raise ValueError(
                f"schedule is {schedule.dtype} {tuple(schedule.shape)} on {schedule.device}, expected a permutation of "
                f"the {N} key blocks, integers on {counts.device}"
            )
        return schedule.long().view(1, 1, N)
    if schedule == LONGEST_FIRST:
        lengths = counts.view(B, H // sharing, sharing, N).sum(2, keepdim=True)
        return lengths.argsort(dim=-1, descending=True, stable=True).expand(-1, -1, sharing, -1).reshape(B, H, N)
    if schedule not in (LEFT_TO_RIGHT, RIGHT_TO_LEFT):
        expected = ", ".join(map(repr, (LEFT_TO_RIGHT, RIGHT_TO_LEFT, LONGEST_FIRST)))
        raise ValueError(f"schedule has to be one of {expected} or a permutation, got {schedule!r}")
    order = torch.arange(N, device=counts.device)
    return (order.flip(0) if schedule == RIGHT_TO_LEFT else order).view(1, 1, N)
