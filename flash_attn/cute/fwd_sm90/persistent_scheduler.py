"""Forward on SM90 with CTAs that stay: one tile's stores and the next one's loads run under the arithmetic.

With few keys a tile of queries is done after a handful of key tiles, and a CTA to a tile waits for
its queries, computes, and waits for its output, one after the other. Here a CTA loops over many tiles.
Queries have two slots of shared memory, and a tile's output overwrites its queries:

    load warp     fills a slot with queries as soon as it is free, and goes on with keys and values
    consumers     wait for a slot's queries, compute, write the output over them, and go on
    store warp    waits for a slot's output, stores it, and frees the slot

A warp group overwrites only those rows of queries that it alone reads. Slots alternate, and a slot's
barrier comes round again only after the store warp has freed the slot: so nobody can lap it.
"""

from typing import Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineUserType
from quack import copy_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.tile_scheduler import SchedulerState, SingleTileLPTScheduler

SLOTS = 2
MOST_ROUNDS = 8  # CTAs of a multiprocessor, one after the other, at most
LEAST_TILES = 16  # of a CTA, where there is more than one round


class PersistentScheduler(SingleTileLPTScheduler):
    """The same tiles in the same order, longest first, dealt out to CTAs of many tiles each.

    Where tiles are many, multiprocessors have several CTAs one after the other: one that another kernel holds at first,
    such as NCCL's, leaves its share to the others.
    """

    @staticmethod
    def get_grid_shape(params: SingleTileLPTScheduler.Params, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32]:
        at_once = target_sm_count()
        rounds = cutlass.max(1, cutlass.min(MOST_ROUNDS, params.total_blocks // (LEAST_TILES * at_once)))
        return (cutlass.min(params.total_blocks, at_once * rounds), Int32(1), Int32(1))

    @staticmethod
    @cute.jit
    def create(
        params: SingleTileLPTScheduler.Params, ctx: Optional[SchedulerState] = None, *, loc=None, ip=None
    ) -> "PersistentScheduler":
        return PersistentScheduler(params, cute.arch.block_idx()[0], Int32(0), loc=loc, ip=ip)

    def advance_to_next_work(self, *, loc=None, ip=None):
        self._tile_idx += cute.arch.grid_dim()[0]
        return self.get_current_work()


@cute.jit
def announce_output(slot: Int32, num_consumers: int):
    """The calling consumer has written its part of a slot's output."""
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(
        barrier_id=int(NamedBarrierFwd.OFull) + slot, number_of_threads=num_consumers + cute.arch.WARP_SIZE
    )


@cute.jit
def store_outputs(
    mO: cute.Tensor,
    sO: cute.Tensor,
    tma_atom_O: cute.CopyAtom,
    pipeline_q: pipeline_custom.PipelineTmaAsync,
    tile: tuple[int, int],
    num_consumers: int,
    SeqlenInfoCls: Callable,
    TileSchedulerCls: Callable,
):
    """The store warp: every tile's output from its slot to memory, and the slot back to the load warp."""
    slots = pipeline_custom.make_pipeline_state(PipelineUserType.Consumer, SLOTS)
    tile_scheduler = TileSchedulerCls()
    work_tile = tile_scheduler.initial_work_tile_info()
    while work_tile.is_valid_tile:
        m_block, head_idx, batch_idx, _ = work_tile.tile_idx
        seqlen = SeqlenInfoCls(batch_idx)
        gO = cute.local_tile(seqlen.offset_batch_Q(mO, batch_idx, dim=3)[None, None, head_idx], tile, (m_block, 0))
        slot = slots.index
        store, _, _ = copy_utils.tma_get_copy_fn(
            tma_atom_O, 0, cute.make_layout(1), sO[None, None, slot], gO, single_stage=True
        )
        cute.arch.barrier(
            barrier_id=int(NamedBarrierFwd.OFull) + slot, number_of_threads=num_consumers + cute.arch.WARP_SIZE
        )
        store()
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        pipeline_q.consumer_release_w_index(slot)
        slots.advance()
        tile_scheduler.advance_to_next_work()
        work_tile = tile_scheduler.get_current_work()
