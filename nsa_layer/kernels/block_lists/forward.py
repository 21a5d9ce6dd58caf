"""Lists of selected blocks by query tile -> lists of the attention kernel's key tiles in them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at

WARPS = 4


class BlocksToTiles:
    """Key tiles of each query tile's blocks, and their count; a warp to a query tile.

    Tiles past the sequence's end, or with `causal` wholly after the queries, are not counted: since blocks ascend in
    a list, they are its last entries.
    """

    shapes = "B H M n", "starts", "starts", "B H M", "B H M width"

    def __init__(self, causal: bool, q_tile: int, kv_tile: int, parts: int) -> None:
        self.causal, self.q_tile, self.kv_tile, self.parts = causal, q_tile, kv_tile, parts

    @cute.jit
    def __call__(self, *arguments):
        """Lists [B, H, M, n], packed [1, H, all M, n]; query tiles and key tiles before each packed sequence; counts
        [B, H, M] and key tiles [B, H, M, width]; key tiles of a sequence unless packed; stream."""
        *tensors, rows, stream = arguments
        B, H, M, _ = tensors[0].shape
        grid = [cute.ceil_div(M, WARPS) * H * B, 1, 1]
        self.kernel(tuple(tensors), rows).launch(grid=grid, block=[32 * WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple, rows: Int32):
        lists, cu_tiles, cu_rows, counts, tiles = tensors
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, chunks, H = cute.arch.block_idx()[0], cute.ceil_div(lists.shape[2], WARPS), lists.shape[1]
        batch, head, tile = cta // chunks // H, cta // chunks % H, cta % chunks * WARPS + warp
        if tile < lists.shape[2]:
            m, end = tile, rows
            if const_expr(cu_tiles is not None):
                sequence = sequence_at(cu_tiles, tile)
                m, end = tile - cu_tiles[sequence], cu_rows[sequence + 1] - cu_rows[sequence]
            if const_expr(self.causal):
                end = cutlass.min(end, ((m + 1) * self.q_tile + (self.kv_tile - 1)) // self.kv_tile)
            count = Int32(0)
            for i in cutlass.range(lane, tiles.shape[3], 32):
                n = lists[batch, head, tile, i // self.parts] * self.parts + i % self.parts
                if n >= 0 and n < end:
                    count += 1
                tiles[batch, head, tile, i] = n
            count = cute.arch.warp_redux_sync(count, "add")
            if lane == 0:
                counts[batch, head, tile] = count
