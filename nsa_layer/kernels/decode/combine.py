"""Fourth launch of a step: partial results of each row's branches, their gated sum, and their log-sum-exps."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.block_topk.online_softmax import exp2
from nsa_layer.kernels.decode.places import Lengths, Pieces
from nsa_layer.kernels.decode.spec import THREADS, WARP, DecodeSpec
from nsa_layer.kernels.gating.gated_sum import EQUAL_SHARE, LOG2_E

LOG_2 = math.log(2.0)
BRANCHES = 3


class CombineDecode:
    """The kernel: a thread block for each row, whose pieces its groups of threads share."""

    shapes = (
        "Bq Tq Hq D", "Hq 3 D", "Bq Tq Hq 3 *", "B *", "Bs *", "B Hkv R pieces 2", "B Hkv R pieces D", "B Hkv",
        "Bq Tq Hq D", "Bq Hq Tq", "Bq Hq Tq", "Bq Hq Tq",
    )  # fmt: skip

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mW: cute.Tensor | None,
        mGates: cute.Tensor | None,
        mLengths: cute.Tensor,
        mCu: cute.Tensor | None,
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        mO: cute.Tensor,
        mLSE_cmp: cute.Tensor,
        mLSE_slc: cute.Tensor,
        mLSE_swa: cute.Tensor,
        room: Int32,
        compressed_room: Int32,
        cmp: Int32,
        slc: Int32,
        swa: Int32,
        stream,
    ):
        lengths = Lengths(self.spec, mLengths, mCu, None, room, compressed_room, Int32(mO.shape[1]))
        B, Hkv, R, _, _ = mStats.shape
        pieces, lses = Pieces(cmp, slc, swa, Int32(0)), (mLSE_cmp, mLSE_slc, mLSE_swa)
        self.kernel(lengths, pieces, mQ, mW, mGates, mStats, mAcc, mValid, mO, lses).launch(
            grid=[R, Hkv, B], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        lengths: Lengths,
        pieces: Pieces,
        mQ: cute.Tensor,
        mW: cute.Tensor | None,
        mGates: cute.Tensor | None,
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        mO: cute.Tensor,
        mLSEs: tuple,
    ):
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        row, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        groups = THREADS // (spec.D // 4)
        sAcc = smem.allocate_tensor(Float32, cute.make_layout((spec.D, groups, BRANCHES)), byte_alignment=16)
        sStats = smem.allocate_tensor(Float32, cute.make_layout((2, groups, BRANCHES)), byte_alignment=16)
        sGates = smem.allocate_tensor(Float32, cute.make_layout(BRANCHES), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        token, h = row // spec.G, head * spec.G + row % spec.G
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        first_row, T = lengths.queries(b)
        at, batch, there = first_row + token, b, token < T
        if const_expr(lengths.cu_seqlens_q is not None):
            batch, there = Int32(0), there & (at >= 0) & (at < lengths.total)
        if there:
            splits = pieces.cmp, pieces.slc, pieces.swa
            first = Int32(0), pieces.cmp, pieces.cmp + pieces.slc
            stats, acc = mStats[b, head, row, None, None], mAcc[b, head, row, None, None]
            for i in cutlass.range_constexpr(BRANCHES):
                self.merge(stats, acc, first[i], splits[i], sAcc[None, None, i], sStats[None, None, i])
                if warp == i:
                    gate = Float32(EQUAL_SHARE)
                    if const_expr(mW is not None):
                        gate = self.gate(mQ[batch, at, h, None], mW[h, i, None])
                    elif const_expr(mGates is not None):
                        gate = mGates[batch, at, h, i].to(Float32)
                    if tidx % WARP == 0:
                        sGates[i] = gate
            valid = mValid[b, head] != 0
            cute.arch.sync_threads()
            if tidx < spec.D:
                o = Float32(0.0)
                for i in cutlass.range_constexpr(BRANCHES):
                    top = sStats[0, 0, i]
                    for n in cutlass.range_constexpr(1, groups):
                        top = cute.arch.fmax(top, sStats[0, n, i])
                    shift = Float32(cutlass.select_(top == -Float32.inf, Float32(0.0), top))
                    total, part = Float32(0.0), Float32(0.0)
                    for n in cutlass.range_constexpr(groups):
                        weight = exp2(sStats[0, n, i] - shift)
                        total += sStats[1, n, i] * weight
                        part += sAcc[tidx, n, i] * weight
                    o += cutlass.select_(total == 0.0, Float32(0.0), sGates[i] * part / total)
                    if tidx == i:
                        lse = (shift + cute.math.log2(total)) * LOG_2
                        mLSEs[i][batch, h, at] = cutlass.select_(valid, lse, Float32(float("nan")))
                o = Float32(cutlass.select_(valid, o, Float32(float("nan"))))
                mO[batch, at, h, tidx] = o.to(mO.element_type)

    @cute.jit
    def merge(
        self, stats: cute.Tensor, acc: cute.Tensor, first: Int32, count: Int32, sAcc: cute.Tensor, sStats: cute.Tensor
    ):
        """Merge each group's pieces, every so many from `first` on, and write them to shared memory."""
        tidx, _, _ = cute.arch.thread_idx()
        lanes = self.spec.D // 4
        lane, group, groups = tidx % lanes, tidx // lanes, THREADS // lanes
        top, total, sums = -Float32.inf, Float32(0.0), cute.make_rmem_tensor((4,), Float32)
        sums.fill(0.0)
        for piece in cutlass.range(first + group, first + count, groups, unroll=4):
            part = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(cute.local_tile(acc[piece, None], (4,), (lane,)), part)
            own = stats[piece, 0]
            highest = cute.arch.fmax(top, own)
            shift = Float32(cutlass.select_(highest == -Float32.inf, Float32(0.0), highest))
            shrink, weight = exp2(top - shift), exp2(own - shift)
            total = total * shrink + stats[piece, 1] * weight
            for x in cutlass.range_constexpr(4):
                # A piece without keys has no sums: what lies there may be NaN.
                added = cutlass.select_(own == -Float32.inf, Float32(0.0), part[x] * weight)
                sums[x] = sums[x] * shrink + added
            top = highest
        cute.autovec_copy(sums, cute.local_tile(sAcc[None, group], (4,), (lane,)))
        if lane == 0:
            sStats[0, group] = top
            sStats[1, group] = total

    @cute.jit
    def gate(self, q: cute.Tensor, weight: cute.Tensor) -> Float32:
        """``sigmoid(q . weight)``, by a warp."""
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.spec.D // WARP):
            d = i * WARP + cute.arch.lane_idx()
            total += q[d].to(Float32) * weight[d].to(Float32)
        total = cute.arch.warp_reduction_sum(total)
        return cute.arch.rcp_approx(1.0 + exp2(-LOG2_E * total))
