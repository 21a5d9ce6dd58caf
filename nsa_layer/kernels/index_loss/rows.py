"""Rows of the index' loss, and the gradient of its queries: a few lanes of a warp share a row, a token and list head.

Lane i of them has the row's blocks i, i + lanes, ....
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from flash_attn.cute.utils import LOG2_E
from nsa_layer.kernels.varlen import round_to
from nsa_layer.support import UNION_BLOCK

THREADS, WARP = 128, 32


def lanes_of(n: int) -> int:
    """Lanes that share a list of n blocks."""
    return min(WARP, 1 << (n - 1).bit_length())


class LossRows:
    """The common part of both kernels.

    Args:
        n: blocks of a list.
    """

    shapes: tuple[str, ...]

    def __init__(self, n: int) -> None:
        self.n, self.lanes = n, lanes_of(n)
        self.each = -(-n // self.lanes)  # blocks of a lane

    @cute.jit
    def __call__(self, *arguments):
        """The kernel's tensors, the first of which has a row for each token and list head; index_scale; stream. Packed
        tensors have a batch of one."""
        tensors, (scale, stream) = arguments[:-2], arguments[-2:]
        rows = math.prod(tensors[0].shape[:3])
        self.kernel(tensors, scale).launch(
            grid=[cute.ceil_div(rows * self.lanes, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, scale: Float32):
        B, T, H, _ = tensors[0].shape
        index = (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]) // self.lanes
        index = cutlass.min(index, B * T * H - 1)  # lanes past the end write the same once more
        self.row(tensors, (index // H // T, index // H % T, index % H), scale)

    def lane(self) -> Int32:
        return cute.arch.lane_idx() % self.lanes

    def over_lanes(self, own: cute.TensorSSA) -> Float32:
        total = own.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)

    @cute.jit
    def entries(self, row: cute.Tensor, other: int | float):
        """A lane's entries of a row; `other` past its end."""
        own = cute.make_rmem_tensor((self.each,), row.element_type)
        own.fill(other)
        for i in cutlass.range_constexpr(self.each):
            if self.lane() + i * self.lanes < self.n:
                own[i] = row[self.lane() + i * self.lanes]
        return own


