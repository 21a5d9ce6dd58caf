"""Third launch of a step: the selected branch, and the gated sum of all three.

The thread blocks of a cluster share the listed blocks of up to 16 query heads of one token and key/value head; each
makes the token's list of the second launch's candidates. While its first keys are on the way, a thread block merges the
other branches' partial results of its share of the rows, to which it adds at last what the cluster has of the selected
branch, in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.block_topk.online_softmax import exp2
from nsa_layer.kernels.block_topk.register_topk import unpack_block
from nsa_layer.kernels.decode.choice import candidates, rank_of
from nsa_layer.kernels.decode.compressed import LOG2_E
from nsa_layer.kernels.decode.places import Lengths, Pieces
from nsa_layer.kernels.decode.spec import KEYS, MOST_PARTS, ROWS, THREADS, DecodeSpec
from nsa_layer.kernels.decode.stored import Stored, new_row
from nsa_layer.kernels.decode.tokens import TokenTile, num_tiles
from nsa_layer.kernels.decode.warp_rows import no_rows, shared_partial, write_partial
from nsa_layer.kernels.gating.gated_sum import EQUAL_SHARE

LOG_2 = math.log(2.0)
COLUMNS = 4  # of a row in one thread
CMP, SLC, SWA = range(3)
OTHERS = (CMP, SWA)


class SelectedDecode:
    """The kernel."""

    shapes = (
        "Bq Tq Hq D", "P S Hkv D", "P S Hkv D", "B np *", "B *", "Bs *", "B *", "B T Hkv parts n", "B Hkv R pieces 2",
        "B Hkv R pieces D", "B Hkv", "B T Hkv width", "Hq 3 D", "Bq Tq Hq 3 *", "Bq Tq Hq D", "Bq Hq Tq", "Bq Hq Tq",
        "Bq Hq Tq",
    )  # fmt: skip

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK_cache: cute.Tensor,
        mV_cache: cute.Tensor,
        mPages: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mLengths: cute.Tensor,
        mBest: cute.Tensor,  # int64 [B, T, Hkv, parts, spec.chosen]
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        mLists: cute.Tensor | None,  # int32 [B, T, Hkv, spec.list_width]
        mW: cute.Tensor | None,
        mGates: cute.Tensor | None,
        mO: cute.Tensor,
        mLSE_cmp: cute.Tensor,
        mLSE_slc: cute.Tensor,
        mLSE_swa: cute.Tensor,
        room: Int32,
        compressed_room: Int32,
        cmp: Int32,
        slc: Int32,
        swa: Int32,
        parts: Int32,
        softmax_scale: Float32,
        stream,
    ):
        spec = self.spec
        lengths = Lengths(spec, mLengths, mCu, mIdx, room, compressed_room, Int32(mQ.shape[1]))
        tokens = Stored((mK_cache, mV_cache), (None, None), mPages)
        B, Hkv, _, _, _ = mStats.shape
        pieces, lses = Pieces(cmp, swa, parts), (mLSE_cmp, mLSE_slc, mLSE_swa)
        partial, gates = (mStats, mAcc, mValid), (mW, mGates)
        self.kernel(mQ, tokens, lengths, pieces, slc, mBest, partial, mLists, gates, mO, lses, softmax_scale * LOG2_E
        ).launch(
            grid=[slc * num_tiles(spec) * spec.T, Hkv, B],
            block=[THREADS, 1, 1],
            cluster=[slc, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=75,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        tokens: Stored,
        lengths: Lengths,
        pieces: Pieces,
        slc: Int32,
        mBest: cute.Tensor,
        partial: tuple,
        mLists: cute.Tensor | None,
        gates: tuple,
        mO: cute.Tensor,
        mLSEs: tuple,
        scale_log2: Float32,
    ):
        spec, (mStats, mAcc, mValid) = self.spec, partial
        tidx, _, _ = cute.arch.thread_idx()
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = shared_partial(smem, spec.D)
        sList = smem.allocate_tensor(Int32, cute.make_layout(spec.list_width), byte_alignment=16)
        sBest = smem.allocate_tensor(Int64, cute.make_layout(MOST_PARTS * spec.chosen), byte_alignment=16)
        merged = Merged(
            smem.allocate_tensor(Float32, cute.make_layout((2, ROWS, 3)), byte_alignment=16),
            smem.allocate_tensor(Float32, cute.make_layout((spec.D, ROWS, 3)), byte_alignment=16),
            smem.allocate_tensor(Float32, cute.make_layout((3, ROWS)), byte_alignment=16),
        )
        sequence, found = lengths.of(b), pieces.parts * spec.chosen
        own = TokenTile.of(spec, sequence, head, x, slc)
        rows = no_rows(spec.D, mQ.element_type, scale_log2)
        own.set_queries(rows, mQ)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        # Loaded whether they count or not, beside what tells.
        for i in cutlass.range(tidx, found, THREADS, unroll=2):
            sBest[i] = mBest[b, own.token, head, i // spec.chosen, i % spec.chosen]
        valid = mValid[b, head] != 0
        listed = self.make_list(own.t, found, sBest, sList)
        if const_expr(mLists is not None):
            if valid & (own.token < sequence.T) & (own.share == 0) & (own.first == 0):
                write_list(mLists[b, own.token, head, None], sList, listed)
        groups = cutlass.select_(valid & (own.token < sequence.T), listed * (spec.block_size // KEYS), Int32(0))
        own.load_first(rows, tokens, sList, groups)
        share = RowShare.of(own, spec)
        share.merge_others(merged, pieces, mStats[b, head, None, None, None], mAcc[b, head, None, None, None])
        share.set_gates(merged, mQ, *gates)
        own.attend(rows, tokens, sList, groups)
        write_partial(rows, *shared, merged.of_rows(SLC), merged.sums_of_rows(SLC), Int32(0), own.count, Int32(0))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        first_row, T = lengths.queries(b)
        there = own.token < T
        if const_expr(lengths.cu_seqlens_q is not None):
            there = there & (first_row + own.token >= 0) & (first_row + own.token < lengths.total)
        if there:
            share.write(merged, mO, mLSEs, valid, first_row + own.token)
        cute.arch.cluster_arrive_relaxed()  # nobody reads what is gone
        cute.arch.cluster_wait()

    @cute.jit
    def make_list(self, t: Int32, found: Int32, sBest: cute.Tensor, sList: cute.Tensor) -> Int32:
        """Token t's blocks, in any order, in shared memory; returns their number."""
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        begin, end = candidates(spec, t)
        own, forced = t // spec.block_size, Int32(0)
        if const_expr(spec.force):
            forced = cutlass.min(own, 2) + 1
            if tidx < forced:
                sList[tidx] = cutlass.select_(tidx == 2, Int32(0), own - tidx)
        cute.arch.sync_threads()
        room = cutlass.max(spec.n - forced, 0)
        for i in cutlass.range(tidx, found, THREADS, unroll=1):
            rank = rank_of(sBest, i, found)
            if (rank < room) & (sBest[i] >= 0):
                sList[forced + rank] = unpack_block(sBest[i])
        cute.arch.sync_threads()
        return forced + cutlass.min(room, end - begin)


