"""The two warps that load for a warpgroup of `bwd_dkdv_sm90/kernel`: tiles by TMA, and what else belongs to their rows.

The heads of a token are neighbours in memory, and the swizzle of shared memory goes by address, so a box of them lands
at any row of a tile. Rows that no pair fills hold another pair's q and do, or zeros, and an lse_log2 of +inf, which
makes their P and dS exactly 0.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType
from quack import copy_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.bwd_dkdv_sm90.items import DRAWS, Dealer, Item, ItemList
from flash_attn.cute.bwd_dkdv_sm90.spec import WARPGROUPS, DkdvSpec
from flash_attn.cute.fwd_sm90.loads import TmaTensor
from flash_attn.cute.lists.tiling import ROWS

WARP = cute.arch.WARP_SIZE
SUMS = 3  # values of a row beside q and do: lse_log2, dpsum, position


@dataclass(frozen=True)
class Loader:
    """The loads of one warpgroup, of all its items."""

    spec: cutlass.Constexpr[DkdvSpec]
    items: ItemList
    dealer: Dealer

    @cute.jit
    def load_tiles(
        self,
        tma: tuple[TmaTensor, ...],
        staged: list[cute.Tensor],
        plain: list[cute.Pointer],
        pipelines: list[pipeline_custom.PipelineTmaAsync],
    ):
        """The warp that loads tiles for a warpgroup."""
        spec, items, group = self.spec, self.items, self.dealer.group
        lane = cute.arch.lane_idx()
        turn = pipeline.make_pipeline_state(PipelineUserType.Producer, DRAWS)
        state = pipeline.make_pipeline_state(PipelineUserType.Producer, spec.stages)
        phase = Int32(1)  # of k and v
        columns = spec.head_dim // spec.columns
        box = (spec.heads, spec.columns)
        # By address: TMA puts the swizzle on it.
        boxes = cute.make_layout(
            (box, spec.slots, columns, WARPGROUPS * spec.stages),
            stride=(
                (spec.columns, 1), spec.heads * spec.columns, ROWS * spec.columns, ROWS * spec.head_dim
            ),
        )  # fmt: skip
        copies = []
        for (atom, mX), memory in zip(tma[:2], plain):
            gX = cute.group_modes(cute.flat_divide(mX, box), 0, 2)
            sX, gX = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.make_tensor(memory, boxes), gX)
            copies.append((atom, gX, sX))
        index = self.dealer.first()
        while index < items.count():
            item = items.item(index)
            for tile in cutlass.range(item.tiles, unroll=1):
                loads = self.tokens(item, tile, lane)
                slot = group * spec.stages + state.index
                for (atom, gX, sX), stages in zip(copies, pipelines[:2]):
                    stages.producer_acquire_w_index_phase(slot, state.phase)
                    barrier = stages.sync_object_full.get_barrier(slot)
                    for chunk in cutlass.range_constexpr(len(loads)):
                        for j in cutlass.range(
                            min(WARP, spec.slots - chunk * WARP), unroll=4 if len(loads) == 1 else 1
                        ):
                            token = cute.arch.shuffle_sync(loads[chunk][0], j) + item.seqlen.offset_q
                            head = item.head * spec.slices
                            if const_expr(spec.slices > 1):
                                head += cute.arch.shuffle_sync(loads[chunk][1], j)
                            for c in cutlass.range_constexpr(columns):
                                place = (None, head, c, token, *(() if const_expr(spec.packed) else (item.batch,)))
                                into = sX[None, chunk * WARP + j, c, slot]
                                cute.copy(atom, gX[place], into, tma_bar_ptr=barrier)
                state.advance()
                if tile == 0:
                    for i in cutlass.range_constexpr(2, 4):
                        self.load_keys(tma[i], staged[i], pipelines[i], item, phase)
            if item.tiles > 0:
                phase ^= 1
            index = self.dealer.draw(turn.index, turn.phase)
            turn.advance()

    def load_keys(
        self,
        tma: TmaTensor,
        staged: cute.Tensor,
        stages: pipeline_custom.PipelineTmaAsync,
        item: Item,
        phase: Int32,
    ) -> None:
        """An item's k or v."""
        group = self.dealer.group
        atom, mX = tma
        gX = item.seqlen.offset_batch_K(mX, item.batch, dim=3)[None, None, item.head]
        gX = cute.local_tile(gX, (ROWS, self.spec.head_dim), (None, 0))
        copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), gX, staged)
        stages.producer_acquire_w_index_phase(group, phase)
        barrier = stages.sync_object_full.get_barrier(group)
        copy(src_idx=item.first_key // ROWS, dst_idx=group, tma_bar_ptr=barrier)

    def tokens(self, item: Item, tile: Int32, lane: Int32) -> list[tuple[Int32, Int32]]:
        """The loads of a tile, one to a lane, and as many times as that takes."""
        spec = self.spec
        first = tile * spec.slots
        return [self.items.token(item, first + chunk + lane) for chunk in range(0, spec.slots, WARP)]

    @cute.jit
    def load_sums(
        self,
        sums: tuple[cute.Tensor, cute.Tensor],
        row_sums: cute.Tensor,
        stages: pipeline_custom.PipelineAsync,
    ):
        """The warp that loads what else a warpgroup has to know of its rows."""
        spec, items, group = self.spec, self.items, self.dealer.group
        lane = cute.arch.lane_idx()
        turn = pipeline.make_pipeline_state(PipelineUserType.Consumer, DRAWS)
        state = pipeline.make_pipeline_state(PipelineUserType.Producer, spec.stages)
        found = cute.make_rmem_tensor((SUMS, ROWS // WARP), Float32)
        positions = cute.recast_tensor(found, Int32)
        index = self.dealer.first()
        while index < items.count():
            item = items.item(index)
            for tile in cutlass.range(item.tiles, unroll=1):
                for i in cutlass.range_constexpr(ROWS // WARP):
                    row = i * WARP + lane
                    load = tile * spec.slots + row // spec.heads
                    token, part = items.token(item, load)
                    head = (item.head * spec.slices + part) * spec.heads + row % spec.heads
                    found[0, i], found[1, i] = Float32.inf, Float32(0.0)
                    if load <= item.last and row < spec.slots * spec.heads:
                        for which in cutlass.range_constexpr(2):
                            rows = sums[which]
                            if const_expr(spec.packed):
                                found[which, i] = rows[head, item.seqlen.padded_offset_q + token]
                            else:
                                found[which, i] = rows[item.batch, head, token]
                    positions[2, i] = token
                slot = group * spec.stages + state.index
                stages.producer_acquire_w_index_phase(slot, state.phase)
                for i in cutlass.range_constexpr(ROWS // WARP):
                    for which in cutlass.range_constexpr(SUMS):
                        row_sums[i * WARP + lane, which, slot] = found[which, i]
                stages.producer_commit_w_index(slot)
                state.advance()
            index = self.dealer.follow(turn.index, turn.phase)
            turn.advance()
