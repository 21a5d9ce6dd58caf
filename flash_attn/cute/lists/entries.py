"""Checks of the fields of block lists, and their entries in one flat sequence without padding.

A check names the argument, its value, and what was expected; none reads a tensor's values. A row lists key blocks of a
query block in forward lists, query blocks of a key block in backward lists. `Rows` (CSR) locates a row's entries in
every form of lists; transposing, ordering and merging lists are based on `flat_entries`. Time and memory are
proportional to an upper bound of the blocks listed; nothing synchronises with the host. PyTorch only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

OptionalTensor = torch.Tensor | None


class ListKind(NamedTuple):
    """Field names of block lists for mask blocks, or for full blocks."""

    name: str
    cnt: str
    idx: str
    order: str
    starts: str


LIST_KINDS = (
    ListKind("mask", "mask_block_cnt", "mask_block_idx", "dq_write_order", "cu_block_idx_offsets"),
    ListKind("full", "full_block_cnt", "full_block_idx", "dq_write_order_full", "cu_full_block_idx_offsets"),
)
LISTS = tuple(field for kind in LIST_KINDS for field in (kind.cnt, kind.idx))
ORDERS = tuple(kind.order for kind in LIST_KINDS)
STARTS = tuple(kind.starts for kind in LIST_KINDS)


def integer(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def block_size(value: object) -> tuple[int, int]:
    """(queries, keys) of a block."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"block_size must be (queries, keys), got {value!r}")
    for part in value:
        if isinstance(part, bool) or not isinstance(part, int) or part < 1:
            raise ValueError(f"block_size must be two ints of at least 1, got {value!r}")
    return value[0], value[1]


def width(value: object) -> None:
    """Check the width of index lists: None, one number for mask and full lists, or two."""
    parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(parts) > 2:
        raise ValueError(f"width must be an int or two, of mask and full lists, got {value!r}")
    for part in parts if value is not None else ():
        integer("width", part)