@dataclass(frozen=True)
class Merged:
    """The sums over a thread block's keys of all three branches of its rows, in shared memory.

    Attributes:
        stats, sums: fp32 [2, ROWS, 3] and [D, ROWS, 3]: maxima and sums, in units of log2, and sums of values.
        gates: fp32 [3, ROWS].
    """

    stats: cute.Tensor
    sums: cute.Tensor
    gates: cute.Tensor

    def of_rows(self, i: int) -> cute.Tensor:
        """A branch's stats as [ROWS, 1, 2]."""
        return cute.make_tensor(self.stats[None, None, i].iterator, cute.make_layout((ROWS, 1, 2), stride=(2, 0, 1)))

    def sums_of_rows(self, i: int) -> cute.Tensor:
        """[ROWS, 1, D]"""
        D = self.sums.shape[0]
        return cute.make_tensor(self.sums[None, None, i].iterator, cute.make_layout((ROWS, 1, D), stride=(D, 0, 1)))

    def in_block(self, rank: Int32) -> Merged:
        """Those of another thread block of the cluster."""
        theirs = [
            cute.make_tensor(cute.arch.map_dsmem_ptr(x.iterator, rank), x.layout)
            for x in (self.stats, self.sums, self.gates)
        ]
        return Merged(*theirs)


