"""Checks of block lists' entries, which name the first wrong one.

The kernels read lists without a look at them: an index out of range reads or writes foreign memory, a block listed
twice counts twice, backward lists that are not the transpose give the gradient of another function, and a semaphore
value that nobody reaches makes the GPU hang. Lists of every form are checked as the rows of a `Side`. Takes time and
memory in proportion to the blocks listed, and synchronises with the host twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flash_attn.cute.lists.entries import (
    KINDS,
    LISTS,
    ORDERS,
    FlatEntries,
    Rows,
    flat_entries,
    narrow,
)
from flash_attn.cute.lists.write_order import as_launch_order, ranks


@dataclass(frozen=True)
class Side:
    """Lists of one direction as rows; those of packed sequences one after the other.

    Attributes:
        name: forward or backward.
        given: the caller's lists, which messages name.
        rows: [B * H, N], of as many heads as those of the other direction; rows that no sequence has list nothing.
        heads: (B, H); packed, where B is 1, H of the lists as given.
        locks: of each kind, flat like its indices; None without semaphore values.
        sequence, block: [N], the sequence that a row belongs to, and its number there.
        across: int64 [N], how many blocks there are for a row to list; `columns` is the largest, `sequences` how many
            sequences there are.
        starts: of packed sequences, the field that says where rows start, of each kind.
    """

    name: str
    given: Any
    rows: Rows
    heads: tuple[int, int]
    locks: tuple[torch.Tensor, ...] | None
    sequence: torch.Tensor
    block: torch.Tensor
    across: torch.Tensor
    columns: int
    block_size: tuple[int, int]
    sequences: int = 1
    starts: tuple[str, ...] | None = None

    @property
    def packed(self) -> bool:
        return self.starts is not None

    @property
    def prefix(self) -> str:
        return "sequence {}, whose rows count from its start: " if self.packed else ""

    @property
    def words(self) -> tuple[str, str]:
        """Words for a row, and for what it lists."""
        return ("query block", "key block") if self.name == "forward" else ("key block", "query block")

    @property
    def merged(self) -> bool:
        """A plan's one list of mask and full blocks, of entries 2 * block + is_full."""
        return getattr(self.given, "plan", None) is not None and self.locks is not None

    def rooms(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The fields of each kind, and how many entries rows have room for, [N]."""
        for (_, cnt, idx, *_), _ in zip(KINDS, self.rows.counts):
            own = getattr(self.given, idx)
            flat = own.ndim < getattr(self.given, cnt).ndim + 1
            yield cnt, idx, self.across if flat else self.across.clamp(max=own.shape[-1])

    def entries(self, order: torch.Tensor | None, listed: int) -> FlatEntries:
        flat = flat_entries(self.rows, order, listed)
        return replace(flat, block=flat.block >> 1, is_full=flat.block & 1 == 1) if self.merged else flat

    def of(self, values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """``values`` [N], of which each head has a copy, at rows that are counted over all heads."""
        return values[row % max(self.rows.N, 1)]

    def at(self, tensor: str, row: int, place: int | None = None) -> str:
        """``forward mask_block_idx[b, h, row, place]``, from the row's number over all heads."""
        head, row = divmod(row, self.rows.N)
        (B, H), given = self.heads, getattr(self.given, tensor).shape
        b, h = 0, head * H // self.rows.heads
        if not self.packed:
            b, h = head // H * given[0] // B, head % H * given[1] // H
        return f"{self.name} {tensor}[{b}, {h}, {int(self.block[row])}" + ("]" if place is None else f", {place}]")

    def entry(self, row: int, place: int, full: int, mask_count: int, names: Sequence[str] = LISTS[1::2]) -> str:
        stored = 0 if self.merged else full
        return self.at(names[stored], row, place - mask_count * stored)


@dataclass(frozen=True)
class _Check:
    """Found on the device: [index of the first wrong entry or -1, numbers about it]; and what to say about it.

    The first of the numbers is the sequence, for the prefix.
    """

    prefix: str
    found: torch.Tensor
    message: Callable[..., str]


def check_sides(
    sides: list[Side],
    *,
    ascending: bool = False,
    order: torch.Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    lengths: Sequence[tuple[int, int]] = (),
) -> None:
    """Check lists of one direction, or of both.

    Args:
        ascending, order: as `validate_lists` has them.
        window: keys before and after its own that a query sees, aligned at the ends of queries and keys; None: all.
            Lists of one direction have to name every block in which it shows something, and may name more: a call
            attends to all of those in the other. None: they need not.
        lengths: (queries, keys) of each sequence, for `window`.

    Raises:
        ValueError: naming the first wrong entry.
    """
    checks = [check for side in sides for check in _counts(side)]
    readable = [[c.clamp(min=0).minimum(room) for c, (*_, room) in zip(s.rows.counts, s.rooms())] for s in sides]
    listed = _raise_first(checks, [sum(counts).sum(dtype=torch.int64).view(1) for counts in readable])
    entries = [side.entries(None, total) for side, total in zip(sides, listed, strict=True)]
    checks = [check for side, flat in zip(sides, entries, strict=True) for check in _indices(side, flat, ascending)]
    if len(sides) == 2 and sides[0].block_size == sides[1].block_size:
        checks += _transposed(sides, entries)
    if sides and sides[-1].locks is not None:
        checks.append(_locks(sides[-1], listed[-1], order))
    _raise_first(checks, [])
    if window is not None and (None in window or sum(window) >= 0):
        _raise_first([_coverage(sides[0], entries[0], window, lengths)], [])


def _counts(side: Side) -> Iterator[_Check]:
    """Counts that rows have room for, and rows that lie within their indices."""
    row = torch.arange(side.rows.heads * side.rows.N, device=side.block.device)
    sequence = side.of(side.sequence, row)
    for at, (cnt, idx, room) in enumerate(side.rooms()):
        counts, starts, size = side.rows.counts[at], side.rows.starts[at], side.rows.indices[at].numel()
        bad = (counts < 0) | (counts > room)
        yield _Check(
            side.prefix,
            _first(bad.flatten(), sequence, row, counts.flatten(), side.of(room, row)),
            lambda row, count, room, cnt=cnt: (
                f"{side.at(cnt, row)} = {count}, expected 0 .. {room}, which its row has room for"
            ),
        )
        if side.starts is None:
            continue
        bad = (counts > 0) & ((starts < 0) | (starts + counts > size))
        yield _Check(
            side.prefix,
            _first(bad.flatten(), sequence, row, starts.flatten(), counts.flatten()),
            lambda row, start, count, at=at, idx=idx, size=size: (
                f"{side.at(idx, row)} starts, by {side.starts[at]}, at place {start} with {count} entries, expected "
                f"them within the {size} that there are"
            ),
        )


def _indices(side: Side, flat: FlatEntries, ascending: bool) -> Iterator[_Check]:
    """Range, duplicates, and order within rows."""
    row_word, column_word = side.words
    across, listed = side.of(side.across, flat.row), flat.listed
    yield _wrong_entry(
        side, flat, listed & ((flat.block < 0) | (flat.block >= across)), (across,),
        lambda across: f", expected a {column_word} of 0 .. {across - 1}",
    )  # fmt: skip
    number = torch.arange(flat.row.numel(), device=flat.row.device)
    key = flat.row.long() * side.columns + flat.block.clamp(0, side.columns - 1)
    ordered, source = torch.where(listed, key, -1 - number).sort(stable=True)
    earlier = torch.full_like(number, -1)  # place of the same block in the same row
    earlier[source[1:]] = torch.where(ordered.diff() == 0, source[:-1], -1)
    yield _wrong_entry(
        side, flat, earlier >= 0, (side.of(side.block, flat.row), *(t[earlier] for t in _where(flat))),
        lambda row, *where: f" is listed twice for {row_word} {row}, also in {side.entry(*where)}",
    )  # fmt: skip
    if ascending:
        same = (flat.row == flat.row.roll(1)) & (flat.is_full == flat.is_full.roll(1)) & listed
        before = flat.block.roll(1)
        yield _wrong_entry(
            side, flat, same & (flat.block < before) & (number > 0), (before,),
            lambda before: f" comes after {before}, expected rising indices",
        )  # fmt: skip


def _transposed(sides: list[Side], entries: list[FlatEntries]) -> Iterator[_Check]:
    """Each entry is one of the other direction too, of the same kind."""
    (forward, backward), keys = sides, []
    M, N = backward.columns, forward.columns
    for side, flat in zip(sides, entries, strict=True):
        head = torch.div(flat.row, max(side.rows.N, 1), rounding_mode="floor").long()
        pair = side.of(side.block, flat.row), flat.block.clamp(0, side.columns - 1)
        m, n = pair if side is forward else reversed(pair)
        key = (((head * side.sequences + side.of(side.sequence, flat.row)) * M + m) * N + n) * 2 + flat.is_full
        keys.append(torch.where(flat.listed, key, -1))

    def said(against: Side, block: int, row: int, full: int, of_other_kind: int) -> str:
        if of_other_kind:
            kind, other_kind = ("full", "mask") if full else ("mask", "full")
            return f" is a {kind} block, but a {other_kind} block in the {against.name} lists"
        return (
            f" is not in the {against.name} lists: {against.words[0]} {block} lacks {against.words[1]} {row}; backward "
            "lists must be the transpose of forward lists"
        )

    for side, flat, key, against, others in zip(sides, entries, keys, sides[::-1], keys[::-1], strict=True):
        there, of_other_kind = (torch.isin(k, others) for k in (key, key ^ 1))
        columns = flat.block, side.of(side.block, flat.row), flat.is_full, of_other_kind
        yield _wrong_entry(side, flat, flat.listed & ~there, columns, partial(said, against))


def _locks(side: Side, listed: int, order: torch.Tensor | None) -> _Check:
    """Semaphore values are the ranks of the key blocks that list a query block, in order of their launch, or in any."""
    spt = None if side.merged else getattr(side.given, "spt", None)  # a plan has the launch
    known = order is not None or spt is not None
    order = as_launch_order(bool(spt) and order is None, order, side.rows.N, side.block.device)
    if order is not None:
        order = narrow(order, (1, 1) if side.packed else side.heads).flatten(0, 1)
    flat = side.entries(order, listed)
    lock = flat.pick(side.locks)
    if not known:
        by_lock = lock.sort(stable=True).indices
        names = ("row", "place", "block", "is_full", "listed")
        flat, lock = replace(flat, **{name: getattr(flat, name)[by_lock] for name in names}), lock[by_lock]
    of_all = replace(flat, block=side.of(side.sequence, flat.row) * side.columns + flat.block)
    expected = ranks(of_all, side.sequences * side.columns)
    rule = (
        "key blocks add to a query block in the order of their launch, or the GPU hangs"
        if known
        else "the semaphore values of a query block are 0, 1, 2, ..., each once"
    )
    return _wrong_entry(
        side, flat, flat.listed & (lock != expected), (flat.block, expected),
        lambda block, expected: f" for query block {block}, expected {expected}: {rule}", names=ORDERS, value=lock,
    )  # fmt: skip


def _coverage(
    side: Side, flat: FlatEntries, window: tuple[int | None, int | None], lengths: Sequence[tuple[int, int]]
) -> _Check:
    """Every block in which the window shows something is listed."""
    own, (left, right) = (0, window) if side.name == "forward" else (1, reversed(window))  # a key sees as far
    tall, wide = side.block_size[own], side.block_size[1 - own]
    head = torch.arange(side.rows.heads, device=side.block.device).unsqueeze(1)
    sequence = side.sequence.unsqueeze(0) if side.packed else head // side.heads[1]
    of_sequence = torch.tensor(lengths, device=head.device)[sequence]
    length, across = of_sequence[..., own], of_sequence[..., 1 - own]
    first = side.block * tall
    last = (first + tall).minimum(length) - 1
    begin = torch.zeros_like(last) if left is None else (first + across - length - left).clamp(min=0)
    end = across - 1 if right is None else (last + across - length + right).minimum(across - 1)
    seen = (begin <= end) & (first < length)
    low, high = (torch.where(seen, edge, none) // wide for edge, none in ((begin, 0), (end, -1)))
    low, high, of = (t.expand(side.rows.heads, side.rows.N).flatten() for t in (low, high, sequence))
    row = flat.row.long()
    inside = flat.listed & (flat.block >= low[row]) & (flat.block <= high[row])
    found = torch.zeros_like(low).scatter_add_(0, row, inside.long())
    number = torch.arange(low.numel(), device=low.device)
    return _Check(
        "sequence {}: ",
        _first(found < high - low + 1, of, number, side.of(side.block, number), found, low, high),
        lambda number, row, found, low, high: (
            f"{side.name} lists name {found} of the {side.words[1]}s {low} .. {high} that the mask shows "
            f"{side.words[0]} {row} of head {number // side.rows.N % side.heads[1]}; the other direction has no lists "
            f"and attends to all of them"
        ),
    )


def _wrong_entry(
    side: Side,
    flat: FlatEntries,
    bad: torch.Tensor,
    columns: Sequence[torch.Tensor],
    said: Callable[..., str],
    *,
    names: Sequence[str] = LISTS[1::2],
    value: torch.Tensor | None = None,
) -> _Check:
    """The first entry that is bad. `said`: what is wrong with it, of what the columns hold there."""
    numbers = side.of(side.sequence, flat.row), *_where(flat), flat.block if value is None else value
    return _Check(
        side.prefix,
        _first(bad, *numbers, *columns),
        lambda *at: f"{side.entry(*at[:4], names)} = {at[4]}{said(*at[5:])}",
    )


def _where(flat: FlatEntries) -> tuple[torch.Tensor, ...]:
    """The arguments of `Side.entry`."""
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
        (at, sequence, *numbers), values = values[: check.found.numel()], values[check.found.numel() :]
        if at >= 0:
            raise ValueError(check.prefix.format(sequence) + check.message(*numbers))
    return values
