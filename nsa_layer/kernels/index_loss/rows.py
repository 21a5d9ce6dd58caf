"""Rows of the index' loss, and the gradient of its queries: a few lanes of a warp have a token and list head.

Lane i of them has the row's blocks i, i + lanes, .... A block's score is that of its best token, whose key is gathered
anew: backward needs it anyway, and gets the numbers that forward had.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.varlen import round_to
from nsa_layer.support import UNION_BLOCK

THREADS, WARP = 128, 32
VECTOR = 8  # numbers of 16 bytes


def lanes_of(n: int) -> int:
    """Lanes that share a list of n blocks."""
    return min(WARP, 1 << (n - 1).bit_length())


class LossRows:
    """The common part of both kernels.

    Args:
        n: blocks of a list.
        G: query heads that share a list.
        init, local: forced blocks, which take no part.
    """

    def __init__(self, D: int, n: int, G: int, block_size: int, init: int, local: int) -> None:
        self.D, self.n, self.G, self.block_size, self.init, self.local = D, n, G, block_size, init, local
        self.lanes = lanes_of(n)
        self.each = -(-n // self.lanes)  # blocks of a lane
        self.parts = max(1, block_size // UNION_BLOCK)  # of a block, of which attention has sums
        self.shapes = "B T H D", "B S Hk D", f"B T H {n}", "starts", "starts", "sequences", *self.more_shapes

    @cute.jit
    def __call__(self, *arguments):
        """q_index, k_index, best tokens; starts of packed queries and keys, positions of first queries; what a kernel
        has more; index_scale; stream. Packed tensors have a batch of one."""
        tensors, (scale, stream) = arguments[:-2], arguments[-2:]
        rows = math.prod(tensors[2].shape[:3])
        self.kernel(tensors, scale).launch(
            grid=[cute.ceil_div(rows * self.lanes, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, scale: Float32):
        q, k, best, cu, cu_keys, q_offset = tensors[:6]
        B, T, H, _ = best.shape
        index = (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]) // self.lanes
        index = cutlass.min(index, B * T * H - 1)  # lanes past the end write the same once more
        batch, token, head = index // H // T, index // H % T, index % H
        position, sequence, first_key = token, batch, Int32(0)
        if const_expr(cu is not None):
            sequence = sequence_at(cu, token)
            position, first_key = token - cu[sequence], cu_keys[sequence]
        if const_expr(q_offset is not None):
            position += q_offset[sequence]
        k = cute.domain_offset((first_key, 0), k[batch, None, head % k.shape[2], None])
        tokens = self.entries(best[batch, token, head, None], -1)
        log_pi = self.log_shares(q[batch, token, head, None], k, tokens, position, scale)
        self.finish(tensors[6:], (batch, token, head), position, k, tokens, log_pi, scale)

    def is_free(self, token: Int32, position: Int32) -> Boolean:
        """True for a best token's block that is not forced."""
        begun = position // self.block_size - token // self.block_size
        return (token >= self.init * self.block_size) & (begun >= self.local)

    @cute.jit
    def log_shares(self, q: cute.Tensor, k: cute.Tensor, tokens: cute.Tensor, position: Int32, scale: Float32):
        """A lane's part of the log-softmax over the row's free blocks; for others -inf, or NaN where none is free."""
        log_pi, top = cute.make_rmem_tensor((self.each,), Float32), -Float32.inf
        for i in cutlass.range_constexpr(self.each):
            score = Float32(0.0)
            for part in cutlass.range_constexpr(self.D // VECTOR):
                a, b = (numbers(x, VECTOR, part) for x in (q, k[cutlass.max(tokens[i], 0), None]))
                score = (a * b).reduce(cute.ReductionOp.ADD, score, 0)
            log_pi[i] = cutlass.select_(self.is_free(tokens[i], position), score * scale, -Float32.inf)
            top = cutlass.max(top, log_pi[i])
        top = cute.arch.warp_reduction_max(top, threads_in_group=self.lanes)
        top = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
        total = self.over_lanes(cute.math.exp(log_pi.load() - top))
        log_pi.store(log_pi.load() - (top + cute.math.log(total)))
        return log_pi

    def lane(self) -> Int32:
        return cute.arch.lane_idx() % self.lanes

    def over_lanes(self, own: cute.TensorSSA) -> Float32:
        total = own.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return cute.arch.warp_reduction_sum(total, threads_in_group=self.lanes)

    @cute.jit
    def entries(self, row: cute.Tensor, other: int):
        """A lane's entries of a row, and another number past its end."""
        own = cute.make_rmem_tensor((self.each,), row.element_type)
        own.fill(other)
        for i in cutlass.range_constexpr(self.each):
            if self.lane() + i * self.lanes < self.n:
                own[i] = row[self.lane() + i * self.lanes]
        return own

    @cute.jit
    def write(self, own: cute.Tensor, row: cute.Tensor):
        """Write a lane's entries of a row."""
        for i in cutlass.range_constexpr(self.each):
            if self.lane() + i * self.lanes < self.n:
                row[self.lane() + i * self.lanes] = own[i]


class LossSums(LossRows):
    """Has more: sums of blocks (`fwd_sm90.block_sums`), the log-sum-exp; m, and numerator and denominator by row."""

    @property
    def more_shapes(self) -> tuple[str, ...]:
        return f"B T H {self.n * self.parts * self.G}", "B Hq T", f"B T H {self.n}", "2 B T H"

    @cute.jit
    def finish(self, tensors: tuple, row: tuple, position: Int32, k, tokens, log_pi, scale):
        sums, lse, mass, of_rows = tensors
        batch, token, head = row
        m = cute.make_rmem_tensor((self.each,), Float32)
        m.fill(0.0)
        for g in cutlass.range(self.G, unroll=4):
            of_head = lse[batch, head * self.G + g, token] * math.log2(math.e)
            of_head = cutlass.select_(of_head == -Float32.inf, Float32.inf, of_head)
            for i in cutlass.range_constexpr(self.each):
                if self.is_free(tokens[i], position):
                    at = (self.lane() + i * self.lanes) * self.parts
                    for part in cutlass.range_constexpr(self.parts):
                        if tokens[i] // self.block_size * self.block_size + part * UNION_BLOCK <= position:
                            of_part = sums[batch, token, head, (at + part) * self.G + g]
                            m[i] += cute.math.exp2(of_part - of_head)
        m.store(m.load() / Float32(self.G))
        total = self.over_lanes(m.load())
        self.write(m, mass[batch, token, head, None])
        for i in cutlass.range_constexpr(self.each):
            term = m[i] * (cute.math.log(m[i] / total) - log_pi[i])
            m[i] = cutlass.select_(m[i] > 0.0, term, Float32(0.0))
        loss = self.over_lanes(m.load())
        if self.lane() == 0:
            of_rows[0, batch, token, head], of_rows[1, batch, token, head] = loss, total


class QueryGradient(LossRows):
    """Has more: m, the gradient of the numerator; gradients of q_index, and of scores, times index_scale."""

    @property
    def more_shapes(self) -> tuple[str, ...]:
        return f"B T H {self.n}", "sums", "B T H D", f"B T H {self.n}"

    @cute.jit
    def finish(self, tensors: tuple, row: tuple, position: Int32, k, tokens, log_pi, scale):
        mass, d_sums, dq, dz = tensors
        batch, token, head = row
        d = self.entries(mass[batch, token, head, None], 0)
        total = self.over_lanes(d.load())
        for i in cutlass.range_constexpr(self.each):
            of_score = (total * cute.math.exp(log_pi[i]) - d[i]) * (d_sums[0] * scale)
            d[i] = cutlass.select_(log_pi[i] > -Float32.inf, of_score, Float32(0.0))
        self.write(d, dz[batch, token, head, None])
        size = max(1, self.D // self.lanes)  # numbers of a lane
        column = cutlass.min(self.lane(), self.D // size - 1)
        acc = cute.make_rmem_tensor((size,), Float32)
        acc.fill(0.0)
        first_lane = cute.arch.lane_idx() - self.lane()
        for i in cutlass.range_constexpr(self.each):
            for lane in cutlass.range(min(self.lanes, self.n - i * self.lanes), unroll=8):
                factor, at = (cute.arch.shuffle_sync(x, first_lane + lane) for x in (d[i], tokens[i]))
                acc.store(acc.load() + numbers(k[cutlass.max(at, 0), None], size, column) * factor)
        if self.lane() * size < self.D:
            round_to(acc.load(), cute.local_tile(dq[batch, token, head, None], (size,), (column,)))


def numbers(row: cute.Tensor, size: int, part: Int32 | int) -> cute.TensorSSA:
    """Neighbouring numbers of a row, in fp32."""
    loaded = cute.make_rmem_tensor((size,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (size,), (part,)), loaded)
    return loaded.load().to(Float32)
