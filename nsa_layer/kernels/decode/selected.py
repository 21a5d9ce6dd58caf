"""The step's only or second launch: window, selection, selected branch, and the gated sum of all branches.

A cluster has up to 16 query heads of one token and key/value head; its CTAs share the keys and the selection of blocks.
In a single launch they begin with the compressed branch, and the window's keys are loaded during the selection, which
takes long and reads little. Otherwise they attend to the window while the earlier launch runs. Rows that the step
appends are read from the call's tensors. Then each CTA makes the token's list from the cluster's candidates, and
attends to a share of the listed keys. In the end each CTA merges a share of the rows, whose partial sums lie in the
shared memory of all CTAs of the cluster, while one CTA for each sequence and head appends to the caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from flash_attn.cute.utils import LOG2_E
from nsa_layer.kernels.decode.append import append, complete_keys, write_valid
from nsa_layer.kernels.decode.attention import TokenTile, allocate_rows, num_tiles, write_partial
from nsa_layer.kernels.decode.cache_rows import Caches, Lengths, Sequence, new_row
from nsa_layer.kernels.decode.compressed import RowTile
from nsa_layer.kernels.decode.partial_sums import AT_ONCE, COLUMNS, Part, finite, fragment, shared_partial
from nsa_layer.kernels.decode.spec import (
    LAUNCH,
    RESIDENT,
    ROWS,
    WARP,
    WARPS,
    DecodeSpec,
    OutputTensors,
    StepTensors,
)
from nsa_layer.kernels.decode.topk import Selection, candidate_range, rank_of
from nsa_layer.kernels.select_by_tile.online_softmax import exp2
from nsa_layer.kernels.select_by_tile.register_topk import unpack_block

LOG_2 = math.log(2.0)
CMP, SLC, SWA = range(3)


class SelectedDecode:
    """The kernel of the only or second launch."""

    shapes = (*StepTensors(), *OutputTensors())

    def __init__(self, spec: DecodeSpec, warps: int, each: int) -> None:
        """warps: of a CTA; each: blocks of a thread in a round of the selection."""
        self.spec = spec
        self.warps = warps
        self.each = each

    @cute.jit
    def __call__(self, *arguments):
        """`StepTensors`, `OutputTensors`, capacities as in `CompressedDecode`, CTAs of a cluster, scale, stream."""
        *tensors, capacity, compressed_capacity, slc, softmax_scale, stream = arguments
        spec, count = self.spec, len(StepTensors._fields)
        step, out = StepTensors(*tensors[:count]), OutputTensors(*tensors[count:])
        lengths, caches = Lengths.of(spec, step, capacity, compressed_capacity), Caches.of(step)
        B, Hkv, _, _ = step.scores.shape
        partial = step.scores, step.stats, step.acc, step.valid
        gates = out.gate_weight, out.gates, (step.v_cmp_scale, step.v_scale, caches.read_window().scales[1])
        lses = (out.lse_cmp, out.lse_slc, out.lse_swa)
        self.kernel(
            step.q, caches, lengths, slc, partial, out.lists, gates, out.o, lses, softmax_scale * LOG2_E
        ).launch(
            grid=[slc * num_tiles(spec) * spec.T, Hkv, B],
            cluster=[slc, 1, 1],
            stream=stream,
            **LAUNCH | dict(block=(WARP * self.warps, 1, 1), min_blocks_per_mp=RESIDENT * WARPS // self.warps),
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        caches: Caches,
        lengths: Lengths,
        slc: Int32,
        partial: tuple,
        mLists: cute.Tensor | None,
        gates: tuple,
        mO: cute.Tensor,
        mLSEs: tuple,
        scale_log2: Float32,
    ):
        spec, (mScores, mStats, mAcc, mValid) = self.spec, partial
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = shared_partial(smem, spec.columns_of_sums, self.warps)
        sList = smem.allocate_tensor(Int32, cute.make_layout(spec.n), byte_alignment=16)
        merged = Merged(
            smem.allocate_tensor(Float32, cute.make_layout((2, ROWS, 3)), byte_alignment=16),
            smem.allocate_tensor(Float32, cute.make_layout((spec.columns_of_sums, ROWS, 3)), byte_alignment=16),
            smem.allocate_tensor(Float32, cute.make_layout((3, ROWS)), byte_alignment=16),
        )
        caches = caches.with_rounded(smem, spec)
        whole, window = caches.keys is not None, caches.read_window()
        if const_expr(whole):
            assert num_tiles(spec) == 1  # the selection reads what the cluster wrote, of all heads
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        sequence = lengths.sequence(b, caches.rows)
        own = TokenTile.of(spec, self.warps, sequence, head, x, slc)
        selection = Selection.of(smem, own, self.each, whole)
        rows = allocate_rows(spec, mQ.element_type, caches.tokens.caches[0].element_type, scale_log2)
        share = RowShare.of(own, whole)
        scores = mScores[b, head, None, None]
        groups = Int32(0)
        if const_expr(spec.window):
            groups = cute.ceil_div(cutlass.min(own.t + 1, spec.window), spec.keys)
            groups = cutlass.select_(own.token < sequence.T, groups, Int32(0))
        if const_expr(whole):
            sBad = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
            keys = RowTile.of(
                spec, self.warps, sequence, caches.keys, head, own.first_row, own.count, own.share, own.shares
            )
            if own.share == own.shares - 1:
                complete_keys(sequence, caches, head, WARP * self.warps, shared[1], sBad)
            own.set_queries(rows, mQ, caches.keys)
            keys.load_first(rows, caches.keys)
            share.set_gates(merged, mQ, *gates)
            self.round_new(sequence, caches, head)
            if own.share == own.shares - 1:
                write_valid(mValid, sequence, caches, head, WARP * self.warps, sBad)
            rows.forget()
            keys.attend(rows, caches.keys, scores)
            own.load_first(rows, mQ, window, None, groups)
            keys.write(rows, *shared, merged.of_rows(CMP), merged.sums_of_rows(CMP), Int32(0), Int32(0))
            cute.arch.cluster_arrive()
        else:
            own.load_first(rows, mQ, window, None, groups)
            share.set_gates(merged, mQ, *gates)
            self.round_new(sequence, caches, head)
        rows.forget()
        if const_expr(whole):
            cute.arch.cluster_wait()
        else:
            own.attend(rows, window, None, groups)
            write_partial(rows, *shared, merged.of_rows(SWA), merged.sums_of_rows(SWA), Int32(0), own.count, Int32(0))
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(not spec.by_index):
                stats, acc = mStats[b, head, None, None, None], mAcc[b, head, None, None, None]
        valid = mValid[b, head] != 0
        if const_expr(spec.by_index):
            selection.select_by_index(scores, valid)
        else:
            selection.select(merged.of_rows(CMP) if whole else stats, scores, valid, window, groups)
        cute.arch.cluster_arrive()
        if const_expr(whole):
            own.attend(rows, window, None, groups)
            write_partial(rows, *shared, merged.of_rows(SWA), merged.sums_of_rows(SWA), Int32(0), own.count, Int32(0))
        cute.arch.cluster_wait()
        listed = self.make_list(own.t, selection.gather(), selection.gathered, sList)
        if const_expr(mLists is not None):
            if valid & (own.token < sequence.T) & (own.share == 0) & (own.first == 0):
                write_list(mLists[b, own.token, head, None], sList, listed)
        groups = cutlass.select_(valid & (own.token < sequence.T), listed * (spec.block_size // spec.keys), Int32(0))
        own.load_first(rows, mQ, caches.tokens, sList, groups)
        if const_expr(not (whole or spec.by_index)):
            share.merge_compressed(merged, stats, acc)
        rows.forget()
        own.attend(rows, caches.tokens, sList, groups)
        write_partial(rows, *shared, merged.of_rows(SLC), merged.sums_of_rows(SLC), Int32(0), own.count, Int32(0))
        cute.arch.cluster_arrive()
        if valid & (own.token == 0) & (own.first == 0) & (own.share == 0):  # the step itself reads the call's tensors
            append(spec, sequence, caches.tokens, head, WARP * self.warps)
            if const_expr(caches.window is not None):
                append(spec, sequence, caches.window, head, WARP * self.warps)
        cute.arch.cluster_wait()
        first_row, T = lengths.queries(b)
        there = own.token < T
        if const_expr(lengths.cu_seqlens_q is not None):
            there = there & (first_row + own.token >= 0) & (first_row + own.token < lengths.total)
        if there:
            share.write(merged, mO, mLSEs, valid, first_row + own.token)
        cute.arch.cluster_arrive_relaxed()  # no CTA ends while others read its shared memory
        cute.arch.cluster_wait()

    @cute.jit
    def round_new(self, sequence: Sequence, caches: Caches, head: Int32):
        """Round new rows of caches in FP8 into `Stored.rounded`; called by all threads."""
        if const_expr(caches.tokens.rounds(0) or caches.tokens.rounds(1)):
            append(self.spec, sequence, caches.tokens, head, WARP * self.warps, False)
            if const_expr(caches.window is not None):
                append(self.spec, sequence, caches.window, head, WARP * self.warps, False)
            cute.arch.sync_threads()

    @cute.jit
    def make_list(self, t: Int32, found: Int32, sBest: cute.Tensor, sList: cute.Tensor) -> Int32:
        """Write token t's blocks to sList, in any order; returns their number. sBest: `found` candidates."""
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        begin, end = candidate_range(spec, t)
        own, forced = t // spec.block_size, Int32(0)
        most = spec.init + spec.local
        if const_expr(most):
            forced = cutlass.min(own, min(most, spec.n) - 1) + 1
            if tidx < forced:  # local blocks from the token's own backwards, then the first ones
                first, block = tidx == spec.local, Int32(0)
                if const_expr(spec.init > 1):
                    first, block = tidx >= spec.local, cutlass.min(own, most - 1) - tidx
                sList[tidx] = cutlass.select_(first, block, own - tidx)
        cute.arch.sync_threads()
        wanted = cutlass.max(spec.n - forced, 0)
        for i in cutlass.range(tidx, found, WARP * self.warps, unroll=1):
            rank = rank_of(sBest, i, found)
            if (rank < wanted) & (sBest[i] >= 0):
                sList[forced + rank] = unpack_block(sBest[i])
        cute.arch.sync_threads()
        return forced + cutlass.min(wanted, end - begin)


