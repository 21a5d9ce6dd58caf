"""Attention of 16 rows over keys, 16 at a time, by one warp: mma.sync straight from registers.

Rows are (token, head) pairs of one key/value head. Keys and values go from memory to registers in pieces of 16 bytes
and nowhere between, which the order of a product's sum allows: lane (g, c) = (lane // 4, lane % 4) holds

- of the keys g and g + 8 the elements ``32 p + 8 c .. + 7``, two steps of the product q . k for each p, whose first
  operand takes elements of q in the same order;
- of the values 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 the elements ``64 j + 8 g .. + 7``. Element e of the 8 makes the
  operand of eight columns, ``64 j + 8 x + e`` for x from 0 to 7. So the lane has of the sum, for the rows g and g + 8,
  the columns ``64 j + 16 c .. + 15``.

`TokenTile` is a token's heads, which attend to a share of its tokens: of listed blocks, or of its window.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from nsa_layer.kernels.decode.cache_rows import Sequence, Stored, Table, new_row
from nsa_layer.kernels.decode.partial_sums import COLUMNS, Part, finite
from nsa_layer.kernels.decode.spec import KEYS, ROWS, VECTOR, WARP, DecodeSpec
from nsa_layer.kernels.select_by_tile.online_softmax import exp2
from nsa_layer.kernels.varlen import load_once

PREFETCHED = 32  # elements of 64 bytes, which a GPU's memory gives at once


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

    def load_k(self, keys: list[cute.Tensor]) -> None:
        """keys: rows [D] of the keys g and g + 8."""
        c = cute.arch.lane_idx() % 4
        for i, row in enumerate(keys):
            for p in range(self.D // 32):
                load_once(vector(row, 4 * p + c), self.k[None, p, i])

    def load_v(self, values: list[cute.Tensor]) -> None:
        """values: rows [D] of the values 2 c, 2 c + 1, 2 c + 8 and 2 c + 9."""
        g = cute.arch.lane_idx() // 4
        for i, row in enumerate(values):
            for j in range(self.D // 64):
                load_once(vector(row, 8 * j + g), self.v[None, j, i])

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


def vector(row: cute.Tensor, i: Int32) -> cute.Tensor:
    """The i-th 16 bytes of a row."""
    return cute.local_tile(row, (VECTOR,), (i,))


def no_rows(D: int, dtype: type[cutlass.Numeric], scale_log2: Float32) -> WarpRows:
    q, k, v = (cute.make_rmem_tensor(shape, dtype) for shape in ((8, D // 16), (8, D // 32, 2), (8, D // 64, 4)))
    acc, top, total = (cute.make_rmem_tensor(shape, Float32) for shape in ((4, D // 8), (2,), (2,)))
    return WarpRows(D, scale_log2, q, k, v, acc, top, total)


def set_queries(rows: WarpRows, queries: list[cute.Tensor]) -> None:
    """queries: rows [D] of q: row g's and row g + 8's."""
    c = cute.arch.lane_idx() % 4
    for r, row in enumerate(queries):
        for p in range(rows.D // 32):
            piece = cute.make_rmem_tensor((VECTOR,), row.element_type)
            load_once(vector(row, 4 * p + c), piece)
            for x in range(VECTOR):
                step, half, pair = 2 * p + x // 4, x % 4 // 2, x % 2
                rows.q[4 * half + 2 * r + pair, step] = piece[x]


def own_keys() -> tuple[list[Int32], list[Int32]]:
    """The keys, of `KEYS`, whose keys and whose values a lane loads."""
    g, c = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    assert KEYS == 16
    return [g, g + 8], [2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9]


@cute.jit
def write_partial(
    rows: WarpRows,
    sStats: cute.Tensor,
    sAcc: cute.Tensor,
    stats: cute.Tensor,
    acc: cute.Tensor,
    first: Int32,
    count: Int32,
    piece: Int32,
):
    """Add up what a thread block's warps have, and write it.

    Args:
        sStats, sAcc: fp32 [2, ROWS, warps] and [D, ROWS, warps] in shared memory, of `shared_partial`.
        stats, acc: fp32 [R, pieces, 2] and [R, pieces, D].
        first, count: the rows, as they lie in these.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, own = cute.arch.lane_idx(), cute.arch.warp_idx()
    g, c = lane // 4, lane % 4
    for r in cutlass.range_constexpr(2):
        total = cute.arch.warp_reduction_sum(rows.total[r], threads_in_group=4)
        if c == 0:
            sStats[0, g + 8 * r, own] = rows.top[r]
            sStats[1, g + 8 * r, own] = total
        if g + 8 * r < count:
            for j in cutlass.range_constexpr(rows.D // 64):
                for i in cutlass.range_constexpr(4):  # 16 columns, four at a time
                    part = cute.make_rmem_tensor((4,), Float32)
                    for x in cutlass.range_constexpr(4):
                        at = 4 * i + x
                        part[x] = rows.acc[2 * r + at // 8, 8 * j + at % 8]
                    cute.autovec_copy(part, cute.local_tile(sAcc[None, g + 8 * r, own], (4,), (16 * j + 4 * c + i,)))
    cute.arch.sync_threads()
    lanes, warps = rows.D // COLUMNS, sStats.shape[2]
    for row in cutlass.range(tidx // lanes, count, WARP * warps // lanes, unroll=1):
        part = Part.nothing()
        part.add_all([(sStats[None, row, w], sAcc[None, row, w]) for w in range(warps)], None, tidx % lanes)
        part.write(stats[first + row, piece, None], acc[first + row, piece, None], tidx % lanes)


@dataclass(frozen=True)
class TokenTile:
    """Up to 16 query heads of a token and key/value head, and a thread block's share of what they attend to.

    Attributes:
        warps: of a thread block.
        first, count: of the heads, among the group's.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    warps: cutlass.Constexpr[int]
    sequence: Sequence
    head: Int32
    token: Int32
    first: Int32
    count: Int32
    share: Int32
    shares: Int32

    @classmethod
    def of(cls, spec: DecodeSpec, warps: int, sequence: Sequence, head: Int32, x: Int32, shares: Int32) -> TokenTile:
        """x: of a token's tiles' shares."""
        tiles = num_tiles(spec)
        first = x // shares % tiles * ROWS
        count = cutlass.min(spec.G - first, ROWS)
        return cls(spec, warps, sequence, head, x // (shares * tiles), first, count, x % shares, shares)

    @property
    def t(self) -> Int32:
        """The token's position."""
        return self.sequence.position(self.token)

    @property
    def first_row(self) -> Int32:
        """The first of the key/value head's rows that this tile has."""
        return self.token * self.spec.G + self.first

    @property
    def group(self) -> Int32:
        """The first group of this warp."""
        return self.share * self.warps + cute.arch.make_warp_uniform(cute.arch.warp_idx())

    def q_head(self, row: Int32) -> Int32:
        return self.head * self.spec.G + self.first + row

    def first_of(self, sList: cute.Tensor | None, group: Int32, groups: Int32) -> Int32:
        """The first token of a group of 16, of the last one if there are fewer: in listed blocks, or in the window."""
        spec, group = self.spec, cutlass.min(group, groups - 1)
        if const_expr(sList is None):
            return cutlass.max(self.t - spec.window + 1, 0) + group * KEYS
        in_block = spec.block_size // KEYS
        return sList[group // in_block] * spec.block_size + group % in_block * KEYS

    def set_queries(self, rows: WarpRows, mQ: cute.Tensor) -> None:
        g = cute.arch.lane_idx() // 4
        heads = [self.q_head(cutlass.min(g + 8 * r, self.count - 1)) for r in range(2)]
        set_queries(rows, [new_row(mQ, self.sequence, self.token, head) for head in heads])

    @cute.jit
    def load_first(self, rows: WarpRows, mQ: cute.Tensor, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Load this warp's first group, and the queries, again rather than keep them."""
        if self.group < groups:
            at, table = self.first_of(sList, self.group, groups), stored.table(self.sequence)
            page, (k_at, v_at) = self.page(table, at), own_keys()
            rows.load_k([self.row_of(stored, 0, table, page, at, i) for i in k_at])
            rows.load_v([self.row_of(stored, 1, table, page, at, i) for i in v_at])
            self.set_queries(rows, mQ)

    @cute.jit
    def prefetch_window(self, stored: Stored, groups: Int32):
        """Bring this warp's second group of the window to the L2."""
        group, lane, pieces = self.group + self.shares * self.warps, cute.arch.lane_idx(), self.spec.D // PREFETCHED
        if group < groups:
            first, table = self.first_of(None, group, groups), stored.table(self.sequence)
            page = self.page(table, first)
            for key in cutlass.range_constexpr(0, KEYS, WARP // pieces):
                for i in cutlass.range_constexpr(2):
                    row = self.row_of(stored, i, table, page, first, key + lane // pieces)
                    piece = row.iterator + lane % pieces * PREFETCHED
                    cute.arch.prefetch(piece.llvm_ptr, cache_level="L2")

    @cute.jit
    def attend(self, rows: WarpRows, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Attention to this warp's groups, of which `load_first` has loaded the first."""
        t, table, step = self.t, stored.table(self.sequence), self.shares * self.warps
        c = cute.arch.lane_idx() % 4
        k_at, v_at = own_keys()
        if self.group < groups:
            at = self.first_of(sList, self.group, groups)
            after = self.first_of(sList, self.group + step, groups)
            page = self.page(table, after)
            for now in cutlass.range(self.group, groups, step, unroll=1):
                scores = rows.scores()
                if now + step < groups:
                    rows.load_k([self.row_of(stored, 0, table, page, after, i) for i in k_at])
                for x in cutlass.range_constexpr(8):
                    seen = at + x // 4 * 8 + 2 * c + x % 2 <= t
                    scores[x] = cutlass.select_(seen, scores[x], -Float32.inf)
                rows.add(scores)
                if now + step < groups:
                    rows.load_v([self.row_of(stored, 1, table, page, after, i) for i in v_at])
                at = after
                after = self.first_of(sList, now + 2 * step, groups)
                page = self.page(table, after)

    def page(self, table: Table, at: Int32) -> Int32:
        """In lane x % 16 that of token ``at + x``."""
        return table.page(cutlass.min(at + cute.arch.lane_idx() % KEYS, self.t))

    def row_of(self, stored: Stored, i: int, table: Table, page: Int32, first: Int32, n: Int32) -> cute.Tensor:
        """Row [D] of token ``first + n``, of token t if that is behind; page: as `page` has it."""
        if const_expr(table.pages is not None):
            page = cute.arch.shuffle_sync(page, n)
        return stored.token(i, table, page, cutlass.min(first + n, self.t), self.head)


def num_tiles(spec: DecodeSpec) -> int:
    return -(-spec.G // ROWS)
