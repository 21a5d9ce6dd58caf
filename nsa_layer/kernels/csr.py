"""CSR rows from their counts, by a single CTA: the starts of their entries, and work items over them.

A CTA of 1,024 threads goes through the counts 8,192 at a time and carries the totals along: the lists of 65,536 tokens
are one step, those of a million sixteen. More CTAs would have to wait for each other, which takes as long.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn.cute.utils import warp_prefix_sum

THREADS = 1024
WARPS = THREADS // 32
PER_THREAD = 8
ITEM = 4  # numbers of a written item


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
    """Row counts -> starts of the rows' entries, and work items before each row: pieces of at most `longest` entries.

    Args:
        longest: 0: a row is one item, whatever it lists.
        empty_items: an empty row has an item, too, whose CTA writes the row's zeros; without, it has none.
    """

    shapes = "rows", "starts", "ends", f"items {ITEM} @16", "sequences"

    def __init__(self, longest: int, empty_items: bool = False) -> None:
        self.longest, self.empty_items = longest, empty_items

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,  # [rows]
        starts: cute.Tensor,  # [rows], with items [rows + 1]
        items_before: cute.Tensor,  # [rows + 1]
        items: cute.Tensor | None,  # [capacity, ITEM]: row, begin, end, number of its partial sum or -1
        cu_rows: cute.Tensor | None,  # [B + 1], filled with multiples of `rows_a_sequence`
        rows_a_sequence: Int32,
        stream,
    ):
        tensors = (counts, starts, items_before, items, cu_rows)
        self.kernel(tensors, rows_a_sequence).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple, rows_a_sequence: Int32):
        counts, starts, items_before, items, cu_rows = tensors
        tidx = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        count = 2 if const_expr(items is None) else 3
        sums = [smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=4) for _ in range(count)]
        if const_expr(cu_rows is not None):
            for b in cutlass.range(tidx, cu_rows.shape[0], THREADS):
                cu_rows[b] = rows_a_sequence * b
        rows = counts.shape[0]
        own = cute.make_rmem_tensor(PER_THREAD, Int32)
        start, item, partial = starts.element_type(0), Int32(0), Int32(0)  # before the step's rows
        for step in cutlass.range(cute.ceil_div(rows, THREADS * PER_THREAD)):
            first = (step * THREADS + tidx) * PER_THREAD
            listed, pieces, partials = Int32(0), Int32(0), Int32(0)  # of this thread's rows
            for i in cutlass.range_constexpr(PER_THREAD):
                own[i] = Int32(0)
                if first + i < rows:
                    own[i] = counts[first + i]
                    number = self.pieces(own[i])
                    pieces += number
                    partials += cutlass.select_(number > 1, number, Int32(0))
                listed += own[i]
            listed_before, all_listed = sum_before(listed, sums[0], warp, lane)
            pieces_before, all_pieces = sum_before(pieces, sums[1], warp, lane)
            row_start, row_item, row_partial = start + listed_before, item + pieces_before, Int32(0)
            if const_expr(items is not None):
                partials_before, all_partials = sum_before(partials, sums[2], warp, lane)
                row_partial = partial + partials_before
                partial += all_partials
            for i in cutlass.range_constexpr(PER_THREAD):
                if first + i < rows:
                    starts[first + i] = row_start
                    items_before[first + i] = row_item
                    number, end = self.pieces(own[i]), row_start + own[i]
                    if const_expr(items is not None):
                        self.write_items(items, row_item, (first + i, row_start, end), number, row_partial)
                        row_partial += cutlass.select_(number > 1, number, Int32(0))
                    row_start, row_item = end, row_item + number
            start += all_listed
            item += all_pieces
        if tidx == 0:
            items_before[rows] = item
            if const_expr(items is not None):
                starts[rows] = start

    @cute.jit
    def write_items(self, items: cute.Tensor, at: Int32, entries: tuple, pieces: Int32, partial: Int32):
        """Write a row's items; entries: row, begin and end. They differ in length by the last one only."""
        row, begin, end = entries
        length = cute.ceil_div(end - begin, pieces)
        for piece in cutlass.range(pieces):
            numbers = cute.make_rmem_tensor(ITEM, Int32)
            numbers[0], numbers[1] = row, begin + piece * length
            numbers[2] = cutlass.min(numbers[1] + length, end)
            numbers[3] = cutlass.select_(pieces > 1, partial + piece, Int32(-1))
            cute.autovec_copy(numbers, items[at + piece, None])

    def pieces(self, count: Int32) -> Int32:
        """Items of a row."""
        pieces = num_items(count, self.longest)
        return cutlass.max(pieces, 1) if self.empty_items else pieces


def num_items(count: Int32, longest: int) -> Int32:
    """Items of a row with `count` entries, none for an empty one."""
    return Int32(1) if longest == 0 else (count + (longest - 1)) // longest
