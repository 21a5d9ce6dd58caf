"""The kernel of `bwd_dq/interface`: a load warp, and two consumer warpgroups of 64 query rows each.

    load warp     q and do when a warpgroup has released their slot, k and v as stages become free
    warpgroups    dS k of the step before and S of this step, in flight together; dP while P is computed from S;
                  then dS, which stays in registers as the A operand of dq

The warpgroups issue their products alternately: one multiplies while the other does arithmetic. `steps` has a
warpgroup's loop.
"""

import math
from functools import partial
from typing import Callable, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType, pipeline_init_arrive, pipeline_init_wait
from cutlass.utils import LayoutEnum
from quack import layout_utils, sm90_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.bwd_dq.epilogue import DqOutput, RowSums
from flash_attn.cute.bwd_dq.packed_heads import load_rows, tma_of_rows
from flash_attn.cute.bwd_dq.spec import THREADS, TILE_M, WARPGROUPS, WARPS, DqSpec
from flash_attn.cute.bwd_dq.steps import StageProducts, WarpgroupSteps, arrive_scheduler_barrier
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.fwd_sm90.loads import KeyLoop, TileCoord, TmaTensor, key_loader, query_loader, tma_pipelines
from flash_attn.cute.fwd_sm90.masks import KeyMask
from flash_attn.cute.lists.rows import lists_by_query_head, sequence_at
from flash_attn.cute.lists.tiling import ROWS
from flash_attn.cute.mma.host import DTYPES
from flash_attn.cute.mma.product import of_registers, of_shared, sum_registers, wait
from flash_attn.cute.runtime.bounded_loads import bounded
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.utils import AuxData

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


