"""Counts of CSR rows -> their starts, and items: pieces of rows, none too long, that kernels take as their work.

By a single CTA that goes through the rows as `csr.RowStarts` does, and writes the items on the way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nsa_layer.kernels.csr import PER_THREAD, THREADS, WARPS, sum_before

ITEM = 4  # numbers of an item


class RowPlan:
    """Row counts -> starts, items and the number of items before each row.

    Every row has an item, also an empty one: whoever takes it writes the row's zeros.

    Args:
        cap: entries of an item at most. A row's items differ in length by its last one only.
    """

    shapes = "rows", "ends", "ends", f"items {ITEM} @16"

    def __init__(self, cap: int) -> None:
        self.cap = cap

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,  # [rows]
        starts: cute.Tensor,  # [rows + 1]
        row_items: cute.Tensor,  # [rows + 1]
        items: cute.Tensor,  # [at least pairs // cap + rows, ITEM]: row, begin, end, number of its partial or -1
        stream,
    ):
        tensors = (counts, starts, row_items, items)
        self.kernel(tensors).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple):
        counts, starts, row_items, items = tensors
        tidx = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        sums = [smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=4) for _ in range(3)]
        rows = counts.shape[0]
        own = cute.make_rmem_tensor(PER_THREAD, Int32)
        pairs_done, items_done, partials_done = Int32(0), Int32(0), Int32(0)
        for step in cutlass.range(cute.ceil_div(rows, THREADS * PER_THREAD)):
            first = (step * THREADS + tidx) * PER_THREAD
            pairs_here, items_here, partials_here = Int32(0), Int32(0), Int32(0)
            for i in cutlass.range_constexpr(PER_THREAD):
                own[i] = Int32(0)
                if first + i < rows:
                    own[i] = counts[first + i]
                    pieces = self.pieces_of(own[i])
                    pairs_here += own[i]
                    items_here += pieces
                    partials_here += cutlass.select_(pieces > 1, pieces, Int32(0))
            pairs_before, all_pairs = sum_before(pairs_here, sums[0], warp, lane)
            items_before, all_items = sum_before(items_here, sums[1], warp, lane)
            partials_before, all_partials = sum_before(partials_here, sums[2], warp, lane)
            start, item, partial = pairs_done + pairs_before, items_done + items_before, partials_done + partials_before
            for i in cutlass.range_constexpr(PER_THREAD):
                row = first + i
                if row < rows:
                    starts[row] = start
                    row_items[row] = item
                    pieces = self.pieces_of(own[i])
                    length, end = cute.ceil_div(own[i], pieces), start + own[i]
                    for piece in cutlass.range(pieces):
                        numbers = cute.make_rmem_tensor(ITEM, Int32)
                        numbers[0], numbers[1] = row, start + piece * length
                        numbers[2] = cutlass.min(numbers[1] + length, end)
                        numbers[3] = cutlass.select_(pieces > 1, partial + piece, Int32(-1))
                        cute.autovec_copy(numbers, items[item + piece, None])
                    start, item = end, item + pieces
                    partial += cutlass.select_(pieces > 1, pieces, Int32(0))
            pairs_done += all_pairs
            items_done += all_items
            partials_done += all_partials
        if tidx == 0:
            starts[rows] = pairs_done
            row_items[rows] = items_done

    def pieces_of(self, count: Int32) -> Int32:
        """Items of a row."""
        return cutlass.max((count + (self.cap - 1)) // self.cap, 1)