@dataclass(frozen=True)
class RowShare:
    """A thread block's share of its cluster's rows, every so many of them.

    Groups of threads have a row each; if there are fewer rows, `ways` groups share the partial results of a row.

    Attributes:
        count: of its rows.
        ways: groups of a row.
    """

    tile: TokenTile
    D: cutlass.Constexpr[int]
    count: Int32
    ways: Int32

    @classmethod
    def of(cls, tile: TokenTile, spec: DecodeSpec) -> RowShare:
        count = cute.ceil_div(cutlass.max(tile.count - tile.share, 0), tile.shares)
        groups = THREADS * COLUMNS // spec.D
        return cls(tile, spec.D, count, cutlass.max(groups // cutlass.max(count, 1), 1))

    def group(self) -> tuple[Int32, Int32, int]:
        """This thread's place in its group, its group, and the number of groups."""
        lanes = self.D // COLUMNS
        tidx, _, _ = cute.arch.thread_idx()
        return tidx % lanes, tidx // lanes, THREADS // lanes

    def row(self, i: Int32) -> Int32:
        return self.tile.share + i * self.tile.shares

    @cute.jit
    def merge_others(self, merged: Merged, pieces: Pieces, stats: cute.Tensor, acc: cute.Tensor):
        """Merge partial results of the compressed branch and the window."""
        lane, group, groups = self.group()
        begins, counts = (Int32(0), pieces.cmp), (pieces.cmp, pieces.swa)
        for slot in cutlass.range(group, self.count * self.ways, groups, unroll=1):
            row = self.tile.first_row + self.row(slot // self.ways)
            for i in cutlass.range_constexpr(2):
                begin = begins[i] + slot % self.ways
                part = Part.nothing()
                for piece in cutlass.range(begin, begins[i] + counts[i], self.ways, unroll=4):
                    part.add(stats[row, piece, None], acc[row, piece, None], lane)
                part.write(merged.stats[None, slot, OTHERS[i]], merged.sums[None, slot, OTHERS[i]], lane)

    @cute.jit
    def set_gates(self, merged: Merged, mQ: cute.Tensor, mW: cute.Tensor | None, mGates: cute.Tensor | None):
        """Gates of the rows, to shared memory; a group's threads together."""
        lane, group, groups = self.group()
        tile = self.tile
        for turn in cutlass.range(cute.ceil_div(self.count, groups), unroll=1):
            i = turn * groups + group
            h = tile.q_head(cutlass.min(self.row(i), tile.count - 1))
            found = self.gates(mQ, mW, mGates, h, lane)
            if (lane == 0) & (i < self.count):
                for n in cutlass.range_constexpr(3):
                    merged.gates[n, i] = found[n]

    def gates(
        self, mQ: cute.Tensor, mW: cute.Tensor | None, mGates: cute.Tensor | None, head: Int32, lane: Int32
    ) -> list[Float32]:
        tile = self.tile
        if mGates is not None:
            given = new_row(mGates, tile.sequence, tile.token, head)
            return [given[n].to(Float32) for n in range(3)]
        if mW is None:
            return [Float32(EQUAL_SHARE)] * 3
        q, found = fragment(new_row(mQ, tile.sequence, tile.token, head), lane), []
        for n in range(3):
            w = fragment(mW[head, n, None], lane)
            total = sum(q[x].to(Float32) * w[x].to(Float32) for x in range(COLUMNS))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.D // COLUMNS)
            found.append(cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * total)))
        return found

    @cute.jit
    def write(self, merged: Merged, mO: cute.Tensor, mLSEs: tuple, valid: Boolean, at: Int32):
        """Write the rows of o and of the log-sum-exps."""
        lane, group, groups = self.group()
        tile = self.tile
        batch = tile.sequence.b * cutlass.min(mO.shape[0] - 1, 1)
        for i in cutlass.range(group, self.count, groups, unroll=1):
            row = self.row(i)
            h, o = tile.q_head(row), cute.make_rmem_tensor((COLUMNS,), Float32)
            o.fill(0.0)
            for n in cutlass.range_constexpr(3):
                part = Part.nothing()
                if const_expr(n == SLC):
                    for rank in cutlass.range(tile.shares, unroll=4):
                        theirs = merged.in_block(rank)
                        part.add(theirs.stats[None, row, n], theirs.sums[None, row, n], lane)
                else:
                    for way in cutlass.range(self.ways, unroll=1):
                        slot = i * self.ways + way
                        part.add(merged.stats[None, slot, n], merged.sums[None, slot, n], lane)
                total = part.total[0]
                gate = cutlass.select_(total == 0.0, Float32(0.0), merged.gates[n, i] / total)
                for x in cutlass.range_constexpr(COLUMNS):
                    o[x] += gate * part.sums[x]
                if lane == n:
                    lse = (part.shift() + cute.math.log2(total)) * LOG_2
                    mLSEs[n][batch, h, at] = cutlass.select_(valid, lse, Float32(float("nan")))
            out = cute.make_rmem_tensor((COLUMNS,), mO.element_type)
            for x in cutlass.range_constexpr(COLUMNS):
                out[x] = Float32(cutlass.select_(valid, o[x], Float32(float("nan")))).to(mO.element_type)
            cute.autovec_copy(out, cute.local_tile(mO[batch, at, h, None], (COLUMNS,), (lane,)))


@dataclass(frozen=True)
class Part:
    """A few columns of a row's attention to some of its keys, not divided by the sum.

    Attributes:
        top, total: fp32 [1]: maximum and sum, in units of log2.
        sums: fp32 [COLUMNS].
    """

    top: cute.Tensor
    total: cute.Tensor
    sums: cute.Tensor

    @classmethod
    def nothing(cls) -> Part:
        part = cls(*(cute.make_rmem_tensor((n,), Float32) for n in (1, 1, COLUMNS)))
        part.top.fill(-Float32.inf)
        part.total.fill(0.0)
        part.sums.fill(0.0)
        return part

    def shift(self) -> Float32:
        return finite(self.top[0])

    def add(self, stats: cute.Tensor, sums: cute.Tensor, lane: Int32) -> None:
        """Add another part: stats [2], and the columns of a row [D] that are this thread's."""
        theirs, head = fragment(sums, lane), fragment(stats, Int32(0), 2)
        own, total = head[0], head[1]
        top = cute.arch.fmax(self.top[0], own)
        shrink, weight = exp2(self.top[0] - finite(top)), exp2(own - finite(top))
        self.top[0] = top
        self.total[0] = self.total[0] * shrink + total * weight
        for x in range(COLUMNS):
            # A part without keys has no sums: what lies there may be NaN.
            added = cutlass.select_(own == -Float32.inf, Float32(0.0), theirs[x] * weight)
            self.sums[x] = self.sums[x] * shrink + added

    @cute.jit
    def write(self, stats: cute.Tensor, sums: cute.Tensor, lane: Int32):
        cute.autovec_copy(self.sums, cute.local_tile(sums, (COLUMNS,), (lane,)))
        if lane == 0:
            stats[0] = self.top[0]
            stats[1] = self.total[0]


def finite(top: Float32) -> Float32:
    """A maximum to subtract, 0 where there is no key."""
    return Float32(cutlass.select_(top == -Float32.inf, Float32(0.0), top))


def fragment(row: cute.Tensor, lane: Int32, columns: int = COLUMNS) -> cute.Tensor:
    """This thread's columns of a row."""
    part = cute.make_rmem_tensor((columns,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (columns,), (lane,)), part)
    return part


@cute.jit
def write_list(to: cute.Tensor, sList: cute.Tensor, listed: Int32):
    """The list in ascending order, padded with -1."""
    tidx, _, _ = cute.arch.thread_idx()
    width = cute.size(sList)
    if tidx < width:
        to[tidx] = Int32(-1)
    cute.arch.sync_threads()
    if tidx < listed:
        rank = Int32(0)
        for i in cutlass.range(listed, unroll=1):
            rank += cutlass.select_(sList[i] < sList[tidx], Int32(1), Int32(0))
        to[rank] = sList[tidx]
