"""Rows of block lists in kernels: their addresses, the heads that share them, semaphores of dk and dv.

A row is the list of one block: key blocks of a query block in forward, query blocks of a key block in backward. Kernels
read padded lists [B, H, rows, n] or ragged ones [L] (`formats`), by rank at compile time. Offsets of entries have 64
bits, row indices 32.

Lists of a key/value head that its query heads share get a head dimension of (group, key/value heads) with stride zero
over the group: kernels index it by query head, and nothing is repeated in memory.

In deterministic backward on SM100 the query heads of a group add to dk and dv in order of heads. A head whose own list
is empty at a key tile adds nothing; `pass_semaphore` then increments for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from flash_attn.cute import barrier
from flash_attn.cute.block_sparsity import BlockSparseTensors, BlockSparseTensorsTorch
from flash_attn.cute.lists.entries import LISTS, ORDERS, STARTS


@dataclass(frozen=True)
class ListRow:
    """Index of a row in the count tensors, and offsets of its mask and full entries; None: the same index."""

    index: tuple
    starts: tuple[Int64 | None, Int64 | None]

    def count(self, counts: cute.Tensor) -> Int32:
        return counts[self.index]

    def entries(self, tensor: cute.Tensor, full: bool = False) -> cute.Tensor:
        """The row of `tensor`: mask_block_idx, full_block_idx, or one laid out like them."""
        start = self.starts[full]
        return tensor[(*self.index, None)] if start is None else cute.domain_offset(start, tensor)

    def bits(self, tensor: cute.Tensor) -> cute.Tensor:
        """The row of mask_block_bits, [entries, words]."""
        start = self.starts[0]
        return tensor[(*self.index, None, None)] if start is None else cute.domain_offset((start, 0), tensor)


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
    return ListRow((head, row), (start, full_start))


@cute.jit
def entry_at(position: Int32, mask_count: Int32, mask_idx: cute.Tensor, full_idx: cute.Tensor | None) -> Int32:
    """2 * block + is_full for a position in a row: its mask blocks, then its full blocks."""
    entry = Int32(0)
    if const_expr(full_idx is None):
        entry = mask_idx[position] * 2
    else:
        if position < mask_count:
            entry = mask_idx[position] * 2
        else:
            entry = full_idx[position - mask_count] * 2 + 1
    return entry


@dataclass(frozen=True)
class ListHeads:
    """`count`: heads that the lists have once normalised. `group`: query heads that share one of them.

    `packable`: whether the query heads of a key/value head always share a list, as pack_gqa asks.
    """

    count: int
    group: int
    packable: bool

    @staticmethod
    def of(tensors: Optional[BlockSparseTensorsTorch], num_head: int, num_head_kv: int) -> "ListHeads":
        """One list for all heads, one for each key/value head, or one for each query head."""
        given = 1 if tensors is None else _given_heads(tensors)
        if given not in (1, num_head_kv, num_head):
            raise ValueError(
                f"block_sparse_tensors have lists for {given} heads, which cannot be expanded: their head dim must be "
                f"{num_head} or 1, or {num_head_kv} for one list a key/value head"
            )
        if given == 1 or given == num_head:
            return ListHeads(num_head, 1, packable=given == 1)
        return ListHeads(num_head_kv, num_head // num_head_kv, packable=True)

    def group_in_kernel(self, pack_gqa: bool) -> int:
        """Heads of the kernel's grid per list: with pack_gqa the grid has key/value heads."""
        return 1 if pack_gqa else self.group


def _given_heads(tensors: BlockSparseTensorsTorch) -> int:
    """Heads of the lists: the largest size of the head dimension, which tensors may broadcast with size 1.

    It is the first dimension of packed lists, the second of padded ones; ragged entries, [L], have none.
    """
    counts = tensors.mask_block_cnt
    head_dim = 0 if counts is not None and counts.ndim == 2 else 1
    given = (getattr(tensors, name) for name in (*LISTS, *ORDERS))
    return max((t.shape[head_dim] for t in given if t is not None and t.ndim > 1), default=1)


def lists_by_query_head(tensors: Optional[BlockSparseTensors], group: int) -> Optional[BlockSparseTensors]:
    """Lists that a kernel indexes by query head: each head of the given ones counts for a group of `group`."""
    if tensors is None or group == 1:
        return tensors
    head_dim = 0 if cute.rank(tensors.mask_block_cnt.shape) == 2 else 1
    # Offsets of ragged rows have a head dimension too; those of stacked lists do not.
    lists = {name: getattr(tensors, name) for name in (*LISTS, *ORDERS, *STARTS)}
    with_heads = {name: t for name, t in lists.items() if t is not None and cute.rank(t.shape) > 1}
    return tensors._replace(**{name: _spread(t, head_dim, group) for name, t in with_heads.items()})


def _spread(tensor: cute.Tensor, dim: int, group: int) -> cute.Tensor:
    shape, stride = list(tensor.shape), list(tensor.stride)
    shape[dim], stride[dim] = (group, shape[dim]), (0, stride[dim])
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


WARPGROUP = 128  # threads


@cute.jit
def pass_semaphore(
    semaphore: cute.Tensor,
    thread: Int32,
    tile: Int32,
    head: Int32,
    batch: Int32,
    group: Constexpr[int],
    flags: Constexpr[int],
) -> None:
    """Wait until the query heads before have added to a key tile, and increment its semaphore without adding.

    semaphore: int32 [key tiles, 2, key/value heads, B]. thread: index among consumer threads. group: query heads of a
    key/value head. flags: semaphores of a tile in use, 1 or 2, one per warpgroup.
    """
    warpgroup = thread // WARPGROUP
    if warpgroup < flags:
        count = semaphore[tile, None, head // group, batch].iterator
        barrier.wait_eq(count, thread % WARPGROUP, warpgroup, head % group)
        barrier.arrive_inc(count, thread % WARPGROUP, warpgroup, 1)


@cute.jit
def sequence_at(starts: cute.Tensor, at: Int32, size: Constexpr[Optional[int]] = None) -> Int32:
    """Index of the packed sequence of a row, or of a tile of `size` rows: the last one that starts at or before it.

    The tiles of sequence s start at ``starts[s] // size + s``.
    """
    low, high = Int32(0), Int32(starts.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        first = starts[middle]
        if const_expr(size is not None):
            first = first // size + middle
        if first <= at:
            low = middle
        else:
            high = middle
    return low
