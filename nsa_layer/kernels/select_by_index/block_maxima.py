"""The warpgroups that multiply: the largest score of each block, for 64 tokens each."""

from dataclasses import dataclass
from operator import or_

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from nsa_layer.kernels.select_by_index.loads import Barriers, stage_and_phase, steps_of
from nsa_layer.kernels.select_by_index.spec import KEYS, ROWS, IndexTopKSpec
from nsa_layer.kernels.select_by_tile.register_topk import halve, reduce_tree
from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of
from nsa_layer.kernels.select_by_token.candidates import any_lane
from nsa_layer.kernels.select_by_token.gemm import Products
from nsa_layer.kernels.select_by_token.spec import NONNEGATIVE, QUAD, SCORES_READ, SCORES_WRITTEN, THREADS, WARP
from nsa_layer.kernels.select_by_token.tiles import Tile, Tiles


@dataclass(frozen=True)
class BlockMaxima:
    """A warpgroup of 64 tokens that multiplies: its operands, buffers and barriers.

    Attributes:
        sQ, sK: [64, D, groups] and [KEYS, D, stages].
        sScores: int32 [BLOCKS, tokens of a list warp, WARPS].
        sNonnegative: int32 [WARPS], 1 once scores from 0 on fill the lists of all tokens of a list warp.
        group: index of the warpgroup.
        thread: index of the thread in it.
    """

    spec: cutlass.Constexpr[IndexTopKSpec]
    scheduler: Tiles
    sQ: cute.Tensor
    sK: cute.Tensor
    sScores: cute.Tensor
    sNonnegative: cute.Tensor
    barriers: Barriers
    group: Int32
    thread: Int32

    @cute.jit
    def run(self):
        """Compute the maxima of all the CTA's tiles, and hand them over to the list warpgroup."""
        spec, scheduler, barriers = self.spec, self.scheduler, self.barriers
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        even = Products.of(self.sQ, self.sK, self.thread, spec.use_mma_sync)
        odd = Products.of(self.sQ, self.sK, self.thread, spec.use_mma_sync)
        maxima = cute.make_rmem_tensor((2 * spec.blocks_a_product,), Int32)
        list_warp = (self.group * ROWS + self.thread // WARP * 16) // spec.tokens_a_warp
        done, tile_number = Int32(0), Int32(0)
        for tile in cutlass.range(cta, scheduler.tiles(), ctas, unroll=1):
            work_tile = scheduler.of(tile)
            steps = steps_of(work_tile)
            if steps > 0:
                cute.arch.mbarrier_wait(barriers.queries_full, tile_number % 2)
                self.start(even, done)
                self.start(odd, done + 1)
                self.finish(even, done, 1)
                self.take(maxima, even, work_tile, Int32(0), True)
                self.finish(odd, done + 1, 0)
                last, nonnegative = steps - 1, Int32(0)
                whole = (last - 1) // spec.unrolled * spec.unrolled
                for step in cutlass.range(1, 1 + whole, spec.unrolled, unroll=1):
                    if any_lane(nonnegative == 0):
                        for first in cutlass.range(step, step + spec.unrolled, 2, unroll=1):
                            self.take_steps(2, odd, even, maxima, work_tile, first, done, True)
                    else:
                        self.take_steps(spec.unrolled, odd, even, maxima, work_tile, step, done, False)
                    if step > spec.products_a_step:  # the list warpgroup is at this tile, and has reset it
                        nonnegative = self.sNonnegative[list_warp]
                for step in cutlass.range(1 + whole, last, 2, unroll=1):
                    self.take_steps(2, odd, even, maxima, work_tile, step, done, True)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barriers.queries_empty)
                self.hand_over(maxima, last - 1)
                self.take(maxima, odd, work_tile, last, True)
                self.hand_over(maxima, last)
                if steps % spec.products_a_step != 0:
                    cute.arch.barrier_arrive(barrier_id=SCORES_WRITTEN, number_of_threads=spec.score_threads + THREADS)
                done += steps
                tile_number += 1
        cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=spec.score_threads + THREADS)

    @cute.jit
    def take_steps(
        self,
        count: cutlass.Constexpr[int],
        ready: Products,
        other: Products,
        maxima: cute.Tensor,
        work_tile: Tile,
        step: Int32,
        done: Int32,
        of_any_sign: cutlass.Constexpr[bool],
    ):
        """Maxima of `count` steps, the first of whose products `ready` has, and products of as many steps after that.

        Two products are in flight while maxima are taken, but none across iterations of a loop, where the compiler
        would wait for each at once. A step's maxima are handed over while the next step's are computed.
        """
        self.start(other, done + step + 1)
        for i in cutlass.range_constexpr(count):
            products, more = (ready, other)[i % 2], i + 2 <= count
            self.hand_over(maxima, step + i - 1)
            self.take(maxima, products, work_tile, step + i, of_any_sign)
            if const_expr(more):
                self.start(products, done + step + i + 2)
            self.finish(products, done + step + i + 1, int(more))

    def start(self, products: Products, step: Int32) -> None:
        """Start the products of the CTA's step-th tile of keys, once it is loaded."""
        stage, phase = stage_and_phase(self.spec, step)
        cute.arch.mbarrier_wait(self.barriers.keys_full + stage, phase)
        products.start(self.group, stage)

    def finish(self, products: Products, step: Int32, in_flight: int) -> None:
        """Wait for all products but the last `in_flight` ones, and release the step's stage of keys."""
        products.finish(in_flight)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.keys_empty + stage_and_phase(self.spec, step)[0])

    @cute.jit
    def take(
        self,
        maxima: cute.Tensor,
        products: Products,
        work_tile: Tile,
        step: Int32,
        of_any_sign: cutlass.Constexpr[bool],
    ):
        """Maxima over this thread's scores of each block, for its two tokens, at 2 * block + row.

        of_any_sign: False if negative scores enter no list: negative maxima then need only be negative.
        """
        spec = self.spec
        scores = [[products.score(row, c) for c in range(KEYS // QUAD)] for row in range(2)]
        self.largest_of_blocks(maxima, scores, of_any_sign)
        if const_expr(spec.local == 0):  # else a token's own block, alone with keys it does not see, is forced
            first = work_tile.first + self.group * ROWS
            if (step + 1) * KEYS > first + 1:
                t = first + self.thread // WARP * 16 + self.thread % WARP // QUAD - step * KEYS
                for row in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(KEYS // QUAD):
                        key = c // 2 * 8 + self.thread % QUAD * 2 + c % 2
                        hidden = key > t + 8 * row
                        scores[row][c] = cutlass.select_(hidden, -cutlass.Float32.inf, scores[row][c])
                self.largest_of_blocks(maxima, scores, True)

    @cute.jit
    def largest_of_blocks(
        self, maxima: cute.Tensor, scores: list[list[cutlass.Float32]], of_any_sign: cutlass.Constexpr[bool]
    ):
        """Maxima of scores [row][column]; a block is `block_size / QUAD` neighbouring columns."""
        spec, columns = self.spec, self.spec.block_size // QUAD
        bits = [
            [bits_of(x) for x in scores[row][block * columns : (block + 1) * columns]]
            for block in range(spec.blocks_a_product)
            for row in range(2)
        ]
        for i in cutlass.range_constexpr(len(bits)):
            maxima[i] = largest(bits[i])
        if const_expr(of_any_sign):
            if any_lane(reduce_tree(or_, [maxima[i] for i in range(len(bits))]) < 0):
                for i in cutlass.range_constexpr(len(bits)):
                    least = bits[i][0]
                    for x in bits[i][1:]:
                        least = cutlass.min(least, x)
                    least = least ^ 0x7FFFFFFF
                    least = cutlass.select_(least == -1, Int32(0), least)  # -0.0
                    maxima[i] = cutlass.select_(maxima[i] < 0, least, maxima[i])

    @cute.jit
    def hand_over(self, maxima: cute.Tensor, step: Int32):
        """Reduce-scatter maxima over the lanes of a quad, and write them as 31 bits that order as the scores."""
        spec, lane = self.spec, self.thread % WARP
        x = lane % QUAD
        values = [maxima[i] for i in range(2 * spec.blocks_a_product)]
        values = halve(cutlass.max, values, x % 2 > 0, 1)
        values = halve(cutlass.max, values, x // 2 > 0, 2)
        token = self.group * ROWS + self.thread // WARP * 16 + lane // QUAD + x % 2 * 8
        target = self.sScores[None, token % spec.tokens_a_warp, token // spec.tokens_a_warp]
        threads, number = spec.score_threads + THREADS, Int32(Uint32(step) % spec.products_a_step)
        if number == 0:
            cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=threads)
        for i in cutlass.range_constexpr(len(values)):
            block = number * spec.blocks_a_product
            if const_expr(spec.blocks_a_product > 1):
                block += 2 * i + x // 2
            target[spec.position(block)] = (values[i] >> 1) + NONNEGATIVE
        if number == spec.products_a_step - 1:
            cute.arch.barrier_arrive(barrier_id=SCORES_WRITTEN, number_of_threads=threads)


def largest(values: list[Int32]) -> Int32:
    """The largest of signed integers, as a chain, which the compiler turns into three-way comparisons."""
    top = values[0]
    for x in values[1:]:
        top = cutlass.max(top, x)
    return top
