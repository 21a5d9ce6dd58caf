"""The largest index score of each listed block, forced ones too.

A warp has up to 32 tokens of a tile of 128 rows, goes through the tile's union of lists, and multiplies by mma.sync
the blocks that any of its tokens lists. Operands go from memory to registers: a lane holds a quarter of a row, elements
side by side, which permutes a product's terms alike in both operands. Loads of several products, and of the next entry
of the union, are in flight before the first product.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.union_lists.sizes import tokens_of_tile, words_of_entry
from nsa_layer.support import UNION_BLOCK, UNION_ROWS

WARP, WARPS = 32, 4  # threads, and warps of a CTA
SIDE = 8  # keys of a product, and half of its tokens
MOST_AHEAD = 256  # dimensions of keys that are loaded before the first is multiplied


class ListedScores:
    """Unions of lists -> scores of their blocks.

    Args:
        n: blocks of a list.
        G: query heads that share a list.
    """

    def __init__(self, D: int, n: int, G: int, block_size: int) -> None:
        self.D, self.G, self.block_size = D, G, block_size
        tokens, words = tokens_of_tile(G), words_of_entry(G, block_size)
        self.halves = 4 if tokens > 2 * SIDE else 2  # a warp's tokens, 8 at a time
        self.warps = -(-tokens // (self.halves * SIDE))  # of a tile
        self.shares = max(1, UNION_BLOCK // block_size)  # blocks of an entry
        self.words_of_block = words // self.shares
        unions = "B H M", "B H M R", f"B H M R {words}"
        starts = "starts", "starts", "sequences", "starts"
        self.shapes = "B T H D", "B S Hk D", *unions, *starts, f"B T H {n}"

    @cute.jit
    def __call__(self, *arguments):
        """q_index, k_index; counts, blocks and bits of unions; starts of packed queries and keys, positions of first
        queries, starts of tiles; scores, filled with -inf; index_scale; stream. Packed tensors have a batch of one."""
        tensors, (scale, stream) = arguments[:-2], arguments[-2:]
        B, H, M = tensors[2].shape
        grid = [cute.ceil_div(B * H * M * self.warps, WARPS), 1, 1]
        self.kernel(tensors, scale).launch(grid=grid, block=[WARP * WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, tensors: tuple, scale: Float32):
        q, k, counts, blocks, bits, cu, cu_keys, q_offset, cu_tiles, scores = tensors
        B, H, M = counts.shape
        job = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        part, tile = job % self.warps, job // self.warps
        m, head, batch = tile % M, tile // M % H, tile // M // H
        if batch < B:
            tile_in_sequence, sequence, row, first_key, keys = m, batch, Int32(0), Int32(0), Int32(k.shape[1])
            if const_expr(cu is not None):
                sequence = sequence_at(cu_tiles, m)
                tile_in_sequence, row, first_key = m - cu_tiles[sequence], cu[sequence], cu_keys[sequence]
                keys = cu_keys[sequence + 1] - first_key
            position = tile_in_sequence * UNION_ROWS // self.G + part * (self.halves * SIDE)
            row += position
            if const_expr(q_offset is not None):
                position += q_offset[sequence]
            of_keys = cute.domain_offset((first_key, 0), k[batch, None, head % k.shape[2], None])
            of_head = q[batch, None, head, None], of_keys, scores[batch, None, head, None]
            union = counts[batch, head, m], blocks[batch, head, m, None], bits[batch, head, m, None, None]
            self.visit(of_head, union, row, position, keys, part, scale)

    @cute.jit
    def visit(self, of_head: tuple, union: tuple, row: Int32, position: Int32, keys: Int32, part: Int32, scale):
        """Score all entries of a union for a warp's tokens; row, position: of the first of these; part: index of the
        warp in the tile."""
        (q, k, of_blocks), (count, blocks, bits) = of_head, union
        halves, steps, each = self.halves, self.D // 16, self.D // 4
        products = UNION_BLOCK // self.shares // SIDE  # of an entry's block
        ahead = min(products, max(1, MOST_AHEAD // self.D))
        g, x = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(q.element_type, Float32, (16, 8, 16)))
        a = cute.make_rmem_tensor(((2, 2, 2), halves // 2, steps), q.element_type)
        b = cute.make_rmem_tensor(((2, 2), 1, steps), q.element_type)
        acc = cute.make_rmem_tensor(((2, 2), halves // 2, 1), Float32)
        loaded = cute.make_rmem_tensor((each, ahead), q.element_type)
        for half in cutlass.range_constexpr(halves):
            at = cutlass.min(row + half * SIDE + g, q.shape[0] - 1)
            cute.autovec_copy(cute.local_tile(q[at, None], (each,), (x,)), loaded[None, 0])
            for i in cutlass.range_constexpr(each):
                a[(i % 2, half % 2, i // 2 % 2), half // 2, i // 4] = loaded[i, 0]
        listed, current = (cute.make_rmem_tensor((halves,), Int32) for _ in range(2))
        tops, scores = (cute.make_rmem_tensor((halves,), Float32) for _ in range(2))
        listed.fill(0)
        current.fill(-1)
        coming, block_of_coming = cute.make_rmem_tensor((self.shares,), Int32), blocks[0]
        for share in cutlass.range_constexpr(self.shares):
            coming[share] = bits[0, share * self.words_of_block + part]
        for entry in cutlass.range(count, unroll=1):
            first, words = block_of_coming * UNION_BLOCK, [coming[share] for share in range(self.shares)]
            following = cutlass.min(entry + 1, count - 1)
            block_of_coming = blocks[following]
            for share in cutlass.range_constexpr(self.shares):
                coming[share] = bits[following, share * self.words_of_block + part]
            for share in cutlass.range_constexpr(self.shares):
                word = words[share]
                if word != 0:
                    scores.fill(-Float32.inf)
                    for i in cutlass.range_constexpr(products):
                        if const_expr(i % ahead == 0):
                            for n in cutlass.range_constexpr(ahead):
                                at = first + (share * products + i + n) * SIDE + g
                                key = k[cutlass.min(at, keys - 1), None]
                                cute.autovec_copy(cute.local_tile(key, (each,), (x,)), loaded[None, n])
                        for e in cutlass.range_constexpr(each):
                            b[(e % 2, e // 2 % 2), 0, e // 4] = loaded[e, i % ahead]
                        acc.fill(0.0)
                        for step in cutlass.range_constexpr(steps):
                            cute.gemm(mma, acc, a[None, None, step], b[None, None, step], acc)
                        column = (share * products + i) * SIDE
                        for half in cutlass.range_constexpr(halves):
                            # The last column that the token sees, among the lane's of the entry.
                            own = position + half * SIDE + g - first - 2 * x
                            for c in cutlass.range_constexpr(2):
                                score = acc[(c, half % 2), half // 2, 0]
                                score = cutlass.select_(column + c <= own, score, -Float32.inf)
                                scores[half] = cutlass.max(scores[half], score)
                    block = (
                        (first // UNION_BLOCK * self.shares + share) * UNION_BLOCK // max(UNION_BLOCK, self.block_size)
                    )
                    for half in cutlass.range_constexpr(halves):
                        score = cute.arch.warp_reduction_max(scores[half], threads_in_group=4)
                        if (word >> (half * SIDE + g)) & 1 == 1:
                            is_new = block != current[half]
                            if is_new:
                                listed[half] += 1
                                current[half] = block
                            if is_new | (score > tops[half]):
                                tops[half] = score
                                if x == 0:
                                    of_blocks[row + half * SIDE + g, listed[half] - 1] = score * scale
