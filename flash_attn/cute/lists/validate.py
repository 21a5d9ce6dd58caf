"""Checks of block lists' entries, which name the first wrong one.

The kernels read lists without a look at them: an index out of range reads or writes foreign memory, a block listed
twice counts twice, backward lists that are not the transpose give the gradient of another function, and a lock value
that nobody reaches makes the GPU hang. Takes time and memory in proportion to the blocks listed, and synchronises
with the host twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn.cute.lists.entries import DistinctLists, FlatEntries, distinct_lists, fields, flat_entries, narrow
from flash_attn.cute.lists.write_order import as_launch_order, ranks

NAMES = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
ORDERS = ("dq_write_order", "dq_write_order_full")


@dataclass(frozen=True)
class _Shape:
    """Sizes that lists have to fit."""

    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int | None
    batch_size: int | None


@dataclass(frozen=True)
class _Side:
    """Lists of one direction: as given, and with a head dimension of 1 or all query heads, equal for both directions.

    Counts in `lists` are cut to the width: nothing reads past a list.
    """

    name: str
    given: Any
    lists: DistinctLists
    orders: tuple[torch.Tensor | None, ...]
    block_size: tuple[int, int]
    rows: int
    columns: int

    @property
    def words(self) -> tuple[str, str]:
        """Words for a row, and for what it lists."""
        return ("query block", "key block") if self.name == "forward" else ("key block", "query block")

    def at(self, tensor: str, row: int, place: int | None = None) -> str:
        """``forward mask_block_idx[b, h, row, place]``, from the row's number over all heads."""
        head, row = divmod(row, self.rows)
        B, H = self.lists.mask_cnt.shape[:2]
        given = getattr(self.given, tensor).shape
        b, h = head // H * given[0] // B, head % H * given[1] // H
        return f"{self.name} {tensor}[{b}, {h}, {row}" + ("]" if place is None else f", {place}]")

    def entry(self, row: int, place: int, full: int, mask_count: int, names: Sequence[str] = NAMES[1::2]) -> str:
        return self.at(names[full], row, place - mask_count * full)


@dataclass(frozen=True)
class _Check:
    """Found on the device: [index of the first wrong entry or -1, numbers about it]; and what to say about it."""

    found: torch.Tensor
    message: Callable[..., str]


def validate_lists(
    forward: Any,
    backward: Any = None,
    *,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_heads_kv: int | None = None,
    batch_size: int | None = None,
    block_size: tuple[int, int] | None = None,
    ascending: bool = False,
    order: torch.Tensor | None = None,
) -> None:
    """Check counts, indices, duplicates, that `backward` is the transpose of `forward`, and its lock values.

    Args:
        forward, backward: with the fields of `BlockSparseTensorsTorch`; None: not checked.
        num_heads: query heads; the lists' head dimension is that, 1, or `num_heads_kv`.
        batch_size: None: any.
        block_size: (queries, keys) of a block, where the lists do not say. Backward lists of another block size than
            the forward lists' are not compared with them.
        ascending: also ask for rising indices in every row.
        order: key blocks in the order of their launch (see `compute_dq_write_order`), which the lock values have to
            follow. None: it follows from ``backward.spt``; without that, they only have to be 0, 1, 2, ... for the key
            blocks that list a query block, each once.

    Raises:
        ValueError: naming the tensor, and the first wrong entry by its place and value.
        NotImplementedError: packed lists (``cu_total_m_blocks``).
    """
    shape = _Shape(seqlen_q, seqlen_k, num_heads, num_heads_kv, batch_size)
    sides = _sides({"forward": forward, "backward": backward}, shape, block_size, order)
    checks = [check for side in sides for check in _counts(side)]
    totals = [_readable(side.lists).counts().sum(dtype=torch.int64).view(1) for side in sides]
    listed = _raise_first(checks, totals)
    entries = [flat_entries(side.lists.rows(), None, total) for side, total in zip(sides, listed, strict=True)]
    checks = [check for side, flat in zip(sides, entries, strict=True) for check in _indices(side, flat, ascending)]
    if len(sides) == 2 and sides[0].block_size == sides[1].block_size:
        checks.append(_transposed(*sides, *entries))
    if sides and sides[-1].orders[0] is not None:
        checks.append(_locks(sides[-1], listed[-1], order))
    _raise_first(checks, [])


