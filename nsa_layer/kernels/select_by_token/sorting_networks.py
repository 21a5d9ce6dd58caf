"""Networks of comparisons that keep the best of many scores, in one thread and over neighbouring lanes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def power_of_two(size: int) -> int:
    """The least that is not less."""
    return 1 << (size - 1).bit_length()


def best_of(scores: list[Int32], size: int) -> list[Int32]:
    """The best `size` of scores, a power of two, descending; -1 where there are fewer."""
    if len(scores) <= size:
        return sorted_scores(scores + [Int32(-1)] * (size - len(scores)))
    half = (len(scores) // size + 1) // 2 * size
    return merge(best_of(scores[:half], size), best_of(scores[half:], size))


def merge(a: list[Int32], b: list[Int32]) -> list[Int32]:
    """The best half of two descending lists, descending."""
    return sorted_bitonic([cutlass.max(x, y) for x, y in zip(a, reversed(b))])


def rank_over_lanes(best: list[Int32], lanes: int, rank: int) -> Int32:
    """The rank-th largest of the descending lists of `lanes` neighbours, the largest of which has rank 1."""
    from_below, step = lanes * len(best) - rank + 1, 1
    while step < lanes:
        others = [cute.arch.shuffle_sync_bfly(x, step) for x in best][::-1]
        if len(best) < from_below:
            best = sorted_bitonic(best + others)
        else:  # none of the better half can have that rank
            best = sorted_bitonic([cutlass.min(x, y) for x, y in zip(best, others)])
        step *= 2
    return best[-from_below]


def sorted_scores(scores: list[Int32]) -> list[Int32]:
    if len(scores) == 1:
        return scores
    half = len(scores) // 2
    return sorted_bitonic(sorted_scores(scores[:half]) + sorted_scores(scores[half:])[::-1])


def sorted_bitonic(scores: list[Int32]) -> list[Int32]:
    if len(scores) == 1:
        return scores
    half = len(scores) // 2
    pairs = list(zip(scores[:half], scores[half:]))
    above, below = [cutlass.max(a, b) for a, b in pairs], [cutlass.min(a, b) for a, b in pairs]
    return sorted_bitonic(above) + sorted_bitonic(below)
