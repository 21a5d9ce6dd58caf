"""A call's block lists row by row, without the dimensions that repeat them: padded and ragged ones in one.

A row is a query block in forward, a key block in backward. PyTorch only, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_attn.cute.lists.csr import is_packed, packed_rows
from flash_attn.cute.lists.entries import STARTS, Rows, distinct_lists, fields, flat_entries


@dataclass(frozen=True)
class ListedEntries:
    """Listed blocks of all rows, int64 and all of one shape; what is not `listed` means nothing.

    Attributes:
        head, row, kind: which row of which head lists it, and as what: of `sizes` (heads, rows, kinds).
        block: what it lists.
        listed: bool.
    """

    head: torch.Tensor
    row: torch.Tensor
    kind: torch.Tensor
    block: torch.Tensor
    listed: torch.Tensor
    sizes: tuple[int, int, int]


@dataclass(frozen=True)
class OwnRows:
    """A call's lists without what is repeated.

    Attributes:
        rows: of all sequences, one after the other.
        sequence, block: int64 [R], the sequence of a row and its number there.
        sequences: how many have lists of their own.
        most: upper bound of the blocks listed.
    """

    rows: Rows
    sequence: torch.Tensor
    block: torch.Tensor
    sequences: int
    most: int

    def sizes(self, asked: bool) -> tuple[int, int, int]:
        """Heads, rows and kinds: one kind where no mask_mod asks which a block is."""
        return self.rows.heads, self.rows.N, len(self.rows.counts) if asked else 1

    def rows_before(self, lists: Any, rows: int) -> torch.Tensor:
        """int64 [B + 1]: where sequences of padded lists start that have `rows` rows each, or share them."""
        batch = torch.arange(lists.mask_block_cnt.shape[0] + 1, device=self.block.device)
        return batch * (rows if self.sequences > 1 else 0)

    def entries(self, asked: bool) -> ListedEntries:
        """All blocks that are listed, and behind them what is left of their room."""
        found = flat_entries(self.rows, None, self.most)
        row, N = found.row.long(), max(self.rows.N, 1)
        kind = (found.is_full if asked else torch.zeros_like(found.is_full)).long()
        block = torch.where(found.listed, found.block.long(), 0)
        return ListedEntries(row // N, row % N, kind, block, found.listed, self.sizes(asked))


def own_rows(lists: Any, rows_before: str) -> OwnRows:
    """The rows of padded or ragged lists, expanded to the batches and heads of a call.

    Args:
        rows_before: the field with the rows before each sequence.
    """
    if not is_packed(lists):
        return _padded_rows(lists)
    lists = lists._replace(dq_write_order=None, dq_write_order_full=None)
    packed = packed_rows(lists, rows_before=rows_before)
    rows = packed.rows
    # Rows behind the last sequence's are nobody's.
    own = torch.arange(rows.N, device=packed.block.device) < getattr(lists, rows_before).select(0, -1)
    starts = [t for t in (getattr(lists, name) for name in STARTS) if t is not None]
    shared = any(t.shape[0] < rows.heads or t.stride(0) == 0 for t in starts)
    return OwnRows(
        replace(rows, counts=tuple(torch.where(own, counts, 0) for counts in rows.counts)),
        packed.sequence.long(),
        packed.block.long(),
        packed.sequences,
        sum(t.numel() for t in rows.indices) * (rows.heads if shared else 1),
    )


def _padded_rows(lists: Any) -> OwnRows:
    """Rows of all batches as rows of one."""
    own = distinct_lists(fields(lists), None)
    B, H, M = own.mask_cnt.shape
    rows = own.rows()
    counts, starts = (
        tuple(t.view(B, H, M).transpose(0, 1).reshape(H, B * M) for t in given) for given in (rows.counts, rows.starts)
    )
    row = torch.arange(B * M, device=own.mask_cnt.device)
    most = sum(t.numel() for t in rows.indices)
    return OwnRows(Rows(counts, starts, rows.indices), row // max(M, 1), row % max(M, 1), B, most)
