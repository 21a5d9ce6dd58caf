"""Rows of packed sequences' lists (CSR), one sequence after the other.

`entries` and `write_order` treat them like padded lists of one sequence, with blocks numbered through all sequences.
PyTorch only; nothing synchronises with the host.
"""

from typing import Any

import torch

from flash_attn.cute.lists.entries import LIST_KINDS, LISTS, ORDERS, STARTS, ListKind, Rows, check_lists, fields, tensor
from flash_attn.cute.lists.formats import as_ragged, sequence_of_row

OptionalTensor = torch.Tensor | None


def is_packed(lists: Any) -> bool:
    """True if the rows of all sequences are concatenated: counts are [H, rows]."""
    return lists.mask_block_cnt.ndim == 2


def packed_rows(
    lists: Any, cu_total_m_blocks: OptionalTensor = None, *, rows_before: str = "cu_total_n_blocks"
) -> Rows:
    """`Rows` of lists of packed sequences, with one head if all heads share them.

    rows_before: field with the number of rows before each sequence: cu_total_n_blocks of backward lists,
    cu_total_m_blocks of forward lists. cu_total_m_blocks: [B + 1], gives the width of the rows of stacked lists.
    """
    check_lists(fields(lists), packed=True)
    before = getattr(lists, rows_before)
    if before is None or (lists.mask_block_idx.ndim == 1 and lists.cu_block_idx_offsets is None):
        raise ValueError(f"{rows_before}, and cu_block_idx_offsets of ragged lists, must be given")
    _check_starts(lists, before, cu_total_m_blocks)
    of_heads = with_heads(lists)
    heads = max(t.shape[0] for t in of_heads.values())
    if all(t.shape[0] == 1 or t.stride(0) == 0 for t in of_heads.values()):
        heads, lists = 1, lists._replace(**{name: t.narrow(0, 0, 1) for name, t in of_heads.items()})
    before, capacity = before.int(), _capacity(lists, heads)
    lists = as_ragged(lists, rows_before, cu_total_m_blocks)
    kinds = [kind for kind in LIST_KINDS if getattr(lists, kind.cnt) is not None]
    N = lists.mask_block_cnt.shape[1]
    starts = [getattr(lists, starts_of(lists, kind)).narrow(1, 0, N) for kind in kinds]
    row = torch.arange(N, device=before.device, dtype=torch.int32)
    # Rows past the last sequence are empty, and count as its.
    sequence = sequence_of_row(before.narrow(0, 0, before.shape[0] - 1), row)
    locks = tuple(getattr(lists, kind.order) for kind in kinds)
    return Rows(
        tuple(getattr(lists, kind.cnt).expand(heads, N) for kind in kinds),
        tuple(t.long().expand(heads, N) for t in starts),
        tuple(getattr(lists, kind.idx) for kind in kinds),
        None if any(t is None for t in locks) else locks,
        sequence=sequence,
        block=row - before.index_select(0, sequence),
        sequences=before.shape[0] - 1,
        capacity=capacity,
        lead=(1, heads),
        repeated=(1, heads),
    )


def with_heads(lists: Any) -> dict[str, torch.Tensor]:
    """The tensors with a head dimension: counts, entries unless ragged, and offsets of ragged lists."""
    names = (*LISTS, *ORDERS, *STARTS) if lists.mask_block_idx.ndim == 1 else (*LISTS, *ORDERS)
    tensors = {name: getattr(lists, name) for name in names}
    return {name: t for name, t in tensors.items() if t is not None and t.ndim > 1}


def starts_of(lists: Any, kind: ListKind) -> str:
    """The field with the offsets of a kind's rows in ragged lists; full lists default to the mask lists' offsets."""
    return LIST_KINDS[0].starts if getattr(lists, kind.starts) is None else kind.starts


def _capacity(lists: Any, heads: int) -> int:
    """Upper bound of the entries, if no two rows share any."""
    indices = [t for t in (lists.mask_block_idx, lists.full_block_idx) if t is not None]
    sizes = [t.numel() if t.ndim == 1 else heads * t.shape[1:].numel() for t in indices]
    return max(sizes) if indices[0].ndim == 2 else sum(sizes)  # stacked: each kind has capacity for all blocks


def _check_starts(lists: Any, like: torch.Tensor, cu_total_m_blocks: OptionalTensor) -> None:
    """Check that cu_total_m_blocks, and the offsets of stacked lists, are integers shaped like cu_total_n_blocks."""
    checked = {}
    if cu_total_m_blocks is not None:
        checked["cu_total_m_blocks"] = tensor("cu_total_m_blocks", cu_total_m_blocks)
    if lists.mask_block_idx.ndim == 2 and lists.cu_block_idx_offsets is not None:
        checked["cu_block_idx_offsets"] = lists.cu_block_idx_offsets
    for name, starts in checked.items():
        if starts.is_floating_point() or starts.device != like.device:
            raise ValueError(f"{name} is {starts.dtype} on {starts.device}, expected integers on {like.device}")
        if starts.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(starts.shape)}, cu_total_n_blocks {tuple(like.shape)}")


def refuse_shared_entries(lists: Any, heads: int) -> None:
    """Refuse ragged lists whose heads share the entries of one kind: semaphore values are per head."""
    for kind in LIST_KINDS:
        starts = getattr(lists, starts_of(lists, kind))
        if getattr(lists, kind.idx) is not None and starts.shape[0] != heads:
            raise ValueError(
                f"{kind.idx} of {starts.shape[0]} heads beside lists of {heads}: ragged heads cannot share "
                "entries, where each has semaphore values of its own"
            )
