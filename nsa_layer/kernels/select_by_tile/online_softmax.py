"""Online softmax denominators: the running maximum and sum of exponentials of the four rows that a thread has.

A row is spread over four neighbouring threads of each of two warps. Each thread reduces its own columns; threads and
warps are reduced once, at the end. Scores have their keys' scales; a row's positive factor makes them exponents of 2.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

PARTS = 2  # warps that share a row


def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, fastmath=True)


def row_shift(highest: Float32, factor: Float32) -> Float32:
    """The negated maximum, in units of log2; 0 for a row without scores."""
    return cutlass.select_(highest == -Float32.inf, Float32(0.0), -highest * factor)


@cute.jit
def update_row_sums(
    acc: cute.Tensor,
    scales: list[Float32],
    factors: list[Float32],
    columns: cutlass.Constexpr[tuple[int, ...]],
    first: Int32,
    ends: list[Int32] | None,
    highest: cute.Tensor,
    sums: cute.Tensor,
):
    """Add a tile's columns of this thread to each row's sum of exponentials, up to each row's end."""
    for r in cutlass.range_constexpr(cute.size(sums)):
        scores, top = [], highest[r]
        for i in cutlass.range_constexpr(len(columns)):
            score = acc[(i % 2, r % 2), r // 2, i // 2] * scales[i]
            if const_expr(ends is not None):
                score = cutlass.select_(first + columns[i] < ends[r], score, -Float32.inf)
            scores.append(score)
            top = cute.arch.fmax(top, score)
        shift = row_shift(top, factors[r])
        total = sums[r] * exp2(cute.math.fma(highest[r], factors[r], shift))
        for score in scores:
            total += exp2(cute.math.fma(score, factors[r], shift))
        highest[r], sums[r] = top, total


@cute.jit
def finish_row_sums(
    sSums: cute.Tensor,
    factors: list[Float32],
    highest: cute.Tensor,
    sums: cute.Tensor,
    counted: list[Boolean],
    first_row: Int32,
    part: Int32,
):
    """Reduce `highest` and `sums` over all columns, and invert `sums`; 0 for rows that are not `counted`."""
    for r in cutlass.range_constexpr(cute.size(sums)):
        top = cute.arch.warp_reduction_max(highest[r], threads_in_group=4)
        share = sums[r] * exp2(cute.math.fma(highest[r], factors[r], row_shift(top, factors[r])))
        total = cute.arch.warp_reduction_sum(share, threads_in_group=4)
        if cute.arch.lane_idx() % 4 == 0:
            row = first_row + 64 * (r // 2) + 8 * (r % 2)
            sSums[row, part, 0] = top
            sSums[row, part, 1] = total
    cute.arch.sync_threads()
    for r in cutlass.range_constexpr(cute.size(sums)):
        row = first_row + 64 * (r // 2) + 8 * (r % 2)
        top, total = cute.arch.fmax(sSums[row, 0, 0], sSums[row, 1, 0]), Float32(0.0)
        for n in cutlass.range_constexpr(PARTS):
            share = exp2(cute.math.fma(sSums[row, n, 0], factors[r], row_shift(top, factors[r])))
            total += sSums[row, n, 1] * share
        highest[r] = top
        sums[r] = cutlass.select_((total > 0.0) & counted[r], 1.0 / total, Float32(0.0))
