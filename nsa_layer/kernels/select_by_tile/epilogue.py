"""Epilogue of the top-k: a tile's block list, ascending, from two warps' lists and the forced blocks.

Nothing is sorted: an entry's position is its rank, the number of entries before it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from nsa_layer.kernels.select_by_tile.query_tiles import local_range
from nsa_layer.kernels.select_by_tile.register_topk import LAST_BLOCK, NO_BLOCK, unpack_block
from nsa_layer.kernels.select_by_tile.spec import TopKSpec


def num_wanted(tile: Int32, sizes: tuple[Int32, ...], spec: TopKSpec) -> Int32:
    """Entries of a tile's list that are left for candidates."""
    _, _, _, q_tile, block_counts = sizes
    if not (spec.init or spec.local):
        return block_counts
    return block_counts - forced_count(*local_range(tile * q_tile, sizes, spec), sizes, spec)


def forced_count(first: Int32, last: Int32, sizes: tuple[Int32, ...], spec: TopKSpec) -> Int32:
    """Number of forced blocks of a tile, which may exceed its list; first, last: `local_range`."""
    count = last - first + 1 + first_blocks(first, spec)
    if not spec.causal and spec.init > 1:  # the first blocks may lie behind the tile
        count += cutlass.max(cutlass.min(cute.ceil_div(sizes[0], sizes[2]), spec.init) - last - 1, 0)
    return count


def first_blocks(first: Int32, spec: TopKSpec) -> Int32:
    """Number of the sequence's forced first blocks before block `first`."""
    if spec.init > 1:
        return cutlass.min(first, spec.init)
    return cutlass.select_(first > 0, Int32(spec.init), Int32(0))


def forced_block_of_tile(i: Int32, first: Int32, last: Int32, sizes: tuple[Int32, ...], spec: TopKSpec) -> Int32:
    """The i-th forced block of a tile's list; the earliest are omitted if the list does not hold them."""
    if spec.crowded:
        i += cutlass.max(last - first + 1 + first_blocks(first, spec) - sizes[-1], 0)
    if spec.init == 0:
        return first + i
    if spec.init == 1:
        return cutlass.select_(first > 0, cutlass.select_(i > 0, first + i - 1, Int32(0)), i)
    before = first_blocks(first, spec)
    return cutlass.select_(i < before, i, first + i - before)


@cute.jit
def write_block_list(
    entries: cute.Tensor,
    mList: cute.Tensor,
    mCounts: cute.Tensor,
    tile: Int32,
    row: Int32,
    wanted: Int32,
    sizes: tuple[Int32, ...],
    spec: cutlass.Constexpr[TopKSpec],
):
    """Merge both warps' lists of a tile and the forced blocks, and write the list and its length; by one warp."""
    _, _, _, q_tile, block_counts = sizes
    lane = cute.arch.lane_idx()
    size = cute.size(entries)
    each = -(-size // 32)
    mine = [entries[cutlass.min(lane + 32 * u, size - 1)] for u in range(each)]
    ranks = [Int32(0) for _ in range(each)]
    for x in cutlass.range(size, unroll=8):
        for u in cutlass.range_constexpr(each):
            ranks[u] += cutlass.select_(entries[x] > mine[u], Int32(1), Int32(0))
    taken = [(mine[u] > NO_BLOCK) & (ranks[u] < wanted) & (lane + 32 * u < size) for u in range(each)]
    blocks = [cutlass.select_(taken[u], unpack_block(mine[u]), Int32(LAST_BLOCK)) for u in range(each)]
    selected = Int32(0)
    cute.arch.sync_warp()
    for u in cutlass.range_constexpr(each):
        selected += cute.arch.popc(cute.arch.vote_ballot_sync(taken[u]))
        if lane + 32 * u < size:
            entries[lane + 32 * u] = Int64(blocks[u])
    cute.arch.sync_warp()
    forced, first, last = Int32(0), Int32(0), Int32(-1)
    if const_expr(spec.init or spec.local or spec.causal):
        first, last = local_range(tile * q_tile, sizes, spec)
        forced = forced_count(first, last, sizes, spec)
    if const_expr(spec.crowded):
        forced = cutlass.min(forced, block_counts)
    for u in cutlass.range_constexpr(each):
        if taken[u]:
            at = cutlass.max(cutlass.min(blocks[u] - first, last - first + 1), 0)
            if const_expr(spec.init == 1):
                at += cutlass.select_((first > 0) & (blocks[u] > 0), Int32(1), Int32(0))
            elif const_expr(spec.init > 1):
                at = cutlass.select_(blocks[u] > last, forced, Int32(spec.init))
            mList[at + count_below(entries, blocks[u])] = blocks[u]
    for f in cutlass.range(lane, forced, 32, unroll=1):
        block = forced_block_of_tile(f, first, last, sizes, spec)
        mList[f + count_below(entries, block)] = block
    count = forced + selected
    for x in cutlass.range(count + lane, mList.shape[0], 32, unroll=1):
        mList[x] = Int32(-1)
    if lane == 0:
        mCounts[row] = count


@cute.jit
def count_below(entries: cute.Tensor, block: Int32) -> Int32:
    count = Int32(0)
    for x in cutlass.range(cute.size(entries), unroll=8):
        count += cutlass.select_(entries[x] < Int64(block), Int32(1), Int32(0))
    return count
