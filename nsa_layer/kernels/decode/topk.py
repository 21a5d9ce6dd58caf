"""Top-k over a token's blocks by the compressed branch's probabilities or an index, shared by the CTAs of a cluster.

A block's importance needs the log-sum-exps of its group's heads, which are merged from the compressed branch's splits.
Each CTA has a share of the blocks, in 32 groups. The k-th largest of the groups' maxima bounds the k-th best block from
below: only blocks that reach it are kept, and ranked by comparing all pairs. Each CTA's best lie in shared memory, from
where every CTA of the cluster gathers and ranks them. A candidate is one int64 that orders as (score, earlier block
first); it is negative where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.decode.attention import TokenTile
from nsa_layer.kernels.decode.cache_rows import Stored
from nsa_layer.kernels.decode.partial_sums import finite, fragment
from nsa_layer.kernels.decode.spec import MOST_OF_CLUSTER, WARP, DecodeSpec
from nsa_layer.kernels.select_by_tile.online_softmax import exp2
from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of
from nsa_layer.kernels.select_by_token.candidates import HIGHEST_SCORE, NOTHING, candidate

SHARE = 8  # threads that share a head's splits
GROUPS = 32  # of a CTA's blocks
MOST_LOADED = 64  # scores that a thread loads before their log-sum-exps are known


@dataclass(frozen=True)
class Selection:
    """A CTA's part of a token's selection, in rounds of `each` blocks a thread.

    Attributes:
        whole: the compressed branch ran in this launch: each CTA of the cluster has a split's partial sums.
        lse: fp32 [G] in shared memory: the heads' log-sum-exps, in units of log2.
        tops: int32 [GROUPS] in shared memory: bits of the groups' best scores.
        count: int32 [1] in shared memory: entries of `best`.
        best: int64 in shared memory: candidates that reach the bound, in any order.
        top: int64 [spec.most_wanted] in shared memory: the CTA's best, which other CTAs of the cluster read.
        gathered: int64 [MOST_OF_CLUSTER * spec.most_wanted] in shared memory: `top` of all CTAs of the cluster.
    """

    tile: TokenTile
    each: cutlass.Constexpr[int]
    whole: cutlass.Constexpr[bool]
    lse: cute.Tensor
    tops: cute.Tensor
    count: cute.Tensor
    best: cute.Tensor
    top: cute.Tensor
    gathered: cute.Tensor

    @classmethod
    def of(cls, smem: SmemAllocator, tile: TokenTile, each: int, whole: bool) -> Selection:
        def shared(dtype: type[cutlass.Numeric], count: int) -> cute.Tensor:
            return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=16)

        wanted = tile.spec.most_wanted
        kept = [shared(Int64, n) for n in (each * WARP * tile.warps + wanted, wanted, MOST_OF_CLUSTER * wanted)]
        return cls(tile, each, whole, shared(Float32, tile.spec.G), shared(Int32, GROUPS), shared(Int32, 1), *kept)

    @property
    def overlapping(self) -> int:
        """Compressed keys that overlap a block."""
        spec = self.tile.spec
        return (spec.span + spec.block_size) // spec.stride - 1

    def first_block(self, step: Int32) -> Int32:
        """This thread's first block of a round."""
        tile = self.tile
        return (step * tile.shares * tile.warps + tile.group) * (WARP * self.each) + cute.arch.lane_idx()

    @cute.jit
    def select_by_index(self, scores: cute.Tensor, valid: Boolean):
        """Find this CTA's best by an index' scores, int32 [T, blocks]; called by all its threads."""
        tile, spec = self.tile, self.tile.spec
        tidx, _, _ = cute.arch.thread_idx()
        if tidx < spec.most_wanted:
            self.top[tidx] = Int64(NOTHING)
        if tidx == 0:
            self.count[0] = Int32(0)
        cute.arch.sync_threads()
        begin, end = candidate_range(spec, tile.t)
        end = cutlass.select_(valid & (tile.token < tile.sequence.T), end, Int32(0))
        rounds = cutlass.max(cute.ceil_div(end, tile.shares * tile.warps * WARP * self.each), 1)
        for step in cutlass.range(rounds, unroll=1):
            bits, first_block = cute.make_rmem_tensor((self.each,), Int32), self.first_block(step)
            for i in cutlass.range_constexpr(self.each):
                block = first_block + i * WARP
                score = scores[tile.token, cutlass.min(block, scores.shape[1] - 1)]
                bits[i] = cutlass.select_((block >= begin) & (block < end), score, Int32(-1))
            self.keep(bits, first_block)
            self.rank()

    @cute.jit
    def select(self, stats: cute.Tensor, scores: cute.Tensor, valid: Boolean, window: Stored, groups: Int32):
        """Find this CTA's best by the compressed branch's scores; called by all its threads.

        stats: fp32 [R, splits, 2] of the key/value head's rows, or [ROWS, 1, 2] in each CTA's shared memory.
        If `whole`, the window's second groups are prefetched into L2, after the log-sum-exps, which they would delay.
        """
        tile, spec = self.tile, self.tile.spec
        tidx, _, _ = cute.arch.thread_idx()
        first = tile.token * spec.G
        early = self.each * spec.G * self.overlapping <= MOST_LOADED
        loaded = cute.make_rmem_tensor((self.each, self.overlapping, spec.G) if early else (1, 1, 1), Float32)
        if const_expr(early):
            self.load(loaded, scores, first, Int32(0))
        self.log_sum_exps(stats, first)
        if tidx < spec.most_wanted:
            self.top[tidx] = Int64(NOTHING)
        if tidx == 0:
            self.count[0] = Int32(0)
        cute.arch.sync_threads()
        if const_expr(self.whole):
            tile.prefetch_window(window, groups)

        begin, end = candidate_range(spec, tile.t)
        end = cutlass.select_(valid & (tile.token < tile.sequence.T), end, Int32(0))
        rounds = cutlass.max(cute.ceil_div(end, tile.shares * tile.warps * WARP * self.each), 1)
        for step in cutlass.range(rounds, unroll=1):
            bits, first_block = cute.make_rmem_tensor((self.each,), Int32), self.first_block(step)
            for i in cutlass.range_constexpr(self.each):
                block, total = first_block + i * WARP, Float32(0.0)
                for x in cutlass.range_constexpr(self.overlapping):
                    p = Float32(0.0)
                    if const_expr(early):
                        for h in cutlass.range_constexpr(spec.G):
                            p += exp2(loaded[i, x, h] - self.lse[h])
                    else:
                        at = self.key_of(block, x, scores.shape[1])
                        for h in cutlass.range(spec.G, unroll=16):
                            p += exp2(scores[first + h, at] - self.lse[h])
                    key = self.key(block, x)
                    seen = (key >= 0) & (key < tile.sequence.keys_end(tile.t))
                    total += cutlass.select_(seen, times(spec, x) * p, Float32(0.0))
                score = cutlass.select_(total == total, bits_of(total), Int32(HIGHEST_SCORE))
                bits[i] = cutlass.select_((block >= begin) & (block < end), score, Int32(-1))
            if const_expr(early):
                if step + 1 < rounds:
                    self.load(loaded, scores, first, step + 1)
            self.keep(bits, first_block)
            self.rank()

    def load(self, loaded: cute.Tensor, scores: cute.Tensor, first: Int32, step: Int32) -> None:
        spec, first_block = self.tile.spec, self.first_block(step)
        for i in range(self.each):
            for x in range(self.overlapping):
                there = self.key_of(first_block + i * WARP, x, scores.shape[1])
                for h in range(spec.G):
                    loaded[i, x, h] = scores[first + h, there]

    def key(self, block: Int32, x: int) -> Int32:
        """The x-th key that overlaps a block."""
        spec = self.tile.spec
        return block * (spec.block_size // spec.stride) + x - (spec.span // spec.stride - 1)

    def key_of(self, block: Int32, x: int, keys: Int32) -> Int32:
        """The x-th key that overlaps a block, clamped to the keys there are."""
        return cutlass.max(cutlass.min(self.key(block, x), keys - 1), 0)

    @cute.jit
    def log_sum_exps(self, stats: cute.Tensor, first: Int32):
        """Write the log-sum-exps of the group's heads to shared memory."""
        spec, (tidx, _, _) = self.tile.spec, cute.arch.thread_idx()
        for h in cutlass.range_constexpr(0, spec.G, WARP * self.tile.warps // SHARE):
            head = h + tidx // SHARE
            lse = self.log_sum_exp(stats, first + cutlass.min(head, spec.G - 1))
            if (head < spec.G) & (tidx % SHARE == 0):
                self.lse[head] = lse

    @cute.jit
    def log_sum_exp(self, stats: cute.Tensor, row: Int32) -> Float32:
        """The log-sum-exp of a row over its splits, in units of log2; by `SHARE` neighbouring threads."""
        count = self.tile.shares if self.whole else stats.shape[1]
        lane, top, total = cute.arch.lane_idx() % SHARE, -Float32.inf, Float32(0.0)
        for begin in cutlass.range(lane, count, 2 * SHARE, unroll=1):
            indices = [begin, begin + SHARE]
            parts = [self.split(stats, row, cutlass.min(i, count - 1)) for i in indices]
            tops = [Float32(cutlass.select_(i < count, part[0], -Float32.inf)) for i, part in zip(indices, parts)]
            highest = cute.arch.fmax(top, cute.arch.fmax(*tops))
            total *= exp2(top - finite(highest))
            for own, part in zip(tops, parts):
                total += part[1] * exp2(own - finite(highest))
            top = highest
        shift = finite(cute.arch.warp_reduction_max(top, threads_in_group=SHARE))
        total = cute.arch.warp_reduction_sum(total * exp2(top - shift), threads_in_group=SHARE)
        return shift + cute.math.log2(total)

    def split(self, stats: cute.Tensor, row: Int32, i: Int32) -> cute.Tensor:
        """Maximum and sum of a row's split."""
        if self.whole:
            there = cute.make_tensor(cute.arch.map_dsmem_ptr(stats.iterator, i), stats.layout)
            return fragment(there[row - self.tile.first_row, 0, None], Int32(0), 2)
        return fragment(stats[row, i, None], Int32(0), 2)

    @cute.jit
    def keep(self, bits: cute.Tensor, first_block: Int32):
        """Append to `best` this round's blocks that reach the bound, and `top` of earlier rounds; by all threads."""
        wanted, (tidx, _, _) = self.tile.spec.most_wanted, cute.arch.thread_idx()
        own, size = bits[0], WARP * self.tile.warps // GROUPS
        for i in cutlass.range_constexpr(1, self.each):
            own = cutlass.max(own, bits[i])
        own = cute.arch.warp_reduction(own, cutlass.max, threads_in_group=size)
        if tidx % size == 0:
            self.tops[tidx // size] = own
        before = self.top[cutlass.min(tidx, wanted - 1)]
        cute.arch.sync_threads()
        bound = Int32(0)
        if const_expr(wanted <= GROUPS):
            own, better = self.tops[cute.arch.lane_idx()], Int32(0)
            for j in cutlass.range_constexpr(GROUPS):
                other = self.tops[j]
                first = (other == own) & (j < cute.arch.lane_idx())
                better += cutlass.select_((other > own) | first, Int32(1), Int32(0))
            bound = cute.arch.warp_redux_sync(cutlass.select_(better == wanted - 1, own, Int32(0)), "max")
        if tidx < wanted:
            self.top[tidx] = Int64(NOTHING)
            if before >= 0:
                self.best[self.next_slot()] = before
        for i in cutlass.range_constexpr(self.each):
            if bits[i] >= bound:
                self.best[self.next_slot()] = candidate(bits[i], first_block + i * WARP)
        cute.arch.sync_threads()

    def next_slot(self) -> Int32:
        return cute.arch.atomic_add(self.count.iterator.llvm_ptr, Int32(1), sem="relaxed", scope="cta")

    @cute.jit
    def rank(self):
        """Rank `best` into `top`, and empty it; by all threads."""
        count, (tidx, _, _) = self.count[0], cute.arch.thread_idx()
        for i in cutlass.range(tidx, count, WARP * self.tile.warps, unroll=1):
            rank = rank_of(self.best, i, count)
            if rank < self.tile.spec.most_wanted:
                self.top[rank] = self.best[i]
        cute.arch.sync_threads()
        if tidx == 0:
            self.count[0] = Int32(0)

    @cute.jit
    def gather(self) -> Int32:
        """Copy `top` of all CTAs of the cluster, which are done with selection, to `gathered`; returns their number."""
        wanted, (tidx, _, _) = self.tile.spec.most_wanted, cute.arch.thread_idx()
        count = self.tile.shares * wanted
        for i in cutlass.range(tidx, count, WARP * self.tile.warps, unroll=1):
            theirs = cute.make_tensor(cute.arch.map_dsmem_ptr(self.top.iterator, i // wanted), self.top.layout)
            self.gathered[i] = fragment(theirs, i % wanted, 1)[0]
        return count


def times(spec: DecodeSpec, x: int) -> float:
    """Strides that a block shares with the x-th key that overlaps it: the weight of that key's probability."""
    in_key, in_block = spec.span // spec.stride, spec.block_size // spec.stride
    return float(min(in_block, x + 1) - max(0, x - in_key + 1))


@cute.jit
def rank_of(entries: cute.Tensor, i: Int32, count: Int32) -> Int32:
    """The number of entries that are better than entry i."""
    own, rank = entries[i], Int32(0)
    for j in cutlass.range(count, unroll=8):
        rank += cutlass.select_(entries[j] > own, Int32(1), Int32(0))
    return rank


def candidate_range(spec: DecodeSpec, t: Int32) -> tuple[Int32, Int32]:
    """Token t's candidate blocks, which exclude the forced ones: the first, and one past the last."""
    if const_expr(spec.local):
        return Int32(spec.init), cutlass.max(t // spec.block_size - (spec.local - 1), spec.init)
    if const_expr(spec.init and not spec.by_index):
        return Int32(spec.init), cutlass.max((t + 1) // spec.block_size, spec.init)
    return Int32(spec.init), cutlass.max(t // spec.block_size + 1, spec.init)
