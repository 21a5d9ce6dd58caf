"""Work tiles of work: what they are, and how the warpgroups of all CTAs get them.

Work tiles are dealt from a counter in memory, to each warpgroup as it comes free. Who takes a work tile changes nothing
in what becomes of it. A warpgroup's load warp draws, and tells the other warps that work for it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.bwd_dkdv.spec import DkdvSpec
from flash_attn.cute.lists.rows import sequence_at
from flash_attn.cute.lists.tiling import ROWS
from flash_attn.cute.seqlen_info import SeqlenInfoQK

DRAWS = 2  # that a load warp is ahead at most


@dataclass(frozen=True)
class WorkTile:
    """64 keys, or the first of 64 that are a block, and the range of their pairs."""

    batch: Int32
    head: Int32  # of keys and values
    first_key: Int32
    end: Int32  # as in `ItemList.end`
    begin: Int32  # the first pair
    last: Int32  # of its loads of `heads` rows, counted from 0; -1: none
    tiles: Int32
    partial: Int32  # of its partial sums, or negative
    seqlen: SeqlenInfoQK


@dataclass(frozen=True)
class WorkTiles:
    """All work tiles of a call, by number."""

    work_tiles: cute.Tensor
    tokens: cute.Tensor
    row_tiles: cute.Tensor
    cu_blocks: Optional[cute.Tensor]
    heads: Int32  # of keys and values
    batch: Int32  # sequences that are not packed
    lengths: Callable[[Int32], SeqlenInfoQK]
    spec: cutlass.Constexpr[DkdvSpec]

    @staticmethod
    def create(pairs: tuple, lengths: tuple, spec: DkdvSpec) -> "WorkTiles":
        """pairs: all but the last two. lengths: static ones of queries and keys, and cu_seqlens of both."""
        names = ("seqlen_q_static", "seqlen_k_static", "mCuSeqlensQ", "mCuSeqlensK")
        create = partial(SeqlenInfoQK.create, **dict(zip(names, lengths)), tile_m=spec.start)
        return WorkTiles(*pairs, create, spec)

    def count(self) -> Int32:
        """Work tiles, of 64 keys each."""
        return self.row_tiles[self.row_tiles.shape[0] - 1] * self.spec.parts

    def place(self, row: Int32, part: Int32) -> tuple[Int32, Int32, Int32]:
        """The sequence, head and first key of a part of a row."""
        blocks = (self.row_tiles.shape[0] - 1) // (self.heads * self.batch)
        rest, block = row // blocks, row % blocks
        if self.cu_blocks is None:
            batch, head = rest // self.heads, rest % self.heads
        else:
            batch, head = sequence_at(self.cu_blocks, block), rest
            block -= self.cu_blocks[batch]
        return batch, head, block * self.spec.block_size + part * ROWS

    def end(self, first_key: Int32, seqlen: SeqlenInfoQK) -> Int32:
        """A key behind which none of a tile is there, or wanted: a small block has fewer."""
        if self.spec.keys == ROWS:
            return seqlen.seqlen_k
        return cutlass.min(seqlen.seqlen_k, first_key + self.spec.keys)

    def work_tile(self, index: Int32) -> WorkTile:
        spec = self.spec
        row, begin, behind, number = [self.work_tiles[index // spec.parts, i] for i in range(4)]
        part = index % spec.parts
        batch, head, first_key = self.place(row, part)
        seqlen = self.lengths(batch)
        loads = (behind - begin) * spec.loads
        loads = Int32(cutlass.select_(first_key < seqlen.seqlen_k, loads, Int32(0)))
        tiles = (loads + (spec.slots - 1)) // spec.slots
        end = self.end(first_key, seqlen)
        return WorkTile(batch, head, first_key, end, begin, loads - 1, tiles, number * spec.parts + part, seqlen)

    def token(self, work_tile: WorkTile, load: Int32) -> tuple[Int32, Int32]:
        """A load's token, and which of the token's loads it is; past the work tile's end the last one's."""
        spec = self.spec
        load = cutlass.min(load, work_tile.last)
        token = self.tokens[cutlass.max(work_tile.begin + load // spec.loads, 0)]
        if spec.by_head:
            return token // spec.group, token % spec.group
        return token, load % spec.slices


@dataclass(frozen=True)
class Scheduler:
    """The work tiles of one warpgroup, or of two that share them."""

    counter: cute.Tensor  # int32 [1], 0 when the kernel starts
    drawn: cute.Tensor  # int32 [DRAWS * teams] in shared memory, work tiles that were drawn
    slots: pipeline_custom.PipelineAsync  # of them
    group: Int32  # the warpgroup in its CTA, 0 for those that share work tiles
    teams: cutlass.Constexpr[int]  # of a CTA

    def first(self) -> Int32:
        """The first work tile, which need not be drawn."""
        cta, _, _ = cute.arch.block_idx()
        return cta * self.teams + self.group

    @cute.jit
    def draw(self, index: Int32, phase: Int32) -> Int32:
        """The next work tile, by the load warp."""
        slot = self.group * DRAWS + index
        self.slots.producer_acquire_w_index_phase(slot, phase)
        if cute.arch.lane_idx() == 0:
            ctas, _, _ = cute.arch.grid_dim()
            self.drawn[slot] = cute.arch.atomic_add(self.counter.iterator, Int32(1)) + ctas * self.teams
        self.slots.producer_commit_w_index(slot)
        return self.drawn[slot]

    @cute.jit
    def follow(self, index: Int32, phase: Int32) -> Int32:
        """The next work tile, by the other warps."""
        slot = self.group * DRAWS + index
        self.slots.consumer_wait_w_index_phase(slot, phase)
        work_tile = self.drawn[slot]
        self.slots.consumer_release_w_index(slot)
        return work_tile
