"""Attention of 16 rows over keys, 16 at a time, by one warp: mma.sync straight from registers.

Rows are (token, head) pairs of one key/value head. Keys and values go from memory to registers in pieces of 16 bytes
and nowhere between, which the order of a product's sum allows: lane (g, c) = (lane // 4, lane % 4) holds

- of the keys g and g + 8 the elements ``32 p + 8 c .. + 7``, two steps of the product q . k for each p, whose first
  operand takes elements of q in the same order;
- of the values 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 the elements ``64 j + 8 g .. + 7``. Element e of the 8 makes the
  operand of eight columns, ``64 j + 8 x + e`` for x from 0 to 7. So the lane has of the sum, for the rows g and g + 8,
  the columns ``64 j + 16 c .. + 15``.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from nsa_layer.kernels.decode.partial_sums import finite
from nsa_layer.kernels.decode.spec import KEYS, VECTOR
from nsa_layer.kernels.select_by_tile.online_softmax import exp2


@dataclass(frozen=True)
class WarpRows:
    """Registers of one lane.

    Attributes:
        q: [8, D / 16], first operands.
        k, v: [8, D / 32, 2] and [8, D / 64, 4].
        acc: fp32 [4, D / 8].
        top, total: fp32 [2]: each row's maximum, in units of log2, and this lane's share of its sum.
    """

    D: cutlass.Constexpr[int]
    scale_log2: Float32
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    acc: cute.Tensor
    top: cute.Tensor
    total: cute.Tensor

    def forget(self) -> None:
        """Begin anew, with the same queries; before `add`."""
        self.top.fill(-Float32.inf)
        self.total.fill(0.0)
        self.acc.fill(0.0)

    def load_k(self, places: list[cute.Tensor]) -> None:
        """places: rows [D] of the keys g and g + 8."""
        c = cute.arch.lane_idx() % 4
        for i, row in enumerate(places):
            for p in range(self.D // 32):
                load(row, 4 * p + c, self.k[None, p, i])

    def load_v(self, places: list[cute.Tensor]) -> None:
        """places: rows [D] of the values 2 c, 2 c + 1, 2 c + 8 and 2 c + 9."""
        g = cute.arch.lane_idx() // 4
        for i, row in enumerate(places):
            for j in range(self.D // 64):
                load(row, 8 * j + g, self.v[None, j, i])

    def scores(self) -> list[Float32]:
        """Scaled scores: rows g, g, g + 8, g + 8 and keys 2 c, 2 c + 1 twice; then keys 2 c + 8, 2 c + 9."""
        found = []
        for i in range(2):
            sums = cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
            sums.fill(0.0)
            for step in range(self.D // 16):
                b = [self.k[step % 2 * 4 + x, step // 2, i] for x in range(4)]
                multiply(sums, [self.q[x, step] for x in range(8)], b, self.k.element_type)
            found += [sums[x] * self.scale_log2 for x in range(4)]
        return found

    def add(self, scores: list[Float32]) -> None:
        """Add values, weighted by exponentials of scores, -inf where a row does not see a key."""
        dtype, weights = self.v.element_type, [None] * 8
        shrink = []
        for r in range(2):
            own = [Float32(scores[x]) for x in (2 * r, 2 * r + 1, 4 + 2 * r, 5 + 2 * r)]
            highest = cute.arch.fmax(cute.arch.fmax(own[0], own[1]), cute.arch.fmax(own[2], own[3]))
            highest = cute.arch.fmax(self.top[r], cute.arch.warp_reduction_max(highest, threads_in_group=4))
            shift = finite(highest)
            p = [exp2(x - shift) for x in own]
            shrink.append(exp2(self.top[r] - shift))
            self.top[r] = highest
            self.total[r] = self.total[r] * shrink[r] + ((p[0] + p[1]) + (p[2] + p[3]))
            for x in range(4):
                weights[x // 2 * 4 + 2 * r + x % 2] = p[x].to(dtype)
        for column in range(self.D // 8):
            j, e = column // 8, column % 8
            sums = cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
            for x in range(4):
                sums[x] = self.acc[x, column] * shrink[x // 2]
            multiply(sums, weights, [self.v[e, j, x] for x in range(4)], dtype)
            for x in range(4):
                self.acc[x, column] = sums[x]


def multiply(sums: cute.Tensor, a: list, b: list, dtype: type[cutlass.Numeric]) -> None:
    """Add a product of 16 rows, 8 columns and 16 terms."""
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    rA, rB = cute.make_rmem_tensor(((2, 2, 2), 1, 1), dtype), cute.make_rmem_tensor(((2, 2), 1, 1), dtype)
    for x in range(8):
        rA[x] = a[x]
    for x in range(4):
        rB[x] = b[x]
    cute.gemm(mma, sums, rA[None, None, 0], rB[None, None, 0], sums)


def load(row: cute.Tensor, piece: Int32, to: cute.Tensor) -> None:
    """16 bytes of a row, which nobody reads again."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        row.element_type,
        num_bits_per_copy=128,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )
    cute.copy(atom, cute.local_tile(row, (VECTOR,), (piece,)), to)


def no_rows(D: int, dtype: type[cutlass.Numeric], scale_log2: Float32) -> WarpRows:
    def registers(shape: tuple[int, ...], dtype: type[cutlass.Numeric]) -> cute.Tensor:
        return cute.make_rmem_tensor(shape, dtype)

    rows = WarpRows(
        D, scale_log2, registers((8, D // 16), dtype), registers((8, D // 32, 2), dtype),
        registers((8, D // 64, 4), dtype), registers((4, D // 8), Float32), registers((2,), Float32),
        registers((2,), Float32),
    )  # fmt: skip
    return rows


def set_queries(rows: WarpRows, queries: list[cute.Tensor]) -> None:
    """queries: rows [D] of q: row g's and row g + 8's."""
    c = cute.arch.lane_idx() % 4
    for r, row in enumerate(queries):
        for p in range(rows.D // 32):
            piece = cute.make_rmem_tensor((VECTOR,), row.element_type)
            load(row, 4 * p + c, piece)
            for x in range(VECTOR):
                step, half, pair = 2 * p + x // 4, x % 4 // 2, x % 2
                rows.q[4 * half + 2 * r + pair, step] = piece[x]


def own_keys() -> tuple[list[Int32], list[Int32]]:
    """The keys, of `KEYS`, whose keys and whose values a lane loads."""
    g, c = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    assert KEYS == 16
    return [g, g + 8], [2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9]
