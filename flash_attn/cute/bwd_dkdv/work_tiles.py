"""Work tiles of the dk and dv pass, and their dynamic scheduler.

An atomic counter in global memory deals work tiles out to warpgroups as they become free. Results do not depend on
which warpgroup takes a work tile. A warpgroup's q load warp draws the next index, and the other warps read it from
shared memory.
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

DRAWS = 2  # stages for drawn indices: how far a load warp may run ahead


@dataclass(frozen=True)
class WorkTile:
    """Up to 64 keys of a block, and a range of the block's (token, block) pairs."""

    batch: Int32
    head: Int32  # of keys and values
    first_key: Int32
    end: Int32  # exclusive, of its keys: `WorkTiles.end`
    begin: Int32  # the first pair
    last: Int32  # index of its last load of `DkdvSpec.heads` rows; -1: none
    tiles: Int32  # of 64 rows of q and do
    partial: Int32  # index of its partial sum, or negative: none
    seqlen: SeqlenInfoQK


@dataclass(frozen=True)
class WorkTiles:
    """All work tiles of a call, by index; `KeyPairs` in the kernel."""

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
        """pairs: the first six fields. lengths: static lengths of queries and keys, and cu_seqlens of both."""
        names = ("seqlen_q_static", "seqlen_k_static", "mCuSeqlensQ", "mCuSeqlensK")
        create = partial(SeqlenInfoQK.create, **dict(zip(names, lengths)), tile_m=spec.start)
        return WorkTiles(*pairs, create, spec)

    def count(self) -> Int32:
        """Number of work tiles, of up to 64 keys each."""
        return self.row_tiles[self.row_tiles.shape[0] - 1] * self.spec.parts

    def coordinates(self, row: Int32, part: Int32) -> tuple[Int32, Int32, Int32]:
        """(batch, head, first key) of the part-th 64 keys of a row's block."""
        blocks = (self.row_tiles.shape[0] - 1) // (self.heads * self.batch)
        rest, block = row // blocks, row % blocks
        if self.cu_blocks is None:
            batch, head = rest // self.heads, rest % self.heads
        else:
            batch, head = sequence_at(self.cu_blocks, block), rest
            block -= self.cu_blocks[batch]
        return batch, head, block * self.spec.block_size + part * ROWS

    def end(self, first_key: Int32, seqlen: SeqlenInfoQK) -> Int32:
        """Exclusive end of a tile's keys: that of the sequence, or of a block of fewer than 64 keys."""
        if self.spec.keys == ROWS:
            return seqlen.seqlen_k
        return cutlass.min(seqlen.seqlen_k, first_key + self.spec.keys)

    def work_tile(self, index: Int32) -> WorkTile:
        spec = self.spec
        row, begin, pairs_end, number = [self.work_tiles[index // spec.parts, i] for i in range(4)]
        part = index % spec.parts
        batch, head, first_key = self.coordinates(row, part)
        seqlen = self.lengths(batch)
        loads = (pairs_end - begin) * spec.loads
        loads = Int32(cutlass.select_(first_key < seqlen.seqlen_k, loads, Int32(0)))
        tiles = (loads + (spec.slots - 1)) // spec.slots
        end = self.end(first_key, seqlen)
        return WorkTile(batch, head, first_key, end, begin, loads - 1, tiles, number * spec.parts + part, seqlen)

    def token(self, work_tile: WorkTile, load: Int32) -> tuple[Int32, Int32]:
        """(token, part): load `load` brings the part-th heads of a token. Past the work tile's last load: its own."""
        spec = self.spec
        load = cutlass.min(load, work_tile.last)
        token = self.tokens[cutlass.max(work_tile.begin + load // spec.loads, 0)]
        if spec.by_head:
            return token // spec.group, token % spec.group
        return token, load % spec.slices


@dataclass(frozen=True)
class Scheduler:
    """Draws the work tiles of one warpgroup, or of two that share them."""

    counter: cute.Tensor  # int32 [1], 0 when the kernel starts
    drawn: cute.Tensor  # int32 [DRAWS * teams] in shared memory: indices of drawn work tiles
    slots: pipeline_custom.PipelineAsync  # of `drawn`
    group: Int32  # index of the warpgroup in its CTA, 0 where both share work tiles
    teams: cutlass.Constexpr[int]  # work tiles in flight per CTA

    def first(self) -> Int32:
        """Index of the first work tile, which is not drawn."""
        cta, _, _ = cute.arch.block_idx()
        return cta * self.teams + self.group

    @cute.jit
    def draw(self, index: Int32, phase: Int32) -> Int32:
        """Draw the index of the next work tile; called by the q load warp."""
        slot = self.group * DRAWS + index
        self.slots.producer_acquire_w_index_phase(slot, phase)
        if cute.arch.lane_idx() == 0:
            ctas, _, _ = cute.arch.grid_dim()
            self.drawn[slot] = cute.arch.atomic_add(self.counter.iterator, Int32(1)) + ctas * self.teams
        self.slots.producer_commit_w_index(slot)
        return self.drawn[slot]

    @cute.jit
    def follow(self, index: Int32, phase: Int32) -> Int32:
        """Read the index of the next work tile; called by the other warps."""
        slot = self.group * DRAWS + index
        self.slots.consumer_wait_w_index_phase(slot, phase)
        work_tile = self.drawn[slot]
        self.slots.consumer_release_w_index(slot)
        return work_tile
