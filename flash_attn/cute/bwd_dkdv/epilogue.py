"""Epilogue of a work tile: round dk and dv to memory, or store a partial sum; and the kernel that adds partial sums.

Accumulators have wgmma's register layout: of every 8 columns a thread holds 2 in 2 rows. A partial sum is stored in
that layout, by 8 columns, then by thread, then by register, with 16-byte accesses. For 16-byte accesses to rounded
rows the threads of a quad exchange pairs of columns.
"""

from dataclasses import dataclass
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn.cute import utils
from flash_attn.cute.bwd_dkdv.spec import THREADS, DkdvSpec
from flash_attn.cute.bwd_dkdv.work_tiles import WorkTiles
from flash_attn.cute.bwd_dq.epilogue import exchanged
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD
from flash_attn.cute.lists.tiling import ROWS


def partial_sum(partials: cute.Tensor, index: Int32, which: int, thread: Int32, dims: tuple[int, int]) -> cute.Tensor:
    """A thread's values of partial sum `index` of dk (0) or dv (1): [4, columns / 8].

    partials: fp32, all partial sums in a row. dims: (D, Dv).
    """
    begin = partials.iterator + (Int64(index) * (ROWS * sum(dims)) + (which * ROWS * dims[0] + thread * 4))
    return cute.make_tensor(begin.align(16), cute.make_layout((4, dims[which] // 8), stride=(1, 4 * THREADS)))


@dataclass(frozen=True)
class KeyRows:
    """64 rows of dk or dv, written by one warpgroup."""

    out: cute.Tensor  # [S, D], of a sequence and head
    first: Int32  # the first of the rows
    end: Int32  # exclusive end of the rows that are written
    thread: Int32  # of the warpgroup
    add: cutlass.Constexpr[bool]  # the old values of `out` are added before rounding

    def row(self, r: int) -> Int32:
        """Index in `out` of the thread's r-th row."""
        return self.first + self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r

    def _vector(self, r: int, fours: int | Int32) -> cute.Tensor:
        """The thread's 8 of columns 32 * fours .. 32 * fours + 31 in its r-th row."""
        return cute.local_tile(self.out[self.row(r), None], (8,), (4 * fours + self.thread % 4,))

    @cute.jit
    def write(self, acc: cute.Tensor, scale: Float32, begin: int | Int32 = 0):
        """Write ``scale * acc``, rounded, to the columns from 32 * begin on."""
        lane, dtype = self.thread % 4, self.out.element_type
        count = cute.size(acc) // 16  # chunks of 32 columns
        acc.store(acc.load() * scale)
        if const_expr(self.add):
            values = cute.make_tensor(acc.iterator, cute.make_layout((2, ROWS_OF_THREAD, 4 * count)))
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                held = cute.make_rmem_tensor((8, count), dtype)
                held.fill(0.0)
                if self.row(r) < self.end:
                    for fours in cutlass.range_constexpr(count):
                        cute.autovec_copy(self._vector(r, begin + fours), held[None, fours])
                words = cute.recast_tensor(held, Int32)
                for fours in cutlass.range_constexpr(count):
                    for i, word in enumerate(exchanged([words[i, fours] for i in range(4)], lane)):
                        words[i, fours] = word
                values[None, r, None].store(
                    values[None, r, None].load() + cute.make_tensor(held.iterator, (2, 4 * count)).load().to(Float32)
                )
        pairs = self._pairs(utils.cvt_f16(acc, dtype))
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for fours in cutlass.range_constexpr(count):
                vector = cute.make_rmem_tensor((8,), dtype)
                four = cute.recast_tensor(vector, Int32)
                for i, word in enumerate(exchanged([pairs[r, 4 * fours + i] for i in range(4)], lane)):
                    four[i] = word
                if self.row(r) < self.end:
                    cute.autovec_copy(vector, self._vector(r, begin + fours))

    def _pairs(self, fragment: cute.Tensor) -> cute.Tensor:
        """32-bit registers, each two neighbouring columns: [2 rows, columns / 8]."""
        words = cute.recast_tensor(fragment, Int32)
        return cute.make_tensor(words.iterator, cute.make_layout((ROWS_OF_THREAD, cute.size(words) // 2)))


@cute.kernel
def add_partial_sums(
    outputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],  # dk, dv, partial sums
    softmax_scale: Float32,
    pairs: tuple[cute.Tensor, ...],  # pairs, lengths: arguments of `WorkTiles.create`
    lengths: tuple[Int32, Int32, Optional[cute.Tensor], Optional[cute.Tensor]],
    spec: cutlass.Constexpr[DkdvSpec],
):
    """Add the partial sums of each row with several work tiles, in a fixed order: that of the work tiles.

    A CTA has 32 columns of 64 keys: its first warpgroup adds dk, its second dv.
    """
    work_tiles = WorkTiles.create(pairs, lengths, spec)
    index, columns, _ = cute.arch.block_idx()
    row, part = index // spec.parts, index % spec.parts
    first, end = work_tiles.row_tiles[row], work_tiles.row_tiles[row + 1]
    if end - first > 1:
        tidx, _, _ = cute.arch.thread_idx()
        which = cute.arch.make_warp_uniform(tidx // THREADS)
        thread = tidx % THREADS
        batch, head, first_key = work_tiles.coordinates(row, part)
        seqlen = work_tiles.lengths(batch)
        acc = cute.make_rmem_tensor((4, 4), Float32)
        acc.fill(0.0)
        number = work_tiles.work_tiles[first, 3]
        for i, scale in enumerate((softmax_scale, Float32(1.0))):
            if (which == i) & (columns < spec.dims[i] // 32):
                for n in cutlass.range(end - first, unroll=8):
                    added = partial_sum(outputs[2], (number + n) * spec.parts + part, i, thread, spec.dims)
                    loaded = cute.make_rmem_tensor((4, 4), Float32)
                    cute.autovec_copy(cute.local_tile(added, (4, 4), (0, columns)), loaded)
                    acc.store(acc.load() + loaded.load())
                rows = seqlen.offset_batch_K(outputs[i], batch, dim=3)[None, None, head]
                KeyRows(rows, first_key, work_tiles.end(first_key, seqlen), thread, spec.add).write(acc, scale, columns)
