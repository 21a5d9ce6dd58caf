"""The place of a row of block lists in memory: one lookup for every kernel, direction and form of lists.

A row is what one CTA walks: the key blocks of a query block in forward, the query blocks of a key
block in backward. Its lists come in one of two forms, told apart by the ranks of the tensors, so
that a compiled kernel knows one of them only:

    padded    counts [B, H, rows], entries [B, H, rows, n]
    ragged    counts [H, total rows], entries [L], and [H, total rows] places where rows start (CSR)

Ragged rows stand one sequence after the other; `packed_lists` has the other forms that a call may bring. What can pass
2**31 is 64 bits wide: a place in the entries. Row numbers are 32 bits wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flash_attn.cute.block_sparsity import BlockSparseTensors


class HalfLists(BlockSparseTensors):
    """Lists whose entries say which halves of a tile of queries list them (`query_halves`): 4 * block + halves."""

    __slots__ = ()

    def __new_from_mlir_values__(self, values):
        return HalfLists(*super().__new_from_mlir_values__(values))


@dataclass(frozen=True)
class HalfEntries:
    """A row of `HalfLists`: its items are the blocks."""

    entries: cute.Tensor

    def __getitem__(self, place: Int32) -> Int32:
        return self.entries[place] >> 2

    def halves(self, place: Int32) -> Int32:
        """Bit 0: the tile's first half lists the block. Bit 1: the second does."""
        return self.entries[place] & 3


def with_halves(tensors: BlockSparseTensors | None, halves: bool) -> BlockSparseTensors | None:
    """The lists that a kernel was given, as `HalfLists` if they are."""
    return HalfLists(*tensors) if halves else tensors


@dataclass(frozen=True)
class ListRow:
    """The place of a row's counts, and where its mask and its full entries start (None: at the same place)."""

    place: tuple
    starts: tuple[Int64 | None, Int64 | None]
    has_halves: bool = False

    def count(self, counts: cute.Tensor) -> Int32:
        return counts[self.place]

    def entries(self, tensor: cute.Tensor, full: bool = False) -> cute.Tensor:
        """The row of `tensor`: mask_block_idx, full_block_idx, or one laid out like them."""
        start = self.starts[full]
        return tensor[(*self.place, None)] if start is None else cute.domain_offset(start, tensor)

    def blocks(self, tensor: cute.Tensor, full: bool = False) -> cute.Tensor | HalfEntries:
        """The row of mask_block_idx or full_block_idx; its items are blocks."""
        entries = self.entries(tensor, full)
        return HalfEntries(entries) if self.has_halves else entries


def find_row(
    tensors: BlockSparseTensors,
    rows_before: cute.Tensor | None,
    batch: Int32,
    head: Int32,
    block: Int32,
    start: Int64 | None = None,
) -> ListRow:
    """The row of a sequence's block.

    rows_before: [B + 1], rows of all sequences before each one. start: where the row's entries start, if that is known
    and the lists are ragged.
    """
    if len(tensors.mask_block_cnt.shape) == 3:
        return ListRow((batch, head, block), (None, None))
    row, of_full = Int32(rows_before[batch]) + block, tensors.cu_full_block_idx_offsets
    start = Int64(tensors.cu_block_idx_offsets[head, row]) if start is None else start
    full_start = start if of_full is None else Int64(of_full[head, row])
    return ListRow((head, row), (start, full_start), isinstance(tensors, HalfLists))


@cute.jit
def entry_at(place: Int32, mask_count: Int32, mask_idx: cute.Tensor, full_idx: cute.Tensor | None) -> Int32:
    """2 * block + is_full for a place in a row: its mask blocks, then its full ones."""
    entry = Int32(0)
    if const_expr(full_idx is None):
        entry = mask_idx[place] * 2
    else:
        if place < mask_count:
            entry = mask_idx[place] * 2
        else:
            entry = full_idx[place - mask_count] * 2 + 1
    return entry
