"""The second warpgroup of a CTA: each token's best blocks, by the sums that the first warpgroup hands over."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from nsa_layer.kernels.select_by_token import candidates
from nsa_layer.kernels.select_by_token.epilogue import write_token_list
from nsa_layer.kernels.select_by_token.spec import (
    NONNEGATIVE,
    SCORES_READ,
    SCORES_WRITTEN,
    THREADS,
    WARPS,
    TokenTopKSpec,
)
from nsa_layer.kernels.select_by_token.step_scores import StepValues
from nsa_layer.kernels.select_by_token.tiles import Tile, Tiles


@dataclass(frozen=True)
class BestBlocks:
    """The second warpgroup's buffers in shared memory.

    Attributes:
        sScores: fp32 [KEYS, tokens of a warp, WARPS].
        sColumns: int64 [capacity, WARP, WARPS], candidates.
        sSelected: int64 [n, tokens of a warp, WARPS], the best of them.
        sNonnegative: int32 [WARPS], 1 once only scores from `NONNEGATIVE` on enter the warp's lists; None: not needed.
        mScores: of the lists' shape: an index' scores of listed blocks that are not forced; None: not written.
    """

    spec: cutlass.Constexpr[TokenTopKSpec]
    scheduler: Tiles
    sScores: cute.Tensor
    sColumns: cute.Tensor
    sSelected: cute.Tensor
    sNonnegative: cute.Tensor | None = None
    mScores: cute.Tensor | None = None

    @cute.jit
    def run(self):
        """Write the lists of all the CTA's tiles."""
        spec, lane = self.spec, cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS
        # The token of the tile whose list this lane helps to keep.
        token = lane // spec.lanes
        number = warp * spec.tokens_a_warp + token
        kept_here = (token < spec.tokens_a_warp) & (number < spec.tokens)
        scores = self.sScores[None, cutlass.min(token, spec.tokens_a_warp - 1), warp]
        columns = (self.sColumns[None, None, warp], self.sSelected[None, None, warp])
        cute.arch.barrier_arrive(barrier_id=SCORES_READ, number_of_threads=spec.score_threads + THREADS)
        for tile in cutlass.range(cta, self.scheduler.tiles(), ctas, unroll=1):
            work_tile = self.scheduler.of(tile)
            t = work_tile.first + cutlass.min(number, spec.tokens - 1)
            own = t // spec.block_size
            wanted = Int32(spec.n)
            if const_expr(spec.forced):
                wanted = cutlass.max(spec.n - work_tile.forced_blocks(own), 0)
            mine = candidates.no_candidates(spec, *columns, wanted, lane)
            values = StepValues(spec, scores, work_tile, t, lane % spec.lanes)
            steps, kept = work_tile.steps(), Int32(0)
            if const_expr(self.sNonnegative is not None):
                self.sNonnegative[warp] = Int32(0)
            for step in cutlass.range(steps, unroll=1):
                cute.arch.barrier(barrier_id=SCORES_WRITTEN, number_of_threads=spec.score_threads + THREADS)
                bits = values.all_bits(step)
                cute.arch.barrier_arrive(barrier_id=SCORES_READ, number_of_threads=spec.score_threads + THREADS)
                values.add_to(mine, step, bits)
                if const_expr(self.sNonnegative is not None):
                    if not candidates.any_lane(mine.bound[0] < NONNEGATIVE):
                        self.sNonnegative[warp] = Int32(1)
            if steps > 0:
                kept = candidates.select(mine)
            written = kept_here & (t < work_tile.end)
            of_lists = (self.scheduler.mIndices, self.mScores)
            mList, mScores = (self.list_of(x, work_tile, cutlass.min(t, work_tile.end - 1)) for x in of_lists)
            write_token_list(mList, mScores, mine, kept, own, work_tile, written)
            cute.arch.sync_warp()

    def list_of(self, of_lists: cute.Tensor | None, work_tile: Tile, t: Int32) -> cute.Tensor | None:
        """Token t's row [n]; None of None."""
        batch = () if self.spec.packed else (work_tile.batch,)
        return None if of_lists is None else of_lists[(*batch, work_tile.rows_before + t, work_tile.head, None)]
