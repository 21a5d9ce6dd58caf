"""What a call's block lists hold, row by row, without the dimensions that repeat them: padded and ragged ones in one.

A row is a query block in forward, a key block in backward. PyTorch only, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.cute.list_arguments import fields
from flash_attn.cute.list_entries import distinct_lists
from flash_attn.cute.packed_entries import OFFSETS, distinct_heads, is_packed, packed_rows


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
    """A call's lists without what is repeated; rows of all sequences one after the other.

    Attributes:
        counts, starts, indices: of mask lists and, if there are any, full ones: [H, R], [H, R] and flat.
        sequence, block: int64 [R], the sequence of a row and its number there.
        sequences: how many have lists of their own.
        most: upper bound of the blocks listed in each of `indices`.
    """

    counts: tuple[torch.Tensor, ...]
    starts: tuple[torch.Tensor, ...]
    indices: tuple[torch.Tensor, ...]
    sequence: torch.Tensor
    block: torch.Tensor
    sequences: int
    most: tuple[int, ...]

    def sizes(self, asked: bool) -> tuple[int, int, int]:
        """Heads, rows and kinds: one kind where no mask_mod asks which a block is."""
        return *self.counts[0].shape, len(self.counts) if asked else 1

    def rows_before(self, lists: Any, rows: int) -> torch.Tensor:
        """int64 [B + 1]: where sequences of padded lists start that have `rows` rows each, or share them."""
        batch = torch.arange(lists.mask_block_cnt.shape[0] + 1, device=self.block.device)
        return batch * (rows if self.sequences > 1 else 0)

    def entries(self, asked: bool) -> ListedEntries:
        """All blocks that are listed, and behind those of a kind what is left of its room."""
        kinds = zip(self.counts, self.starts, self.indices, self.most, strict=True)
        parts = [self._kind(number if asked else 0, *kind) for number, kind in enumerate(kinds)]
        return ListedEntries(*map(torch.cat, zip(*parts, strict=True)), self.sizes(asked))

    def _kind(
        self, kind: int, counts: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, ...]:
        lines = counts.numel()
        ends = counts.flatten().cumsum(0)
        at = torch.arange(most if lines else 0, device=counts.device)
        line = torch.searchsorted(ends, at, right=True)
        listed = line < lines
        line = line.clamp(max=max(lines - 1, 0))
        place = at - (ends - counts.flatten()).index_select(0, line) + starts.flatten().index_select(0, line)
        block = indices.index_select(0, torch.where(listed, place, 0)).long()
        rows = max(counts.shape[1], 1)
        return line // rows, line % rows, torch.full_like(line, kind), torch.where(listed, block, 0), listed


def own_rows(lists: Any, rows_before: str) -> OwnRows:
    """The rows of padded or ragged lists, expanded to the batches and heads of a call.

    Args:
        rows_before: the field with the rows before each sequence.
    """
    if not is_packed(lists):
        return _padded_rows(lists)
    lists = lists._replace(dq_write_order=None, dq_write_order_full=None)
    lists = distinct_heads(lists)._replace(cu_total_n_blocks=getattr(lists, rows_before))
    rows = packed_rows(lists)
    heads, count = rows.counts[0].shape
    # Rows behind the last sequence's are nobody's.
    own = torch.arange(count, device=rows.block.device) < lists.cu_total_n_blocks.select(0, -1)
    starts = [t for t in (getattr(lists, name) for name in OFFSETS) if t is not None]
    shared = any(t.shape[0] < heads or t.stride(0) == 0 for t in starts)
    return OwnRows(
        tuple(torch.where(own, counts, 0) for counts in rows.counts),
        rows.starts,
        rows.indices,
        rows.sequence.long(),
        rows.block.long(),
        rows.sequences,
        tuple(t.numel() * (heads if shared else 1) for t in rows.indices),
    )


def _padded_rows(lists: Any) -> OwnRows:
    own = distinct_lists(fields(lists), None)
    B, H, M = own.mask_cnt.shape
    number = torch.arange(B * H * M, device=own.mask_cnt.device).view(B, H, M)
    kinds = [(own.mask_cnt, own.mask_idx), (own.full_cnt, own.full_idx)]
    kinds = [(cnt, idx) for cnt, idx in kinds if cnt is not None]
    row = torch.arange(B * M, device=number.device)

    def by_head(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(0, 1).reshape(H, B * M)

    return OwnRows(
        tuple(by_head(cnt) for cnt, _ in kinds),
        tuple(by_head(number * idx.shape[3]) for _, idx in kinds),
        tuple(idx.flatten() for _, idx in kinds),
        row // max(M, 1),
        row % max(M, 1),
        B,
        tuple(idx.numel() for _, idx in kinds),
    )
