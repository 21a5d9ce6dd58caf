"""Top-k in registers: each tile's best blocks so far, held by the four neighbouring threads that share its scores.

An entry is one int64 that orders as (score, earlier block first): the score's monotone bits above the block's
complement. All entries of a list differ, so comparisons alone find the entry to evict and the thread that holds it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import or_

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of

QUAD = 4
COLUMNS = 16  # of a tile of scores, in one thread
WORST_SCORE = -(1 << 31)
LAST_BLOCK = (1 << 31) - 1
EMPTY = -(1 << 63)  # plus the slot's index: an empty slot
CLOSED = (1 << 63) - 1  # a slot beyond the list's capacity: nothing is better
NO_BLOCK = EMPTY + LAST_BLOCK  # entries above it are blocks


def column(i: Int32) -> Int32:
    """Offset of a thread's i-th column from its first: pairs, every 16."""
    return i // 2 * 16 + i % 2


def orderable_bits(score: Float32) -> Int32:
    """An int32 that orders as the score; NaN is best."""
    bits = bits_of(score + 0.0)  # -0.0 and 0.0 are equal
    return cutlass.select_(bits < 0, bits ^ 0x7FFFFFFF, bits)


def pack_entry(bits: Int32, block: Int32) -> Int64:
    return (Int64(bits) << 32) | Int64(LAST_BLOCK - block)


def unpack_block(entry: Int64) -> Int32:
    return LAST_BLOCK - Int32(entry & 0xFFFFFFFF)


def better(a: Int64, b: Int64) -> Int64:
    return cutlass.select_(a > b, a, b)


def worse(a: Int64, b: Int64) -> Int64:
    return cutlass.select_(a < b, a, b)


def reduce_quad(combine: Callable[[Int64, Int64], Int64], x: Int64) -> Int64:
    for step in (1, 2):
        x = combine(x, cute.arch.shuffle_sync_bfly(x, step))
    return x


@dataclass(frozen=True)
class RegisterTopK:
    """The list of one tile: this thread's `entries`, and the `least` entry of its quad."""

    entries: cute.Tensor
    least: cute.Tensor


def empty_topk(share: int, wanted: Int32) -> RegisterTopK:
    """A list of `wanted` entries, `share` in each thread."""
    best = RegisterTopK(cute.make_rmem_tensor((share,), Int64), cute.make_rmem_tensor((1,), Int64))
    for s in range(share):
        slot = cute.arch.lane_idx() % QUAD * share + s
        best.entries[s] = cutlass.select_(slot < wanted, Int64(EMPTY) + Int64(slot), Int64(CLOSED))
    best.least[0] = least_of(best.entries)
    return best


def reduce_tree(combine: Callable, values: list) -> Int32 | Int64:
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def halve(combine: Callable, values: list, upper: Boolean, mask: int) -> list:
    """Reduce-scatter over two lanes: the lower one gets even values, the upper one odd values, both a left over one."""
    rest = values[len(values) // 2 * 2 :]
    pairs = list(zip(values[::2], values[1::2]))
    kept = [cutlass.select_(upper, b, a) for a, b in pairs] + rest
    sent = [cutlass.select_(upper, a, b) for a, b in pairs] + rest
    return [combine(a, cute.arch.shuffle_sync_bfly(b, mask)) for a, b in zip(kept, sent)]


def least_of(entries: cute.Tensor) -> Int64:
    return reduce_quad(worse, reduce_tree(worse, [entries[s] for s in range(cute.size(entries))]))


def largest(values: list[Int32]) -> Int32:
    return reduce_tree(cutlass.max, values)


def index_of(values: list[Int32], value: Int32) -> Int32:
    """The first index of `value`, which the list has."""
    marks = [cutlass.select_(x == value, Int32(1 << i), Int32(0)) for i, x in enumerate(values)]
    mark = reduce_tree(or_, marks)
    return cute.arch.popc((mark & -mark) - 1)


@cute.jit
def insert(best: RegisterTopK, keys: cute.Tensor, first: Int32):
    """Insert a quad's scores into its list, best first; called by all threads of a warp.

    Args:
        keys: this thread's scores as `orderable_bits`, WORST_SCORE for blocks that are not eligible; overwritten.
        first: the block of the first score; the others follow at `column`.
    """
    entries, least = best.entries, best.least
    top = largest([keys[i] for i in range(cute.size(keys))])
    pending = cute.arch.vote_any_sync((top > WORST_SCORE) & (top >= Int32(least[0] >> 32)))
    while pending:
        at = index_of([keys[i] for i in range(cute.size(keys))], top)
        mine = pack_entry(top, first + column(at))
        entry = reduce_quad(better, mine)
        taken = (entry > least[0]) & (entry > NO_BLOCK)
        # The quad's best score is dropped even if it is not taken: the least entry only grows.
        gone = cutlass.select_(entry == mine, at, Int32(-1))
        for i in cutlass.range_constexpr(cute.size(keys)):
            keys[i] = cutlass.select_(gone == i, Int32(WORST_SCORE), keys[i])
        top = largest([keys[i] for i in range(cute.size(keys))])
        for s in cutlass.range_constexpr(cute.size(entries)):
            entries[s] = cutlass.select_(taken & (entries[s] == least[0]), entry, entries[s])
        least[0] = least_of(entries)
        pending = cute.arch.vote_any_sync((top > WORST_SCORE) & (top >= Int32(least[0] >> 32)))