def validate_coverage(
    lists: Any,
    window: tuple[int | None, int | None],
    *,
    backward: bool,
    seqlen_q: int,
    seqlen_k: int,
    block_size: tuple[int, int] | None = None,
) -> None:
    """Check that lists name every block in which a window shows something; they may name more.

    A call with lists in one direction attends to all of those in the other.

    Args:
        lists: [B, H, rows] and [B, H, rows, width], as `validate_lists` takes them; it has found nothing wrong.
        window: keys before and after its own that a query sees, aligned at the ends of queries and keys; None: all.
        block_size: (queries, keys) of a block, where the lists do not say.

    Raises:
        ValueError: naming the first row that lacks a block.
    """
    size = lists.block_size or block_size
    row_word, column_word, (left, right) = "query block", "key block", window
    length, across, height, width = seqlen_q, seqlen_k, *size
    if backward:  # a key sees as far, the other way round
        row_word, column_word, (left, right) = column_word, row_word, (right, left)
        length, across, height, width = across, length, width, height
    if left is not None and right is not None and left + right < 0:
        return
    device = lists.mask_block_cnt.device
    first = torch.arange(lists.mask_block_cnt.shape[2], device=device) * height
    last = (first + height).clamp(max=length) - 1
    begin = torch.zeros_like(first) if left is None else (first + across - length - left).clamp(min=0)
    end = torch.full_like(last, across - 1)
    if right is not None:
        end = (last + across - length + right).clamp(max=across - 1)
    seen = (begin <= end) & (first < length)
    low, high = (torch.where(seen, t // width, at) for t, at in ((begin, 0), (end, -1)))
    found = torch.zeros((), dtype=torch.long, device=device)
    for cnt, idx in ((lists.mask_block_cnt, lists.mask_block_idx), (lists.full_block_cnt, lists.full_block_idx)):
        if cnt is not None:
            used = torch.arange(idx.shape[3], device=device) < cnt.unsqueeze(-1)
            found = found + (used & (idx >= low.unsqueeze(-1)) & (idx <= high.unsqueeze(-1))).sum(-1)
    short = found < high - low + 1
    if short.any():
        at = tuple(short.nonzero()[0].tolist())
        raise ValueError(
            f"{'backward' if backward else 'forward'} lists name {int(found[at])} of the {column_word}s "
            f"{int(low[at[2]])} .. {int(high[at[2]])} that the mask shows {row_word} {at[2]} of head {at[1]}; the "
            f"other direction has no lists and attends to all of them"
        )


def _sides(
    given: dict[str, Any], shape: _Shape, block_size: tuple[int, int] | None, order: torch.Tensor | None
) -> list[_Side]:
    given = {name: lists for name, lists in given.items() if lists is not None}
    sizes = {name: _check_shapes(name, lists, shape, block_size) for name, lists in given.items()}
    tensors = {name: [_per_query_head(t, shape.num_heads) for t in fields(lists)] for name, lists in given.items()}
    orders = {
        name: tuple(_per_query_head(getattr(lists, o, None), shape.num_heads) for o in ORDERS if name == "backward")
        for name, lists in given.items()
    }
    everything = [t for group in (*tensors.values(), *orders.values()) for t in group]
    if order is not None and "backward" in given:
        N = _rows_and_columns("backward", sizes["backward"], shape)[0]
        everything.append(as_launch_order(False, order, N, order.device))
    sides = []
    for name, lists in given.items():
        own = distinct_lists(tensors[name], None, everything)
        side_orders = [None if t is None else narrow(t, own.mask_idx.shape[:2]) for t in orders[name]] or (None, None)
        place = _rows_and_columns(name, sizes[name], shape)
        sides.append(_Side(name, lists, own, tuple(side_orders), sizes[name], *place))
    return sides


def _check_shapes(name: str, lists: Any, shape: _Shape, block_size: tuple[int, int] | None) -> tuple[int, int]:
    """Check shapes and types; returns the block size."""
    if getattr(lists, "cu_total_m_blocks", None) is not None:
        raise NotImplementedError(f"{name} cu_total_m_blocks is given: packed lists are not checked, only [B, H, rows]")
    size = getattr(lists, "block_size", None) or block_size
    if size is None:
        raise ValueError(f"{name} block_size is None: give block_size=(queries, keys)")
    rows, columns = _rows_and_columns(name, size, shape)
    heads = sorted({1, shape.num_heads, shape.num_heads_kv or 1})
    batches = sorted({1, shape.batch_size or lists.mask_block_cnt.shape[0]})
    for tensor_name in (*NAMES, *ORDERS):
        tensor = getattr(lists, tensor_name, None)
        if tensor is None:
            continue
        what = f"{name} {tensor_name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        if tensor.dtype != torch.int32 or tensor.ndim != (3 if tensor_name.endswith("cnt") else 4):
            raise ValueError(f"{what}, expected int32 with dimensions [B, H, rows], and width where it holds a list")
        if tensor.device != lists.mask_block_cnt.device:
            raise ValueError(f"{what}, expected {lists.mask_block_cnt.device} like mask_block_cnt")
        if tensor.shape[0] not in batches or tensor.shape[1] not in heads or tensor.shape[2] != rows:
            raise ValueError(
                f"{what}, expected B of {batches}, H of {heads} and {rows} rows, for seqlen_q={shape.seqlen_q}, "
                f"seqlen_k={shape.seqlen_k} and block_size={tuple(size)}"
            )
        most = max(columns, 1)  # kernels want a dimension with stride 1, so lists of nothing are that wide too
        if tensor.ndim == 4 and tensor.shape[3] > most:
            raise ValueError(f"{what}, expected a width of at most {most}: a row cannot list more blocks")
    _check_companions(name, lists)
    return tuple(size)


def _check_companions(name: str, lists: Any) -> None:
    for cnt, idx in (NAMES[:2], NAMES[2:]):
        if (getattr(lists, cnt) is None) != (getattr(lists, idx) is None):
            raise ValueError(f"{name} {cnt} and {idx} must be given together")
    if getattr(lists, ORDERS[0], None) is None:
        return
    for order, idx in zip(ORDERS, NAMES[1::2], strict=True):
        shapes = [None if t is None else tuple(t.shape) for t in (getattr(lists, order, None), getattr(lists, idx))]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} {order} is {shapes[0]}, expected the shape of {idx}, {shapes[1]}")


def _rows_and_columns(name: str, block_size: tuple[int, int], shape: _Shape) -> tuple[int, int]:
    M, N = -(-shape.seqlen_q // block_size[0]), -(-shape.seqlen_k // block_size[1])
    return (M, N) if name == "forward" else (N, M)


def _per_query_head(tensor: torch.Tensor | None, num_heads: int) -> torch.Tensor | None:
    if tensor is None or tensor.shape[1] in (1, num_heads):
        return tensor
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def _readable(lists: DistinctLists) -> DistinctLists:
    mask_cnt = lists.mask_cnt.clamp(0, lists.mask_idx.shape[3])
    full_cnt = None if lists.full_cnt is None else lists.full_cnt.clamp(0, lists.full_idx.shape[3])
    return DistinctLists(mask_cnt, lists.mask_idx, full_cnt, lists.full_idx, lists.repeated)


def _counts(side: _Side) -> Iterator[_Check]:
    lists = side.lists
    for name, cnt, idx in ((NAMES[0], lists.mask_cnt, lists.mask_idx), (NAMES[2], lists.full_cnt, lists.full_idx)):
        if cnt is None:
            continue
        flat = cnt.flatten()
        bad = (flat < 0) | (flat > idx.shape[3])
        yield _Check(
            _first(bad, flat),
            lambda row, count, name=name, width=idx.shape[3]: (
                f"{side.at(name, row)} = {count}, expected 0 .. {width}, the width of its index list"
            ),
        )


def _indices(side: _Side, flat: FlatEntries, ascending: bool) -> Iterator[_Check]:
    """Range, duplicates, and order within rows."""
    row_word, column_word = side.words
    where = _where(flat)
    bad = flat.listed & ((flat.block < 0) | (flat.block >= side.columns))
    yield _Check(
        _first(bad, *where, flat.block),
        lambda _, *at: f"{side.entry(*at[:4])} = {at[4]}, expected a {column_word} of 0 .. {side.columns - 1}",
    )
    number = torch.arange(flat.row.numel(), device=flat.row.device)
    key = flat.row.long() * side.columns + flat.block.clamp(0, side.columns - 1)
    ordered, source = torch.where(flat.listed, key, -1 - number).sort(stable=True)
    before, after = source[:-1], source[1:]
    yield _Check(
        _first(ordered.diff() == 0, *(t[after] for t in where), flat.block[after], *(t[before] for t in where)),
        lambda _, *at: (
            f"{side.entry(*at[:4])} = {at[4]} is listed twice for {row_word} {at[0] % side.rows}, also in "
            f"{side.entry(*at[5:])}"
        ),
    )
    if ascending:
        same = (flat.row.diff() == 0) & (flat.is_full[1:] == flat.is_full[:-1]) & flat.listed[1:]
        falls = same & (flat.block.diff() < 0)
        yield _Check(
            _first(falls, *(t[1:] for t in where), flat.block[1:], flat.block[:-1]),
            lambda _, *at: f"{side.entry(*at[:4])} = {at[4]} comes after {at[5]}, expected rising indices",
        )


def _transposed(forward: _Side, backward: _Side, there: FlatEntries, back: FlatEntries) -> _Check:
    """Both directions sorted by (head, query block, key block, kind): where they first differ, one lacks an entry."""
    M, N = forward.rows, backward.rows
    past = forward.lists.heads * M * N * 2
    size = max(there.row.numel(), back.row.numel()) + 1
    columns = []
    for side, flat in ((forward, there), (backward, back)):
        head = torch.div(flat.row, side.rows, rounding_mode="floor").long()
        row, block = flat.row % side.rows, flat.block.clamp(0, side.columns - 1)
        m, n = (row, block) if side is forward else (block, row)
        key, source = torch.where(flat.listed, ((head * M + m) * N + n) * 2 + flat.is_full, past).sort(stable=True)
        numbers = (key, *(t[source] for t in _where(flat)), block[source])
        # Neither list ends before the other: what is missing at an end compares as well.
        columns.append([torch.nn.functional.pad(t.long(), (0, size - key.numel()), value=past) for t in numbers])

    def message(_: int, *numbers: int) -> str:
        (key, *at), (other_key, *other_at) = numbers[:6], numbers[6:]
        side, against = (forward, backward) if key < other_key else (backward, forward)
        row, place, full, mask_count, block = at if key < other_key else other_at
        entry = f"{side.entry(row, place, full, mask_count)} = {block}"
        kind, other_kind = ("full", "mask") if full else ("mask", "full")
        if key // 2 == other_key // 2:
            return f"{entry} is a {kind} block, but a {other_kind} block in the {against.name} lists"
        return (
            f"{entry} is not in the {against.name} lists: {against.words[0]} {block} lacks {against.words[1]} "
            f"{row % side.rows}; backward lists must be the transpose of forward lists"
        )

    return _Check(_first(columns[0][0] != columns[1][0], *columns[0], *columns[1]), message)


def _locks(side: _Side, listed: int, order: torch.Tensor | None) -> _Check:
    """Lock values are the ranks of the key blocks that list a query block, in the order of their launch, or in any."""
    device, spt = side.lists.mask_cnt.device, getattr(side.given, "spt", None)
    known = order is not None or spt is not None
    order = as_launch_order(bool(spt) and order is None, order, side.rows, device)
    flat = flat_entries(side.lists.rows(), side.lists.launch_order(order), listed)
    lock = flat.pick([t.flatten() for t in side.orders if t is not None])
    if not known:
        by_lock = lock.sort(stable=True).indices
        names = ("row", "place", "block", "is_full", "listed")
        flat, lock = replace(flat, **{name: getattr(flat, name)[by_lock] for name in names}), lock[by_lock]
    expected = ranks(flat, side.columns)
    rule = (
        "key blocks add to a query block in the order of their launch, or the GPU hangs"
        if known
        else "the lock values of a query block are 0, 1, 2, ..., each once"
    )
    return _Check(
        _first(flat.listed & (lock != expected), *_where(flat), lock, flat.block, expected),
        lambda _, *at: f"{side.entry(*at[:4], ORDERS)} = {at[4]} for query block {at[5]}, expected {at[6]}: {rule}",
    )


def _where(flat: FlatEntries) -> tuple[torch.Tensor, ...]:
    """The arguments of `_Side.entry`."""
    return flat.row, flat.place, flat.is_full, flat.rows.counts[0].flatten()[flat.row]


def _first(bad: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    """int64 [1 + columns]: index of the first True, or -1, and what the columns hold there, without synchronising."""
    if bad.numel() == 0:
        return torch.full((1 + len(columns),), -1, device=bad.device)
    at = bad.int().argmax().view(1)
    return torch.cat([torch.where(bad.any(), at, -1), *(c.index_select(0, at).long() for c in columns)])


def _raise_first(checks: list[_Check], totals: list[torch.Tensor]) -> list[int]:
    """Fetch all results at once: an error for the first check that found something, else the totals."""
    fetched = [*(check.found for check in checks), *totals]
    values = torch.cat(fetched).tolist() if fetched else []
    for check in checks:
        found, values = values[: check.found.numel()], values[check.found.numel() :]
        if found[0] >= 0:
            raise ValueError(check.message(*found))
    return values
