"""Candidates of each token: `spec.lanes` lanes of a warp share a token, each keeps the candidates of its own blocks.

A candidate is one int64 that orders as (score, earlier block first). A lane has a column of them in shared memory, and
its `depth` best scores in registers. Scores are not negative, so their bits order as they do; -1 stands for no
candidate, and NaN is best.
"""

from dataclasses import dataclass
from operator import add as add_up

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from nsa_layer.kernels.select_by_tile.register_topk import LAST_BLOCK, reduce_tree
from nsa_layer.kernels.select_by_token.spec import TokenTopKSpec

HIGHEST_SCORE = (1 << 31) - 1  # in bits, that of NaN
NOTHING = -(1 << 63)  # below every candidate
SOME, MANY = 5, 20  # lanes with new candidates from which on to raise the bound, by their best or all
COUNT_BITS = 10
TOGETHER = 4  # candidates of a lane that are loaded together


@dataclass(frozen=True)
class Candidates:
    """Candidates of one lane.

    Attributes:
        columns: int64 [capacity, lanes of the warp] in shared memory.
        selected: int64 [n] in shared memory, the token's best once they are ranked.
        best: int32, bits of the lane's best scores, descending.
        bound: int32 [2]: bits that a new score has to exceed, and the number of the lane's candidates.
        wanted: entries of the token's list that are left for candidates.
        lane: lane of the warp.
        first_lane, member: the first of the lanes that share the token, and the lane's index among them.
    """

    spec: cutlass.Constexpr[TokenTopKSpec]
    columns: cute.Tensor
    selected: cute.Tensor
    best: cute.Tensor
    bound: cute.Tensor
    wanted: Int32
    lane: Int32

    @property
    def member(self) -> Int32:
        return self.lane % self.spec.lanes

    @property
    def first_lane(self) -> Int32:
        return self.lane - self.member


