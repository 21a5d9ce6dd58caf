"""Persistent CTAs for forward on SM90: a tile's stores and the next one's loads overlap the arithmetic.

With few keys a tile of queries is done after a handful of key tiles, and a CTA per tile would load q, compute and store
o one after the other. Here a CTA loops over many tiles. q has two slots of shared memory, and a tile's o overwrites its
q:

    load warp     loads q into a slot as soon as it is free, then the tile's k and v
    consumers     wait for a slot's q, compute, and write o over it
    store warp    waits for a slot's o, stores it, and frees the slot

A warpgroup overwrites only rows of q that it alone reads. Slots alternate, and a slot's barrier is used again only
after the store warp has freed the slot, so no role can run two tiles ahead of it.
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
MOST_ROUNDS = 8  # most CTAs per multiprocessor, one after the other
LEAST_CTA_TILES = 16  # least tiles per CTA, where there is more than one round


class PersistentScheduler(SingleTileLPTScheduler):
    """SingleTileLPTScheduler's tiles, longest first, dealt out round-robin to persistent CTAs.

    Where tiles are many, there are several CTAs per multiprocessor, one after the other: a multiprocessor that another
    kernel, such as NCCL's, occupies at first runs fewer of them.
    """

    @staticmethod
    def get_grid_shape(params: SingleTileLPTScheduler.Params, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32]:
        at_once = target_sm_count()
        rounds = cutlass.max(1, cutlass.min(MOST_ROUNDS, params.total_blocks // (LEAST_CTA_TILES * at_once)))
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
    """Signal the store warp that the calling consumer has written its rows of a slot's o."""
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
    """The store warp: store every tile's o from its slot, and return the slot to the load warp."""
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
