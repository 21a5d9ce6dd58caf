"""Loads of the dq pass of SM90 backward: tiles of q and do to a warpgroup, blocks of k and v to their part of a stage.

Those of k and v are also forward's by `list_steps`. A caller binds a loader to a tile, and calls it once for the tile's
queries, and for the keys of every step.
"""

from typing import Callable

import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from quack import copy_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.dq_output import Place
from flash_attn.cute.dq_spec import ROWS, WARPGROUPS
from flash_attn.cute.seqlen_info import SeqlenInfoQK

TmaTensor = tuple[cute.CopyAtom, cute.Tensor]


def query_loader(
    tma: TmaTensor, staged: cute.Tensor, slots: pipeline_custom.PipelineTmaAsync, seqlen: SeqlenInfoQK, place: Place
) -> Callable[[Int32], None]:
    """For a tile of q or do, [T, D, Hq, B] (packed [total, D, Hq]): the rows of each warpgroup go into its slot."""
    atom, mX = tma
    gX = seqlen.offset_batch_Q(mX, place.batch, dim=3)[None, None, place.head]
    gX = cute.local_tile(gX, (ROWS, mX.shape[1]), (None, 0))
    copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), gX, staged)

    def load(phase: Int32) -> None:
        for part in range(WARPGROUPS):
            slots.producer_acquire_w_index_phase(Int32(part), phase)
            barrier = slots.sync_object_full.get_barrier(part)
            copy(src_idx=place.m_block * WARPGROUPS + part, dst_idx=part, tma_bar_ptr=barrier)

    return load


def key_loader(
    tma: TmaTensor,
    staged: cute.Tensor,
    stages: pipeline_custom.PipelineTmaAsync,
    seqlen: SeqlenInfoQK,
    batch: Int32,
    head_kv: Int32,
    box: tuple[int, int],
) -> Callable[[tuple[Int32, ...], pipeline.PipelineState], None]:
    """For a step's entries of k or v, [S, D, Hkv, B] (packed [total, D, Hkv]): each goes into its part of the stage.

    box: keys of a block, and head dimensions that are loaded at a time (`box_columns`).
    """
    atom, mX = tma
    gX = seqlen.offset_batch_K(mX, batch, dim=3)[None, None, head_kv]
    gX = cute.local_tile(gX, box, (None, None))  # (block, columns, blocks, boxes)
    sX = cute.flat_divide(staged, box)  # (block, columns, parts, boxes, stages)
    boxes = cute.size(sX, mode=[3])
    sX, gX = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))

    def load(entries: tuple[Int32, ...], state: pipeline.PipelineState) -> None:
        stages.producer_acquire(state)
        barrier = stages.producer_get_barrier(state)
        for part, entry in enumerate(entries):
            for i in range(boxes):
                cute.copy(atom, gX[None, entry >> 1, i], sX[None, part, i, state.index], tma_bar_ptr=barrier)

    return load