class FlashAttentionBackwardDqSm90:
    """The kernel compiled for a `DqSpec`."""

    def __init__(self, spec: DqSpec, mask_mod: Optional[Callable] = None) -> None:
        self.spec = spec
        self.mask_mod = mask_mod
        self.dtype = DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, Hq, D], or packed [total, Hq, D]
        mK: cute.Tensor,  # [B, S, Hkv, D], or packed [total, Hkv, D]
        mV: cute.Tensor,  # v and do have Dv
        mdO: cute.Tensor,
        mdPsum: cute.Tensor,  # fp32 [B, Hq, rows], or packed [Hq, rows]
        mLSElog2: cute.Tensor,
        mO: cute.Tensor | None,  # like do; with it dpsum and lse_log2 are written, else read
        mLSE: cute.Tensor | None,  # fp32 [B, Hq, T], or packed [Hq, total]
        mDQ: cute.Tensor,  # like q
        mAccum: cute.Tensor | None,  # fp32 [B, Hq, rows * D], or packed [Hq, rows * D]; what dq starts from
        softmax_scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mSeqUsedQ: cute.Tensor | None,
        mSeqUsedK: cute.Tensor | None,
        mQOffset: cute.Tensor | None,
        lists: BlockSparseTensors,
        aux_data: AuxData,
        stream: cuda.CUstream,
    ):
        mQ, mK, mV, mdO, mDQ = [assume_tensor_aligned(t) for t in (mQ, mK, mV, mdO, mDQ)]
        mQ, mdO, mDQ = [self.by_token(t, 0) for t in (mQ, mdO, mDQ)]
        mK, mV = [self.by_token(t, 1) for t in (mK, mV)]
        if const_expr(mO is not None):
            mO = self.by_token(assume_tensor_aligned(mO), 0)
            mLSE = self.rows_by_token(mLSE)
        self.launch(
            (mQ, mdO), (mK, mV), (mLSElog2, mdPsum, mO, mdO if const_expr(mO is not None) else None, mLSE),
            (mDQ, mAccum), softmax_scale, (left, right), (mCuSeqlensQ, mCuSeqlensK, mSeqUsedQ, mSeqUsedK, mQOffset),
            lists_by_query_head(lists, self.spec.list_group), aux_data, stream,
        )  # fmt: skip

    def by_token(self, t: cute.Tensor, side: int) -> cute.Tensor:
        """[B, T, H, D] -> [T, D, H, B], packed [total, H, D] -> [total, D, H]; side: 0 for queries, 1 for keys."""
        return layout_utils.select(t, [0, 2, 1] if self.spec.packed[side] else [1, 3, 2, 0])

    def rows_by_token(self, t: cute.Tensor) -> cute.Tensor:
        """[B, Hq, T] -> [T, Hq, B], packed [Hq, total] -> [total, Hq]"""
        return layout_utils.select(t, [1, 0] if self.spec.packed[0] else [2, 1, 0])

    def launch(
        self,
        rows: tuple[cute.Tensor, ...],  # q and do, or q alone, by token
        keys: tuple[cute.Tensor, cute.Tensor],  # k and v, by token
        sums: tuple[Optional[cute.Tensor], ...],
        outputs: tuple[cute.Tensor, Optional[cute.Tensor]],
        softmax_scale: Float32,
        edges: tuple[Optional[Int32], Optional[Int32]],
        ends: tuple[Optional[cute.Tensor], ...],
        lists: BlockSparseTensors,
        aux_data: AuxData,
        stream: cuda.CUstream,
    ) -> None:
        """Launch `kernel`; arguments without a comment are passed on to it."""
        spec = self.spec
        layout = partial(sm90_utils.make_smem_layout, self.dtype, LayoutEnum.ROW_MAJOR)
        layouts = [layout((ROWS, dim), WARPGROUPS) for dim in spec.dims[: len(rows)]]
        layouts += [layout((spec.step, dim), spec.stages) for dim in spec.dims]
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_rows = [tma_of_rows(load, t, layout((ROWS, dim)), spec.packed_heads) for t, dim in zip(rows, spec.dims)]
        keys = [bounded(t, ends[1]) for t in keys]
        tma_keys = [
            cpasync.make_tiled_tma_atom(load, t, layout(spec.box(dim), major_mode_size=dim), spec.box(dim))
            for t, dim in zip(keys, spec.dims)
        ]

        tiles = self.all_tiles(lists, outputs[0], ends[0])
        self.kernel(
            (*tma_rows, *tma_keys), sums, outputs, (softmax_scale, Float32(softmax_scale * math.log2(math.e))), edges,
            ends, lists, aux_data, tuple(layouts), tiles,
        ).launch(
            grid=[cutlass.min(tiles, target_sm_count()) if spec.stay else tiles, 1, 1],
            block=[(WARPGROUPS + 1) * THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma: tuple[TmaTensor, ...],  # of q and do, or of q alone, see `tma_of_rows`; of k and v; so below too
        sums: tuple[Optional[cute.Tensor], ...],  # lse_log2, dpsum, o, do, lse; the last three to compute them
        outputs: tuple[cute.Tensor, Optional[cute.Tensor]],  # dq, accumulator
        scales: tuple[Float32, Float32],  # softmax_scale; that times log2(e)
        edges: tuple[Optional[Int32], Optional[Int32]],
        ends: tuple[Optional[cute.Tensor], ...],  # cu_seqlens of q and k, seqused of q and k, q_offset
        lists: BlockSparseTensors,
        aux_data: AuxData,
        layouts: tuple[cute.ComposedLayout, ...],  # shared-memory layouts of the tensors of `tma`
        tiles: Int32,
    ):
        spec = self.spec
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in tma:
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        staged, pipelines = self.stage(layouts)
        lengths = partial(
            SeqlenInfoQK.create,
            seqlen_q_static=outputs[0].shape[0],
            seqlen_k_static=tma[-2][1].shape[0],
            mCuSeqlensQ=ends[0],
            mCuSeqlensK=ends[1],
            mSeqUsedQ=ends[2],
            mSeqUsedK=ends[3],
            mQOffset=ends[4],
            tile_m=spec.start,
            tile_n=spec.block_k,
        )
        coord_of = partial(self.coordinates, lists=lists, mDQ=outputs[0])
        pipeline_init_wait(cluster_shape_mn=(1, 1))

        if warp_idx < WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_idx == 0:
                self.load(tma, staged, pipelines, lists, lengths, coord_of, tiles)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(
                tma[:-2], staged, pipelines, sums, outputs, scales, edges, lists, aux_data, lengths, coord_of, tiles
            )  # fmt: skip

    def stage(
        self, layouts: tuple[cute.ComposedLayout, ...]
    ) -> tuple[list[cute.Tensor], list[pipeline_custom.PipelineTmaAsync]]:
        """Shared memory for q and do (or q), k and v, and the TMA pipelines that fill it."""
        # A slot of rows belongs to one warpgroup, a stage of k or v to both.
        spec, of_rows = self.spec, len(layouts) - 2
        each = of_rows * [(WARPGROUPS, WARPS, ROWS)] + 2 * [(spec.stages, WARPGROUPS * WARPS, spec.step)]
        row_bytes = [dim * self.dtype.width // 8 for dim in (*spec.dims[:of_rows], *spec.dims)]
        smem = cutlass.utils.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * sum(count for count, _, _ in each))
        staged = []
        for of in layouts:
            staged.append(smem.allocate_tensor(self.dtype, of.outer, byte_alignment=1024, swizzle=of.inner))
        sizes = [(count, warps, rows * of_row) for (count, warps, rows), of_row in zip(each, row_bytes)]
        pipelines = tma_pipelines(barriers, sizes)
        pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        return staged, pipelines

    def all_tiles(self, lists: BlockSparseTensors, mDQ: cute.Tensor, mCuSeqlensQ: Optional[cute.Tensor]) -> Int32:
        """Query tiles of all heads and sequences."""
        tiles = self.tiles_of_head(lists, mDQ) * (mDQ.shape[2] // self.spec.packed_heads)
        if const_expr(cute.rank(lists.mask_block_cnt) == 3):
            tiles *= mDQ.shape[3] if const_expr(mCuSeqlensQ is None) else mCuSeqlensQ.shape[0] - 1
        return tiles

    def tiles_of_head(self, lists: BlockSparseTensors, mDQ: cute.Tensor) -> Int32:
        """Query tiles of a sequence; of all sequences where the rows of their lists are contiguous (CSR)."""
        if const_expr(cute.rank(lists.mask_block_cnt) == 3 and not self.spec.packed[0]):
            return cute.ceil_div(mDQ.shape[0] * self.spec.packed_heads, TILE_M)
        return cute.size(lists.mask_block_cnt, mode=[cute.rank(lists.mask_block_cnt) - 1]) * self.spec.subtiles

    @cute.jit
    def coordinates(self, index: Int32, lists: BlockSparseTensors, mDQ: cute.Tensor) -> TileCoord:
        """The tile of a launch index; tiles that read the same keys are launched one after the other.

        The heads of a group vary fastest, then query tiles, with a right bound (causal) from the last, longest one on.
        With packed heads `head` is the key/value head.
        """
        spec = self.spec
        across = self.tiles_of_head(lists, mDQ)
        heads_kv, members = mDQ.shape[2] // spec.group, spec.group // spec.packed_heads
        index, member = index // members, index % members
        rest, m_block = index // across, index % across
        if const_expr(spec.edges[1]):
            m_block = across - 1 - m_block
        batch, head_kv = rest // heads_kv, rest % heads_kv
        if const_expr(cute.rank(lists.mask_block_cnt) == 2):
            before = lists.cu_total_m_blocks
            batch = sequence_at(before, m_block // spec.subtiles)
            m_block -= Int32(before[batch]) * spec.subtiles
        return TileCoord(batch, head_kv * members + member, m_block)

    def visit(
        self, coord: TileCoord, lists: BlockSparseTensors, lengths: Callable
    ) -> tuple[SeqlenInfoQK, KeyLoop, Int32]:
        """A tile's sequence lengths, its loop over keys, and the loop's steps: 0 past the last query."""
        seqlen = lengths(coord.batch)
        block = coord.m_block // self.spec.subtiles
        spec = self.spec
        loop = KeyLoop.create(lists, coord.batch, coord.head, block, spec.block_k, spec.words, spec.step)
        rows = seqlen.seqlen_q * self.spec.packed_heads
        steps = cutlass.select_(coord.m_block * TILE_M < rows, loop.steps, Int32(0))
        return seqlen, loop, Int32(steps)

    @cute.jit
    def load(
        self,
        tma: tuple[TmaTensor, ...],
        staged: list[cute.Tensor],
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        lists: BlockSparseTensors,
        lengths: Callable,
        coord_of: Callable,
        tiles: Int32,
    ):
        """The load warp: all tiles of the CTA. A tile's q is loaded after its first k, do after its first v."""
        state = pipeline.make_pipeline_state(PipelineUserType.Producer, self.spec.stages)
        phase = Int32(1)  # of the slots of q and do
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for index in cutlass.range(first, tiles, stride, unroll=1):
            coord = coord_of(index)
            seqlen, loop, steps = self.visit(coord, lists, lengths)
            if steps > 0:
                of = list(zip(tma, staged, pipelines))
                row_loaders = []
                if const_expr(tma[0][0] is not None):
                    row_loaders = [query_loader(*each, seqlen, coord) for each in of[:-2]]
                head_kv = coord.head // (self.spec.group // self.spec.packed_heads)
                key_loaders = [
                    key_loader(*each, seqlen, coord.batch, head_kv, self.spec.box(dim))
                    for each, dim in zip(of[-2:], self.spec.dims)
                ]
                coming = loop.entries(Int32(0))
                for step in cutlass.range(steps, unroll=1):
                    entries = coming
                    coming = loop.entries(step + 1)
                    for i in cutlass.range_constexpr(2):
                        key_loaders[i](entries, state)
                        if const_expr(i < len(row_loaders)):
                            if step == 0:
                                row_loaders[i](phase)
                    state.advance()
                phase ^= 1
        pipelines[-1].producer_tail(state)

    @cute.jit
    def multiply(
        self,
        queries: tuple[TmaTensor, TmaTensor],
        staged: list[cute.Tensor],
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        sums: tuple[Optional[cute.Tensor], ...],
        outputs: tuple[cute.Tensor, Optional[cute.Tensor]],
        scales: tuple[Float32, Float32],
        edges: tuple[Optional[Int32], Optional[Int32]],
        lists: BlockSparseTensors,
        aux_data: AuxData,
        lengths: Callable,
        coord_of: Callable,
        tiles: Int32,
    ):
        """A consumer warpgroup: its 64 rows of all tiles of the CTA."""
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // THREADS) - 1
        thread = tidx % THREADS

        acc_dQ = sum_registers(spec.head_dim)
        products = partial(self.products, staged, group, thread, acc_dQ)
        stage, block = products(None), None
        if const_expr(spec.words > 0):
            block = products(stage.dS)

        if group == 1:
            arrive_scheduler_barrier(group)
        state = pipeline.make_pipeline_state(PipelineUserType.Consumer, spec.stages)
        phase = Int32(0)  # of the slots of q and do
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for index in cutlass.range(first, tiles, stride, unroll=1):
            coord = coord_of(index)
            seqlen, loop, steps = self.visit(coord, lists, lengths)
            first_row = coord.m_block * TILE_M + group * ROWS
            mask = KeyMask(
                seqlen, coord.batch, coord.head, first_row, thread, *edges, self.mask_mod, aux_data, spec.packed_heads
            )  # fmt: skip
            output = DqOutput(*outputs, spec.onto_dq, spec.head_dim, scales[0], mask)
            output.start(acc_dQ)
            rows = RowSums(*sums, spec.head_dim_v, spec.start, mask).of_thread()
            if const_expr(queries[0][0] is None):
                sources = tuple(seqlen.offset_batch_Q(t, coord.batch, dim=3) for _, t in queries)
                load_rows(sources, tuple(t[None, None, group] for t in staged[:2]), mask, group)
            if steps > 0:
                tile = WarpgroupSteps(
                    stage, block, tuple(pipelines), queries[0][0] is not None, group, phase, loop, mask, rows,
                    scales[1], partial(wait, spec.use_mma_sync), spec.stages,
                )  # fmt: skip
                if const_expr(spec.words > 0 and spec.use_mma_sync):
                    state = tile.run_blocks(steps, state)
                elif const_expr(spec.words > 0):
                    state = tile.run_listed(steps, state)
                else:
                    state = tile.run_all(steps, state)
                phase ^= 1
            output.write(acc_dQ)

    def products(
        self,
        staged: list[cute.Tensor],
        group: Int32,
        thread: Int32,
        acc_dQ: cute.Tensor,
        dS: Optional[cute.Tensor],
    ) -> StageProducts:
        """A warpgroup's products with a stage, or, given the stage's registers for dS, with one block of it."""
        sQ, sdO, sK, sV = staged
        if dS is not None:
            sK, sV = [parts_of_stages(t, (self.spec.block_k, dim)) for t, dim in zip((sK, sV), self.spec.dims)]
        sync = self.spec.use_mma_sync
        scores, dprobabilities = of_shared(sQ, sK, thread, sync), of_shared(sdO, sV, thread, sync)
        add_dq = of_registers(layout_utils.transpose_view(sK), thread, sync, None if dS is None else dS.iterator)
        return StageProducts(
            partial(scores, A_idx=group), partial(dprobabilities, A_idx=group), partial(add_dq, acc=acc_dQ), add_dq.A
        )


def parts_of_stages(staged: cute.Tensor, part: tuple[int, int]) -> cute.Tensor:
    """k or v as [keys of a part, D, (parts, stages)]."""
    return cute.group_modes(cute.flat_divide(staged, part)[None, None, None, 0, None], 2, 4)
