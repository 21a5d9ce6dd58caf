"""Best keys of blocks that are not forced, and the gradient of index keys: a CTA loops over the tokens of a block.

A warp multiplies the queries of 32 tokens and the block's keys by mma.sync; a token's best key is the first with the
largest score. The sum over tokens is a product as well, in TF32: of a matrix [keys, tokens], whose only entry in each
column is the gradient of the token's score, and queries. Queries are exact in TF32; gradients are rounded to 11 bits.
Warps add up at the end.

Operands go from memory to registers: a lane holds neighbouring elements of a row, which permutes a product's terms,
alike in both operands, and its columns.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.csr import WORK_TILE
from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of, float_of

WARP, LEAST_WARPS = 32, 4
SIDE = 8  # tokens of a quarter of a warp, and columns of a product
QUARTERS = WARP // SIDE  # of a warp's tokens
MOST_KEYS, MOST_DIMS = 64, 32  # of the tile of the gradient that a warp accumulates
VECTOR = 8  # elements in 16 bytes
CTAS, SHARED = 3, 228 * 1024  # of a multiprocessor


class IndexKeyGradient:
    """Lists and gradients of scores -> positions of best keys, and the gradient of k_index.

    Args:
        n: blocks of a list.
        init, local: forced blocks, which take no part.
    """

    def __init__(self, D: int, n: int, block_size: int, init: int, local: int) -> None:
        self.D, self.n, self.block_size, self.init, self.local = D, n, block_size, init, local
        self.keys, self.dims = min(block_size, MOST_KEYS), min(D, MOST_DIMS)
        self.slices = block_size // self.keys * (D // self.dims)  # tiles of the gradient, a warp each
        self.warps = max(LEAST_WARPS, self.slices)
        self.ctas = CTAS if self.D <= 32 else 1  # of a multiprocessor, at least
        self.vector = math.gcd(n, 4)  # entries of a list that are loaded at a time
        self.loads = -(-self.n // (self.vector * 4))  # of a lane
        of_lists, pairs = f"B T H {n} @{4 * self.vector}", ("pairs", f"work_tiles {WORK_TILE}", "ends")
        starts = "starts", "starts", "starts", "sequences"
        self.shapes = "B T H D", "B S Hk D", of_lists, of_lists, *pairs, *starts, "sums", of_lists, "B S Hk D"

    @cute.jit
    def __call__(self, *arguments):
        """q_index, k_index, lists, gradients of scores over d_sums[0] and index_scale; three tensors of `KeyPairs`;
        starts of packed queries, keys and blocks, positions of first queries; d_sums; positions of best keys, written
        where blocks are not forced; gradient of k_index; index_scale; stream. Packed tensors have a batch of one."""
        tensors, (scale, stream) = arguments[:-2], arguments[-2:]
        lists, ends, dk = tensors[2], tensors[6], tensors[13]
        blocks = (ends.shape[0] - 1) // (lists.shape[0] * lists.shape[2])
        grid = blocks * dk.shape[0] * dk.shape[2]
        shared = 1024 + 6 * self.D * self.block_size + 12 * WARP * self.warps  # bytes, rounded up
        self.kernel(tensors, blocks, scale).launch(
            grid=[grid, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream, min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=min(100, -(-100 * self.ctas * shared // SHARED)),
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors: tuple, blocks: Int32, scale: Float32):
        q, k, lists, dz, pair_tokens, work_tiles, ends, cu, cu_keys, cu_blocks, q_offset, d_sums, best, dk = tensors
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        number, kv_head, batch = cta % blocks, cta // blocks % dk.shape[2], cta // blocks // dk.shape[2]
        block, sequence, before, keys_before, keys = number, batch, Int32(0), Int32(0), Int32(dk.shape[1])
        if const_expr(cu is not None):
            sequence = sequence_at(cu_blocks, number)
            block, before, keys_before = number - cu_blocks[sequence], cu[sequence], cu_keys[sequence]
            keys = cu_keys[sequence + 1] - keys_before
        offset = Int32(0)
        if const_expr(q_offset is not None):
            offset = q_offset[sequence]
        of_block = (keys_before + block * self.block_size, keys - block * self.block_size)  # first key, and how many
        smem = cutlass.utils.SmemAllocator()
        threads, by_row = self.warps * WARP, cute.make_ordered_layout((self.block_size, self.D), order=(1, 0))
        sums = smem.allocate_tensor(Float32, by_row, byte_alignment=16)
        sK = smem.allocate_tensor(k.element_type, by_row, byte_alignment=16)
        found = tuple(
            smem.allocate_tensor(of, cute.make_layout(threads), byte_alignment=16) for of in (Int32, Int32, Float32)
        )
        acc = cute.make_rmem_tensor(((2, 2), self.keys // 16, self.dims // SIDE), Float32)
        acc.fill(0.0)
        if block >= self.init and of_block[1] > 0:
            self.load_keys(k[batch, None, kv_head, None], of_block, sK)
            heads = lists.shape[2] // dk.shape[2]  # of lists, that share the keys
            for member in cutlass.range(heads, unroll=1):
                head = kv_head * heads + member
                row = (batch * lists.shape[2] + head) * blocks + number
                begin, end = work_tiles[ends[row], 1], work_tiles[ends[row + 1] - 1, 2]
                of_head = tuple(x[batch, None, head, None] for x in (q, lists, dz, best))
                for first in cutlass.range(begin, end, threads, unroll=1):
                    own = first + tidx // WARP * WARP
                    tokens = cute.domain_offset(own, pair_tokens), end - own
                    if const_expr(self.slices == 1):
                        if own < end:
                            self.find(of_head, tokens, (block, before, offset), sK, found)
                            cute.arch.sync_warp()
                            self.add_up(of_head[0], found, acc)
                            cute.arch.sync_warp()
                    else:
                        self.find(of_head, tokens, (block, before, offset), sK, found)
                        cute.arch.sync_threads()
                        self.add_up(of_head[0], found, acc)
                        cute.arch.sync_threads()
        self.write(acc, sums, dk[batch, None, kv_head, None], of_block, d_sums[0] * scale)

    @cute.jit
    def load_keys(self, k: cute.Tensor, of_block: tuple, sK: cute.Tensor):
        first, count = of_block
        parts = self.D // VECTOR
        loaded = cute.make_rmem_tensor((VECTOR,), k.element_type)
        for i in cutlass.range(cute.arch.thread_idx()[0], self.block_size * parts, self.warps * WARP, unroll=2):
            row = k[first + cutlass.min(i // parts, count - 1), None]
            cute.autovec_copy(cute.local_tile(row, (VECTOR,), (i % parts,)), loaded)
            cute.autovec_copy(loaded, cute.local_tile(sK[i // parts, None], (VECTOR,), (i % parts,)))
        cute.arch.sync_threads()

    @cute.jit
    def find(self, of_head: tuple, tokens: tuple, where: tuple, sK: cute.Tensor, found: tuple):
        """Find rows of a warp's tokens, their best keys in the block, and gradients of the scores; 0 if it is forced.

        tokens: positions, and their number. where: the block, rows of q before the sequence, position of the first
        query.
        """
        (q, lists, dz, best), (positions, count), (block, before, offset) = of_head, tokens, where
        rows, keys, factors = (cute.domain_offset(cute.arch.thread_idx()[0] // WARP * WARP, x) for x in found)
        lane = cute.arch.lane_idx()
        g, x, each = lane // 4, lane % 4, self.D // 4
        factors[lane] = Float32(0.0)
        own, row = (cute.make_rmem_tensor((QUARTERS,), Int32) for _ in range(2))
        for i in cutlass.range_constexpr(QUARTERS):
            token = positions[cutlass.min(i * SIDE + g, count - 1)]
            own[i], row[i] = token + offset - block * self.block_size, before + token
        if x == 0:
            for i in cutlass.range_constexpr(QUARTERS):
                rows[i * SIDE + g] = row[i]
        cute.arch.sync_warp()
        loaded = cute.make_rmem_tensor((each, QUARTERS), q.element_type)
        entries = cute.make_rmem_tensor((self.vector, QUARTERS), Int32)
        gradients = cute.make_rmem_tensor((self.vector, QUARTERS), Float32)
        for i in cutlass.range_constexpr(QUARTERS):
            cute.autovec_copy(cute.local_tile(q[row[i], None], (each,), (x,)), loaded[None, i])
        entry, factor = cute.make_rmem_tensor((QUARTERS,), Int32), cute.make_rmem_tensor((QUARTERS,), Float32)
        entry.fill(-1)
        factor.fill(0.0)
        for load in cutlass.range_constexpr(self.loads):
            self.load_entries((lists, dz), row, load, entries, gradients)
            for i in cutlass.range_constexpr(QUARTERS):
                for e in cutlass.range_constexpr(self.vector):
                    is_here = entries[e, i] == block
                    entry[i] = cutlass.select_(is_here, (load * 4 + x) * self.vector + e, entry[i])
                    factor[i] = cutlass.select_(is_here, gradients[e, i], factor[i])
        of_best = self.best_keys(loaded, own, sK)
        for i in cutlass.range_constexpr(QUARTERS):
            is_free = own[i] >= self.local * self.block_size
            if (entry[i] >= 0) & (i * SIDE + g < count) & is_free:
                keys[i * SIDE + g] = of_best[i]
                factors[i * SIDE + g] = float_of(bits_of(factor[i]) + (1 << 12))  # TF32 ignores the last 13 bits
                best[row[i], entry[i]] = block * self.block_size + of_best[i]

    @cute.jit
    def load_entries(self, of_lists: tuple, row: cute.Tensor, load: int, entries: cute.Tensor, gradients: cute.Tensor):
        """A lane's part of the lists, and of the gradients."""
        part = load * 4 + cute.arch.lane_idx() % 4
        at = cutlass.min(part, self.n // self.vector - 1)
        for i in cutlass.range_constexpr(QUARTERS):
            for x, into in zip(of_lists, (entries, gradients)):
                cute.autovec_copy(cute.local_tile(x[row[i], None], (self.vector,), (at,)), into[None, i])
        if const_expr(self.n % (4 * self.vector) != 0):
            if part > at:
                entries.fill(-1)

    @cute.jit
    def best_keys(self, queries: cute.Tensor, own: cute.Tensor, sK: cute.Tensor) -> cute.Tensor:
        """The key of the block with the largest score, the first of several, for each of a quad's tokens.

        own: the tokens' positions, from the block's first key on.
        """
        steps, each, x = self.D // 16, self.D // 4, cute.arch.lane_idx() % 4
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(queries.element_type, Float32, (16, 8, 16)))
        a = cute.make_rmem_tensor(((2, 2, 2), QUARTERS // 2, steps), queries.element_type)
        b = cute.make_rmem_tensor(((2, 2), 1, steps), queries.element_type)
        scores = cute.make_rmem_tensor(((2, 2), QUARTERS // 2, 1), Float32)
        loaded = cute.make_rmem_tensor((each,), queries.element_type)
        tops, keys = cute.make_rmem_tensor((QUARTERS,), Float32), cute.make_rmem_tensor((QUARTERS,), Int32)
        tops.fill(-Float32.inf)
        keys.fill(0)
        for i in cutlass.range_constexpr(QUARTERS):
            for e in cutlass.range_constexpr(each):
                a[(e % 2, i % 2, e // 2 % 2), i // 2, e // 4] = queries[e, i]
        for column in cutlass.range_constexpr(0, self.block_size, SIDE):
            row = sK[column + cute.arch.lane_idx() // 4, None]
            cute.autovec_copy(cute.local_tile(row, (each,), (x,)), loaded)
            for e in cutlass.range_constexpr(each):
                b[(e % 2, e // 2 % 2), 0, e // 4] = loaded[e]
            scores.fill(0.0)
            for step in cutlass.range_constexpr(steps):
                cute.gemm(mma, scores, a[None, None, step], b[None, None, step], scores)
            for i in cutlass.range_constexpr(QUARTERS):
                for c in cutlass.range_constexpr(2):
                    score = scores[(c, i % 2), i // 2, 0]
                    better = score > tops[i]
                    if const_expr(self.local == 0):  # else a token sees all of a free block
                        better = better & (column + c <= own[i] - 2 * x)
                    tops[i] = cutlass.select_(better, score, tops[i])
                    keys[i] = cutlass.select_(better, Int32(column + c), keys[i])
        for i in cutlass.range_constexpr(QUARTERS):
            keys[i] = of_quad(tops[i], keys[i] + 2 * x)
        return keys

    @cute.jit
    def add_up(self, q: cute.Tensor, found: tuple, acc: cute.Tensor):
        """Accumulate gradients of scores times queries, over the tokens of all warps that share them."""
        rows, keys, factors = found
        number, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        g, x, each, steps = lane // 4, lane % 4, self.dims // SIDE, WARP // SIDE
        part = number % self.slices
        first_key = part % (self.block_size // self.keys) * self.keys + g
        of_dims = part // (self.block_size // self.keys) * SIDE + g
        mma = cute.make_tiled_mma(warp.MmaTF32Op((16, 8, 8)))
        loaded = cute.make_rmem_tensor((each, 2, steps), q.element_type)
        a = cute.make_rmem_tensor(((2, 2), self.keys // 16), cutlass.TFloat32)
        b = cute.make_rmem_tensor((2, each), cutlass.TFloat32)
        of_a, of_b = cute.recast_tensor(a, Float32), cute.recast_tensor(b, Float32)
        for member in cutlass.range(self.slices, unroll=1):
            first = (number // self.slices * self.slices + member) * WARP + x
            for step in cutlass.range_constexpr(steps):
                for i in cutlass.range_constexpr(2):
                    row = q[rows[first + step * SIDE + i * 4], None]
                    cute.autovec_copy(cute.local_tile(row, (each,), (of_dims,)), loaded[None, i, step])
            for step in cutlass.range_constexpr(steps):
                for i in cutlass.range_constexpr(2):
                    at = first + step * SIDE + i * 4
                    key, factor = keys[at] - first_key, factors[at]
                    for m in cutlass.range_constexpr(self.keys // 16):
                        for r in cutlass.range_constexpr(2):
                            of_a[(r, i), m] = cutlass.select_(key == m * 16 + r * SIDE, factor, Float32(0.0))
                    for d in cutlass.range_constexpr(each):
                        of_b[i, d] = loaded[d, i, step].to(Float32)
                cute.gemm(mma, acc, a, b, acc)

    @cute.jit
    def write(self, acc: cute.Tensor, sums: cute.Tensor, dk: cute.Tensor, of_block: tuple, factor: Float32):
        """Add up the warps' sums in order, and write them times a factor."""
        number, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        g, x, each, (first, count) = lane // 4, lane % 4, self.dims // SIDE, of_block
        part = number % self.slices
        first_key = part % (self.block_size // self.keys) * self.keys + g
        of_dims = part // (self.block_size // self.keys) * SIDE + 2 * x
        for stream in cutlass.range_constexpr(self.warps // self.slices):
            if number // self.slices == stream:
                for m in cutlass.range_constexpr(self.keys // 16):
                    for r in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(2):
                            row = sums[first_key + m * 16 + r * SIDE, None]
                            for d in cutlass.range_constexpr(each):
                                dim = (of_dims + c) * each + d
                                total = acc[(c, r), m, d]
                                row[dim] = total if const_expr(stream == 0) else row[dim] + total
            cute.arch.sync_threads()
        for i in cutlass.range(cute.arch.thread_idx()[0], self.block_size * self.D, self.warps * WARP):
            key, dim = i // self.D, i % self.D
            if key < count:
                dk[first + key, dim] = (sums[key, dim] * factor).to(dk.element_type)


def of_quad(score: Float32, key: Int32) -> Int32:
    """The key of the largest score of a quad's lanes, the first of several."""
    for mask in (1, 2):
        other, of_other = (cute.arch.shuffle_sync_bfly(value, mask) for value in (score, key))
        better = (other > score) | ((other == score) & (of_other < key))
        score, key = cutlass.select_(better, other, score), cutlass.select_(better, of_other, key)
    return key
