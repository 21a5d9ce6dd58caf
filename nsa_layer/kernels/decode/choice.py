"""Second launch of a step: the best blocks of each part of a sequence's, by the compressed branch's probabilities.

A block's importance needs the log-sum-exps of its group's heads, which the first launch left in pieces. Every warp
finds the best of its blocks, one after another, and a thread block the best of its warps'; the third launch merges
those of all thread blocks. A candidate is one int64 that orders as (score, earlier block first), below 0 where there
is none.

This takes long and reads little, so the sliding window's attention goes beside it, in thread blocks of its own. They
do not wait for the first launch: of what it appends, they read what it is given.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.block_topk.online_softmax import exp2
from nsa_layer.kernels.block_topk.split_fp16 import bits_of
from nsa_layer.kernels.decode.compressed import LOG2_E
from nsa_layer.kernels.decode.places import Lengths, Pieces, Sequence
from nsa_layer.kernels.decode.spec import KEYS, THREADS, WARP, WARPS, DecodeSpec
from nsa_layer.kernels.decode.stored import Stored
from nsa_layer.kernels.decode.tokens import TokenTile, num_tiles
from nsa_layer.kernels.decode.warp_rows import no_rows, shared_partial, write_nothing, write_partial
from nsa_layer.kernels.token_topk.candidates import NOTHING, candidate

NAN_BITS = 0x7FFFFFFF  # NaN is best
NO_BLOCK = (1 << 31) - 1
SHARE = 8  # threads that share a head's pieces
MOST_LOADED = 128  # scores that a thread loads before it knows what they count


class ChoiceDecode:
    """The kernel."""

    shapes = (
        "Bq Tq Hq D", "P S Hkv D", "P S Hkv D", "Bk Tk Hkv D", "Bk Tk Hkv D", "B np *", "B *", "Bs *", "B *",
        "B Hkv R keys", "B Hkv R pieces 2", "B Hkv R pieces D", "B Hkv", "B T Hkv parts n",
    )  # fmt: skip

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK_cache: cute.Tensor,  # the window's
        mV_cache: cute.Tensor,
        mK: cute.Tensor | None,
        mV: cute.Tensor | None,
        mPages: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mLengths: cute.Tensor,
        mScores: cute.Tensor,
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        mBest: cute.Tensor,  # int64 [B, T, Hkv, parts, spec.chosen]
        room: Int32,
        compressed_room: Int32,
        cmp: Int32,
        swa: Int32,
        parts: Int32,
        softmax_scale: Float32,
        stream,
    ):
        spec = self.spec
        lengths = Lengths(spec, mLengths, mCu, mIdx, room, compressed_room, Int32(mQ.shape[1]))
        window = Stored((mK_cache, mV_cache), (mK, mV), mPages)
        pieces = Pieces(cmp, swa, parts)
        B, Hkv, _, _ = mScores.shape
        partial = mStats, mAcc
        self.kernel(mQ, window, lengths, pieces, mScores, partial, mValid, mBest, softmax_scale * LOG2_E).launch(
            grid=[(parts + swa * num_tiles(spec)) * spec.T, Hkv, B],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=50,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        window: Stored,
        lengths: Lengths,
        pieces: Pieces,
        mScores: cute.Tensor,
        partial: tuple,
        mValid: cute.Tensor,
        mBest: cute.Tensor,
        scale_log2: Float32,
    ):
        spec = self.spec
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = shared_partial(smem, spec.D)
        sLse = smem.allocate_tensor(Float32, cute.make_layout(spec.G), byte_alignment=16)
        sBest = smem.allocate_tensor(Int64, cute.make_layout(WARPS * spec.chosen), byte_alignment=16)
        sequence, choosing = lengths.of(b), pieces.parts * spec.T
        stats, acc = partial[0][b, head, None, None, None], partial[1][b, head, None, None, None]
        if x < choosing:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            part, token = x % pieces.parts, x // pieces.parts
            scores, best = mScores[b, head, None, None], mBest[b, token, head, part, None]
            self.choose(sequence, token, part, pieces.cmp, stats, scores, mValid[b, head] != 0, best, sLse, sBest)
        else:
            cute.arch.griddepcontrol_launch_dependents()
            own = TokenTile.of(spec, sequence, head, x - choosing, pieces.swa)
            if own.token < sequence.T:
                groups = own.t // KEYS - cutlass.max(own.t - spec.window + 1, 0) // KEYS + 1
                piece = pieces.cmp + own.share
                if own.share * WARPS < groups:
                    rows = no_rows(spec.D, mQ.element_type, scale_log2)
                    own.set_queries(rows, mQ)
                    own.load_first(rows, window, None, groups)
                    own.attend(rows, window, None, groups)
                    write_partial(rows, *shared, stats, acc, own.first_row, own.count, piece)
                else:
                    write_nothing(stats, own.first_row, own.count, piece)

    @cute.jit
    def choose(
        self,
        sequence: Sequence,
        token: Int32,
        part: Int32,
        splits: Int32,
        stats: cute.Tensor,
        scores: cute.Tensor,
        valid: cutlass.Boolean,
        to: cute.Tensor,
        sLse: cute.Tensor,
        sBest: cute.Tensor,
    ):
        """Write the part's best blocks; all threads together. Scores are loaded whether they count or not."""
        spec = self.spec
        lane, (tidx, _, _) = cute.arch.lane_idx(), cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        first, first_block = token * spec.G, (part * WARPS + warp) * (WARP * spec.each) + lane
        overlapping = (spec.span + spec.block_size) // spec.stride - 1  # keys of a block
        early = spec.each * spec.G * overlapping <= MOST_LOADED
        loaded = cute.make_rmem_tensor((spec.each, overlapping, spec.G) if early else (1, 1, 1), Float32)
        if const_expr(early):
            for i in cutlass.range_constexpr(spec.each):
                for x in cutlass.range_constexpr(overlapping):
                    there = self.key_of(first_block + i * WARP, x, scores.shape[1])
                    for h in cutlass.range_constexpr(spec.G):
                        loaded[i, x, h] = scores[first + h, there]
        self.log_sum_exps(stats, first, splits, sLse)
        cute.arch.sync_threads()

        t = sequence.position(token)
        begin, end = candidates(spec, t)
        end = cutlass.select_(valid & (token < sequence.T), end, Int32(0))
        if part * (THREADS * spec.each) < end:
            bits = cute.make_rmem_tensor((spec.each,), Int32)
            for i in cutlass.range_constexpr(spec.each):
                block, total = first_block + i * WARP, Float32(0.0)
                for x in cutlass.range_constexpr(overlapping):
                    key = block * (spec.block_size // spec.stride) + x - (spec.span // spec.stride - 1)
                    p = Float32(0.0)
                    if const_expr(early):
                        for h in cutlass.range_constexpr(spec.G):
                            p += exp2(loaded[i, x, h] - sLse[h])
                    else:
                        at = self.key_of(block, x, scores.shape[1])
                        for h in cutlass.range(spec.G, unroll=16):
                            p += exp2(scores[first + h, at] - sLse[h])
                    seen = (key >= 0) & (key < sequence.keys_end(t))
                    total += cutlass.select_(seen, times(spec, x) * p, Float32(0.0))
                score = cutlass.select_(total == total, bits_of(total), Int32(NAN_BITS))
                bits[i] = cutlass.select_((block >= begin) & (block < end), score, Int32(-1))
            self.best_of_warp(bits, first_block, sBest)
            found = WARPS * spec.chosen
            for i in cutlass.range(tidx, found, THREADS, unroll=1):
                rank = rank_of(sBest, i, Int32(found))
                if rank < spec.chosen:
                    to[rank] = sBest[i]
        else:
            for i in cutlass.range(tidx, spec.chosen, THREADS, unroll=1):
                to[i] = Int64(NOTHING)

    def key_of(self, block: Int32, x: int, keys: Int32) -> Int32:
        """The x-th key that overlaps a block, or another that is there."""
        key = block * (self.spec.block_size // self.spec.stride) + x - (self.spec.span // self.spec.stride - 1)
        return cutlass.max(cutlass.min(key, keys - 1), 0)

    @cute.jit
    def log_sum_exps(self, stats: cute.Tensor, first: Int32, splits: Int32, sLse: cute.Tensor):
        """Those of the group's heads, in units of log2, to shared memory."""
        spec, (tidx, _, _) = self.spec, cute.arch.thread_idx()
        for h in cutlass.range_constexpr(0, spec.G, THREADS // SHARE):
            head = h + tidx // SHARE
            row = first + cutlass.min(head, spec.G - 1)
            lse = log_sum_exp(stats, row, Int32(0), splits, SHARE)
            if (head < spec.G) & (tidx % SHARE == 0):
                sLse[head] = lse

    @cute.jit
    def best_of_warp(self, bits: cute.Tensor, first_block: Int32, sBest: cute.Tensor):
        """The best of a warp's blocks, best first, to its part of shared memory."""
        spec, lane = self.spec, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        own = bits[0]
        for i in cutlass.range_constexpr(1, spec.each):
            own = cutlass.max(own, bits[i])
        for rank in cutlass.range(spec.chosen, unroll=1):
            best = cute.arch.warp_redux_sync(own, "max")
            block = Int32(NO_BLOCK)
            for i in cutlass.range_constexpr(spec.each):
                block = cutlass.select_((bits[i] == best) & (block == NO_BLOCK), first_block + i * WARP, block)
            block = cute.arch.warp_redux_sync(block, "min")
            at = warp * spec.chosen + rank
            if lane == 0:
                sBest[at] = cutlass.select_(best >= 0, candidate(best, block), Int64(NOTHING) + Int64(at))
            own = Int32(-1)
            for i in cutlass.range_constexpr(spec.each):
                bits[i] = cutlass.select_(first_block + i * WARP == block, Int32(-1), bits[i])
                own = cutlass.max(own, bits[i])
        cute.arch.sync_threads()


def times(spec: DecodeSpec, x: int) -> float:
    """Strides in which a block and the x-th key that overlaps it overlap."""
    in_key, in_block = spec.span // spec.stride, spec.block_size // spec.stride
    return float(min(in_block, x + 1) - max(0, x - in_key + 1))


@cute.jit
def rank_of(entries: cute.Tensor, i: Int32, count: Int32) -> Int32:
    """The number of entries that are better than entry i."""
    own, rank = entries[i], Int32(0)
    for j in cutlass.range(count, unroll=8):
        rank += cutlass.select_(entries[j] > own, Int32(1), Int32(0))
    return rank


def candidates(spec: DecodeSpec, t: Int32) -> tuple[Int32, Int32]:
    """The complete blocks of token t that are not forced: the first, and one past the last."""
    if const_expr(spec.force):
        return Int32(1), cutlass.max(t // spec.block_size - 1, 1)
    return Int32(0), (t + 1) // spec.block_size


@cute.jit
def log_sum_exp(stats: cute.Tensor, row: Int32, first: Int32, count: Int32, threads: cutlass.Constexpr[int]) -> Float32:
    """The log-sum-exp of a row's pieces from `first` on, in units of log2; by so many neighbouring threads."""
    lane = cute.arch.lane_idx() % threads
    top = -Float32.inf
    for i in cutlass.range(lane, count, threads, unroll=4):
        top = cute.arch.fmax(top, stats[row, first + i, 0])
    top = cute.arch.warp_reduction_max(top, threads_in_group=threads)
    shift = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0.0)
    for i in cutlass.range(lane, count, threads, unroll=4):
        total += stats[row, first + i, 1] * exp2(stats[row, first + i, 0] - shift)
    total = cute.arch.warp_reduction_sum(total, threads_in_group=threads)
    return shift + cute.math.log2(total)
