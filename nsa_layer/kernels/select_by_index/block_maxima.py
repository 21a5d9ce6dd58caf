"""The warpgroups that multiply: the largest score of each block, for 64 tokens each."""

from dataclasses import dataclass
from operator import or_

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from nsa_layer.kernels.select_by_index.loads import Barriers, steps_of
from nsa_layer.kernels.select_by_index.spec import KEYS, ROWS, IndexTopKSpec
from nsa_layer.kernels.select_by_tile.register_topk import reduce_tree
from nsa_layer.kernels.select_by_tile.split_fp16 import bits_of
from nsa_layer.kernels.select_by_token.candidates import any_lane
from nsa_layer.kernels.select_by_token.gemm import Products
from nsa_layer.kernels.select_by_token.spec import QUAD, SCORES_READ, SCORES_WRITTEN, THREADS, WARP
from nsa_layer.kernels.select_by_token.tiles import Tile, Tiles

NEGATIVE_INFINITY = 0xFF800000 - (1 << 32)  # the bits of -inf


@dataclass(frozen=True)
class BlockMaxima:
    """One warpgroup's part.

    Attributes:
        sQ, sK: [64, D, groups] and [KEYS, D, stages].
        sScores: int32 [BLOCKS, tokens of a list warp, WARPS].
        group: number of the warpgroup.
        thread: of the warpgroup.
    """

    spec: cutlass.Constexpr[IndexTopKSpec]
    scheduler: Tiles
    sQ: cute.Tensor
    sK: cute.Tensor
    sScores: cute.Tensor
    barriers: Barriers
    group: Int32
    thread: Int32

    @cute.jit
    def run(self):
        """Hand over the maxima of all the CTA's tiles."""
        spec, scheduler, barriers = self.spec, self.scheduler, self.barriers
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        even = Products.of(self.sQ, self.sK, self.thread, spec.use_mma_sync)
        odd = Products.of(self.sQ, self.sK, self.thread, spec.use_mma_sync)
        done, tile_number = Int32(0), Int32(0)
        for tile in cutlass.range(cta, scheduler.tiles(), ctas, unroll=1):
            work_tile = scheduler.of(tile)
            steps = steps_of(work_tile)
            if steps > 0:
                cute.arch.mbarrier_wait(barriers.queries_full, tile_number % 2)
                self.start(even, done)
                self.finish(even, done)
                for step in cutlass.range(0, steps - 2, 2, unroll=1):
                    self.start(odd, done + step + 1)
                    self.hand_over(even, work_tile, step, steps)
                    self.finish(odd, done + step + 1)
                    self.start(even, done + step + 2)
                    self.hand_over(odd, work_tile, step + 1, steps)
                    self.finish(even, done + step + 2)
                self.start(odd, done + steps - 1)
                self.hand_over(even, work_tile, steps - 2, steps)
                self.finish(odd, done + steps - 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barriers.queries_empty)
                self.hand_over(odd, work_tile, steps - 1, steps)
                done += steps
                tile_number += 1
        cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=spec.score_threads + THREADS)

    def start(self, products: Products, step: Int32) -> None:
        """Start the products of the CTA's step-th keys, once they are there."""
        stages = self.spec.stages
        cute.arch.mbarrier_wait(self.barriers.keys_full + step % stages, step // stages % 2)
        products.start(self.group, step % stages)

    def finish(self, products: Products, step: Int32) -> None:
        """Wait for products, and release their keys. None are in flight where a loop begins again: wgmma would wait."""
        products.finish()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.keys_empty + step % self.spec.stages)

    @cute.jit
    def hand_over(self, products: Products, work_tile: Tile, step: Int32, steps: Int32):
        """Write the maxima of a tile's step-th products."""
        spec = self.spec
        if const_expr(spec.local == 0):  # else a token's own block, alone with keys it does not see, is forced
            self.hide(products, work_tile, step)
        maxima = self.maxima(products)
        threads, first = spec.score_threads + THREADS, step % spec.products_a_step
        if first == 0:
            cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=threads)
        self.store(maxima, step)
        if (first == spec.products_a_step - 1) | (step == steps - 1):
            cute.arch.barrier_arrive(barrier_id=SCORES_WRITTEN, number_of_threads=threads)

    @cute.jit
    def hide(self, products: Products, work_tile: Tile, step: Int32):
        """-inf for keys behind a token."""
        first = work_tile.first + self.group * ROWS
        if (step + 1) * KEYS > first + 1:
            t = first + self.thread // WARP * 16 + self.thread % WARP // QUAD - step * KEYS
            for row in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(KEYS // QUAD):
                    key = c // 2 * 8 + self.thread % QUAD * 2 + c % 2
                    score = products.score(row, c)
                    visible = cutlass.select_(key > t + 8 * row, -cutlass.Float32.inf, score)
                    products.scores[(c % 2, row, c // 2), 0, 0] = visible

    @cute.jit
    def maxima(self, products: Products) -> list[Int32]:
        """Maxima of this thread's scores of each block and of its two tokens, at 2 * block + row."""
        spec, columns = self.spec, self.spec.block_size // QUAD
        bits = [
            [bits_of(products.score(row, block * columns + c)) for c in range(columns)]
            for block in range(spec.blocks_a_product)
            for row in range(2)
        ]
        maxima = cute.make_rmem_tensor((len(bits),), Int32)
        for i in cutlass.range_constexpr(len(bits)):
            maxima[i] = largest(bits[i])
        if any_lane(reduce_tree(or_, [maxima[i] for i in range(len(bits))]) < 0):
            for i in cutlass.range_constexpr(len(bits)):
                least = bits[i][0]
                for x in bits[i][1:]:
                    least = cutlass.min(least, x)
                least = least ^ 0x7FFFFFFF
                least = cutlass.select_(least == -1, Int32(0), least)  # -0.0
                maxima[i] = cutlass.select_(maxima[i] < 0, least, maxima[i])
        return maxima

    @cute.jit
    def store(self, maxima: cute.Tensor, step: Int32):
        """Write the maxima of a quad's lanes, of which each gets its share, as 31 bits that order as the scores."""
        spec, lane = self.spec, self.thread % WARP
        x = lane % QUAD
        values = [maxima[i] for i in range(2 * spec.blocks_a_product)]
        values = halve(values, x % 2 > 0, 1)
        values = halve(values, x // 2 > 0, 2)
        token = self.group * ROWS + self.thread // WARP * 16 + lane // QUAD + x % 2 * 8
        target = self.sScores[None, token % spec.tokens_a_warp, token // spec.tokens_a_warp]
        first = step % spec.products_a_step * spec.blocks_a_product
        for i in cutlass.range_constexpr(len(values)):
            block = first + 2 * i + x // 2 if const_expr(spec.blocks_a_product > 1) else first
            target[spec.position(block)] = (values[i] >> 1) + (1 << 30)


def largest(values: list[Int32]) -> Int32:
    """The largest of signed integers; a chain, of which the compiler compares three at once."""
    top = values[0]
    for x in values[1:]:
        top = cutlass.max(top, x)
    return top


def halve(values: list[Int32], odd: cutlass.Boolean, mask: int) -> list[Int32]:
    """Maxima over two lanes, of which one keeps the even and one the odd ones; both the only one."""
    if len(values) == 1:
        return [cutlass.max(values[0], cute.arch.shuffle_sync_bfly(values[0], mask))]
    pairs = list(zip(values[::2], values[1::2]))
    kept = [cutlass.select_(odd, b, a) for a, b in pairs]
    sent = [cutlass.select_(odd, a, b) for a, b in pairs]
    return [cutlass.max(a, cute.arch.shuffle_sync_bfly(b, mask)) for a, b in zip(kept, sent)]
