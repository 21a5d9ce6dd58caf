"""Scores of blocks by an index of tokens: the first launch of a decode step, whose second launch selects by them.

A warp takes a block at a time: neighbouring lanes have 16 bytes each of a key, and each lane up to `AT_ONCE` loads in
flight. Dot products with a query are reduce-scattered over the lanes of a key. A block's score is the largest over the
keys that the token sees, written as 31 bits that order as the score; a scale of keys in FP8 is left out, since it
does not change the order. Keys that all lists share are read once. The first CTA of a sequence and head appends the
call's index keys to the cache; the others read them from the call's tensor.
"""

from __future__ import annotations

from operator import add

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.decode.append import append, is_inside, write
from nsa_layer.kernels.decode.attention import vector
from nsa_layer.kernels.decode.cache_rows import UNLIMITED, Caches, Lengths, Sequence, Stored, new_row
from nsa_layer.kernels.decode.partial_sums import fragment
from nsa_layer.kernels.decode.spec import LAUNCH, VECTOR, WARP, WARPS, DecodeSpec
from nsa_layer.kernels.decode.topk import candidate_range
from nsa_layer.kernels.fp8 import floats
from nsa_layer.kernels.select_by_tile.register_topk import halve, reduce_tree
from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of
from nsa_layer.kernels.varlen import load_once

AT_ONCE = 8  # loads of a lane in flight
BLOCKS = 2  # of a warp
MOST_INDEX_ROWS = 64  # (token, list) pairs that share keys