def no_candidates(
    spec: TokenTopKSpec, columns: cute.Tensor, selected: cute.Tensor, wanted: Int32, lane: Int32
) -> Candidates:
    """Empty candidates; selected: int64 [n, tokens of the warp]."""
    best, bound = cute.make_rmem_tensor((power_of_two(spec.depth),), Int32), cute.make_rmem_tensor((2,), Int32)
    best.fill(-1)
    bound[0], bound[1] = -1, 0
    return Candidates(spec, columns, selected[None, lane // spec.lanes], best, bound, wanted, lane)


def candidate(bits: Int32, block: Int32) -> Int64:
    return (Int64(bits) << 32) | Int64(Uint32(LAST_BLOCK - block))


@cute.jit
def any_lane(condition: Boolean) -> Boolean:
    return cute.arch.vote_any_sync(condition)


@cute.jit
def add(mine: Candidates, bits: cute.Tensor, blocks: list[Int32]):
    """Add each lane's new blocks to its candidates; called by all lanes of a warp.

    Earlier blocks that reach the old bound fill the list, so a new block has to exceed it, as later blocks lose ties. A
    bound that is raised here counts the new blocks themselves, so these need only reach it.
    """
    size, bound = cute.size(bits), mine.bound
    before = bound[0]
    top = reduce_tree(cutlass.max, [bits[i] for i in range(size)])
    passes = cute.arch.vote_ballot_sync(top > before)
    if passes != 0:
        reach = cutlass.min(before, HIGHEST_SCORE - 1) + 1
        coming = cute.arch.popc(passes)
        if coming >= SOME:
            if coming >= MANY:
                keep_scores(mine, best_of([bits[i] for i in range(size)], cute.size(mine.best)))
            else:
                keep_scores(mine, [top])
            raise_bound(mine)
            reach = cutlass.max(reach, bound[0])
        count = bound[1]
        for i in cutlass.range_constexpr(size):
            if bits[i] >= reach:
                mine.columns[count, mine.lane] = candidate(bits[i], blocks[i])
                count += 1
        bound[1] = count
        if any_lane(count > mine.spec.slots):
            prune(mine)


def keep_scores(mine: Candidates, scores: list[Int32]) -> None:
    """Merge descending scores into the lane's best; scores that the caller leaves out only lower the bound."""
    best = [mine.best[i] for i in range(cute.size(mine.best))]
    if len(scores) == len(best):
        best = merge(best, scores)
    else:
        for coming in scores:
            for i, here in enumerate(best):
                best[i], coming = cutlass.max(here, coming), cutlass.min(here, coming)
    for i, score in enumerate(best):
        mine.best[i] = score


def raise_bound(mine: Candidates) -> None:
    """Raise the bound to the token's `most_wanted`-th best score, over the best of all lanes that share it."""
    best = [mine.best[i] for i in range(cute.size(mine.best))]
    least = rank_over_lanes(best, mine.spec.lanes, max(1, mine.spec.most_wanted))
    mine.bound[0] = cutlass.max(mine.bound[0], least)


@cute.jit
def prune(mine: Candidates):
    """Drop candidates that cannot be among the best, until another chunk fits."""
    drop_below_bound(mine)
    if any_lane(mine.bound[1] > mine.spec.slots):
        tighten(mine, mine.spec.capacity)
        drop_below_bound(mine)
        if any_lane(mine.bound[1] > mine.spec.slots):
            keep_best(mine)


@cute.jit
def drop_below_bound(mine: Candidates):
    count, kept = mine.bound[1], Int32(0)
    for begin in cutlass.range(0, count, TOGETHER, unroll=1):
        entries = [mine.columns[begin + i, mine.lane] for i in range(TOGETHER)]
        for i in cutlass.range_constexpr(TOGETHER):
            if (begin + i < count) & (Int32(entries[i] >> 32) >= mine.bound[0]):
                mine.columns[kept, mine.lane] = entries[i]
                kept += 1
    mine.bound[1] = kept


@cute.jit
def tighten(mine: Candidates, slots: cutlass.Constexpr[int]) -> Boolean:
    """Raise the bound to the least score of the token's best candidates, by search.

    slots: candidates that a lane has at most. Returns whether more than the best reach it, because scores tie.
    """
    lanes, wanted, bound = mine.spec.lanes, mine.wanted, mine.bound
    scores = [Int32(mine.columns[i, mine.lane] >> 32) for i in range(slots)]
    scores = [cutlass.select_(i < bound[1], score, Int32(-1)) for i, score in enumerate(scores)]
    most = reduce_tree(cutlass.max, scores)
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, 1 << step))
    low = cutlass.max(bound[0], 0)
    high = cutlass.min(most, HIGHEST_SCORE - 1) + 1
    reached = count_reached(scores, [low], lanes)
    enough = reached >= wanted
    pending = enough & (reached > wanted) & (high - low > 1)
    while any_lane(pending):
        # The result is near the bound, and each look at all lanes takes long: three bounds at once.
        limits = [low + cutlass.max((high - low) >> shift, 1) for shift in (1, 2, 4)]
        counts = count_reached(scores, limits, lanes)
        for i in cutlass.range_constexpr(len(limits)):
            count = counts >> COUNT_BITS * i & (1 << COUNT_BITS) - 1
            up = pending & (count >= wanted) & (limits[i] > low)
            high = cutlass.select_(pending & (count < wanted), limits[i], high)
            low = cutlass.select_(up, limits[i], low)
            reached = cutlass.select_(up, count, reached)
        pending = enough & (reached > wanted) & (high - low > 1)
    bound[0] = cutlass.select_(enough, low, bound[0])
    return reached > wanted


def count_reached(scores: list[Int32], limits: list[Int32], lanes: int) -> Int32:
    """The number of scores, of all lanes that share a token, that reach each limit; packed, `COUNT_BITS` each."""
    counts = [
        cutlass.select_(x >= limit, Int32(1 << COUNT_BITS * i), Int32(0))
        for i, limit in enumerate(limits)
        for x in scores
    ]
    return sum_of_lanes(reduce_tree(add_up, counts), lanes)


