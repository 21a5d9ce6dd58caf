"""Checks of the entries of block lists; errors name the first wrong one.

Kernels trust the lists: an index out of range reads or writes foreign memory, a block listed
twice counts twice, backward lists that are not the transpose give the gradient of another function, and a semaphore
value that nobody reaches makes the GPU hang. Lists of every form are checked as the rows of a `Side`. Time and memory
are proportional to the blocks listed; every check synchronises with the host.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn.cute.lists.entries import LIST_KINDS, LISTS, ORDERS, FlatEntries, Rows, flat_entries, narrow
from flash_attn.cute.lists.write_order import as_launch_order, ranks


@dataclass(frozen=True)
class Side:
    """Lists of one direction as rows; packed sequences are concatenated."""

    name: str  # forward or backward
    lists: Any  # the caller's, for error messages
    rows: Rows  # with the batches and heads of the other direction; rows past the sequences are empty
    heads: tuple[int, int]  # (B, H) of the rows; packed, where B is 1, H of the lists as given
    across: torch.Tensor  # int64 [N], number of blocks in the direction that a row lists; `columns` is the largest
    columns: int
    block_size: tuple[int, int]
    starts: tuple[str, ...] | None = None  # packed: the field with the offsets of rows, per kind

    @property
    def packed(self) -> bool:
        return self.starts is not None

    def spread(self, heads: tuple[int, int]) -> "Side":
        """The side with rows expanded to (batches, heads), which may share entries."""
        B, H = self.rows.lead

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.view(B, H, -1).repeat_interleave(heads[1] // H, dim=1)
            return tensor.expand(heads[0], -1, -1).flatten(0, 1)

        counts, starts = (tuple(map(wide, tensors)) for tensors in (self.rows.counts, self.rows.starts))
        rows = replace(self.rows, counts=counts, starts=starts, lead=heads)
        return replace(self, rows=rows, heads=self.heads if self.packed else heads)

    @property
    def words(self) -> tuple[str, str]:
        """Names of a row and of what it lists."""
        return ("query block", "key block") if self.name == "forward" else ("key block", "query block")

    @property
    def merged(self) -> bool:
        """True for lists with a plan that are merged: entries are 2 * block + is_full."""
        return getattr(self.lists, "plan", None) is not None and self.rows.locks is not None

    def capacities(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(count field, index field, capacity of each row [N]), per kind."""
        for (_, cnt, idx, *_), _ in zip(LIST_KINDS, self.rows.counts):
            indices = getattr(self.lists, idx)
            flat = indices.ndim < getattr(self.lists, cnt).ndim + 1
            yield cnt, idx, self.across if flat else self.across.clamp(max=indices.shape[-1])

    def entries(self, order: torch.Tensor | None, listed: int) -> FlatEntries:
        flat = flat_entries(self.rows, order, listed)
        return replace(flat, block=flat.block >> 1, is_full=flat.block & 1 == 1) if self.merged else flat

    def of(self, values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """``values`` [N] at row indices over all heads, head * N + row."""
        return values[row % max(self.rows.N, 1)]

    def at(self, tensor: str, row: int, index: int | None = None) -> str:
        """``forward mask_block_idx[b, h, row, index]``, from the row index over all heads."""
        head, row = divmod(row, self.rows.N)
        (B, H), shape = self.heads, getattr(self.lists, tensor).shape
        b, h = 0, head * H // self.rows.heads
        if not self.packed:
            b, h = head // H * shape[0] // B, head % H * shape[1] // H
        return f"{self.name} {tensor}[{b}, {h}, {int(self.rows.block[row])}" + ("]" if index is None else f", {index}]")

    def entry(self, flat: FlatEntries, i: int, names: Sequence[str] = LISTS[1::2]) -> str:
        """The i-th entry by its indices in the caller's lists."""
        row, full = int(flat.row[i]), 0 if self.merged else int(flat.is_full[i])
        return self.at(names[full], row, int(flat.position[i]) - full * int(self.rows.counts[0].flatten()[row]))

    def error(self, row: int, message: str) -> ValueError:
        if self.packed:
            sequence = int(self.rows.sequence[row % self.rows.N])
            message = f"sequence {sequence}, whose rows count from its start: {message}"
        return ValueError(message)


def check_sides(
    sides: list[Side],
    *,
    ascending: bool = False,
    order: torch.Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    lengths: Sequence[tuple[int, int]] = (),
) -> None:
    """Check lists of one direction, or of both.

    ascending, order: as in `validate_lists`. window: (left, right), the keys before and after its own position that a
    query sees, aligned at the ends of queries and keys; None for all. With a window, lists of one direction have to
    name every block with a visible pair, since the other direction attends to all of them. lengths: (queries, keys) of
    each sequence, for `window`.
    """
    listed = [_check_counts(side) for side in sides]
    entries = [side.entries(None, total) for side, total in zip(sides, listed, strict=True)]
    for side, flat in zip(sides, entries, strict=True):
        _check_range(side, flat)
        _check_duplicates(side, flat)
        if ascending:
            _check_ascending(side, flat)
    if len(sides) == 2 and sides[0].block_size == sides[1].block_size:
        _check_transposed(sides, entries)
    if sides and sides[-1].rows.locks is not None:
        _check_locks(sides[-1], listed[-1], order)
    if window is not None and (None in window or sum(window) >= 0):
        _check_coverage(sides[0], entries[0], window, lengths)


def _check_counts(side: Side) -> int:
    """Check counts against the capacity of rows, and entries against the size of the indices. Returns all entries."""
    for kind, (cnt, idx, most) in enumerate(side.capacities()):
        counts, starts, size = side.rows.counts[kind], side.rows.starts[kind], side.rows.indices[kind].numel()
        row = _first((counts < 0) | (counts > most))
        if row is not None:
            count, most = int(counts.flatten()[row]), int(side.of(most, row))
            raise side.error(row, f"{side.at(cnt, row)} = {count}, expected 0 .. {most}, the capacity of its row")
        row = _first((counts > 0) & ((starts < 0) | (starts + counts > size))) if side.packed else None
        if row is not None:
            start, count = int(starts.flatten()[row]), int(counts.flatten()[row])
            raise side.error(
                row,
                f"{side.at(idx, row)} starts, by {side.starts[kind]}, at offset {start} with {count} entries, expected "
                f"them within the {size} that there are",
            )
    return int(side.rows.total().sum())


def _check_range(side: Side, flat: FlatEntries) -> None:
    across, wrong = side.of(side.across, flat.row), f", expected a {side.words[1]} of 0 .. "
    _refuse(side, flat, (flat.block < 0) | (flat.block >= across), lambda i: f"{wrong}{int(across[i]) - 1}")


def _check_duplicates(side: Side, flat: FlatEntries) -> None:
    number = torch.arange(flat.row.numel(), device=flat.row.device)
    key = torch.where(flat.listed, flat.row.long() * side.columns + flat.block, -1 - number)
    ordered, source = key.sort(stable=True)
    earlier = torch.full_like(number, -1)  # the same block in the same row
    earlier[source[1:]] = torch.where(ordered.diff() == 0, source[:-1], -1)

    def said(i: int) -> str:
        row = int(side.of(side.rows.block, flat.row[i]))
        return f" is listed twice for {side.words[0]} {row}, also in {side.entry(flat, int(earlier[i]))}"

    _refuse(side, flat, earlier >= 0, said)


def _check_ascending(side: Side, flat: FlatEntries) -> None:
    before, number = flat.block.roll(1), torch.arange(flat.row.numel(), device=flat.row.device)
    same = (flat.row == flat.row.roll(1)) & (flat.is_full == flat.is_full.roll(1)) & (number > 0)
    said = " comes after {}, expected rising indices".format
    _refuse(side, flat, same & (flat.block < before), lambda i: said(int(before[i])))


def _check_transposed(sides: list[Side], entries: list[FlatEntries]) -> None:
    """Check that each entry is in the lists of the other direction, with the same kind."""
    (forward, backward), keys = sides, []
    M, N = backward.columns, forward.columns
    for side, flat in zip(sides, entries, strict=True):
        head = torch.div(flat.row, max(side.rows.N, 1), rounding_mode="floor").long()
        pair = side.of(side.rows.block, flat.row), flat.block
        m, n = pair if side is forward else reversed(pair)
        sequence = head * side.rows.sequences + side.of(side.rows.sequence, flat.row)
        keys.append(torch.where(flat.listed, ((sequence * M + m) * N + n) * 2 + flat.is_full, -1))
    for side, flat, key, against, others in zip(sides, entries, keys, sides[::-1], keys[::-1], strict=True):

        def said(i: int) -> str:
            if bool(torch.isin(key[i] ^ 1, others)):
                kinds = ("full", "mask") if flat.is_full[i] else ("mask", "full")
                return " is a {} block, but a {} block in the {} lists".format(*kinds, against.name)
            block, row = int(flat.block[i]), int(side.of(side.rows.block, flat.row[i]))
            return (
                f" is not in the {against.name} lists: {against.words[0]} {block} lacks {against.words[1]} {row}; "
                "backward lists must be the transpose of forward lists"
            )

        _refuse(side, flat, ~torch.isin(key, others), said)


def _check_locks(side: Side, listed: int, order: torch.Tensor | None) -> None:
    """Check that a query block's semaphore values are ranks of its key blocks, by launch order if known, or in any."""
    spt = None if side.merged else getattr(side.lists, "spt", None)  # a plan has its own launch order
    known = order is not None or spt is not None
    order = as_launch_order(bool(spt) and order is None, order, side.rows.N, side.across.device)
    if order is not None:
        order = narrow(order, (1, 1) if side.packed else side.heads).flatten(0, 1)
    flat = side.entries(order, listed)
    lock = flat.pick(side.rows.locks)
    if not known:
        by_lock = lock.sort(stable=True).indices
        names = ("row", "position", "block", "is_full", "listed")
        flat, lock = replace(flat, **{name: getattr(flat, name)[by_lock] for name in names}), lock[by_lock]
    of_all = replace(flat, block=side.of(side.rows.sequence, flat.row) * side.columns + flat.block)
    expected = ranks(of_all, side.rows.sequences * side.columns)
    rule = (
        "key blocks add to a query block in the order of their launch, or the GPU hangs"
        if known
        else "the semaphore values of a query block are 0, 1, 2, ..., each once"
    )

    def said(i: int) -> str:
        return f" for query block {int(flat.block[i])}, expected {int(expected[i])}: {rule}"

    _refuse(side, flat, lock != expected, said, names=ORDERS, value=lock)


def _check_coverage(
    side: Side, flat: FlatEntries, window: tuple[int | None, int | None], lengths: Sequence[tuple[int, int]]
) -> None:
    """Check that every block with a pair inside the window is listed."""
    own, (left, right) = (0, window) if side.name == "forward" else (1, reversed(window))  # sides swap for a key
    tall, wide = side.block_size[own], side.block_size[1 - own]
    head = torch.arange(side.rows.heads, device=side.across.device).unsqueeze(1)
    sequence = side.rows.sequence.unsqueeze(0) if side.packed else head // side.heads[1]
    of_sequence = torch.tensor(lengths, device=head.device)[sequence]
    length, across = of_sequence[..., own], of_sequence[..., 1 - own]
    first = side.rows.block * tall
    last = (first + tall).minimum(length) - 1
    begin = torch.zeros_like(last) if left is None else (first + across - length - left).clamp(min=0)
    end = across - 1 if right is None else (last + across - length + right).minimum(across - 1)
    seen = (begin <= end) & (first < length)
    low, high = (torch.where(seen, edge, none) // wide for edge, none in ((begin, 0), (end, -1)))
    low, high, sequence = (t.expand(side.rows.heads, side.rows.N).flatten() for t in (low, high, sequence))
    row = flat.row.long()
    inside = flat.listed & (flat.block >= low[row]) & (flat.block <= high[row])
    listed = torch.zeros_like(low).scatter_add_(0, row, inside.long())
    at = _first(listed < high - low + 1)
    if at is not None:
        row_word, column_word = side.words
        raise ValueError(
            f"sequence {int(sequence[at])}: {side.name} lists name {int(listed[at])} of the {column_word}s "
            f"{int(low[at])} .. {int(high[at])} that the mask shows {row_word} {int(side.of(side.rows.block, at))} of "
            f"head {at // side.rows.N % side.heads[1]}; the other direction has no lists and attends to all of them"
        )


def _refuse(
    side: Side,
    flat: FlatEntries,
    bad: torch.Tensor,
    said: Callable[[int], str],
    *,
    names: Sequence[str] = LISTS[1::2],
    value: torch.Tensor | None = None,
) -> None:
    """Raise for the first bad entry. `said(i)`: the end of the message for the i-th entry."""
    i = _first(flat.listed & bad)
    if i is not None:
        number = int((flat.block if value is None else value)[i])
        raise side.error(int(flat.row[i]), f"{side.entry(flat, i, names)} = {number}{said(i)}")


def _first(bad: torch.Tensor) -> int | None:
    """Index of the first True."""
    at = bad.flatten().nonzero()
    return int(at[0]) if at.numel() else None
