"""The two load warps of a warpgroup of `bwd_dkdv/kernel`: tiles by TMA, and their row sums.

The heads of a token are contiguous in memory, and the shared-memory swizzle is a function of the address, so a box of
heads may start at any row of a tile. Rows without a pair hold another pair's q and do, or zeros, with lse_log2 = +inf:
P = dS = 0.
"""

from dataclasses import dataclass
from typing import Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.bwd_dkdv.spec import DkdvSpec
from flash_attn.cute.bwd_dkdv.work_tiles import DRAWS, Scheduler, WorkTile, WorkTiles
from flash_attn.cute.fwd_sm90.loads import TmaTensor
from flash_attn.cute.lists.tiling import ROWS, box_columns

WARP = cute.arch.WARP_SIZE
SUMS = 3  # values per row beside q and do: lse_log2, dpsum, position


@dataclass(frozen=True)
class Loader:
    """A load warp of one warpgroup."""

    spec: cutlass.Constexpr[DkdvSpec]
    work_tiles: WorkTiles
    scheduler: Scheduler

    @cute.jit
    def load(
        self,
        rows_tma: TmaTensor,
        keys_tma: TmaTensor,
        memory: cute.Pointer,
        staged_keys: cute.Tensor,
        row_stages: pipeline_custom.PipelineTmaAsync,
        key_stages: pipeline_custom.PipelineTmaAsync,
        sums: Optional[tuple[cute.Tensor, cute.Tensor, Optional[cute.Tensor]]],  # lse_log2, dpsum, q_offset
        staged_sums: Optional[cute.Tensor],
        sum_stages: Optional[pipeline_custom.PipelineAsync],
    ):
        """Without `sums`: load q and k, and draw the work tiles. With them: load do, v and the row sums."""
        spec, work_tiles, group = self.spec, self.work_tiles, self.scheduler.group
        draws = const_expr(sums is None)
        draw = pipeline.make_pipeline_state(PipelineUserType.Producer if draws else PipelineUserType.Consumer, DRAWS)
        state = pipeline.make_pipeline_state(PipelineUserType.Producer, spec.stages)
        phase = Int32(1)  # of k and v
        load_boxes = self.box_loader(rows_tma, memory)
        found = cute.make_rmem_tensor((SUMS, ROWS // WARP), Float32)
        index = self.scheduler.first()
        while index < work_tiles.count():
            work_tile = work_tiles.work_tile(index)
            for tile in cutlass.range(work_tile.tiles, unroll=1):
                loads = self.tokens(work_tile, tile)
                if const_expr(not draws):
                    self.find_sums(work_tile, tile, sums, found)
                slot = group * spec.stages + state.index
                row_stages.producer_acquire_w_index_phase(slot, state.phase)
                barrier = row_stages.sync_object_full.get_barrier(slot)
                for chunk in cutlass.range_constexpr(len(loads)):
                    for j in cutlass.range(min(WARP, spec.slots - chunk * WARP), unroll=4):
                        token = cute.arch.shuffle_sync(loads[chunk][0], j) + work_tile.seqlen.offset_q
                        head = work_tile.head * spec.slices
                        if const_expr(spec.slices > 1):
                            head += cute.arch.shuffle_sync(loads[chunk][1], j)
                        load_boxes(head, token, work_tile.batch, chunk * WARP + j, slot, barrier)
                if const_expr(not draws):
                    sum_stages.producer_acquire_w_index_phase(slot, state.phase)
                    for i in cutlass.range_constexpr(ROWS // WARP):
                        for which in cutlass.range_constexpr(SUMS):
                            staged_sums[i * WARP + cute.arch.lane_idx(), which, slot] = found[which, i]
                    sum_stages.producer_commit_w_index(slot)
                state.advance()
                if tile == 0:
                    self.load_keys(keys_tma, staged_keys, key_stages, work_tile, phase)
            if work_tile.tiles > 0:
                phase ^= 1
            if const_expr(draws):
                index = self.scheduler.draw(draw.index, draw.phase)
            else:
                index = self.scheduler.follow(draw.index, draw.phase)
            draw.advance()

    def box_loader(self, tma: TmaTensor, memory: cute.Pointer) -> Callable[..., None]:
        """A function that loads a box of heads of q or do, [Hq, D, T, B] (packed [Hq, D, total]), into a slot."""
        spec = self.spec
        atom, mX = tma
        dim = spec.columns(mX.shape[1])
        width = box_columns(dim)
        columns = dim // width
        box = (spec.heads, width)
        # Unswizzled addresses: TMA applies the swizzle.
        boxes = cute.make_layout(
            (box, spec.slots, columns, spec.teams * spec.stages),
            stride=((width, 1), spec.heads * width, ROWS * width, ROWS * dim),
        )
        gX = cute.group_modes(cute.flat_divide(mX, box), 0, 2)
        sX, gX = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.make_tensor(memory, boxes), gX)

        def load(head: Int32, token: Int32, batch: Int32, slot: Int32, stage: Int32, barrier: cute.Pointer) -> None:
            for c in range(columns):
                box_index = (None, head, c, token) if spec.packed else (None, head, c, token, batch)
                cute.copy(atom, gX[box_index], sX[None, slot, c, stage], tma_bar_ptr=barrier)

        return load

    def tokens(self, work_tile: WorkTile, tile: Int32) -> list[tuple[Int32, Int32]]:
        """(token, part) of a tile's loads, one per lane, in chunks of 32."""
        first = tile * self.spec.slots + cute.arch.lane_idx()
        return [self.work_tiles.token(work_tile, first + chunk) for chunk in range(0, self.spec.slots, WARP)]

    def load_keys(
        self,
        tma: TmaTensor,
        staged: cute.Tensor,
        stages: pipeline_custom.PipelineTmaAsync,
        work_tile: WorkTile,
        phase: Int32,
    ) -> None:
        """Load a work tile's k or v, [S, D, Hkv, B] (packed [total, D, Hkv]), into the first rows of a tile."""
        atom, mX = tma
        group, box = self.scheduler.group, self.spec.key_box(mX.shape[1])
        gX = work_tile.seqlen.offset_batch_K(mX, work_tile.batch, dim=3)[None, None, work_tile.head]
        gX = cute.group_modes(cute.local_tile(gX, box, (None, None)), 0, 2)  # (box, rows of boxes, boxes)
        sX = cute.group_modes(cute.flat_divide(staged, box), 0, 2)
        sX, gX = cpasync.tma_partition(atom, 0, cute.make_layout(1), sX, gX)
        stages.producer_acquire_w_index_phase(group, phase)
        barrier = stages.sync_object_full.get_barrier(group)
        for i in range(self.spec.columns(mX.shape[1]) // box[1]):
            cute.copy(atom, gX[None, work_tile.first_key // box[0], i], sX[None, 0, i, group], tma_bar_ptr=barrier)

    @cute.jit
    def find_sums(
        self,
        work_tile: WorkTile,
        tile: Int32,
        sums: tuple[cute.Tensor, cute.Tensor, Optional[cute.Tensor]],
        found: cute.Tensor,
    ):
        """Read lse_log2, dpsum and positions of the lane's rows into `found`: [3, 64 / 32]."""
        spec = self.spec
        positions = cute.recast_tensor(found, Int32)
        for i in cutlass.range_constexpr(ROWS // WARP):
            row = i * WARP + cute.arch.lane_idx()
            load = tile * spec.slots + row // spec.heads
            token, part = self.work_tiles.token(work_tile, load)
            head = (work_tile.head * spec.slices + part) * spec.heads + row % spec.heads
            found[0, i], found[1, i] = Float32.inf, Float32(0.0)
            if load <= work_tile.last and row < spec.slots * spec.heads:
                for which, rows in enumerate(sums[:2]):
                    if const_expr(spec.packed):
                        found[which, i] = rows[head, work_tile.seqlen.padded_offset_q + token]
                    else:
                        found[which, i] = rows[work_tile.batch, head, token]
            positions[2, i] = token
            if const_expr(sums[2] is not None):
                positions[2, i] = token + sums[2][work_tile.batch]
