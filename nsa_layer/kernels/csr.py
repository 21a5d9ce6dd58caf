"""Prefix sums by a single CTA: the starts of CSR rows and of their plan items.

A CTA of 1,024 threads goes through its input 8,192 numbers at a time and carries the totals along: the lists of 65,536
tokens are one step, those of a million sixteen. More CTAs would have to wait for each other, which takes as long.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flash_attn.cute.utils import warp_prefix_sum

THREADS = 1024
WARPS = THREADS // 32
PER_THREAD = 8


@cute.jit
def sum_before(value: Int32, sums: cute.Tensor, warp: Int32, lane: Int32):
    """(exclusive prefix sum of `value` over the CTA's threads, total); sums: [WARPS] in shared memory."""
    through = warp_prefix_sum(value, lane)
    if lane == 31:
        sums[warp] = through
    cute.arch.sync_threads()
    of_warps = warp_prefix_sum(sums[lane], lane)
    total = cute.arch.shuffle_sync(of_warps, WARPS - 1)
    before = cute.arch.shuffle_sync(of_warps, cutlass.max(warp - 1, 0))
    if warp == 0:
        before = Int32(0)
    cute.arch.sync_threads()  # the sums' next use
    return before + through - value, total


class RowStarts:
    """Row counts -> starts of their entries, and the number of plan items of one head before each row's.

    longest: entries of an item at most; 0: a row is one item, whatever it lists.
    """

    shapes = "H rows", "H rows", "items", "starts"

    def __init__(self, longest: int) -> None:
        self.longest = longest

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,  # [H, rows], contiguous like starts
        starts: cute.Tensor,
        items_before: cute.Tensor,  # [H * rows + 1]
        cu_rows: cute.Tensor | None,  # [B + 1], filled with multiples of `rows_a_sequence`; None: packed
        rows_a_sequence: Int32,
        stream,
    ):
        counts, starts = (cute.make_tensor(t.iterator, cute.make_layout((cute.size(t),))) for t in (counts, starts))
        tensors = (counts, starts, items_before, cu_rows)
        self.kernel(tensors, rows_a_sequence).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple, rows_a_sequence: Int32):
        counts, starts, items_before, cu_rows = tensors
        tidx = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        entry_sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=4)
        item_sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=4)
        if const_expr(cu_rows is not None):
            for b in cutlass.range(tidx, cu_rows.shape[0], THREADS):
                cu_rows[b] = rows_a_sequence * b
        rows = counts.shape[0]
        entries, items = Int64(0), Int32(0)
        own = cute.make_rmem_tensor(PER_THREAD, Int32)
        for step in cutlass.range(cute.ceil_div(rows, THREADS * PER_THREAD)):
            begin = (step * THREADS + tidx) * PER_THREAD
            entries_here, pieces = Int32(0), Int32(0)
            for i in cutlass.range_constexpr(PER_THREAD):
                own[i] = Int32(0)
                if begin + i < rows:
                    own[i] = counts[begin + i]
                    pieces += num_items(own[i], self.longest)
                entries_here += own[i]
            listed_before, all_listed = sum_before(entries_here, entry_sums, warp, lane)
            pieces_before, all_pieces = sum_before(pieces, item_sums, warp, lane)
            start, item = entries + listed_before, items + pieces_before
            for i in cutlass.range_constexpr(PER_THREAD):
                if begin + i < rows:
                    starts[begin + i] = start
                    items_before[begin + i] = item
                    start += own[i]
                    item += num_items(own[i], self.longest)
            entries += all_listed
            items += all_pieces
        if tidx == 0:
            items_before[rows] = items


def num_items(count: Int32, longest: int) -> Int32:
    """Plan items of a row with `count` entries."""
    return Int32(1) if longest == 0 else (count + (longest - 1)) // longest
