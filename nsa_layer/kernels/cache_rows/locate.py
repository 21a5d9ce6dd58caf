"""Slots of a call's sequences in caches, found on the GPU: one launch, a CTA for each sequence.

Lengths, pages and rows are only known there. A sequence whose slots are not all in the caches is invalid: its numbers
are 0 but for `CacheSlots.INVALID`, so that nothing of it is written or read.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, const_expr

from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.varlen import compressed_length

Tensor = torch.Tensor
THREADS = 256
ALIGNED = 4  # numbers in 16 bytes


class CacheSlots(IntEnum):
    """Rows of the tensor int32 [fields, B] that `locate` gives; slots are counted from a sequence's start."""

    FIRST = 0  # position of the first query
    NEW = 1  # queries: 0 where there are none, or slots for them are missing
    END = 2  # tokens, q's included
    CMP_FIRST = 3  # compressed keys before the call
    CMP_NEW = 4  # compressed keys that it completes
    CMP_END = 5
    SOURCE = 6  # first token of the completed keys
    SOURCE_TOKENS = 7  # tokens of the completed keys
    INVALID = 8  # 1 where there are queries, and slots for them are missing
    START = 9  # 0
    WINDOW = 10  # first token in the first query's window
    WINDOW_TOKENS = 11  # from there to the end
    IN_WINDOW = 12  # first query, counted from WINDOW


@dataclass(frozen=True)
class Blocks:
    """Static options: tokens of a compressed key, between the starts of two, and of the window; adds: the queries
    are not counted by the caches' lengths."""

    span: int
    stride: int
    window: int
    adds: bool


class LocateSlots:
    """One launch of `locate`."""

    shapes = ("sequences *", "starts *", "sequences width *", "sequences cmp_width *", "fields sequences")

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    @cute.jit
    def __call__(self, *arguments):
        """cache_seqlens, cu_seqlens, tables [B, n], slots [fields, B]; T, both caches' pages and page sizes; stream."""
        tensors, (*sizes, stream) = arguments[:5], arguments[5:]
        self.kernel(tensors, tuple(sizes)).launch(
            grid=[tensors[4].shape[1], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, sizes: tuple):
        mSeqlens, mCu, mTable, mCmp_table, mSlots = tensors
        T, pages, page, cmp_pages, cmp_page = sizes
        s, tidx = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        smem = cutlass.utils.SmemAllocator()
        sBad = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        most = T
        if const_expr(mCu is not None):
            T = mCu[s + 1] - mCu[s]
        capacity = page if const_expr(mTable is None) else page * mTable.shape[1]
        end = mSeqlens[s]
        # Lengths out of range stay out of range, and cannot overflow.
        end = cutlass.min(cutlass.max(end, -1), capacity + 1)
        if const_expr(self.blocks.adds):
            end = capacity + 1 if end < 0 else end + T
        count = self.compressed(end)
        inside = end >= T and end <= capacity and T <= most
        tables = [
            (table, s, cutlass.min(cute.ceil_div(tokens, size), table.shape[1]), number)
            for table, tokens, size, number in ((mTable, end, page, pages), (mCmp_table, count, cmp_page, cmp_pages))
            if table is not None
        ]
        exist = pages_exist(inside, tables, sBad, THREADS)
        if tidx == 0:
            if const_expr(mCmp_table is not None):
                exist = exist and count <= cmp_page * mCmp_table.shape[1]
            there = Int32(exist and T > 0)
            before = self.compressed(end - T)
            completed = count - before
            mSlots[CacheSlots.FIRST, s] = (end - T) * there
            mSlots[CacheSlots.NEW, s] = T * there
            mSlots[CacheSlots.END, s] = end * there
            mSlots[CacheSlots.CMP_FIRST, s] = before * there
            mSlots[CacheSlots.CMP_NEW, s] = completed * there
            mSlots[CacheSlots.CMP_END, s] = count * there
            mSlots[CacheSlots.SOURCE, s] = before * self.blocks.stride * there
            source = (completed - 1) * self.blocks.stride + self.blocks.span
            mSlots[CacheSlots.SOURCE_TOKENS, s] = source * there * Int32(completed > 0)
            mSlots[CacheSlots.INVALID, s] = Int32(T > 0) * (1 - there)
            mSlots[CacheSlots.START, s] = Int32(0)
            window = cutlass.max(end - T - self.blocks.window + 1, 0)
            mSlots[CacheSlots.WINDOW, s] = window * there
            mSlots[CacheSlots.WINDOW_TOKENS, s] = (end - window) * there
            mSlots[CacheSlots.IN_WINDOW, s] = (end - T - window) * there

    def compressed(self, tokens: Int32) -> Int32:
        return compressed_length(tokens, self.blocks.span, self.blocks.stride)


@cute.jit
def pages_exist(
    inside: Boolean, tables: cutlass.Constexpr[list], sBad: cute.Tensor, threads: cutlass.Constexpr[int]
) -> Boolean:
    """True if `inside` and every page that a sequence uses is one of the cache's; called by all threads.

    tables: (int32 [B, n], a row of it, pages used, pages of the cache) each.
    """
    tidx, _, _ = cute.arch.thread_idx()
    if tidx == 0:
        sBad[0] = Int32(0)
    cute.arch.sync_threads()
    if inside:
        bad = Boolean(False)
        for n in cutlass.range_constexpr(len(tables)):
            table, s, used, pages = tables[n]
            for i in cutlass.range(tidx, used, threads, unroll=4):
                bad = bad | (table[s, i] < 0) | (table[s, i] >= pages)
        if bad:
            sBad[0] = Int32(1)
    cute.arch.sync_threads()
    return inside & (sBad[0] == 0)


def locate(
    cache_seqlens: Tensor,
    *,
    T: int,
    cu_seqlens: Tensor | None,
    cache: Tensor,
    table: Tensor | None,
    cmp_cache: Tensor | None,
    cmp_table: Tensor | None,
    span: int,
    stride: int,
    window: int,
    adds: bool,
) -> Tensor:
    """The numbers of `CacheSlots` for each sequence of a call, int32 [fields, B].

    Args:
        cache_seqlens: int32 [B].
        T: queries of a sequence; packed: at most, a sequence of more is invalid.
        cu_seqlens: int32 [B + 1] of packed queries.
        cache: [rows, S, ...] or [pages, page, ...].
        table: int32 [B, n], pages of each sequence, or [B, 1], its row; None: row b.
        cmp_cache, cmp_table: those of compressed keys.
        span, stride, window: tokens of a compressed key, between two, and of the window.
        adds: the queries are not counted by cache_seqlens.
    """
    B = len(cache_seqlens)
    whole = torch.empty(len(CacheSlots), -(-B // ALIGNED) * ALIGNED, dtype=torch.int32, device=cache.device)
    slots = whole.narrow(1, 0, B)
    cmp_sizes = (0, 1) if cmp_cache is None else cmp_cache.shape[:2]
    tensors = (cache_seqlens, cu_seqlens, table, None if cmp_cache is None else cmp_table, slots)
    launch(
        "locate_slots", LocateSlots, (Blocks(span, stride, window, adds),), *tensors, T, *cache.shape[:2], *cmp_sizes
    )
    return slots
