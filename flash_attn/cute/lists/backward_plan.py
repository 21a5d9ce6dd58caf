"""Plans of block-sparse SM90 backward: work tiles, ranges of key blocks' lists of similar length, in launch order.

Without a plan there is a CTA per key block and query head, and the CTA of a key block that all queries list finishes
long after the others. A work tile has at most `longest` entries of one key block's list, for one query head or all of a
key/value head. Work tiles are ordered by head, so that what the CTAs in flight read and add to stays in L2.

They add to dk and dv by rank and, in deterministic mode, to dq by semaphore value. A work tile may only wait for ones
launched earlier, since a later one may not start until those in flight are done; `check_work_tiles` verifies that on
request. PyTorch only; `query_loop` is the kernel's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch

from flash_attn.cute.lists.csr import is_packed, packed_rows
from flash_attn.cute.lists.deterministic_lists import SM90
from flash_attn.cute.lists.entries import Rows, check_lists, fields, integer
from flash_attn.cute.lists.formats import as_ragged
from flash_attn.cute.lists.write_order import merged_lists

LEFT_TO_RIGHT, RIGHT_TO_LEFT, LONGEST_FIRST = "left to right", "right to left", "longest first"
LONGEST_WORK_TILE = 32  # entries
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def plan_backward(
    lists: Any,
    *,
    num_heads: int,
    num_heads_kv: int,
    num_q_blocks: int,
    deterministic: bool = False,
    schedule: str | torch.Tensor = LEFT_TO_RIGHT,
    longest: Optional[int] = None,
    listed: Optional[int] = None,
    per_group: bool = False,
    cu_total_m_blocks: Optional[torch.Tensor] = None,
) -> Any:
    """Backward lists with a plan, and with semaphore values where `deterministic`, ready for backward on SM90.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`, padded or packed, of 1, `num_heads_kv` or
            `num_heads` heads.
        num_q_blocks: query blocks of the longest sequence.
        deterministic: replace semaphore values in `lists` by new ones, and merge mask and full blocks by them, as
            deterministic calls in one pass need. Two passes do not.
        schedule: launch order of the key blocks of a head: "left to right", "right to left", "longest first", or a
            permutation, integers [N]; [rows] of packed sequences.
        longest: most entries of a work tile. None: `LONGEST_WORK_TILE`, with `per_group` divided by the group's size.
        listed: upper bound of the entries of one list head, mask and full together; avoids a synchronisation.
        per_group: a work tile is for all query heads of a key/value head, which share their lists; for calls on SM90
            without dq.
        cu_total_m_blocks: integers [B + 1], of the forward lists, which stacked lists need.

    Returns:
        The lists, packed ones made ragged, with `plan`, int32 [work tiles, 6]: batch, query head (or, per group,
        key/value head), key block, first entry, end, and rank: number of work tiles that add to the same dk and dv
        before. With ragged lists [work tiles, 8]: and the low and high 32 bits of the offset of the key block's row.

    Raises:
        ValueError: a head count or length that does not fit, a schedule that is no permutation, or packed lists without
            the starts that they need.
    """
    packed = getattr(fields(lists)[0], "ndim", 3) == 2
    rows = packed_rows(lists, cu_total_m_blocks) if packed else None
    if packed:
        lists = as_ragged(lists, "cu_total_n_blocks", cu_total_m_blocks)
    else:
        check_lists(fields(lists))
    for name, value in (("num_heads", num_heads), ("num_heads_kv", num_heads_kv), ("num_q_blocks", num_q_blocks)):
        integer(name, value)
    cut, per_group = num_heads > num_heads_kv, per_group and num_heads > num_heads_kv
    if longest is None:
        longest = max(1, LONGEST_WORK_TILE * num_heads_kv // num_heads) if per_group else LONGEST_WORK_TILE
    integer("longest", longest)
    if listed is not None:
        integer("listed", listed, least=0)
    counts = _row_counts(lists, rows)
    heads = counts.shape[1]
    if per_group and heads > num_heads_kv:
        raise ValueError(f"per_group=True with lists of {heads} heads, expected 1 or num_heads_kv={num_heads_kv}")
    if num_heads % num_heads_kv or heads not in (1, num_heads_kv, num_heads):
        raise ValueError(
            f"lists have {heads} heads, expected 1, num_heads_kv={num_heads_kv} or num_heads={num_heads}, a multiple "
            "of num_heads_kv"
        )
    order = _order(schedule, counts, max(1, heads // num_heads_kv), waits=listed is None)
    if deterministic:
        most = None if listed is None else listed * counts.shape[0] * heads
        if packed and most is None:  # rows may share entries
            most = int(counts.sum())
        launch = order[0] if packed else order
        lists = merged_lists(lists, order=launch, num_q_blocks=num_q_blocks, listed=most)._replace(spt=False)
    else:
        lists = lists._replace(dq_write_order=None, dq_write_order_full=None, spt=None)
    planned = num_heads_kv if per_group else num_heads  # heads that have work tiles of their own
    counts = counts.long().repeat_interleave(planned // heads, dim=1)
    order = order.expand(counts.shape[0], heads, -1).repeat_interleave(planned // heads, dim=1)
    if cut:
        splits = torch.div(counts + longest - 1, longest, rounding_mode="floor")
    else:  # dk and dv are stored, not added: exactly one work tile per row, even if empty
        splits = torch.ones_like(counts)
    most = None if cut else splits.numel()
    if cut and listed is not None:
        most = splits.numel() + counts.shape[0] * planned * listed // longest
    if not counts.numel():  # no key blocks: one empty work tile
        plan = torch.zeros(1, 8 if packed else 6, dtype=torch.int32, device=counts.device)
    else:
        plan = _work_tiles(counts, splits, order, planned // num_heads_kv, most)
        if packed:
            plan = _of_sequences(plan, rows, lists, planned, stored=not cut)
    return lists._replace(plan=plan, plan_per_group=per_group or None)


def _row_counts(lists: Any, rows: Optional[Rows]) -> torch.Tensor:
    """Entries of each row, [B, H, N]; rows: of packed lists, whose B is 1."""
    if rows is not None:
        return rows.total().unsqueeze(0)
    return lists.mask_block_cnt if lists.full_block_cnt is None else lists.mask_block_cnt + lists.full_block_cnt


def _of_sequences(plan: torch.Tensor, rows: Any, lists: Any, num_heads: int, stored: bool) -> torch.Tensor:
    """Convert work tiles over packed rows: row to (sequence, block), and append the offsets of rows.

    stored: empty work tiles store zeros for their key block; otherwise they are padding of the plan, all zeros.
    """
    _, head, row, begin, end, rank = plan.unbind(-1)
    real = torch.ones_like(row, dtype=torch.bool) if stored else end > begin
    columns = [rows.sequence.index_select(0, row), head, rows.block.index_select(0, row), begin, end, rank]
    starts = lists.cu_block_idx_offsets.long()
    own = torch.div(head * starts.shape[0], num_heads, rounding_mode="floor")
    start = starts.flatten().index_select(0, own * starts.shape[1] + row)
    columns += [start & 0xFFFFFFFF, start >> 32]
    columns[6] = torch.where(columns[6] >= 1 << 31, columns[6] - (1 << 32), columns[6])
    return torch.where(real.unsqueeze(-1), torch.stack(columns, dim=-1), 0).int()


def _work_tiles(
    counts: torch.Tensor, splits: torch.Tensor, order: torch.Tensor, group: int, most: Optional[int]
) -> torch.Tensor:
    """The plan, [most work tiles, 6]: row r of `order` is split evenly into splits[r] ranges of its counts[r] entries.

    counts, splits, order: [B, H, N]. group: consecutive heads that add to the same dk and dv.
    """
    B, H, N = counts.shape
    by_group = splits.view(B, H // group, group, N)
    first_rank = by_group.cumsum(2) - by_group
    rows = (torch.arange(B * H, device=counts.device).view(B, H, 1) * N + order).flatten()
    in_order = splits.flatten().index_select(0, rows)
    ends = in_order.cumsum(0)
    most = int(ends[-1]) if most is None else most
    at = torch.arange(max(most, 1), device=counts.device)
    row = torch.searchsorted(ends, at, right=True)
    real = row < ends.numel()
    row = row.clamp(max=ends.numel() - 1)
    split = at - (ends - in_order).index_select(0, row)
    row = rows.index_select(0, row)
    steps, of, rank = (t.flatten().index_select(0, row) for t in (counts, splits, first_rank))
    begin, end = (torch.div(steps * p, of.clamp(min=1), rounding_mode="floor") for p in (split, split + 1))
    head = torch.div(row, N, rounding_mode="floor")
    plan = torch.stack([torch.div(head, H, rounding_mode="floor"), head % H, row % N, begin, end, rank + split], dim=-1)
    return torch.where(real.unsqueeze(-1), plan, 0).int()


def _order(schedule: str | torch.Tensor, counts: torch.Tensor, sharing: int, waits: bool) -> torch.Tensor:
    """Launch order of the key blocks, [1 or B, 1 or H, N]; the same for heads that add to the same dk.

    waits: check that a schedule on the GPU is a permutation, which synchronises.
    """
    B, H, N = counts.shape
    if isinstance(schedule, torch.Tensor):
        expected = f"expected a permutation of the {N} key blocks, integers on {counts.device}"
        if schedule.shape != (N,) or schedule.dtype not in INTEGERS or schedule.device != counts.device:
            raise ValueError(f"schedule is {schedule.dtype} {tuple(schedule.shape)} on {schedule.device}, {expected}")
        if waits or not schedule.is_cuda:
            found = schedule.sort().values
            wrong = (found != torch.arange(N, device=found.device)).nonzero()
            if wrong.numel():
                at = int(wrong[0])
                raise ValueError(f"schedule, sorted, has {int(found[at])} at position {at}, {expected}")
        return schedule.long().view(1, 1, N)
    if schedule == LONGEST_FIRST:
        lengths = counts.view(B, H // sharing, sharing, N).sum(2, keepdim=True)
        return lengths.argsort(dim=-1, descending=True, stable=True).expand(-1, -1, sharing, -1).reshape(B, H, N)
    if schedule not in (LEFT_TO_RIGHT, RIGHT_TO_LEFT):
        expected = ", ".join(map(repr, (LEFT_TO_RIGHT, RIGHT_TO_LEFT, LONGEST_FIRST)))
        raise ValueError(f"schedule must be one of {expected} or a permutation, got {schedule!r}")
    order = torch.arange(N, device=counts.device)
    return (order.flip(0) if schedule == RIGHT_TO_LEFT else order).view(1, 1, N)


def check_plan(lists: Any, arch: int, *, batch: int, packed_k: bool) -> None:
    """Refuse a plan that the kernel of a call cannot execute.

    lists: backward lists as the caller gave them. batch: sequences of the call. packed_k: whether keys are packed.
    """
    if lists.plan is None:
        return
    if arch // 10 != SM90:
        raise NotImplementedError(
            f"block_sparse_tensors.plan on sm_{arch}: only backward on SM90 follows a plan; give the lists without it"
        )
    check_form(lists)
    padded = not is_packed(lists)
    if padded and packed_k:
        raise NotImplementedError(
            "a plan of padded lists for packed sequences: give compact lists, [H, rows, n], or ragged ones, [L]"
        )
    made_for = max(x.shape[0] for x in (lists.mask_block_cnt, lists.full_block_cnt) if x is not None)
    if padded and made_for != batch:
        raise ValueError(
            f"block_sparse_tensors.plan was made of lists for {made_for} sequences, the call has {batch}: expand the "
            "lists before plan_backward"
        )


def check_form(lists: Any) -> None:
    """Refuse a plan whose type, shape or device `plan_backward` does not give these lists."""
    plan, device = lists.plan, lists.mask_block_idx.device
    columns = 8 if lists.mask_block_idx.ndim == 1 else 6
    fits = plan.ndim == 2 and plan.shape[0] > 0 and plan.shape[1] == columns and plan.stride(1) == 1
    if plan.dtype != torch.int32 or not fits or plan.device != device:
        raise ValueError(
            f"block_sparse_tensors.plan is {plan.dtype} {tuple(plan.shape)} on {plan.device}, expected torch.int32 "
            f"[work tiles, {columns}] on {device}, as plan_backward makes it of these lists"
        )


@dataclass(frozen=True)
class _WorkTiles:
    """Work tiles of a plan as int64 [work tiles], in launch order.

    counts: [B, H, N], entries of each key block; B is 1 for packed sequences, whose rows are concatenated, and H the
    query heads or, in plans per group, the key/value heads. batch, head, row: indices into `counts`. sequence: `batch`,
    or the packed sequence.
    """

    plan: torch.Tensor  # as given, for error messages
    counts: torch.Tensor
    sequence: torch.Tensor
    batch: torch.Tensor
    head: torch.Tensor
    row: torch.Tensor
    key_block: torch.Tensor  # flat index into `counts`
    begin: torch.Tensor  # begin, end: range of entries in its key block's list
    end: torch.Tensor

    def named(self, at: int) -> str:
        return f"plan[{at}] = {self.plan[at].tolist()}"


def check_work_tiles(lists: Any, num_heads: int, num_heads_kv: int) -> None:
    """Check that work tiles have each entry of the lists once, and that none waits for one launched later.

    lists: backward lists with a plan.
    """
    check_form(lists)
    heads = num_heads_kv if lists.plan_per_group else num_heads
    packed = packed_rows(lists) if is_packed(lists) else None
    counts = _row_counts(lists, packed).long()
    counts = counts.repeat_interleave(heads // counts.shape[1], dim=1)
    if counts.numel() == 0:
        return
    tiles = _within_lists(lists, packed, counts)
    _each_entry_once(tiles)
    if num_heads == num_heads_kv:
        used = counts.shape[2] if packed is None else int(lists.cu_total_n_blocks[-1])
        _stored_once(tiles, used)
    _check_ranks(tiles, heads // num_heads_kv)
    if lists.dq_write_order is not None and not lists.plan_per_group:
        _check_locks(lists, packed, tiles)


def _within_lists(lists: Any, packed: Any, counts: torch.Tensor) -> _WorkTiles:
    """Parse a plan, and check that its indices and ranges are within the lists."""
    plan, (B, H, N) = lists.plan.long(), counts.shape
    sequence, head, block, begin, end = plan[:, :5].unbind(-1)
    wrong, batch, row = block < 0, sequence, block
    if packed is not None:
        before = lists.cu_total_n_blocks.long()
        known = sequence.clamp(0, packed.sequences - 1)
        wrong |= (sequence != known) | (block >= before.diff()[known])
        batch, row = torch.zeros_like(batch), before[known] + block
    index, limits = torch.stack([batch, head, row], dim=-1), torch.tensor([B, H, N], device=plan.device)
    wrong |= ((index < 0) | (index >= limits)).any(-1) | (begin < 0) | (begin > end)
    key_block = ((batch * H + head) * N + row).clamp(0, counts.numel() - 1)
    wrong |= end > counts.flatten()[key_block]
    if lists.mask_block_idx.ndim == 1:
        starts = packed.starts[0].repeat_interleave(H // packed.heads, dim=0)
        low, high = plan[:, 6] & 0xFFFFFFFF, plan[:, 7]
        wrong |= (end > begin) & (starts.flatten()[key_block] != ((high << 32) | low))
    wrong &= plan.any(-1)  # padding of a plan is zeros
    tiles = _WorkTiles(lists.plan, counts, sequence, batch, head, row, key_block, begin, end)
    if wrong.any():
        raise ValueError(
            f"backward {tiles.named(int(wrong.int().argmax()))}, expected batch, head and key block within "
            f"{[B, H, N]} and entries within what the key block lists"
        )
    return tiles


def _each_entry_once(tiles: _WorkTiles) -> None:
    counts, (_, H, N) = tiles.counts.flatten(), tiles.counts.shape
    planned = torch.zeros_like(counts).scatter_add_(0, tiles.key_block, tiles.end - tiles.begin)
    short = planned != counts
    # Consecutive work tiles of a list overlap or leave a gap unless each begins where the one before ends.
    used = tiles.end > tiles.begin
    order = (tiles.key_block * (int(tiles.end.max()) + 1) + tiles.begin)[used].argsort()
    key_block, begin, end = (t[used][order] for t in (tiles.key_block, tiles.begin, tiles.end))
    same = torch.nn.functional.pad(key_block.diff() == 0, (1, 0)) if key_block.numel() else key_block.bool()
    short[key_block[begin != end.roll(1).where(same, 0)]] = True
    if short.any():
        at = int(short.int().argmax())
        raise ValueError(
            f"backward plan deals out {int(planned[at])} entries of key block {at % N} for batch {at // (H * N)} and "
            f"head {at // N % H}, expected the {int(counts[at])} that it lists, each once"
        )


def _stored_once(tiles: _WorkTiles, used: int) -> None:
    """Check that without GQA each key block has exactly one work tile, which stores its dk and dv, even zeros."""
    found = torch.bincount(tiles.key_block, minlength=tiles.counts.numel()).view_as(tiles.counts)[..., :used]
    if (found != 1).any():
        b, h, row = (found != 1).nonzero()[0].tolist()
        raise ValueError(
            f"backward plan has {int(found[b, h, row])} work tiles for key block {row} of batch {b} and head {h}, "
            "expected one, which stores its dk and dv"
        )


def _check_ranks(tiles: _WorkTiles, group: int) -> None:
    """Check that ranks count earlier work tiles with the same dk and dv, which `group` consecutive heads share."""
    _, H, N = tiles.counts.shape
    shared = (tiles.batch * H + tiles.head // group) * N + tiles.row
    busy = (tiles.end > tiles.begin).nonzero().flatten()  # empty ones do not add
    own, order = shared[busy].sort(stable=True)
    expected = torch.empty_like(own).scatter_(0, order, torch.arange(own.numel(), device=own.device))
    expected -= torch.searchsorted(own, shared[busy])
    wrong = tiles.plan[:, 5].long()[busy] != expected
    if wrong.any():
        first = int(wrong.int().argmax())
        raise ValueError(
            f"backward {tiles.named(int(busy[first]))}, expected rank {int(expected[first])}: so many work tiles "
            "launched before it add to the same dk and dv, or the GPU hangs"
        )


def _check_locks(lists: Any, packed: Any, tiles: _WorkTiles) -> None:
    """Check that semaphore values of a query block and head ascend with the launch order of work tiles."""
    count, H = tiles.end - tiles.begin, tiles.counts.shape[1]
    plan_tile = torch.arange(count.numel(), device=count.device).repeat_interleave(count)
    step = torch.arange(plan_tile.numel(), device=plan_tile.device) - (count.cumsum(0) - count - tiles.begin)[plan_tile]
    batch, head, row = tiles.batch[plan_tile], tiles.head[plan_tile], tiles.row[plan_tile]
    idx, locks = lists.mask_block_idx, lists.dq_write_order
    if packed is not None:
        starts = packed.starts[0]
        at = (starts[head // (H // starts.shape[0]), row] + step,)
    else:
        at = (batch.clamp(max=idx.shape[0] - 1), head // (H // idx.shape[1]), row, step)
    block, lock = idx[at].long() >> 1, locks.expand(idx.shape)[at]
    query = (tiles.sequence[plan_tile] * H + head) * (int(block.max()) + 1 if block.numel() else 1) + block
    order = lock.argsort(stable=True)
    order = order[query[order].argsort(stable=True)]
    query, plan_tile, block = query[order], plan_tile[order], block[order]
    wrong = (query.diff() == 0) & (plan_tile.diff() < 0)
    if wrong.any():
        first = int(wrong.int().argmax())
        before, after = int(plan_tile[first]), int(plan_tile[first + 1])
        raise ValueError(
            f"backward {tiles.named(after)} waits at query block {int(block[first])} for {tiles.named(before)}, which "
            "is launched later: semaphore values must rise with the launch, or the GPU hangs"
        )