@dataclass(frozen=True)
class Merged:
    """A CTA's partial sums of its rows in the three branches, in shared memory.

    Attributes:
        stats, sums: fp32 [2, ROWS, 3] and [columns, ROWS, 3], as in `partial_sums.Part`.
        gates: fp32 [3, ROWS], times the scales of values in FP8.
    """

    stats: cute.Tensor
    sums: cute.Tensor
    gates: cute.Tensor

    def of_rows(self, i: int) -> cute.Tensor:
        """A branch's stats as [ROWS, 1, 2]."""
        return cute.make_tensor(self.stats[None, None, i].iterator, cute.make_layout((ROWS, 1, 2), stride=(2, 0, 1)))

    def sums_of_rows(self, i: int) -> cute.Tensor:
        """A branch's sums as [ROWS, 1, columns]."""
        D = self.sums.shape[0]
        return cute.make_tensor(self.sums[None, None, i].iterator, cute.make_layout((ROWS, 1, D), stride=(D, 0, 1)))

    def in_cta(self, rank: Int32) -> Merged:
        """The partial sums of CTA `rank` of the cluster."""
        theirs = [
            cute.make_tensor(cute.arch.map_dsmem_ptr(x.iterator, rank), x.layout)
            for x in (self.stats, self.sums, self.gates)
        ]
        return Merged(*theirs)


