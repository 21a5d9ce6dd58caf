"""The packed sequence of a query tile, and its candidate and forced blocks."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from nsa_layer.kernels.select_by_tile.spec import TopKSpec


@cute.jit
def tile_to_batch(cu_seqlens: cute.Tensor, size: Int32, group: cutlass.Constexpr[int], number: Int32):
    """Find a group of tiles in packed input: groups of `group` tiles of `size` tokens; a sequence's last may be short.

    Called by all threads of a warp. Returns the sequence that group `number` belongs to, or -1 if there is no such
    group, the group's index in the sequence, and the number of tiles of earlier sequences.
    """
    lane = cute.arch.lane_idx()
    S = cu_seqlens.shape[0] - 1
    sequence, groups_before, tiles_before = Int32(-1), Int32(0), Int32(0)
    chunk = Int32(0)
    while (sequence < 0) & (chunk < S):
        tiles = Int32(0)
        if chunk + lane < S:
            tiles = cute.ceil_div(cu_seqlens[chunk + lane + 1] - cu_seqlens[chunk + lane], size)
        groups = cute.ceil_div(tiles, group)
        tiles_to, groups_to = tiles, groups
        for step in cutlass.range_constexpr(5):
            other_tiles = cute.arch.shuffle_sync_up(tiles_to, 1 << step)
            other_groups = cute.arch.shuffle_sync_up(groups_to, 1 << step)
            if lane >= (1 << step):
                tiles_to += other_tiles
                groups_to += other_groups
        after = cute.arch.vote_ballot_sync(groups_before + groups_to > number)
        if after != 0:
            first = cute.arch.popc((after & -after) - 1)
            sequence = chunk + first
            tiles_before += cute.arch.shuffle_sync(tiles_to - tiles, first)
            groups_before += cute.arch.shuffle_sync(groups_to - groups, first)
        else:
            tiles_before += cute.arch.shuffle_sync(tiles_to, 31)
            groups_before += cute.arch.shuffle_sync(groups_to, 31)
        chunk += 32
    return sequence, number - groups_before, tiles_before


def blocks_end(t0: Int32, T: Int32, block_size: Int32, causal: bool) -> Int32:
    """One past the last complete block, if causal at the tile's first token t0."""
    return (t0 + 1) // block_size if causal else T // block_size


def local_range(t0: Int32, sizes: tuple[Int32, ...], spec: TopKSpec) -> tuple[Int32, Int32]:
    """(first, last) of a tile's forced local blocks; if causal and no block is forced, of its own incomplete blocks."""
    T, _, block_size, q_tile, block_counts = sizes
    first = cutlass.max(t0 // block_size - (spec.local - 1), 0)
    last = cutlass.min(t0 + q_tile - 1, T - 1) // block_size
    if spec.local:
        return first, last
    if spec.init or not spec.causal:
        return last + 1, last
    first = blocks_end(t0, T, block_size, True)
    return first, cutlass.min(last, cutlass.max(first, block_counts) - 1)


def eligible(block: Int32, end: Int32, local: tuple[Int32, Int32], spec: TopKSpec) -> Boolean:
    """True for a complete candidate block that is not forced."""
    if const_expr(not spec.init and not spec.local):
        return block < end
    first, last = local
    if const_expr(spec.causal):  # candidates lie before the tile
        return (block > spec.init - 1) & (block < cutlass.min(end, first))
    return (block > spec.init - 1) & (block < end) & ((block < first) | (block > last))
