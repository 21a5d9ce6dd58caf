"""The loop over a query tile's key blocks, and its TMA loads, in the dq pass and in forward by `two_block_steps`.

All warps of a CTA loop over the same blocks in the same order: mask blocks, then full ones. A step is `STEP` keys:
one block of 128, or two of 64 that need not be neighbours; one block of 64 in forward by `own_blocks`. Where the last
step lacks a second block, its first is loaded twice and masked. A warpgroup has a slot for its rows of q and do, a
block of k or v is a part of a stage; a caller makes a loader for a tile and calls it for each step.
"""

from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from quack import copy_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.lists.rows import entry_at, find_row
from flash_attn.cute.lists.tiling import ROWS, STEP
from flash_attn.cute.seqlen_info import SeqlenInfoQK

NOWHERE = 1 << 30  # a key index past the end of every sequence


@dataclass(frozen=True)
class KeyLoop:
    """The entries of a row of forward lists: `mask_count` mask blocks, then full blocks, `count` in all."""

    count: Int32
    mask_count: Int32
    mask_idx: cute.Tensor
    full_idx: Optional[cute.Tensor]
    block_k: int
    bits: Optional[cute.Tensor] = None  # [entries, words]
    words_per_entry: int = 0
    step: int = STEP  # keys

    @staticmethod
    def create(
        tensors: BlockSparseTensors,
        batch: Int32,
        head: Int32,
        block: Int32,
        block_k: int,
        words_per_entry: int = 0,
        step: int = STEP,
    ) -> "KeyLoop":
        """block: query block in its sequence. words_per_entry: of `mask_block_bits`; with bits all are mask blocks."""
        row = find_row(tensors, tensors.cu_total_m_blocks, batch, head, block)
        mask_count, mask_idx = row.count(tensors.mask_block_cnt), row.entries(tensors.mask_block_idx)
        if words_per_entry:
            bits = row.bits(tensors.mask_block_bits)
            return KeyLoop(mask_count, mask_count, mask_idx, None, block_k, bits, words_per_entry, step)
        if tensors.full_block_cnt is None:
            return KeyLoop(mask_count, mask_count, mask_idx, None, block_k)
        count = mask_count + row.count(tensors.full_block_cnt)
        return KeyLoop(count, mask_count, mask_idx, row.entries(tensors.full_block_idx, full=True), block_k)

    @property
    def parts(self) -> int:
        """Blocks per step."""
        return self.step // self.block_k

    @property
    def steps(self) -> Int32:
        return (self.count + (self.parts - 1)) // self.parts

    @cute.jit
    def entry(self, step: Int32, part: cutlass.Constexpr[int]) -> Int32:
        """2 * block + is_full for the part-th block of a step; past the end of the loop, for its last block."""
        return entry_at(self._position(step, part), self.mask_count, self.mask_idx, self.full_idx)

    def _position(self, step: Int32, part: int) -> Int32:
        return cutlass.min(step * self.parts + part, self.count - 1)

    def entries(self, step: Int32) -> tuple[Int32, ...]:
        """`entry` for all parts of a step."""
        return tuple(self.entry(step, part) for part in range(self.parts))

    def words(self, step: Int32, part: int) -> tuple[Int32, ...]:
        """The `words_per_entry` words of bits of the part-th block of a step; past the end, of the last block.

        Bit j % 32 of word j // 32: the j-th token with rows in the tile lists the block.
        """
        position = self._position(step, part)
        return tuple(self.bits[position, word] for word in range(self.words_per_entry))

    def all_words(self, step: Int32) -> tuple[tuple[Int32, ...], ...]:
        """`words` for all parts of a step."""
        return tuple(self.words(step, part) for part in range(self.parts))

    def first_key(self, entry: Int32, step: Int32, part: int) -> Int32:
        """The block's first key in the sequence; `NOWHERE` where a step has no part-th block."""
        key = (entry >> 1) * self.block_k
        if part == 0:
            return key
        return Int32(cutlass.select_(step * self.parts + part < self.count, key, Int32(NOWHERE)))


