"""The warp that loads queries and keys, by TMA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from nsa_layer.kernels.select_by_index.spec import KEYS, ROWS, IndexTopKSpec
from nsa_layer.kernels.select_by_token.tiles import Tile, Tiles


@dataclass(frozen=True)
class Barriers:
    """mbarriers in shared memory: a full and an empty one for each stage of keys, and for the queries."""

    keys_full: cute.Pointer
    keys_empty: cute.Pointer
    queries_full: cute.Pointer
    queries_empty: cute.Pointer

    @staticmethod
    def of(memory: cute.Pointer, stages: int) -> "Barriers":
        return Barriers(memory, memory + stages, memory + 2 * stages, memory + 2 * stages + 1)

    def init(self, stages: int, warps: int) -> None:
        """warps: number of warps that read."""
        for stage in range(stages):
            cute.arch.mbarrier_init(self.keys_full + stage, 1)
            cute.arch.mbarrier_init(self.keys_empty + stage, warps)
        cute.arch.mbarrier_init(self.queries_full, 1)
        cute.arch.mbarrier_init(self.queries_empty, warps)


@cute.jit
def steps_of(work_tile: Tile) -> Int32:
    """Tiles of keys of a work tile: an even number, so that two products are in flight without a branch."""
    spec = work_tile.spec
    steps = Int32(0)
    if work_tile.steps() > 0:
        steps = 2 * cute.ceil_div(work_tile.candidates_end(work_tile.last_token()) * spec.block_size, 2 * KEYS)
    return steps


def stage_and_phase(spec: IndexTopKSpec, step: Int32) -> tuple[Int32, Int32]:
    """The stage of a CTA's step-th tile of keys, and the phase of its full barrier."""
    step = Uint32(step)
    return Int32(step % spec.stages), Int32(step // spec.stages % 2)


@dataclass(frozen=True)
class Loads:
    """The load warp; TMA loads [64, D] of mQ [T, D, Hs, B] and [128, D] of mK [S, D, Hs or 1, B]; packed without B."""

    spec: cutlass.Constexpr[IndexTopKSpec]
    scheduler: Tiles
    tma_q: tuple[cute.CopyAtom, cute.Tensor]
    tma_k: tuple[cute.CopyAtom, cute.Tensor]
    sQ: cute.Tensor
    sK: cute.Tensor
    barriers: Barriers

    @cute.jit
    def run(self):
        spec, scheduler, barriers = self.spec, self.scheduler, self.barriers
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        done, tile_number = Int32(0), Int32(0)
        for tile in cutlass.range(cta, scheduler.tiles(), ctas, unroll=1):
            work_tile = scheduler.of(tile)
            steps = steps_of(work_tile)
            if steps > 0:
                cute.arch.mbarrier_wait(barriers.queries_empty, (tile_number + 1) % 2)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers.queries_full, spec.tokens * spec.D * 2)
                for group in cutlass.range_constexpr(spec.groups):
                    row = work_tile.rows_before + work_tile.first + group * ROWS
                    self.load(
                        self.tma_q, self.sQ, ROWS, work_tile, work_tile.head, row, Int32(group), barriers.queries_full
                    )
                head = Int32(0) if const_expr(spec.one_key) else work_tile.head
                for step in cutlass.range(steps, unroll=1):
                    stage, phase = stage_and_phase(spec, done + step)
                    full = barriers.keys_full + stage
                    cute.arch.mbarrier_wait(barriers.keys_empty + stage, 1 - phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, KEYS * spec.D * 2)
                    self.load(
                        self.tma_k, self.sK, KEYS, work_tile, head, work_tile.keys_before + step * KEYS, stage, full
                    )
                done += steps
                tile_number += 1

    def load(
        self,
        tma: tuple[cute.CopyAtom, cute.Tensor],
        target: cute.Tensor,
        rows: int,
        work_tile: Tile,
        head: Int32,
        first: Int32,
        stage: Int32,
        full: cute.Pointer,
    ) -> None:
        """Load rows from `first` on into a stage; rows past the tensor's end are 0."""
        batch = () if const_expr(self.spec.packed) else (work_tile.batch,)
        source = cute.domain_offset((first, 0), tma[1][(None, None, head, *batch)])
        source = cute.local_tile(source, (rows, self.spec.D), (0, 0))
        s, g = cpasync.tma_partition(
            tma[0], 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
        )
        cute.copy(tma[0], g, s[None, stage], tma_bar_ptr=full)