class LossSums(LossRows):
    """Lists and scores of their blocks -> numerator and denominator by row, and gradients of the numerator by score.

    Args:
        G: query heads that share a list.
        init, local: forced blocks, which take no part.
    """

    def __init__(self, n: int, G: int, block_size: int, init: int, local: int) -> None:
        super().__init__(n)
        self.G, self.block_size, self.init, self.local = G, block_size, init, local
        self.parts = max(1, block_size // UNION_BLOCK)  # of a block, each with a sum from attention
        self.vector = math.gcd(G, 4)  # heads whose sums are loaded at a time
        of_lists, starts = f"B T H {n}", ("starts", "sequences")
        sums = f"B T H {n * self.parts * G} @{4 * self.vector}"
        self.shapes = of_lists, of_lists, *starts, sums, "B Hq T", of_lists, "2 B T H"

    @cute.jit
    def row(self, tensors: tuple, row: tuple, scale: Float32):
        """Lists, scores without index_scale; starts of packed queries, positions of first queries; sums of blocks
        (`fwd_sm90.block_sums`), the log-sum-exp; gradients, and both sums."""
        lists, scores, cu, q_offset, sums, lse, dz, of_rows = tensors
        batch, token, head = row
        position, sequence = token, batch
        if const_expr(cu is not None):
            sequence = sequence_at(cu, token)
            position = token - cu[sequence]
        if const_expr(q_offset is not None):
            position += q_offset[sequence]
        blocks = self.entries(lists[batch, token, head, None], -1)
        log_pi = self.log_shares(self.entries(scores[batch, token, head, None], 0.0), blocks, position, scale)
        m = self.mass(sums[batch, token, head, None], lse[batch, None, token], head, blocks, position)
        total = self.over_lanes(m.load())
        for i in cutlass.range_constexpr(self.each):
            of_score = cutlass.select_(
                self.is_free(blocks[i], position), total * cute.math.exp(log_pi[i]) - m[i], Float32(0.0)
            )
            if self.lane() + i * self.lanes < self.n:
                dz[batch, token, head, self.lane() + i * self.lanes] = of_score
            term = m[i] * (cute.math.log(m[i] / total) - log_pi[i])
            m[i] = cutlass.select_(m[i] > 0.0, term, Float32(0.0))
        loss = self.over_lanes(m.load())
        if self.lane() == 0:
            of_rows[0, batch, token, head], of_rows[1, batch, token, head] = loss, total

    def is_free(self, block: Int32, position: Int32) -> Boolean:
        """True for a listed block that is not forced."""
        return (block >= self.init) & (position // self.block_size - block >= self.local)

    @cute.jit
    def log_shares(self, scores: cute.Tensor, blocks: cute.Tensor, position: Int32, scale: Float32):
        """A lane's part of the log-softmax over the row's free blocks; for others -inf, or NaN where none is free."""
        top = -Float32.inf
        for i in cutlass.range_constexpr(self.each):
            is_free = self.is_free(blocks[i], position)
            scores[i] = cutlass.select_(is_free, scores[i] * scale, -Float32.inf)
            top = cutlass.max(top, scores[i])
        top = cute.arch.warp_reduction_max(top, threads_in_group=self.lanes)
        top = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
        total = self.over_lanes(cute.math.exp(scores.load() - top))
        scores.store(scores.load() - (top + cute.math.log(total)))
        return scores

    @cute.jit
    def mass(self, sums: cute.Tensor, lse: cute.Tensor, head: Int32, blocks: cute.Tensor, position: Int32):
        """A lane's part of m: probabilities of free blocks, a mean over heads."""
        m, loaded = cute.make_rmem_tensor((self.each,), Float32), cute.make_rmem_tensor((self.vector,), Float32)
        m.fill(0.0)
        for first in cutlass.range(0, self.G, self.vector, unroll=2):
            of_heads = [lse[head * self.G + first + g] * LOG2_E for g in range(self.vector)]
            of_heads = [cutlass.select_(x == -Float32.inf, Float32.inf, x) for x in of_heads]
            for i in cutlass.range_constexpr(self.each):
                if self.is_free(blocks[i], position):
                    at = (self.lane() + i * self.lanes) * self.parts
                    for part in cutlass.range_constexpr(self.parts):
                        if blocks[i] * self.block_size + part * UNION_BLOCK <= position:
                            of_part = (((at + part) * self.G + first) // self.vector,)
                            cute.autovec_copy(cute.local_tile(sums, (self.vector,), of_part), loaded)
                            for g in cutlass.range_constexpr(self.vector):
                                m[i] += cute.math.exp2(loaded[g] - of_heads[g])
        m.store(m.load() / Float32(self.G))
        return m


class QueryGradient(LossRows):
    """Gradients of scores and positions of best keys -> the gradient of q_index."""

    def __init__(self, D: int, n: int) -> None:
        super().__init__(n)
        self.D = D
        of_lists = f"B T H {n}"
        self.shapes = of_lists, of_lists, "B S Hk D", "starts", "starts", "sums", "B T H D"

    @cute.jit
    def row(self, tensors: tuple, row: tuple, scale: Float32):
        """Gradients of scores over d_sums[0] and index_scale; positions of best keys, read where these are not 0;
        k_index; starts of packed queries and keys; d_sums; the gradient."""
        dz, best, k, cu, cu_keys, d_sums, dq = tensors
        batch, token, head = row
        first_key = Int32(0)
        if const_expr(cu is not None):
            first_key = cu_keys[sequence_at(cu, token)]
        k = cute.domain_offset((first_key, 0), k[batch, None, head % k.shape[2], None])
        d = self.entries(dz[batch, token, head, None], 0.0)
        tokens = self.entries(best[batch, token, head, None], 0)
        for i in cutlass.range_constexpr(self.each):
            tokens[i] = cutlass.select_(d[i] != 0.0, tokens[i], Int32(0))
        size = max(1, self.D // self.lanes)  # numbers of a lane
        column = cutlass.min(self.lane(), self.D // size - 1)
        acc, loaded = (cute.make_rmem_tensor((size,), of) for of in (Float32, k.element_type))
        acc.fill(0.0)
        first_lane = cute.arch.lane_idx() - self.lane()
        for i in cutlass.range_constexpr(self.each):
            for lane in cutlass.range(min(self.lanes, self.n - i * self.lanes), unroll=16):
                factor, at = (cute.arch.shuffle_sync(x, first_lane + lane) for x in (d[i], tokens[i]))
                cute.autovec_copy(cute.local_tile(k[at, None], (size,), (column,)), loaded)
                acc.store(acc.load() + loaded.load().to(Float32) * factor)
        if self.lane() * size < self.D:
            factor = d_sums[0] * scale
            round_to(acc.load() * factor, cute.local_tile(dq[batch, token, head, None], (size,), (column,)))
