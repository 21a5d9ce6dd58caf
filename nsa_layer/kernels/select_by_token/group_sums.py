"""The first warpgroup of a CTA: probabilities of its (token, head) pairs, summed over each token's heads.

Keys are the rows of a product, (token, head) pairs its columns: lane x of a quad has columns ``8 j + 2 x + i``, which
are numbered ``c = 2 j + i`` in the thread and hold its tokens' heads one after another. A step's scores are copied out
of the accumulators before they are summed, so that the next step's products run meanwhile; a tile's last sums are
computed while the next tile is loaded.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn.cute.utils import LOG2_E
from nsa_layer.kernels.select_by_tile.online_softmax import exp2
from nsa_layer.kernels.select_by_token.gemm import Products
from nsa_layer.kernels.select_by_token.spec import (
    KEYS,
    PRODUCTS_DONE,
    QUAD,
    SCORES_READ,
    SCORES_WRITTEN,
    STAGES,
    THREADS,
    TokenTopKSpec,
)
from nsa_layer.kernels.select_by_token.tiles import Tile, Tiles

VECTOR = 8  # elements of q in a copy of 16 bytes


@dataclass(frozen=True)
class GroupSums:
    """The first warpgroup's inputs and buffers in shared memory.

    Attributes:
        tma: copies [KEYS, D] of mK [Tc, D, Hkv, B], packed [all, D, Hkv].
        sQ, sK, sLSE: [columns, D, 1], [KEYS, D, STAGES] and fp32 [columns].
        sScores: fp32 [KEYS, tokens of a warp, WARPS].
        barriers: mbarriers, one for each stage of keys.
    """

    spec: cutlass.Constexpr[TokenTopKSpec]
    scheduler: Tiles
    tma: cute.CopyAtom
    mK: cute.Tensor
    mLSE: cute.Tensor
    scale_log2: Float32
    sQ: cute.Tensor
    sK: cute.Tensor
    sLSE: cute.Tensor
    sScores: cute.Tensor
    barriers: cute.Pointer

    @cute.jit
    def run(self):
        """Compute the sums of all the CTA's tiles, and hand them over to the second warpgroup."""
        spec, scheduler = self.spec, self.scheduler
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        products = Products.of(self.sK, self.sQ, tidx, spec.use_mma_sync)
        exponents = cute.make_rmem_tensor((2, spec.own_columns), Float32)
        tiles = scheduler.tiles()
        before = Int32(0)  # steps of earlier tiles
        for tile in cutlass.range(cta, tiles + ctas, ctas, unroll=1):
            work_tile = scheduler.of(cutlass.min(tile, tiles - 1))
            steps = cutlass.select_(tile < tiles, work_tile.steps(), Int32(0))
            self.load(work_tile, steps, before)
            if (before > 0) & ((steps > 0) | (tile >= tiles)):
                self.write_sums(exponents)
            if steps > 0:
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=PRODUCTS_DONE, number_of_threads=THREADS)
                shifts = self.shifts()
                self.start(products, before)
                for step in cutlass.range(steps - 1, unroll=1):
                    products.finish()
                    self.reload(work_tile, step + STAGES, steps, before)
                    self.scale(products, shifts, exponents)
                    if const_expr(spec.use_mma_sync):  # nothing runs on after a start, and registers are few
                        self.write_sums(exponents)
                        self.start(products, before + step + 1)
                    else:
                        self.start(products, before + step + 1)
                        self.write_sums(exponents)
                products.finish()
                cute.arch.barrier(barrier_id=PRODUCTS_DONE, number_of_threads=THREADS)
                self.scale(products, shifts, exponents)
            before += steps
        cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=2 * THREADS)

    def start(self, products: Products, number: Int32) -> None:
        """Start the products of a step, the CTA's `number`-th, once its keys are there."""
        cute.arch.mbarrier_wait(self.barriers + number % STAGES, number // STAGES % 2)
        products.start(number % STAGES, 0)

    @cute.jit
    def reload(self, work_tile: Tile, step: Int32, steps: Int32, before: Int32):
        """Load a step's keys into the stage that the products just finished have read."""
        cute.arch.barrier(barrier_id=PRODUCTS_DONE, number_of_threads=THREADS)
        if (cute.arch.warp_idx() == 0) & (step < steps):
            self.load_keys(work_tile, step, (before + step) % STAGES)

    @cute.jit
    def load(self, work_tile: Tile, steps: Int32, before: Int32):
        """Load a tile's queries and its first keys, if it has any."""
        if cute.arch.warp_idx() == 0:
            for step in cutlass.range_constexpr(STAGES):
                if step < steps:
                    self.load_keys(work_tile, Int32(step), (before + step) % STAGES)
        if steps > 0:
            self.load_queries(work_tile)
            self.load_lse(work_tile)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def load_keys(self, work_tile: Tile, step: Int32, stage: Int32):
        """Load a step's keys, by one warp; rows before the first and past the last key of the tensor are 0."""
        spec, barrier = self.spec, self.barriers + stage
        batch = () if const_expr(spec.packed) else (work_tile.batch,)
        keys = self.mK[(None, None, work_tile.head, *batch)]
        keys = cute.domain_offset((work_tile.keys_before + work_tile.first_key(step), 0), keys)
        gK = cute.local_tile(keys, (KEYS, spec.D), (0, 0))
        sX, gX = cpasync.tma_partition(
            self.tma, 0, cute.make_layout(1), cute.group_modes(self.sK, 0, 2), cute.group_modes(gK, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, KEYS * spec.D * 2)
        cute.copy(self.tma, gX, sX[None, stage], tma_bar_ptr=barrier)

    def column_row(self, work_tile: Tile, column: Int32) -> tuple[Int32, Int32]:
        """(row of q, query head) of a column of the product; clamped to existing ones."""
        spec = self.spec
        x, c = column // 2 % QUAD, column // 8 * 2 + column % 2
        token = x // spec.share * spec.tokens_a_warp + cutlass.min(c // spec.heads, spec.tokens_a_warp - 1)
        head = x % spec.share * spec.heads + c % spec.heads
        t = cutlass.min(work_tile.first + cutlass.min(token, spec.tokens - 1), work_tile.end - 1)
        return work_tile.rows_before + t, work_tile.head * spec.G + cutlass.min(head, spec.G - 1)

    @cute.jit
    def load_queries(self, work_tile: Tile):
        spec, mQ = self.spec, self.scheduler.mQ
        tidx, _, _ = cute.arch.thread_idx()
        lanes = math.gcd(spec.D // VECTOR, THREADS)  # threads of a row, each of which copies every `lanes`-th vector
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), mQ.element_type, num_bits_per_copy=128
        )
        threads = cute.make_ordered_layout((THREADS // lanes, lanes), order=(1, 0))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))
        tQsQ = copy.get_slice(tidx).partition_D(self.sQ[None, None, 0])
        for i in cutlass.range_constexpr(spec.columns * lanes // THREADS):
            row, head = self.column_row(work_tile, tidx // lanes + i * (THREADS // lanes))
            source = mQ[row, head, None] if const_expr(spec.packed) else mQ[work_tile.batch, row, head, None]
            for part in cutlass.range_constexpr(spec.D // VECTOR // lanes):
                vector = cute.local_tile(source, (VECTOR,), (part * lanes + tidx % lanes,))
                target = tQsQ[None, i, part]
                cute.copy(copy, cute.make_tensor(vector.iterator, target.layout), target)

    @cute.jit
    def load_lse(self, work_tile: Tile):
        tidx, _, _ = cute.arch.thread_idx()
        if tidx < self.spec.columns:
            row, head = self.column_row(work_tile, tidx)
            batch = () if const_expr(self.spec.packed) else (work_tile.batch,)
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
            source, one = cute.domain_offset((*batch, head, row), self.mLSE), cute.make_layout(1)
            cute.copy(atom, cute.make_tensor(source.iterator, one), cute.make_tensor(self.sLSE.iterator + tidx, one))

    @cute.jit
    def shifts(self) -> cute.Tensor:
        """For each of this thread's columns -lse in units of log2; -inf for columns without a head."""
        spec = self.spec
        x = cute.arch.lane_idx() % QUAD
        shifts = cute.make_rmem_tensor((spec.own_columns,), Float32)
        for c in cutlass.range_constexpr(spec.own_columns):
            there = x % spec.share * spec.heads + c % spec.heads < spec.G
            lse = self.sLSE[c // 2 * 8 + 2 * x + c % 2]
            shifts[c] = cutlass.select_(there, -lse * LOG2_E, -Float32.inf)
        return shifts

    def scale(self, products: Products, shifts: cute.Tensor, exponents: cute.Tensor) -> None:
        """Copy scores, as exponents of 2, out of the accumulators of the next products."""
        for row in range(2):
            for c in range(self.spec.own_columns):
                exponents[row, c] = cute.math.fma(products.score(row, c), self.scale_log2, shifts[c])

    def write_sums(self, exponents: cute.Tensor) -> None:
        """Write a step's sums, once the second warpgroup has read those before."""
        sums = self.sum_groups(exponents)
        cute.arch.barrier(barrier_id=SCORES_READ, number_of_threads=2 * THREADS)
        self.store_sums(sums)
        cute.arch.barrier_arrive(barrier_id=SCORES_WRITTEN, number_of_threads=2 * THREADS)

    def sum_groups(self, exponents: cute.Tensor) -> list[list[Float32]]:
        """Probabilities summed over the group's heads: [this thread's two keys][its tokens]."""
        spec, sums = self.spec, []
        for row in range(2):
            sums.append([])
            for token in range(spec.tokens_a_warp):
                total = None
                for c in range(token * spec.heads, (token + 1) * spec.heads):
                    p = exp2(exponents[row, c])
                    total = p if total is None else total + p
                step = 1
                while step < spec.share:
                    total += cute.arch.shuffle_sync_bfly(total, step)
                    step *= 2
                sums[row].append(total)
        return sums

    @cute.jit
    def store_sums(self, sums: list[list[Float32]]):
        spec, warp, lane = self.spec, cute.arch.warp_idx(), cute.arch.lane_idx()
        owner = lane % QUAD // spec.share
        for row in cutlass.range_constexpr(2):
            position = spec.position(16 * warp + lane // QUAD + 8 * row)
            for token in cutlass.range_constexpr(spec.tokens_a_warp):
                self.sScores[position, token, owner] = sums[row][token]
