"""The listed blocks of packed sequences, one after the other, and walks over them in ragged lists.

What is known of padded lists (`entries`, `write_order`) holds here too once the rows of all sequences are rows of one,
and a query block is told from those of other sequences. Ragged lists, which hold nothing but what is listed, are what
comes out. PyTorch only, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn.cute.lists.entries import (
    KINDS,
    LISTS,
    ORDERS,
    STARTS,
    FlatEntries,
    Kind,
    Rows,
    check_lists,
    fields,
    flat_entries,
    integer,
    tensor,
)
from flash_attn.cute.lists.formats import as_ragged, sequence_of_row
from flash_attn.cute.lists.write_order import ranks, sorted_walk

OptionalTensor = torch.Tensor | None


@dataclass(frozen=True)
class PackedRows:
    """Backward lists of packed sequences, flattened.

    Attributes:
        rows: of all sequences, one after the other.
        locks: of each kind, flat like its indices; None without semaphore values.
        sequence: int32 [rows], the sequence that a row belongs to.
        block: int32 [rows], the row's number in its sequence.
        sequences: how many there are.
        places: how many entries can be listed, where no two rows share any.
    """

    rows: Rows
    locks: tuple[torch.Tensor, ...] | None
    sequence: torch.Tensor
    block: torch.Tensor
    sequences: int
    places: int


def is_packed(lists: Any) -> bool:
    """True if the rows of all sequences stand one after the other."""
    return lists.mask_block_cnt.ndim == 2


def packed_rows(
    lists: Any, cu_total_m_blocks: OptionalTensor = None, *, rows_before: str = "cu_total_n_blocks"
) -> PackedRows:
    """Lists of packed sequences as rows, with one head where all heads share them.

    Args:
        rows_before: the field with the rows before each sequence, of backward lists or of forward ones.
        cu_total_m_blocks: [B + 1], query blocks before each sequence: how wide the rows of stacked lists are.

    Raises:
        ValueError: lists of another form or of heads that do not go together, or the starts of sequences or rows are
            missing or do not fit.
    """
    check_lists(fields(lists), packed=True)
    before = getattr(lists, rows_before)
    if before is None or (lists.mask_block_idx.ndim == 1 and lists.cu_block_idx_offsets is None):
        raise ValueError(f"{rows_before}, and cu_block_idx_offsets of ragged lists, have to be given")
    _check_starts(lists, before, cu_total_m_blocks)
    with_heads = _with_heads(lists)
    heads = max(t.shape[0] for t in with_heads.values())
    if all(t.shape[0] == 1 or t.stride(0) == 0 for t in with_heads.values()):
        heads, lists = 1, lists._replace(**{name: t.narrow(0, 0, 1) for name, t in with_heads.items()})
    before, places = before.int(), _places(lists, heads)
    lists = as_ragged(lists, rows_before, cu_total_m_blocks)
    kinds = [kind for kind in KINDS if getattr(lists, kind.cnt) is not None]
    starts = [getattr(lists, starts_of(lists, kind)).narrow(1, 0, lists.mask_block_cnt.shape[1]) for kind in kinds]
    rows = lists.mask_block_cnt.shape[1]
    row = torch.arange(rows, device=before.device, dtype=torch.int32)
    # Rows behind the last sequence's list nothing, and may count as its.
    sequence = sequence_of_row(before.narrow(0, 0, before.shape[0] - 1), row)
    locks = tuple(getattr(lists, kind.order) for kind in kinds)
    return PackedRows(
        Rows(
            tuple(getattr(lists, kind.cnt).expand(heads, rows) for kind in kinds),
            tuple(t.long().expand(heads, rows) for t in starts),
            tuple(getattr(lists, kind.idx) for kind in kinds),
        ),
        locks=None if any(t is None for t in locks) else locks,
        sequence=sequence,
        block=row - before.index_select(0, sequence),
        sequences=before.shape[0] - 1,
        places=places,
    )


def _with_heads(lists: Any) -> dict[str, torch.Tensor]:
    """The tensors with a dimension for heads; offsets have one in ragged lists, whose entries have none."""
    names = (*LISTS, *ORDERS, *STARTS) if lists.mask_block_idx.ndim == 1 else (*LISTS, *ORDERS)
    given = {name: getattr(lists, name) for name in names}
    return {name: t for name, t in given.items() if t is not None and t.ndim > 1}


def starts_of(lists: Any, kind: Kind) -> str:
    """The field that says where rows of a kind start in ragged lists: full ones may start where mask ones do."""
    return KINDS[0].starts if getattr(lists, kind.starts) is None else kind.starts


def _places(lists: Any, heads: int) -> int:
    """Upper bound of the blocks listed, where no two rows share places."""
    given = [t for t in (lists.mask_block_idx, lists.full_block_idx) if t is not None]
    rooms = [t.numel() if t.ndim == 1 else heads * t.shape[1:].numel() for t in given]
    return max(rooms) if given[0].ndim == 2 else sum(rooms)  # stacked: either has room for every block of a row


def packed_write_order(
    lists: Any,
    *,
    num_q_blocks: int,
    spt: bool = False,
    listed: int | None = None,
    cu_total_m_blocks: OptionalTensor = None,
) -> Any:
    """Backward lists of packed sequences with semaphore values, for deterministic backward in one pass.

    What `compute_dq_write_order` is for padded lists: time and memory go with the blocks listed, rows may be in any
    order, and nothing waits for the device.

    Args:
        lists: backward lists with the fields of `BlockSparseTensorsTorch`; semaphore values in them are replaced.
        num_q_blocks: of the longest sequence.
        spt: key blocks are launched from the last to the first.
        listed: upper bound of the blocks listed, all heads and sequences together. None: the room that there is.
        cu_total_m_blocks: integers [B + 1], of the forward lists: query blocks before each sequence. Stacked lists
            need it, whose rows have room for each of them.

    Returns:
        The lists with dq_write_order and, of full lists, dq_write_order_full: int32, like the indices, 0 after the
        entries in use; and with `spt`. Compact and stacked lists of one head are repeated where others have more.

    Raises:
        TypeError, ValueError: lists of another form, stacked ones without `cu_total_m_blocks`, ragged ones whose heads
            share places, or a wrong number.
    """
    check_lists(fields(lists), packed=True)
    integer("num_q_blocks", num_q_blocks)
    if listed is not None:
        integer("listed", listed, least=0)
    if not isinstance(spt, bool):
        raise TypeError(f"spt has to be a bool, got {spt!r}")
    heads = max(t.shape[0] for t in _with_heads(lists).values())
    if lists.mask_block_idx.ndim == 1:
        _refuse_shared_places(lists, heads)
    else:  # semaphore values are each head's own
        own = {name: t for name, t in _with_heads(lists).items() if name in LISTS}
        lists = lists._replace(**{name: t.expand(heads, *t.shape[1:]).contiguous() for name, t in own.items()})
    rows = packed_rows(lists._replace(dq_write_order=None, dq_write_order_full=None), cu_total_m_blocks)
    order = torch.arange(rows.rows.N, device=rows.sequence.device).flip(0) if spt else None
    entries = _flat_entries(rows, order, num_q_blocks, rows.places if listed is None else listed)
    locks = ranks(entries, rows.sequences * num_q_blocks)
    changed: dict[str, Any] = {"spt": spt, "dq_write_order_full": None}
    for full, kind in enumerate(KINDS[: len(rows.rows.counts)]):
        changed[kind.order] = entries.put(locks, full=bool(full)).view(getattr(lists, kind.idx).shape)
    return lists._replace(**changed)


def _check_starts(lists: Any, like: torch.Tensor, cu_total_m_blocks: OptionalTensor) -> None:
    """A sequence's start in cu_total_m_blocks, and in the offsets of stacked lists, for each of cu_total_n_blocks."""
    given = {}
    if cu_total_m_blocks is not None:
        given["cu_total_m_blocks"] = tensor("cu_total_m_blocks", cu_total_m_blocks)
    if lists.mask_block_idx.ndim == 2 and lists.cu_block_idx_offsets is not None:
        given["cu_block_idx_offsets"] = lists.cu_block_idx_offsets
    for name, starts in given.items():
        if starts.is_floating_point() or starts.device != like.device:
            raise ValueError(f"{name} is {starts.dtype} on {starts.device}, expected integers on {like.device}")
        if starts.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(starts.shape)}, cu_total_n_blocks {tuple(like.shape)}")


