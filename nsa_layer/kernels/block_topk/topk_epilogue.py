"""Epilogue of the top-k: a tile's block list, ascending, from two warps' lists and the forced blocks.

Nothing is sorted: an entry's position is its rank, the number of entries before it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from nsa_layer.kernels.block_topk.query_tiles import forced_range
from nsa_layer.kernels.block_topk.register_topk import LAST_BLOCK, NO_BLOCK, unpack_block


def room_of(tile: Int32, place: tuple[Int32, ...], block_counts: Int32, force: bool) -> Int32:
    """Entries of a tile's list that are left for candidates."""
    T, _, block_size, q_tile = place
    if not force:
        return block_counts
    first, last = forced_range(tile * q_tile, T, block_size, q_tile)
    return block_counts - forced_count(first, last)


def forced_count(first: Int32, last: Int32) -> Int32:
    return last - first + 1 + cutlass.select_(first > 0, Int32(1), Int32(0))


@cute.jit
def write_block_list(
    entries: cute.Tensor,
    mList: cute.Tensor,
    mCounts: cute.Tensor,
    tile: Int32,
    row: Int32,
    room: Int32,
    place: tuple[Int32, ...],
    force: cutlass.Constexpr[bool],
):
    """Merge both warps' lists of a tile and the forced blocks, by one warp."""
    T, _, block_size, q_tile = place
    lane = cute.arch.lane_idx()
    size = cute.size(entries)
    each = -(-size // 32)
    mine = [entries[cutlass.min(lane + 32 * u, size - 1)] for u in range(each)]
    ranks = [Int32(0) for _ in range(each)]
    for x in cutlass.range(size, unroll=8):
        for u in cutlass.range_constexpr(each):
            ranks[u] += cutlass.select_(entries[x] > mine[u], Int32(1), Int32(0))
    taken = [(mine[u] > NO_BLOCK) & (ranks[u] < room) & (lane + 32 * u < size) for u in range(each)]
    blocks = [cutlass.select_(taken[u], unpack_block(mine[u]), Int32(LAST_BLOCK)) for u in range(each)]
    chosen = Int32(0)
    cute.arch.sync_warp()
    for u in cutlass.range_constexpr(each):
        chosen += cute.arch.popc(cute.arch.vote_ballot_sync(taken[u]))
        if lane + 32 * u < size:
            entries[lane + 32 * u] = Int64(blocks[u])
    cute.arch.sync_warp()
    forced, first, last = Int32(0), Int32(0), Int32(-1)
    if const_expr(force):
        first, last = forced_range(tile * q_tile, T, block_size, q_tile)
        forced = forced_count(first, last)
    for u in cutlass.range_constexpr(each):
        if taken[u]:
            at = cutlass.max(cutlass.min(blocks[u] - first, last - first + 1), 0)
            at += cutlass.select_((first > 0) & (blocks[u] > 0), Int32(1), Int32(0))
            mList[at + count_below(entries, blocks[u])] = blocks[u]
    for f in cutlass.range(lane, forced, 32, unroll=1):
        block = cutlass.select_(first > 0, cutlass.select_(f > 0, first + f - 1, Int32(0)), f)
        mList[f + count_below(entries, block)] = block
    count = forced + chosen
    for x in cutlass.range(count + lane, mList.shape[0], 32, unroll=1):
        mList[x] = Int32(-1)
    if lane == 0:
        mCounts[row] = count


@cute.jit
def count_below(entries: cute.Tensor, block: Int32) -> Int32:
    found = Int32(0)
    for x in cutlass.range(cute.size(entries), unroll=8):
        found += cutlass.select_(entries[x] < Int64(block), Int32(1), Int32(0))
    return found
