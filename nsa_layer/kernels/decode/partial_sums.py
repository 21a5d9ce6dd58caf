"""Partial softmax sums of attention to some of a row's keys, and merging those of warps, CTAs and splits."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from nsa_layer.kernels.decode.spec import ROWS, WARPS
from nsa_layer.kernels.select_by_tile.online_softmax import exp2

COLUMNS = 4  # of a row in one thread
AT_ONCE = 4  # partial sums that a thread loads before it adds the first


@dataclass(frozen=True)
class Part:
    """A thread's columns of a row's unnormalised attention to some of its keys.

    Attributes:
        top, total: fp32 [1]: maximum score in units of log2, and sum of exponentials.
        sums: fp32 [COLUMNS]: values weighted by exponentials.
    """

    top: cute.Tensor
    total: cute.Tensor
    sums: cute.Tensor

    @classmethod
    def nothing(cls) -> Part:
        part = cls(*(cute.make_rmem_tensor((n,), Float32) for n in (1, 1, COLUMNS)))
        part.top.fill(-Float32.inf)
        part.total.fill(0.0)
        part.sums.fill(0.0)
        return part

    def add_all(self, parts: list[tuple[cute.Tensor, cute.Tensor]], there: list[Boolean] | None, lane: Int32) -> None:
        """Merge partial sums, (stats [2], row [D]) each, where `there`; all are loaded before the first is added."""
        heads = [fragment(stats, Int32(0), 2) for stats, _ in parts]
        theirs = [fragment(sums, lane) for _, sums in parts]
        tops = [head[0] for head in heads]
        if there is not None:
            tops = [Float32(cutlass.select_(x, top, -Float32.inf)) for x, top in zip(there, tops)]
        top = self.top[0]
        for own in tops:
            top = cute.arch.fmax(top, own)
        shift = finite(top)
        shrink = exp2(self.top[0] - shift)
        self.top[0] = top
        self.total[0] *= shrink
        for x in range(COLUMNS):
            self.sums[x] *= shrink
        for own, head, sums in zip(tops, heads, theirs):
            weight = exp2(own - shift)
            self.total[0] += cutlass.select_(own == -Float32.inf, Float32(0.0), head[1] * weight)
            for x in range(COLUMNS):
                # A part without keys has no sums: what lies there may be NaN.
                self.sums[x] += cutlass.select_(own == -Float32.inf, Float32(0.0), sums[x] * weight)

    @cute.jit
    def write(self, stats: cute.Tensor, sums: cute.Tensor, lane: Int32):
        cute.autovec_copy(self.sums, cute.local_tile(sums, (COLUMNS,), (lane,)))
        if lane == 0:
            stats[0] = self.top[0]
            stats[1] = self.total[0]


def finite(top: Float32) -> Float32:
    """The maximum to subtract from scores; 0 if no key was seen."""
    return Float32(cutlass.select_(top == -Float32.inf, Float32(0.0), top))


def fragment(row: cute.Tensor, lane: Int32, columns: int = COLUMNS) -> cute.Tensor:
    """This thread's columns of a row."""
    part = cute.make_rmem_tensor((columns,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (columns,), (lane,)), part)
    return part


@cute.jit
def write_nothing(stats: cute.Tensor, first: Int32, count: Int32):
    """Write the stats [R, 2] of `count` rows that see no key; their sums stay unwritten."""
    tidx, _, _ = cute.arch.thread_idx()
    if tidx < count:
        stats[first + tidx, 0], stats[first + tidx, 1] = -Float32.inf, Float32(0.0)


def shared_partial(smem: cutlass.utils.SmemAllocator, D: int, warps: int = WARPS) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared memory of `write_partial`.

    Rows are padded by four words against bank conflicts and, with more than `WARPS` warps, each 32 columns by eight.
    CTAs of `WARPS` warps omit the latter: they leave shared memory to CTAs of another launch.
    """
    stats = smem.allocate_tensor(Float32, cute.make_layout((2, ROWS, warps)), byte_alignment=16)
    behind = 8 if warps > WARPS else 0
    row = D // 32 * (32 + behind) + 4
    columns = cute.make_layout(((32, D // 32), ROWS, warps), stride=((1, 32 + behind), row, row * ROWS))
    return stats, smem.allocate_tensor(Float32, columns, byte_alignment=16)