@dataclass(frozen=True)
class RowShare:
    """The rows that a CTA merges: every `tile.shares`-th of its cluster's, from `tile.share` on.

    Groups of threads have a row each; if there are fewer rows, `ways` groups share the partial sums of a row.

    Attributes:
        whole: the compressed branch ran in this launch, and its partial sums are in the cluster's shared memory.
        count: number of the rows.
        ways: groups of threads that share a row.
    """

    tile: TokenTile
    whole: cutlass.Constexpr[bool]
    count: Int32
    ways: Int32

    @classmethod
    def of(cls, tile: TokenTile, whole: bool) -> RowShare:
        count = cute.ceil_div(cutlass.max(tile.count - tile.share, 0), tile.shares)
        groups = WARP * tile.warps * COLUMNS // tile.spec.columns_of_sums
        return cls(tile, whole, count, cutlass.max(groups // cutlass.max(count, 1), 1))

    def group(self) -> tuple[Int32, Int32, int]:
        """(index of this thread in its group, index of the group, number of groups)."""
        lanes = self.tile.spec.columns_of_sums // COLUMNS
        tidx, _, _ = cute.arch.thread_idx()
        return tidx % lanes, tidx // lanes, WARP * self.tile.warps // lanes

    def row(self, i: Int32) -> Int32:
        return self.tile.share + i * self.tile.shares

    @cute.jit
    def merge_compressed(self, merged: Merged, stats: cute.Tensor, acc: cute.Tensor):
        """Merge the compressed branch's partial sums of an earlier launch into `merged`."""
        lane, group, groups = self.group()
        for slot in cutlass.range(group, self.count * self.ways, groups, unroll=1):
            row, part = self.tile.first_row + self.row(slot // self.ways), Part.nothing()
            last = stats.shape[1] - 1
            for begin in cutlass.range(slot % self.ways, last + 1, self.ways * AT_ONCE, unroll=1):
                splits = [begin + n * self.ways for n in range(AT_ONCE)]
                clamped = [cutlass.min(split, last) for split in splits]
                theirs = [(stats[row, at, None], acc[row, at, None]) for at in clamped]
                part.add_all(theirs, [split <= last for split in splits], lane)
            part.write(merged.stats[None, slot, CMP], merged.sums[None, slot, CMP], lane)

    @cute.jit
    def set_gates(
        self, merged: Merged, mQ: cute.Tensor, mW: cute.Tensor | None, mGates: cute.Tensor | None, scales: tuple
    ):
        """Write the rows' gates, times the branches' scales of values, to `merged`; by all threads of a group."""
        lane, group, groups = self.group()
        tile = self.tile
        for step in cutlass.range(cute.ceil_div(self.count, groups), unroll=1):
            i = step * groups + group
            h = tile.q_head(cutlass.min(self.row(i), tile.count - 1))
            gates = self.gates(mQ, mW, mGates, h, lane)
            if (lane == 0) & (i < self.count):
                for n in cutlass.range_constexpr(3):
                    if const_expr(scales[n] is None):
                        merged.gates[n, i] = gates[n]
                    else:
                        merged.gates[n, i] = gates[n] * scales[n][tile.head]

    def gates(
        self, mQ: cute.Tensor, mW: cute.Tensor | None, mGates: cute.Tensor | None, head: Int32, lane: Int32
    ) -> list[Float32]:
        tile, gates = self.tile, [Float32(0.0)] * 3
        columns = tile.spec.columns
        if mGates is not None:
            row = new_row(mGates, tile.sequence, tile.token, head)
            for i, n in enumerate(columns):
                gates[n] = row[i].to(Float32)
            return gates
        if mW is None:
            return [Float32(1.0 / len(columns)) if n in columns else zero for n, zero in enumerate(gates)]
        lanes, count = tile.spec.columns_of_sums // COLUMNS, tile.spec.D // COLUMNS
        indices = [lane + first for first in range(0, count, lanes)]

        def pieces(row: cute.Tensor) -> list[cute.Tensor]:
            return [fragment(row, cutlass.min(at, count - 1) if count % lanes else at) for at in indices]

        q = pieces(new_row(mQ, tile.sequence, tile.token, head))
        for i, n in enumerate(columns):
            pairs = zip(q, pieces(mW[head, i, None]))
            parts = [sum(a[x].to(Float32) * b[x].to(Float32) for x in range(COLUMNS)) for a, b in pairs]
            if count % lanes:
                parts = [Float32(cutlass.select_(at < count, z, Float32(0.0))) for at, z in zip(indices, parts)]
            total = cute.arch.warp_reduction_sum(reduce(add, parts), threads_in_group=lanes)
            gates[n] = cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * total))
        return gates

    def add_ctas(self, parts: list[Part], merged: Merged, row: Int32, begin: Int32, count: int, lane: Int32) -> None:
        """Merge a row's partial sums of `count` CTAs of the cluster from `begin` on, as far as they exist."""
        ranks = [begin + i for i in range(count)]
        theirs = [merged.in_cta(cutlass.min(rank, self.tile.shares - 1)) for rank in ranks]
        there = [rank < self.tile.shares for rank in ranks]
        for n in range(3):
            if self.whole or n != CMP:
                parts[n].add_all([(x.stats[None, row, n], x.sums[None, row, n]) for x in theirs], there, lane)

    @cute.jit
    def write(self, merged: Merged, mO: cute.Tensor, mLSEs: tuple, valid: Boolean, at: Int32):
        """Merge the cluster's partial sums of the rows, and write o and the log-sum-exps."""
        lane, group, groups = self.group()
        tile = self.tile
        batch = tile.sequence.b * cutlass.min(mO.shape[0] - 1, 1)
        for i in cutlass.range(group, self.count, groups, unroll=1):
            row = self.row(i)
            h, o = tile.q_head(row), cute.make_rmem_tensor((COLUMNS,), Float32)
            o.fill(0.0)
            parts = [Part.nothing() for _ in range(3)]
            if tile.shares <= 2:
                self.add_ctas(parts, merged, row, Int32(0), 2, lane)
            else:
                for begin in cutlass.range(0, tile.shares, AT_ONCE, unroll=1):
                    self.add_ctas(parts, merged, row, begin, AT_ONCE, lane)
            if const_expr(not (self.whole or tile.spec.by_index)):
                for way in cutlass.range(self.ways, unroll=1):
                    slot = i * self.ways + way
                    parts[CMP].add_all([(merged.stats[None, slot, CMP], merged.sums[None, slot, CMP])], None, lane)
            for n in cutlass.range_constexpr(3):
                total = parts[n].total[0]
                gate = cutlass.select_(total == 0.0, Float32(0.0), merged.gates[n, i] / total)
                for x in cutlass.range_constexpr(COLUMNS):
                    o[x] += gate * parts[n].sums[x]
                if lane == n:
                    lse = (finite(parts[n].top[0]) + cute.math.log2(total)) * LOG_2
                    mLSEs[n][batch, h, at] = cutlass.select_(valid, lse, Float32(float("nan")))
            out = cute.make_rmem_tensor((COLUMNS,), mO.element_type)
            for x in cutlass.range_constexpr(COLUMNS):
                out[x] = Float32(cutlass.select_(valid, o[x], Float32(float("nan")))).to(mO.element_type)
            if lane < tile.spec.Dv // COLUMNS:
                cute.autovec_copy(out, cute.local_tile(mO[batch, at, h, None], (COLUMNS,), (lane,)))


@cute.jit
def write_list(to: cute.Tensor, sList: cute.Tensor, listed: Int32):
    """Write the list in ascending order, padded with -1."""
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
