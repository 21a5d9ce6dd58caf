"""Which key tile a CTA of block-sparse backward on SM100 works on: by the items of a plan, in their order.

A plan for SM100 (`backward_plan`) has an item for every key block of every query head, and SM100 walks its list whole.
An item stands for the CTAs, or pairs of CTAs, that a key block's tiles are dealt out to. They are launched one after
the other, from the block's last tile to its first: the kernel's lock values are those of `spt`, which count a block's
tiles from its last one, and let that which adds last release what the tiles behind the sequence's end would have.

An item lies where its CTAs are launched, so whatever order the lock values follow, they follow the launch if they
follow the plan.
"""

from dataclasses import dataclass
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from quack.cute_dsl_utils import ParamsBase

from flash_attn.cute.tile_scheduler import SingleTileLPTBwdScheduler, TileSchedulerArguments, WorkTileInfo


class PlannedArguments(NamedTuple):
    """`tiles`: what another scheduler would be made of. `subtiles`: tiles of a key block."""

    tiles: TileSchedulerArguments
    plan: cute.Tensor
    subtiles: int


class PlannedScheduler(SingleTileLPTBwdScheduler):
    """SingleTileLPTBwdScheduler, in the order of a plan."""

    @dataclass
    class Params(ParamsBase):
        """`num_block`: tiles of a sequence whose length does not vary. `clusters`: of CTAs, to a key block."""

        plan: cute.Tensor
        total_blocks: Int32
        num_block: Int32
        clusters: cutlass.Constexpr[int]
        cluster_m: cutlass.Constexpr[int]
        tile: cutlass.Constexpr[int]
        cu_seqlens: Optional[cute.Tensor] = None
        seqused: Optional[cute.Tensor] = None

    @staticmethod
    def to_underlying_arguments(args: PlannedArguments, **options) -> "PlannedScheduler.Params":
        cluster_m = args.tiles.cluster_shape_mn[0]
        return PlannedScheduler.Params(
            plan=args.plan,
            total_blocks=cute.size(args.plan.shape[0]) * args.subtiles,
            num_block=args.tiles.num_block,
            clusters=args.subtiles // cluster_m,
            cluster_m=cluster_m,
            tile=args.tiles.tile_shape_mn[0],
            cu_seqlens=args.tiles.mCuSeqlensQ,
            seqused=args.tiles.mSeqUsedQ,
        )

    @staticmethod
    def create(params: Params, *, loc=None, ip=None) -> "PlannedScheduler":
        return PlannedScheduler(params, cute.arch.block_idx()[0], loc=loc, ip=ip)

    @cute.jit
    def sequence_tiles(self, batch: Int32) -> Int32:
        """Key tiles of a sequence."""
        tiles, seqlen = self.params.num_block, Int32(0)
        if const_expr(self.params.seqused is not None):
            seqlen = self.params.seqused[batch]
        elif const_expr(self.params.cu_seqlens is not None):
            seqlen = self.params.cu_seqlens[batch + 1] - self.params.cu_seqlens[batch]
        if const_expr(self.params.seqused is not None or self.params.cu_seqlens is not None):
            tiles = cute.ceil_div(seqlen, self.params.tile)
        return tiles

    @cute.jit
    def get_current_work(self, *, loc=None, ip=None) -> WorkTileInfo:
        params = self.params
        cluster = self._tile_idx // params.cluster_m
        item, place = cluster // params.clusters, cluster % params.clusters
        is_valid = self._tile_idx < params.total_blocks
        batch, head, tile = Int32(0), Int32(0), Int32(0)
        if is_valid:
            batch, head, block = params.plan[item, 0], params.plan[item, 1], params.plan[item, 2]
            first = block * params.clusters
            behind = cutlass.min(first + params.clusters, cute.ceil_div(self.sequence_tiles(batch), params.cluster_m))
            is_valid = first + place < behind
            tile = (behind - 1 - place) * params.cluster_m + self._tile_idx % params.cluster_m
        return WorkTileInfo((tile, head, batch, Int32(0)), is_valid)
