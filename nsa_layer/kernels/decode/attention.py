"""Attention of 16 rows over keys, 16 or 32 at a time, by one warp: mma.sync straight from registers.

Rows are (token, head) pairs of one key/value head. Keys and values are loaded from global memory straight into operands
of products, 16 bytes at a time, without shared memory. So the terms of q . k are permuted, alike in both operands, and
the columns of the output. Lane (g, c) = (lane // 4, lane % 4) holds

- of keys g and g + 8 the elements ``4 n p + n c .. + n - 1`` for each p, n = 8: operands of n / 4 steps of q . k;
- of values 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 the elements ``8 n j + n g .. + n - 1`` for each j. Element e of the n is
  an operand of the columns ``8 n j + n x + e``, x from 0 to 7, so that the lane accumulates, for rows g and g + 8, the
  columns ``8 n j + 2 n c .. + 2 n - 1``.

If a row is shorter than the pieces of all lanes, lanes past its end load its last piece again: q is 0 there, and those
columns of the output are not read.

For caches in FP8 n is 16, or 8 for values of up to 64 elements. A step of 32 such keys has as many bytes in flight as
16 keys of 16 bits; the second 16 lie over the lanes like the first. Keys and values are converted to fp16, exactly, and
weights of values rounded to it. Each row of q is scaled by a power of two into fp16's range; the inverse is a factor of
its scores, like the scale of the keys.

`TokenTile` has up to 16 query heads of a token, which attend to a share of its listed blocks or of its window.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from nsa_layer.kernels.decode.cache_rows import Sequence, Stored, Table, new_row
from nsa_layer.kernels.decode.partial_sums import COLUMNS, Part, finite
from nsa_layer.kernels.decode.spec import ROWS, VECTOR, WARP, DecodeSpec
from nsa_layer.kernels.fp8 import E4M3, unpack, words
from nsa_layer.kernels.select_by_tile.online_softmax import exp2
from nsa_layer.kernels.select_by_tile.register_topk import reduce_tree
from nsa_layer.kernels.select_by_tile.split_fp16 import powers_of_two
from nsa_layer.kernels.varlen import load_once

PREFETCHED = 64  # bytes: what GPU memory transfers at a time


@dataclass(frozen=True)
class WarpRows:
    """A lane's registers: operands, accumulators and softmax statistics of a warp's 16 rows.

    Attributes:
        q: [8, D / 16]: first operands, in fp16 if keys are in FP8. Here D and Dv are rounded up to whole pieces.
        k, v: [n, D / 4 n, keys / 8] and [n, Dv / 8 n, keys / 4].
        acc: fp32 [4, Dv / 8].
        scale: fp32 [2]: factor of each row's scores, to units of log2, if keys are in FP8; else it is scale_log2.
        top, total: fp32 [2]: each row's maximum, in units of log2, and this lane's share of its sum.
    """

    dims: cutlass.Constexpr[tuple[int, int]]
    scale_log2: Float32
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    acc: cute.Tensor
    scale: cute.Tensor
    top: cute.Tensor
    total: cute.Tensor

    def forget(self) -> None:
        """Reset the accumulators and statistics, before the first `add`; queries stay."""
        self.top.fill(-Float32.inf)
        self.total.fill(0.0)
        self.acc.fill(0.0)

    def load_k(self, keys: list[cute.Tensor]) -> None:
        """keys: rows [D] of the keys of `lane_keys`."""
        for i, row in enumerate(keys):
            for target, at in self.parts(0, i):
                load_once(vector(row, at, target), target)

    def load_v(self, values: list[cute.Tensor]) -> None:
        """values: rows [D] of the values of `lane_keys`."""
        for i, row in enumerate(values):
            for target, at in self.parts(1, i):
                load_once(vector(row, at, target), target)

    def parts(self, of: int, i: int) -> list[tuple[cute.Tensor, Int32]]:
        """(registers, index in the row) of each piece that the lane has of its i-th key (of = 0) or value (of = 1)."""
        lane, x = cute.arch.lane_idx(), (self.k, self.v)[of]
        lanes, at = (8, lane // 4) if of else (4, lane % 4)
        last = self.dims[of] // x.shape[0] - 1
        indices = [lanes * p + at for p in range(x.shape[1])]
        if lanes * x.shape[1] > last + 1:
            indices = [cutlass.min(index, last) for index in indices]
        return [(x[None, p, i], index) for p, index in enumerate(indices)]

    def scores(self) -> list[Float32]:
        """Scaled scores of rows g, g, g + 8, g + 8 for keys 2 c, 2 c + 1, 2 c, 2 c + 1; then for keys 8 on, etc."""
        found, in_fp8 = [], self.k.element_type == E4M3
        scale = [self.scale[r] if const_expr(in_fp8) else self.scale_log2 for r in range(2)]
        for i in range(self.k.shape[2]):
            sums = cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
            sums.fill(0.0)
            for step in range(self.q.shape[1]):
                steps = self.k.shape[0] // 4
                if const_expr(in_fp8):
                    b = unpack(words(self.k)[step % steps, step // steps, i])
                else:
                    b = [self.k[step % steps * 4 + x, step // steps, i] for x in range(4)]
                multiply(sums, [self.q[x, step] for x in range(8)], b, self.q.element_type)
            found += [sums[x] * scale[x // 2] for x in range(4)]
        return found

    def add(self, scores: list[Float32]) -> None:
        """Add values, weighted by an online softmax of the scores, which are -inf where a row does not see a key."""
        products = len(scores) // 8
        weights, in_fp8 = [[None] * 8 for _ in range(products)], self.v.element_type == E4M3
        dtype = Float16 if in_fp8 else self.v.element_type
        shrink = []
        for r in range(2):
            row_scores = [Float32(scores[x]) for x in range(len(scores)) if x % 4 // 2 == r]
            highest = cute.arch.warp_reduction_max(reduce_tree(cute.arch.fmax, row_scores), threads_in_group=4)
            highest = cute.arch.fmax(self.top[r], highest)
            shift = finite(highest)
            p = [exp2(x - shift) for x in row_scores]
            shrink.append(exp2(self.top[r] - shift))
            self.top[r] = highest
            self.total[r] = self.total[r] * shrink[r] + reduce_tree(add, p)
            for x in range(4 * products):
                weights[x // 4][x % 4 // 2 * 4 + 2 * r + x % 2] = p[x].to(dtype)
        size = self.v.shape[0]
        for column in range(self.acc.shape[1]):
            j, e = column // size, column % size
            sums = cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
            for x in range(4):
                sums[x] = self.acc[x, column] * shrink[x // 2]
            if const_expr(in_fp8 and e % 2 == 0):
                pairs = [self.of_rows(j, e, x) for x in range(0, 4 * products, 2)]
            for i in range(products):
                if const_expr(in_fp8):
                    b = [pair[e % 2] for pair in pairs[2 * i : 2 * i + 2]]
                else:
                    b = [self.v[e, j, 4 * i + x] for x in range(4)]
                multiply(sums, weights[i], b, dtype)
            for x in range(4):
                self.acc[x, column] = sums[x]

    def of_rows(self, j: int, e: int, x: int) -> tuple[Int32, Int32]:
        """Elements e of the values x and x + 1 as one word of fp16, and their elements e + 1 as another."""
        first, second = (words(self.v)[e // 4, j, x + i] for i in range(2))
        return unpack(cute.arch.prmt(first, second, 0x7362 if e % 4 else 0x5140))


def multiply(sums: cute.Tensor, a: list, b: list, dtype: type[cutlass.Numeric]) -> None:
    """sums += a . b, one mma.sync of 16 rows, 8 columns and 16 terms; b: four elements, or two words of two."""
    mma = cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    rA, rB = cute.make_rmem_tensor(((2, 2, 2), 1, 1), dtype), cute.make_rmem_tensor(((2, 2), 1, 1), dtype)
    for x in range(8):
        rA[x] = a[x]
    for x in range(len(b)):
        (rB if len(b) == 4 else words(rB))[x] = b[x]
    cute.gemm(mma, sums, rA[None, None, 0], rB[None, None, 0], sums)


def vector(row: cute.Tensor, i: Int32, like: cute.Tensor | None = None) -> cute.Tensor:
    """The i-th piece of a row: `VECTOR` elements, or as many as `like` has."""
    return cute.local_tile(row, (VECTOR if like is None else cute.size(like),), (i,))


def allocate_rows(
    spec: DecodeSpec,
    dtype: type[cutlass.Numeric],
    stored: type[cutlass.Numeric],
    scale_log2: Float32,
) -> WarpRows:
    """Registers without values; dtype, stored: of queries and of caches."""
    columns = spec.columns_of_sums
    n, m = (16, columns // 8) if stored == E4M3 else (VECTOR, VECTOR)  # elements of a load of keys, of values
    pieces = -(-spec.D // (4 * n))
    q = cute.make_rmem_tensor((8, pieces * n // 4), Float16 if stored == E4M3 else dtype)
    of_k, of_v = (n, pieces, spec.keys // 8), (m, columns // (8 * m), spec.keys // 4)
    k, v = (cute.make_rmem_tensor(shape, stored) for shape in (of_k, of_v))
    acc, scale, top, total = (cute.make_rmem_tensor(shape, Float32) for shape in ((4, columns // 8), (2,), (2,), (2,)))
    return WarpRows(spec.dims, scale_log2, q, k, v, acc, scale, top, total)


def set_queries(rows: WarpRows, queries: list[cute.Tensor], scale: Float32) -> None:
    """Load first operands; queries: rows [D] of q, those of rows g and g + 8; scale: of keys in FP8."""
    c, n = cute.arch.lane_idx() % 4, rows.k.shape[0]
    pieces = n * rows.k.shape[1] // VECTOR
    for r, row in enumerate(queries):
        held = [cute.make_rmem_tensor((VECTOR,), row.element_type) for _ in range(pieces)]
        for p, piece in enumerate(held):
            first = VECTOR * p % n  # element among the lane's n
            at, count = ((VECTOR * p // n) * 4 + c) * (n // VECTOR) + first // VECTOR, rows.dims[0] // VECTOR
            whole = pieces * 4 == count
            load_once(vector(row, at if whole else cutlass.min(at, count - 1)), piece)
            for x in range(VECTOR if not whole else 0):
                piece[x] = cutlass.select_(at < count, piece[x], piece.element_type(0.0))
        numbers = [piece[x] for piece in held for x in range(VECTOR)]
        if const_expr(rows.k.element_type == E4M3):
            up, down = powers_of_two([x.to(Float32) for x in numbers], 4)
            rows.scale[r] = rows.scale_log2 * scale * down
            numbers = [(x.to(Float32) * up).to(Float16) for x in numbers]
        for i, number in enumerate(numbers):
            rows.q[i % 4 // 2 * 4 + 2 * r + i % 2, i // 4] = number


def lane_keys(keys: int) -> tuple[list[Int32], list[Int32]]:
    """Offsets in a step of `keys` tokens: of those whose keys a lane loads, and of those whose values it loads."""
    g, c = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    return [g + i for i in range(0, keys, 8)], [2 * c + i + x for i in range(0, keys, 8) for x in range(2)]


@cute.jit
def write_partial(
    rows: WarpRows,
    sStats: cute.Tensor,
    sAcc: cute.Tensor,
    stats: cute.Tensor,
    acc: cute.Tensor,
    first: Int32,
    count: Int32,
    split: Int32,
):
    """Merge the partial sums of a CTA's warps, and write them.

    Args:
        sStats, sAcc: fp32 [2, ROWS, warps] and [columns, ROWS, warps] in shared memory, of `shared_partial`.
        stats, acc: fp32 [R, splits, 2] and [R, splits, columns], of `DecodeSpec.columns_of_sums`.
        first, count: the tile's rows in stats and acc.
    """
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp_idx, n = cute.arch.lane_idx(), cute.arch.warp_idx(), rows.v.shape[0]
    g, c = lane // 4, lane % 4
    for r in cutlass.range_constexpr(2):
        total = cute.arch.warp_reduction_sum(rows.total[r], threads_in_group=4)
        if c == 0:
            sStats[0, g + 8 * r, warp_idx] = rows.top[r]
            sStats[1, g + 8 * r, warp_idx] = total
        if g + 8 * r < count:
            for j in cutlass.range_constexpr(rows.v.shape[1]):
                for i in cutlass.range_constexpr(n // 2):  # 2 n columns, four at a time
                    part = cute.make_rmem_tensor((4,), Float32)
                    for x in cutlass.range_constexpr(4):
                        at = 4 * i + x
                        part[x] = rows.acc[2 * r + at // n, n * j + at % n]
                    to = cute.local_tile(sAcc[None, g + 8 * r, warp_idx], (4,), (2 * n * j + n // 2 * c + i,))
                    cute.autovec_copy(part, to)
    cute.arch.sync_threads()
    lanes, warps = rows.acc.shape[1] * 8 // COLUMNS, sStats.shape[2]
    for row in cutlass.range(tidx // lanes, count, WARP * warps // lanes, unroll=1):
        part = Part.nothing()
        part.add_all([(sStats[None, row, w], sAcc[None, row, w]) for w in range(warps)], None, tidx % lanes)
        part.write(stats[first + row, split, None], acc[first + row, split, None], tidx % lanes)


@dataclass(frozen=True)
class TokenTile:
    """A CTA's work tile: up to 16 query heads of a token and key/value head, and a share of the keys they attend to.

    Attributes:
        warps: warps of a CTA.
        first, count: the tile's query heads in the group of the key/value head.
        share, shares: the CTA's rank among those that share the keys, and their number.
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
        """x: index of the CTA, over tokens, tiles of heads and shares; the share is fastest."""
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
        """The tile's first row among the (token, head) rows of the key/value head."""
        return self.token * self.spec.G + self.first

    @property
    def group(self) -> Int32:
        """This warp's first group of `spec.keys` tokens; groups go round the warps of all shares."""
        return self.share * self.warps + cute.arch.make_warp_uniform(cute.arch.warp_idx())

    def q_head(self, row: Int32) -> Int32:
        return self.head * self.spec.G + self.first + row

    def first_of(self, sList: cute.Tensor | None, group: Int32, groups: Int32) -> Int32:
        """Position of a group's first token, of the last group if there are fewer: in listed blocks or the window."""
        spec, group = self.spec, cutlass.min(group, groups - 1)
        if const_expr(sList is None):
            return cutlass.max(self.t - spec.window + 1, 0) + group * spec.keys
        in_block = spec.block_size // spec.keys
        return sList[group // in_block] * spec.block_size + group % in_block * spec.keys

    def set_queries(self, rows: WarpRows, mQ: cute.Tensor, stored: Stored) -> None:
        """Load the tile's queries; stored: the caches whose keys they are multiplied with."""
        g = cute.arch.lane_idx() // 4
        heads = [self.q_head(cutlass.min(g + 8 * r, self.count - 1)) for r in range(2)]
        queries = [new_row(mQ, self.sequence, self.token, head) for head in heads]
        set_queries(rows, queries, stored.scale(0, self.head))

    @cute.jit
    def load_first(self, rows: WarpRows, mQ: cute.Tensor, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Load this warp's first group, and the queries: for each branch anew, which saves registers."""
        if self.group < groups:
            at, table = self.first_of(sList, self.group, groups), stored.table(self.sequence)
            page = self.page(table, at)
            for i in cutlass.range_constexpr(2):
                self.load(rows, stored, i, table, page, at)
            self.set_queries(rows, mQ, stored)

    @cute.jit
    def load(self, rows: WarpRows, stored: Stored, i: cutlass.Constexpr[int], table: Table, page: Int32, first: Int32):
        """Load keys (i = 0) or values (i = 1) of the group at position `first`, with the result of `page` for it."""
        at = lane_keys(self.spec.keys)[i]
        tokens = [self.row_of(stored, i, table, page, first, n) for n in at]
        if const_expr(i == 0):
            rows.load_k(tokens)
        else:
            rows.load_v(tokens)

    @cute.jit
    def read_rounded(self, rows: WarpRows, stored: Stored, i: cutlass.Constexpr[int], first: Int32):
        """Replace loaded keys or values of tokens that this call appends by their rows of `Stored.rounded`."""
        if const_expr(stored.rounded[i] is not None):
            at, begin = lane_keys(self.spec.keys)[i], self.sequence.position(Int32(0))
            if first + self.spec.keys > begin:
                for x in cutlass.range_constexpr(len(at)):
                    past = cutlass.min(first + at[x], self.t) - begin
                    if past >= 0:
                        for target, part in rows.parts(i, x):
                            cute.autovec_copy(vector(stored.rounded[i][None, past], part, target), target)

    @cute.jit
    def prefetch_window(self, stored: Stored, groups: Int32):
        """Prefetch this warp's second group of the window into L2."""
        group, lane = self.group + self.shares * self.warps, cute.arch.lane_idx()
        pieces = max(WARP // self.spec.keys, self.spec.Dv * stored.caches[0].element_type.width // (8 * PREFETCHED))
        pieces = 1 << (pieces.bit_length() - 1)
        if group < groups:
            first, table = self.first_of(None, group, groups), stored.table(self.sequence)
            page = self.page(table, first)
            for key in cutlass.range_constexpr(0, self.spec.keys, WARP // pieces):
                for i in cutlass.range_constexpr(2):
                    row = self.row_of(stored, i, table, page, first, key + lane // pieces)
                    piece = row.iterator + lane % pieces * (self.spec.dims[i] // pieces)
                    cute.arch.prefetch(piece.llvm_ptr, cache_level="L2")

    @cute.jit
    def attend(self, rows: WarpRows, stored: Stored, sList: cute.Tensor | None, groups: Int32):
        """Attention to this warp's groups, the first of which `load_first` has loaded; `Stored.rounded` is filled."""
        t, table, step = self.t, stored.table(self.sequence), self.shares * self.warps
        c = cute.arch.lane_idx() % 4
        if self.group < groups:
            at = self.first_of(sList, self.group, groups)
            for i in cutlass.range_constexpr(2):
                self.read_rounded(rows, stored, i, at)
            after = self.first_of(sList, self.group + step, groups)
            page = self.page(table, after)
            for now in cutlass.range(self.group, groups, step, unroll=1):
                scores = rows.scores()
                if now + step < groups:
                    self.load(rows, stored, 0, table, page, after)
                    self.read_rounded(rows, stored, 0, after)
                for x in cutlass.range_constexpr(len(scores)):
                    seen = at + x // 4 * 8 + 2 * c + x % 2 <= t
                    scores[x] = cutlass.select_(seen, scores[x], -Float32.inf)
                rows.add(scores)
                if now + step < groups:
                    self.load(rows, stored, 1, table, page, after)
                    self.read_rounded(rows, stored, 1, after)
                at = after
                after = self.first_of(sList, now + 2 * step, groups)
                page = self.page(table, after)

    def page(self, table: Table, at: Int32) -> Int32:
        """In each lane the page of token ``at + lane % spec.keys``, for `row_of`."""
        return table.page(cutlass.min(at + cute.arch.lane_idx() % self.spec.keys, self.t))

    def row_of(self, stored: Stored, i: int, table: Table, page: Int32, first: Int32, n: Int32) -> cute.Tensor:
        """Row [D] of token ``min(first + n, t)``; page: the result of `page` for `first`."""
        if const_expr(table.pages is not None):
            page = cute.arch.shuffle_sync(page, n)
        return stored.token(i, table, page, cutlass.min(first + n, self.t), self.head)


def num_tiles(spec: DecodeSpec) -> int:
    return -(-spec.G // ROWS)
