"""CSR rows from their counts, by a single CTA: the starts of their entries, and work tiles over them.

A CTA of 1,024 threads goes through the counts 8,192 at a time and carries the totals along: the lists of 65,536 tokens
are one step, the starts of a million sixteen. With several CTAs, each would wait for those before it, for as long.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn.cute.utils import warp_prefix_sum

THREADS = 1024
WARPS = THREADS // 32
PER_THREAD = 8
WORK_TILE = 4  # fields of a work tile


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
    cute.arch.sync_threads()  # before `sums` is written again
    return before + through - value, total


class RowStarts:
    """Row counts -> starts of the rows' entries, and work tiles before each row, of at most `longest` entries.

    Args:
        longest: entries of a work tile at most; 0: a row is one work tile.
        empty_tiles: an empty row has a work tile, whose CTA writes the row's zeros; else it has none.
    """

    shapes = "rows", "starts", "ends", f"work_tiles {WORK_TILE} @16", "sequences"

    def __init__(self, longest: int, empty_tiles: bool = False) -> None:
        self.longest, self.empty_tiles = longest, empty_tiles

    @cute.jit
    def __call__(
        self,
        counts: cute.Tensor,  # [rows]
        starts: cute.Tensor,  # [rows], with work_tiles [rows + 1]
        tiles_before: cute.Tensor,  # [rows + 1]
        work_tiles: cute.Tensor | None,  # [capacity, WORK_TILE]: row, begin, end, number of its partial sum or -1
        cu_rows: cute.Tensor | None,  # [B + 1], filled with multiples of `rows_a_sequence`
        rows_a_sequence: Int32,
        stream,
    ):
        tensors = (counts, starts, tiles_before, work_tiles, cu_rows)
        self.kernel(tensors, rows_a_sequence).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple, rows_a_sequence: Int32):
        counts, starts, tiles_before, work_tiles, cu_rows = tensors
        tidx = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        count = 2 if const_expr(work_tiles is None) else 3
        sums = [smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=4) for _ in range(count)]
        if const_expr(cu_rows is not None):
            for b in cutlass.range(tidx, cu_rows.shape[0], THREADS):
                cu_rows[b] = rows_a_sequence * b
        rows = counts.shape[0]
        own = cute.make_rmem_tensor(PER_THREAD, Int32)
        start, tile, partial = starts.element_type(0), Int32(0), Int32(0)  # before the step's rows
        for step in cutlass.range(cute.ceil_div(rows, THREADS * PER_THREAD)):
            first = (step * THREADS + tidx) * PER_THREAD
            listed, num_tiles, partials = Int32(0), Int32(0), Int32(0)  # of this thread's rows
            for i in cutlass.range_constexpr(PER_THREAD):
                own[i] = Int32(0)
                if first + i < rows:
                    own[i] = counts[first + i]
                    number = self.num_tiles(own[i])
                    num_tiles += number
                    partials += cutlass.select_(number > 1, number, Int32(0))
                listed += own[i]
            listed_before, all_listed = sum_before(listed, sums[0], warp, lane)
            earlier_tiles, all_tiles = sum_before(num_tiles, sums[1], warp, lane)
            row_start, row_tile, row_partial = start + listed_before, tile + earlier_tiles, Int32(0)
            if const_expr(work_tiles is not None):
                partials_before, all_partials = sum_before(partials, sums[2], warp, lane)
                row_partial = partial + partials_before
                partial += all_partials
            for i in cutlass.range_constexpr(PER_THREAD):
                if first + i < rows:
                    starts[first + i] = row_start
                    tiles_before[first + i] = row_tile
                    number, end = self.num_tiles(own[i]), row_start + own[i]
                    if const_expr(work_tiles is not None):
                        self.write_work_tiles(work_tiles, row_tile, (first + i, row_start, end), number, row_partial)
                        row_partial += cutlass.select_(number > 1, number, Int32(0))
                    row_start, row_tile = end, row_tile + number
            start += all_listed
            tile += all_tiles
        if tidx == 0:
            tiles_before[rows] = tile
            if const_expr(work_tiles is not None):
                starts[rows] = start

    @cute.jit
    def write_work_tiles(self, work_tiles: cute.Tensor, at: Int32, entries: tuple, num_tiles: Int32, partial: Int32):
        """Write a row's work tiles, equally long but for the last one; entries: row, begin and end."""
        row, begin, end = entries
        length = cute.ceil_div(end - begin, num_tiles)
        for n in cutlass.range(num_tiles):
            numbers = cute.make_rmem_tensor(WORK_TILE, Int32)
            numbers[0], numbers[1] = row, begin + n * length
            numbers[2] = cutlass.min(numbers[1] + length, end)
            numbers[3] = cutlass.select_(num_tiles > 1, partial + n, Int32(-1))
            cute.autovec_copy(numbers, work_tiles[at + n, None])

    def num_tiles(self, count: Int32) -> Int32:
        """Work tiles of a row."""
        num_tiles = num_work_tiles(count, self.longest)
        return cutlass.max(num_tiles, 1) if self.empty_tiles else num_tiles


def num_work_tiles(count: Int32, longest: int) -> Int32:
    """Work tiles of a row with `count` entries, none for an empty one."""
    return Int32(1) if longest == 0 else (count + (longest - 1)) // longest