@cute.jit
def keep_best(mine: Candidates):
    """Drop all candidates that are not among the best, and raise the bound to the last that is."""
    lanes = mine.spec.lanes
    kept = rank(mine, mine.columns, mine.bound[1])
    count = Int32(0)
    for i in cutlass.range_constexpr(-(-mine.spec.n // lanes)):
        if i * lanes + mine.member < kept:
            mine.columns[i, mine.lane] = mine.selected[i * lanes + mine.member]
            count = Int32(i + 1)
    mine.bound[1] = count
    if (kept > 0) & (kept == mine.wanted):
        mine.bound[0] = cutlass.max(mine.bound[0], Int32(mine.selected[kept - 1] >> 32))
    cute.arch.sync_warp()


@cute.jit
def select(mine: Candidates) -> Int32:
    """Write the token's best candidates to `selected`, in any order, and return how many they are."""
    kept = Int32(0)
    if any_lane(tighten(mine, mine.spec.slots)):
        kept = rank(mine, mine.columns, mine.bound[1])
    else:
        kept = take_reached(mine)
    cute.arch.sync_warp()
    return kept


@cute.jit
def take_reached(mine: Candidates) -> Int32:
    """`select` if exactly the best reach the bound."""
    lanes, slots = mine.spec.lanes, mine.spec.slots
    entries = [mine.columns[i, mine.lane] for i in range(slots)]
    taken = [(i < mine.bound[1]) & (Int32(entries[i] >> 32) >= mine.bound[0]) for i in range(slots)]
    count = reduce_tree(add_up, [cutlass.select_(x, Int32(1), Int32(0)) for x in taken])
    at = count
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        before = cute.arch.shuffle_sync_up(at, 1 << step)
        at += cutlass.select_(mine.member >= (1 << step), before, Int32(0))
    kept = cute.arch.shuffle_sync(at, mine.first_lane + lanes - 1)
    at -= count
    for i in cutlass.range_constexpr(slots):
        if taken[i]:
            mine.selected[at] = entries[i]
            at += 1
    return kept


def sum_of_lanes(count: Int32, lanes: int) -> Int32:
    step = 1
    while step < lanes:
        count += cute.arch.shuffle_sync_bfly(count, step)
        step *= 2
    return count


@cute.jit
def rank(mine: Candidates, columns: cute.Tensor, count: Int32) -> Int32:
    """Write the best of each token's candidates to `selected`, best first, and return how many they are.

    columns: int64 [slots, lanes of the warp], of which the lane has `count`.
    """
    most = count
    for step in cutlass.range_constexpr(5):
        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, 1 << step))
    rounds = cute.ceil_div(most, TOGETHER)
    for i in cutlass.range(count, rounds * TOGETHER, unroll=1):
        columns[i, mine.lane] = Int64(NOTHING)
    cute.arch.sync_warp()
    for i in cutlass.range(rounds, unroll=1):
        entries = [columns[i * TOGETHER + u, mine.lane] for u in range(TOGETHER)]
        above = [Int32(0) for _ in range(TOGETHER)]
        for j in cutlass.range(most, unroll=1):
            for lane in cutlass.range(mine.spec.lanes, unroll=4):
                other = columns[j, mine.first_lane + lane]
                for u in cutlass.range_constexpr(TOGETHER):
                    above[u] += cutlass.select_(other > entries[u], Int32(1), Int32(0))
        for u in cutlass.range_constexpr(TOGETHER):
            if (entries[u] > NOTHING) & (above[u] < mine.wanted):
                mine.selected[above[u]] = entries[u]
    cute.arch.sync_warp()
    return cutlass.min(sum_of_lanes(count, mine.spec.lanes), mine.wanted)


def power_of_two(size: int) -> int:
    """The least power of two from `size` on."""
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