def window_side(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or None, got {value!r}")
    if value < -1:
        raise ValueError(f"{name}={value}, expected at least 0, or None or -1 for no limit")


def tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def bool_table(name: str, value: object) -> torch.Tensor:
    """bool with two dimensions or four."""
    mask = tensor(name, value)
    if mask.dtype != torch.bool or mask.ndim not in (2, 4):
        raise ValueError(f"{name} is {mask.dtype} {tuple(mask.shape)}, expected bool with 4 dimensions, or 2")
    return mask


def fields(lists: Any) -> tuple[Any, Any, Any, Any]:
    """(mask counts, mask indices, full counts, full indices) of lists without bits."""
    if getattr(lists, "mask_block_bits", None) is not None:
        raise NotImplementedError("mask_block_bits: only SM90 forward reads lists with a bit for each token")
    try:
        return tuple(getattr(lists, name) for name in LISTS)
    except AttributeError:
        raise TypeError(f"lists must be a BlockSparseTensorsTorch, got {type(lists).__name__}") from None


def check_lists(tensors: Sequence[Any], *, packed: bool = False) -> None:
    """Check that types and shapes of `fields` are consistent: padded lists, or lists of packed sequences."""
    expected, ranks = "[B, H, N] and [B, H, N, width]", ((3, 4),)
    if packed:
        expected, ranks = "[H, rows], and [H, rows, n], [H, L] or [L]", ((2, 3), (2, 2), (2, 1))
    for name, cnt, idx in (("mask", *tensors[:2]), ("full", *tensors[2:])):
        if (cnt is None) != (idx is None):
            raise ValueError(f"{name}_block_cnt and {name}_block_idx must be given together")
        if cnt is None and name == "mask":
            raise ValueError("mask_block_cnt and mask_block_idx must be given, got None")
        if cnt is None:
            continue
        for field, value in ((f"{name}_block_cnt", cnt), (f"{name}_block_idx", idx)):
            if tensor(field, value).dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{field} must be int32, got {value.dtype}")
        alike = (cnt.ndim, idx.ndim) in ranks and idx.ndim == tensors[1].ndim and cnt.shape[-1] == tensors[0].shape[-1]
        if not alike or (idx.ndim > cnt.ndim and cnt.shape[-1] != idx.shape[-2]):
            raise ValueError(
                f"{name}_block_cnt {tuple(cnt.shape)} and {name}_block_idx {tuple(idx.shape)} must be {expected}"
            )
    given = dict(zip(LISTS, tensors, strict=True))
    leading = 1 if packed else 2
    sizes = {name: tuple(t.shape[:leading]) for name, t in given.items() if t is not None and t.ndim > 1}
    if any(len({size[d] for size in sizes.values()} - {1}) > 1 for d in range(leading)):
        raise ValueError(f"lists must have the same {'' if packed else 'batches and '}heads, or 1, got {sizes}")


@dataclass(frozen=True)
class Rows:
    """Rows of lists in CSR: mask lists and, if any, full lists. Padded lists count as one sequence."""

    counts: tuple[torch.Tensor, ...]  # per kind, [heads, N]: entries of a row
    starts: tuple[torch.Tensor, ...]  # per kind, [heads, N]: offset of a row's first entry in `indices`
    indices: tuple[torch.Tensor, ...]  # per kind, flat
    locks: tuple[torch.Tensor, ...] | None  # semaphore values per kind, laid out like `indices`; None without
    sequence: torch.Tensor  # [N], sequence of a row
    block: torch.Tensor  # [N], index of a row in its sequence
    sequences: int
    capacity: int  # upper bound of the entries of all heads, if no two rows share any
    lead: tuple[int, int]  # batches and heads of the rows, (1, heads) of packed sequences
    repeated: tuple[int, int]  # batches and heads of the caller's tensors

    @property
    def heads(self) -> int:
        return self.counts[0].shape[0]

    @property
    def N(self) -> int:
        return self.counts[0].shape[1]

    @property
    def width(self) -> int:
        """Capacity of a padded row, mask and full entries together."""
        return self.capacity // max(self.heads * self.N, 1)

    def total(self) -> torch.Tensor:
        """Entries of each row, [heads, N]."""
        return sum(self.counts[1:], start=self.counts[0])

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """Values of padded lists in the caller's shape, [B, H, N] or [B, H, N, n]."""
        return flat.view(*self.lead, self.N, *flat.shape[2:]).expand(*self.repeated, self.N, *flat.shape[2:])

    def launch_order(self, order: OptionalTensor) -> OptionalTensor:
        """An order [1 or B, 1 or H, N] as [heads, N], without batches and heads that the rows have no more."""
        return None if order is None else narrow(order, self.lead).flatten(0, 1)


def padded_rows(lists: Any, order: OptionalTensor = None, *, locks: bool = False) -> Rows:
    """The rows of padded lists, without broadcast batches and heads.

    order: launch order [1 or B, 1 or H, N]; batches and heads that share lists are kept apart if it differs between
    them. locks: include the semaphore values of the lists.
    """
    tensors = fields(lists)
    check_lists(tensors)
    values = [t for t in (getattr(lists, name) for name in ORDERS) if t is not None] if locks else []
    given = [t for t in tensors if t is not None]
    lead = []
    for d in (0, 1):
        distinct = [t for t in (*given, *values, order) if t is not None]
        shared = all(t.shape[d] == 1 or t.stride(d) == 0 for t in distinct)
        lead.append(1 if shared else max(t.shape[d] for t in distinct))
    repeated = torch.broadcast_shapes(*(t.shape[:2] for t in given))
    counts, indices = ([narrow(t, lead) for t in given[at::2]] for at in (0, 1))
    heads, N, device = lead[0] * lead[1], counts[0].shape[2], counts[0].device
    number, row = torch.arange(heads * N, device=device).view(heads, N), torch.arange(N, device=device)
    return Rows(
        tuple(t.flatten(0, 1) for t in counts),
        tuple(number * t.shape[3] for t in indices),
        tuple(t.flatten() for t in indices),
        tuple(narrow(t, lead).flatten() for t in values) or None,
        sequence=torch.zeros_like(row),
        block=row,
        sequences=1,
        capacity=sum(t.numel() for t in indices),
        lead=tuple(lead),
        repeated=tuple(map(max, repeated, lead)),
    )


def narrow(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor with batch and head dimensions of the given sizes, each cut to 1 or expanded."""
    for d in (0, 1):
        if shape[d] == 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor.expand(*shape, *tensor.shape[2:]).contiguous()


@dataclass(frozen=True)
class FlatEntries:
    """Entries of lists in one flat sequence: by head, row in launch order, mask blocks before full blocks.

    All tensors are [E], E at least the number of entries; elements past it are not `listed`.
    """

    row: torch.Tensor  # head * N + index of the row in its head
    position: torch.Tensor  # in the row, mask blocks first
    at: torch.Tensor  # offset in the indices of the entry's kind; 0 if not listed
    block: torch.Tensor  # listed block; plus sequence * across, if `across` was given
    is_full: torch.Tensor
    listed: torch.Tensor
    rows: Rows

    def pick(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The entries' values in flat tensors that are laid out like the indices."""
        return _pick(tensors, self.at, self.is_full)

    def put(self, values: torch.Tensor, *, full: bool) -> torch.Tensor:
        """A flat tensor laid out like the mask (or full) indices with the entries' values, 0 elsewhere."""
        of_kind = self.listed & (self.is_full if full else self.is_full.logical_not())
        return scatter(values, self.at, of_kind, self.rows.indices[full].shape)


def flat_entries(rows: Rows, order: OptionalTensor, most: int, across: int = 0) -> FlatEntries:
    """The entries of all rows, at most `most`, in work proportional to `most`, not to the padding.

    order: [1 or heads, N], the rows of each head in the order wanted; None: ascending. across: upper bound of the
    blocks that a row can list, added per packed sequence to make block indices unique.
    """
    counts = rows.total().flatten()
    number = torch.arange(counts.numel(), device=counts.device)
    if order is not None and rows.N:
        number = (number.view(-1, rows.N).narrow(1, 0, 1) + order).flatten()
        counts = counts.index_select(0, number)
    ends = counts.cumsum(0)
    at = torch.arange(most if number.numel() else 0, device=counts.device)
    row = torch.searchsorted(ends, at, right=True)  # rows that end before the entry
    listed = row < number.numel()
    row = row.clamp(max=max(number.numel() - 1, 0))
    position = torch.where(listed, at - (ends - counts).index_select(0, row), 0)
    row = number.index_select(0, row)
    at, is_full = rows.starts[0].flatten().index_select(0, row) + position, torch.zeros_like(listed)
    if len(rows.counts) > 1:
        masks = rows.counts[0].flatten().index_select(0, row)
        is_full = position >= masks
        at = torch.where(is_full, rows.starts[1].flatten().index_select(0, row) + position - masks, at)
    at, row = torch.where(listed, at, 0), row.int()
    block = _pick(rows.indices, at, is_full)
    if rows.sequences > 1 and across:
        block = block + rows.sequence.index_select(0, row % max(rows.N, 1)) * across
    return FlatEntries(row, position.int(), at, block, is_full, listed, rows)


def _pick(tensors: Sequence[torch.Tensor], at: torch.Tensor, is_full: torch.Tensor) -> torch.Tensor:
    if len(tensors) == 1:
        return _at(tensors[0], at)
    mask, full = tensors
    return torch.where(is_full, _at(full, torch.where(is_full, at, 0)), _at(mask, torch.where(is_full, 0, at)))


def _at(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, at) if tensor.numel() else at.int()


def scatter(values: torch.Tensor, at: torch.Tensor, kept: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of `shape` with the values that are `kept` at their offsets."""
    size = torch.Size(shape).numel()
    spread = torch.zeros(size + 1, dtype=torch.int32, device=values.device)  # values that are not kept go past the end
    spread.scatter_(0, torch.where(kept, at, size), values.int())
    return spread.narrow(0, 0, size).view(shape)