class IndexDecode:
    """The kernel of block scores."""

    shapes = (
        *("Bq Tq Hkv D", "P S Hi D", "Bk Tk Hi D", "Hi *", "B n *", "B *", "Bs *", "B *"),
        *("B Hkv T blocks@16", "B Hkv"),
    )

    def __init__(self, spec: DecodeSpec, lists: int, splits_blocks: bool) -> None:
        """spec: D is the index' dimension; lists: that share an index key; splits_blocks: a block may span pages."""
        self.spec = spec
        self.lists = lists
        self.splits_blocks = splits_blocks

    @cute.jit
    def __call__(self, *arguments):
        """q_index; cache, new rows and scale of k_index; page table, rows of contiguous caches, starts of packed
        queries, lengths, scores int32, `StepTensors.valid`; capacity, stream."""
        mQ, mCache, mNew, mScale, table, batch_idx, cu_seqlens, seqlens, mScores, mValid, capacity, stream = arguments
        stored = Stored((mCache, None), (mNew, None), table, (mScale, None))
        lengths = Lengths(self.spec, seqlens, cu_seqlens, batch_idx, capacity, capacity, Int32(mQ.shape[1]))
        self.kernel(mQ, stored, lengths, mScores, mValid).launch(
            grid=[cute.ceil_div(mScores.shape[3], BLOCKS * WARPS), mCache.shape[2], mScores.shape[0]],
            stream=stream,
            **LAUNCH,
        )

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, stored: Stored, lengths: Lengths, mScores: cute.Tensor, mValid: cute.Tensor):
        spec, lists = self.spec, self.lists
        x, head, b = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        smem, rows = SmemAllocator(), spec.T * lists
        sQ = smem.allocate_tensor(Float32, cute.make_layout((spec.D, rows)), byte_alignment=16)
        sBad = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        held = UNLIMITED if const_expr(stored.pages is not None) else Int32(stored.caches[0].shape[0])
        sequence = lengths.sequence(b, held)
        for i in cutlass.range(tidx, rows * spec.D, WARP * WARPS, unroll=1):
            row = i // spec.D
            query = new_row(mQ, sequence, cutlass.min(row // lists, sequence.T - 1), head * lists + row % lists)
            sQ[i % spec.D, row] = query[i % spec.D].to(Float32)
        if x == 0:
            valid = is_inside(sequence, Caches(stored, None, None, (None, None)), WARP * WARPS, sBad)
            if tidx < lists:
                mValid[b, head * lists + tidx] = cutlass.select_(valid, Int32(1), Int32(0))
            if valid:
                append(spec, sequence, stored, head, WARP * WARPS)
        cute.arch.sync_threads()
        begin, end = candidate_range(spec, sequence.position(sequence.T - 1))
        first = (x * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())) * BLOCKS
        for block in cutlass.range(cutlass.max(first, begin), cutlass.min(first + BLOCKS, end), unroll=1):
            self.score(sQ, stored, sequence, head, block, mScores[b, None, None, None])

    @cute.jit
    def score(
        self, sQ: cute.Tensor, stored: Stored, sequence: Sequence, head: Int32, block: Int32, scores: cute.Tensor
    ):
        """Write a block's scores, one for each token and list, to `scores` [Hkv, T, blocks]; by one warp."""
        spec, lists, rows = self.spec, self.lists, self.spec.T * self.lists
        lanes = spec.D // VECTOR
        keys = WARP // lanes  # of a load
        loads = max(n for n in range(1, AT_ONCE + 1) if spec.block_size // keys % n == 0)
        lane, table = cute.arch.lane_idx(), stored.table(sequence)
        first = block * spec.block_size
        page = table.page(first)
        top = cute.make_rmem_tensor((rows,), Float32)
        top.fill(-Float32.inf)
        for step in cutlass.range(spec.block_size // (keys * loads), unroll=1):
            at = first + step * (keys * loads) + lane // lanes
            held = cute.make_rmem_tensor((VECTOR, loads), stored.caches[0].element_type)
            for i in cutlass.range_constexpr(loads):
                key = cutlass.max(cutlass.min(at + i * keys, sequence.S - 1), 0)
                its_page = table.page(key) if const_expr(self.splits_blocks) else page
                load_once(vector(stored.token(0, table, its_page, key, head), lane % lanes), held[None, i])
            if const_expr(stored.rounds(0)):
                before = sequence.position(Int32(0))
                if first + spec.block_size > before:
                    for i in cutlass.range_constexpr(loads):
                        past = cutlass.min(at + i * keys, sequence.S - 1) - before
                        if past >= 0:
                            new = vector(new_row(stored.new[0], sequence, past, head), lane % lanes)
                            write(fragment(new, Int32(0), VECTOR), stored, 0, head, held[None, i])
            numbers = [floats(held[None, i]) for i in range(loads)]
            for row in cutlass.range_constexpr(rows):
                q = cute.make_rmem_tensor((VECTOR,), Float32)
                cute.autovec_copy(vector(sQ[None, row], lane % lanes), q)
                t, parts = sequence.position(Int32(row // lists)), []
                for i in cutlass.range_constexpr(loads):
                    z = q[0] * numbers[i][0]
                    for e in cutlass.range_constexpr(1, VECTOR):
                        z = cute.math.fma(q[e], numbers[i][e], z)
                    if const_expr(spec.local == 0):  # else a token's own block is forced
                        z = Float32(cutlass.select_(at + i * keys > t, -Float32.inf, z))
                    parts.append(z)
                top[row] = reduce_tree(cute.arch.fmax, [top[row], *added_over_lanes(parts, lane, spec.D // VECTOR)])
        for row in cutlass.range_constexpr(rows):
            score = cute.arch.warp_reduction_max(top[row])
            if lane == 0:
                scores[head * lists + row % lists, row // lists, block] = in_order(score)


def added_over_lanes(values: list[Float32], lane: Int32, lanes: int) -> list[Float32]:
    """Sums over `lanes` neighbouring lanes, a power of two, reduce-scattered: each lane gets a part of them."""
    for mask in [lanes >> i for i in range(1, lanes.bit_length())]:
        values = halve(add, values, (lane & mask) != 0, mask)
    return values


def in_order(x: Float32) -> Int32:
    """A number of 31 bits that orders as x."""
    bits = bits_of(x)
    negative = cutlass.select_(bits == -(1 << 31), Int32(0), bits ^ 0x7FFFFFFF)  # -0.0
    bits = cutlass.select_(bits < 0, negative, bits)
    return (bits >> 1) + (1 << 30)