def _refuse_shared_places(lists: Any, heads: int) -> None:
    """Heads with lists of their own in one kind have semaphore values of their own in both."""
    for kind in KINDS:
        starts = getattr(lists, starts_of(lists, kind))
        if getattr(lists, kind.idx) is not None and starts.shape[0] != heads:
            raise ValueError(
                f"{kind.idx} of {starts.shape[0]} heads beside lists of {heads}: ragged heads cannot share "
                "places, where each has semaphore values of its own"
            )


def ragged_walk(
    rows: PackedRows,
    lists: Any,
    *,
    num_q_blocks: int,
    order: OptionalTensor = None,
    descending: bool = True,
    listed: int | None = None,
) -> Any:
    """Ragged lists with each key block's mask and full blocks in one list: `merged_walk` of packed sequences.

    Args:
        num_q_blocks: of the longest sequence.
        order: [1 or H, rows], the rows of a head in the order of their launch, from which semaphore values follow.
            None: take those in the lists.
        descending: among equal semaphore values the later query block comes first.
        listed: upper bound of the entries of all heads. None: the room that there is, which rows then must not share.
    """
    M = rows.sequences * num_q_blocks
    entries = _flat_entries(rows, order, num_q_blocks, rows.places if listed is None else listed)
    values = entries.pick(rows.locks) if order is None else ranks(entries, M)
    walk = sorted_walk(entries, values, descending, M)
    counts = walk.ends.flatten().diff(prepend=walk.ends.new_zeros(1)).view(walk.ends.shape)
    return walk.in_place_of(
        lists,
        mask_block_cnt=counts.int(),
        mask_block_idx=walk.entries % (2 * num_q_blocks),
        cu_block_idx_offsets=walk.ends - counts,
        dq_write_order=walk.locks,
    )


def _flat_entries(packed: PackedRows, order: OptionalTensor, num_q_blocks: int, most: int) -> FlatEntries:
    """Entries by head and row in order; blocks count through all sequences."""
    entries = flat_entries(packed.rows, order, most)
    sequence = packed.sequence.index_select(0, entries.row % max(packed.rows.N, 1))
    return replace(entries, block=entries.block + sequence * num_q_blocks)