TmaTensor = tuple[cute.CopyAtom, cute.Tensor]


def tma_pipelines(barriers: cute.Pointer, sizes: list[tuple[int, int, int]]) -> list[pipeline_custom.PipelineTmaAsync]:
    """TMA pipelines with contiguous barriers. sizes: (stages, consumer warps, bytes per stage) of each."""
    pipelines, at = [], 0
    for stages, consumers, tx_count in sizes:
        producer, consumer = (pipeline.CooperativeGroup(pipeline.Agent.Thread, size) for size in (1, consumers))
        pipelines.append(
            pipeline_custom.PipelineTmaAsync.create(
                barrier_storage=barriers + at, num_stages=stages, producer_group=producer, consumer_group=consumer,
                tx_count=tx_count, defer_sync=True,
            )
        )  # fmt: skip
        at += 2 * stages
    return pipelines


class TileCoord(NamedTuple):
    """Tile coordinates: batch (packed: sequence), query head, and query tile of its sequence."""

    batch: Int32
    head: Int32
    m_block: Int32


def query_loader(
    tma: TmaTensor, staged: cute.Tensor, slots: pipeline_custom.PipelineTmaAsync, seqlen: SeqlenInfoQK, coord: TileCoord
) -> Callable[[Int32], None]:
    """A function that loads a tile of q or do, [T, D, Hq, B] (packed [total, D, Hq]), 64 rows to a warpgroup's slot."""
    atom, mX = tma
    warpgroups = cute.size(staged, mode=[2])
    gX = seqlen.offset_batch_Q(mX, coord.batch, dim=3)[None, None, coord.head]
    gX = cute.local_tile(gX, (ROWS, cute.size(staged, mode=[1])), (None, 0))
    copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), gX, staged)

    def load(phase: Int32) -> None:
        for part in range(warpgroups):
            slots.producer_acquire_w_index_phase(Int32(part), phase)
            barrier = slots.sync_object_full.get_barrier(part)
            copy(src_idx=coord.m_block * warpgroups + part, dst_idx=part, tma_bar_ptr=barrier)

    return load


def key_loader(
    tma: TmaTensor,
    staged: cute.Tensor,
    stages: pipeline_custom.PipelineTmaAsync,
    seqlen: SeqlenInfoQK,
    batch: Int32,
    head_kv: Int32,
    box: tuple[int, int],
    page_table: Optional[cute.Tensor] = None,
) -> Callable[[tuple[Int32, ...], pipeline.PipelineState], None]:
    """A function that loads a step's blocks of k or v, [S, D, Hkv, B] (packed [total, D, Hkv]), into parts of a stage.

    box: (keys of a block, `box_columns`).
    page_table: int32 [B, n]: k or v is [page, D, Hkv, pages], and a page is a multiple of the block.
    """
    atom, mX = tma
    if page_table is None:
        gX = seqlen.offset_batch_K(mX, batch, dim=3)[None, None, head_kv]
        gX = cute.local_tile(gX, box, (None, None))  # (block, columns, blocks, boxes)
    else:
        gX = cute.local_tile(mX[None, None, head_kv, None], box, (None, None, None))  # and pages
        blocks_of_page = mX.shape[0] // box[0]
    sX = cute.flat_divide(staged, box)  # (block, columns, parts, boxes, stages)
    boxes = cute.size(sX, mode=[3])
    sX, gX = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))

    def load(entries: tuple[Int32, ...], state: pipeline.PipelineState) -> None:
        stages.producer_acquire(state)
        barrier = stages.producer_get_barrier(state)
        for part, entry in enumerate(entries):
            block = (entry >> 1,)
            if page_table is not None:
                block = block[0] % blocks_of_page, page_table[batch, block[0] // blocks_of_page]
            for i in range(boxes):
                source = gX[(None, block[0], i, *block[1:])]
                cute.copy(atom, source, sX[None, part, i, state.index], tma_bar_ptr=barrier)

    return load
