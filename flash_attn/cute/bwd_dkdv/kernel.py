"""The kernel of `bwd_dkdv/interface`: two consumer warpgroups, each with work tiles and two load warps of its own.

    q load warp     k of a work tile, and q of its tokens, a TMA box of the group's heads at a time
    do load warp    v and do; lse_log2, dpsum and position of the same rows
    warpgroups      S^T = k q^T and dP^T = v do^T; P and dS stay in registers as A operands of dv and dk

A row of a tile of 64 is a (token, head) pair. One warpgroup's products overlap the other's arithmetic, prologue and
epilogue: the two share nothing and need no barrier. At large head dimensions they share work tiles and load warps
(`DkdvSpec.split`).
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
from flash_attn.cute import utils
from flash_attn.cute.bwd_dkdv.epilogue import KeyRows, add_partial_sums, partial_sum
from flash_attn.cute.bwd_dkdv.loads import SUMS, WARP, Loader
from flash_attn.cute.bwd_dkdv.spec import THREADS, WARPGROUPS, DkdvSpec
from flash_attn.cute.bwd_dkdv.work_tiles import DRAWS, Scheduler, WorkTile, WorkTiles
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.fwd_sm90.loads import TmaTensor, tma_pipelines
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD
from flash_attn.cute.lists.tiling import ROWS, box_columns
from flash_attn.cute.mma.host import DTYPES
from flash_attn.cute.mma.product import of_registers, of_shared, sum_registers, wait
from flash_attn.cute.runtime.own_device import target_sm_count

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40  # 2 * 232 + 40 = 3 * 168, the registers at launch


class FlashAttentionBackwardDkdvSm90:
    """The kernel compiled for a `DkdvSpec`."""

    def __init__(self, spec: DkdvSpec) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, Hq, D], or packed [total, Hq, D]
        mK: cute.Tensor,  # [B, S, Hkv, D], or packed [total, Hkv, D]
        mV: cute.Tensor,  # v and do have Dv
        mdO: cute.Tensor,
        mLSElog2: cute.Tensor,  # fp32 [B, Hq, rows], or packed [Hq, rows]
        mdPsum: cute.Tensor,
        mDK: cute.Tensor,  # like k and v
        mDV: cute.Tensor,
        mTokens: cute.Tensor,  # these three as in `KeyPairs`
        mWorkTiles: cute.Tensor,
        mRowTiles: cute.Tensor,
        mCounter: cute.Tensor,  # int32 [1], 0
        mPartials: cute.Tensor,  # fp32 [partial sums * parts * 64 * (D + Dv)]
        softmax_scale: Float32,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mCuBlocks: cute.Tensor | None,
        mQOffset: cute.Tensor | None,  # int32 [sequences]
        stream: cuda.CUstream,
    ):
        spec = self.spec
        mQ, mK, mV, mdO, mDK, mDV = [assume_tensor_aligned(t) for t in (mQ, mK, mV, mdO, mDK, mDV)]
        mQ, mdO = [layout_utils.select(t, [1, 2, 0] if const_expr(spec.packed) else [2, 3, 1, 0]) for t in (mQ, mdO)]
        by_token = [0, 2, 1] if const_expr(spec.packed) else [1, 3, 2, 0]
        mK, mV, mDK, mDV = [layout_utils.select(t, by_token) for t in (mK, mV, mDK, mDV)]

        layout = partial(sm90_utils.make_smem_layout, self.dtype, LayoutEnum.ROW_MAJOR)
        row_layouts = [layout((ROWS, dim), spec.teams * spec.stages) for dim in spec.tile_dims]
        key_layouts = [layout((ROWS, dim), spec.teams) for dim in spec.tile_dims]
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, tma_do = [self.tma_of_rows(load, t, of.inner) for t, of in zip((mQ, mdO), row_layouts)]
        tma_k, tma_v = [
            cpasync.make_tiled_tma_atom(load, t, layout(box, major_mode_size=dim), box)
            for t, dim, box in zip((mK, mV), spec.tile_dims, map(spec.key_box, spec.dims))
        ]

        batch = mK.shape[3] if const_expr(not spec.packed) else Int32(1)
        grid = cutlass.min(cute.ceil_div(mWorkTiles.shape[0] * spec.parts, spec.teams), target_sm_count())
        pairs = (mWorkTiles, mTokens, mRowTiles, mCuBlocks, mK.shape[2], batch)
        lengths = (mQ.shape[2], mK.shape[0], mCuSeqlensQ, mCuSeqlensK)
        self.kernel(
            (tma_q, tma_do, tma_k, tma_v), (mLSElog2, mdPsum, mQOffset), (mDK, mDV, mPartials),
            (softmax_scale, Float32(softmax_scale * math.log2(math.e))), pairs, lengths, mCounter,
            (*row_layouts, *key_layouts),
        ).launch(
            grid=[grid, 1, 1], block=[(WARPGROUPS + 1) * THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip
        add_partial_sums((mDK, mDV, mPartials), softmax_scale, pairs, lengths, spec).launch(
            grid=[(mRowTiles.shape[0] - 1) * spec.parts, max(spec.dims) // 32, 1],
            block=[2 * THREADS, 1, 1],
            stream=stream,
        )

    def tma_of_rows(self, load: cpasync.CopyBulkTensorTileG2SOp, mX: cute.Tensor, swizzle: cute.Swizzle) -> TmaTensor:
        """TMA atom for q or do, [Hq, D, T, B]: a box is `DkdvSpec.heads` heads of a token by `box_columns` columns."""
        box = (self.spec.heads, box_columns(self.spec.columns(mX.shape[1])))
        swizzled = cute.make_composed_layout(swizzle, 0, cute.make_layout(box, stride=(box[1], 1)))
        return cpasync.make_tiled_tma_atom(load, mX, swizzled, box)

    @cute.kernel
    def kernel(
        self,
        tma: tuple[TmaTensor, ...],  # of q, do, k and v
        sums: tuple[cute.Tensor, cute.Tensor, Optional[cute.Tensor]],  # lse_log2, dpsum, q_offset
        outputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],  # dk, dv, partial sums
        scales: tuple[Float32, Float32],  # softmax_scale; that times log2(e)
        pairs: tuple[cute.Tensor, ...],  # pairs, lengths: arguments of `WorkTiles.create`
        lengths: tuple[Int32, Int32, Optional[cute.Tensor], Optional[cute.Tensor]],
        counter: cute.Tensor,
        layouts: tuple[cute.ComposedLayout, ...],  # of q, do, k and v in shared memory
    ):
        spec = self.spec
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in tma:
                cpasync.prefetch_descriptor(atom)
        smem = cutlass.utils.SmemAllocator()
        tiles = spec.teams * spec.stages
        counts = (tiles, tiles, spec.teams, spec.teams, tiles)  # of q, do, k, v, row sums
        barriers = smem.allocate_array(cutlass.Int64, 2 * (sum(counts) + DRAWS * spec.teams))
        staged, plain = [], []
        for of in layouts:
            memory = smem.allocate_array(self.dtype, cute.cosize(of.outer), byte_alignment=1024)
            plain.append(memory)
            swizzled = cute.recast_ptr(memory, of.inner, dtype=self.dtype)
            staged.append(cute.make_tensor(swizzled, of.outer))
        row_sums = smem.allocate_tensor(Float32, cute.make_layout((ROWS, SUMS, tiles)), byte_alignment=16)
        drawn = smem.allocate_tensor(Int32, cute.make_layout(DRAWS * spec.teams), byte_alignment=4)
        loaders = 2 * spec.teams
        warps = THREADS // WARP * (WARPGROUPS // spec.teams)  # consumer warps per work tile
        row_bytes = [dim * self.dtype.width // 8 for dim in 2 * spec.tile_dims]
        group_of = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
        loaded = (spec.slots * spec.heads, spec.slots * spec.heads, spec.keys, spec.keys)  # rows of a stage
        sizes = [(n, warps, rows * of_row) for n, rows, of_row in zip(counts, loaded, row_bytes)]
        pipelines = tma_pipelines(barriers, sizes)
        at = 2 * sum(counts[:4])
        pipelines.append(
            pipeline_custom.PipelineAsync.create(
                barrier_storage=barriers + at,
                num_stages=tiles,
                producer_group=group_of(WARP),
                consumer_group=group_of(warps),
                elect_one_release=True,
                syncwarp_before_release=False,
                defer_sync=True,
            )
        )
        draws = pipeline_custom.PipelineAsync.create(
            barrier_storage=barriers + (at + 2 * tiles),
            num_stages=DRAWS * spec.teams,
            producer_group=group_of(1),
            consumer_group=group_of(1 + warps),
            elect_one_commit=True,
            elect_one_release=True,
            defer_sync=True,
        )
        pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        tidx, _, _ = cute.arch.thread_idx()
        if const_expr(spec.slots * spec.heads < ROWS):
            for memory, dim in zip(plain, spec.tile_dims):
                words = cute.make_tensor(
                    cute.recast_ptr(memory, dtype=Int32), cute.make_layout(tiles * ROWS * dim // 2)
                )
                for i in cutlass.range(tidx, cute.size(words), (WARPGROUPS + 1) * THREADS, unroll=1):
                    words[i] = 0
            cute.arch.fence_view_async_shared()
        work_tiles = WorkTiles.create(pairs, lengths, spec)
        pipeline_init_wait(cluster_shape_mn=(1, 1))
        if const_expr(spec.slots * spec.heads < ROWS):
            cute.arch.sync_threads()

        scheduler_of = partial(Scheduler, counter, drawn, draws, teams=spec.teams)
        if warp_idx < THREADS // WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            loader = Loader(spec, work_tiles, scheduler_of(group=warp_idx // 2))
            load_q, load_do = [
                partial(loader.load, tma[i], tma[i + 2], plain[i], staged[i + 2], pipelines[i], pipelines[i + 2])
                for i in (0, 1)
            ]
            if (warp_idx % 2 == 0) & (warp_idx < loaders):
                load_q(None, None, None)
            elif warp_idx < loaders:
                load_do(sums, row_sums, pipelines[4])
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = cute.arch.make_warp_uniform(tidx // THREADS) - 1
            arguments = (staged, row_sums, pipelines, outputs, scales, work_tiles)
            if const_expr(not spec.split):
                self.multiply(*arguments, scheduler_of(group=group), tidx % THREADS)
            elif group == 0:
                self.multiply_one(0, *arguments, scheduler_of(group=Int32(0)), tidx % THREADS)
            else:
                self.multiply_one(1, *arguments, scheduler_of(group=Int32(0)), tidx % THREADS)

    @cute.jit
    def multiply(
        self,
        staged: list[cute.Tensor],
        row_sums: cute.Tensor,
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        outputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        scales: tuple[Float32, Float32],
        work_tiles: WorkTiles,
        scheduler: Scheduler,
        thread: Int32,
    ):
        """A warpgroup that computes dk and dv of its own work tiles."""
        spec, group = self.spec, scheduler.group
        sQ, sdO, sK, sV = staged
        pipeline_q, pipeline_do, pipeline_k, pipeline_v, pipeline_sums = pipelines

        scores, dprobabilities = [
            partial(of_shared(a, b, thread, spec.use_mma_sync), A_idx=group) for a, b in ((sK, sQ), (sV, sdO))
        ]
        acc_dK, acc_dV = [sum_registers(dim) for dim in spec.tile_dims]
        of_rows = [of_registers(layout_utils.transpose_view(t), thread, spec.use_mma_sync) for t in (sQ, sdO)]
        add_dk, add_dv = [partial(product, acc=acc) for product, acc in zip(of_rows, (acc_dK, acc_dV))]

        draw = pipeline.make_pipeline_state(PipelineUserType.Consumer, DRAWS)
        state = pipeline.make_pipeline_state(PipelineUserType.Consumer, spec.stages)
        phase = Int32(0)  # of k and v
        # Not a constant 0: the compiler would keep it in one register with wgmma's zero-init flags, lose track of their
        # values, and keep old scores in registers.
        zero = scales[0] * 0.0
        index = scheduler.first()
        while index < work_tiles.count():
            work_tile = work_tiles.work_tile(index)
            acc_dK.fill(zero)
            acc_dV.fill(zero)
            if work_tile.tiles > 0:
                finish = partial(
                    self.finish_tile, row_sums=row_sums, pipeline_sums=pipeline_sums, first_key=work_tile.first_key,
                    thread=thread, scale_log2=scales[1], tdVrP=of_rows[1].A, tdKrdS=of_rows[0].A, add_dv=add_dv,
                )  # fmt: skip
                slot = group * spec.stages + state.index
                pipeline_k.consumer_wait_w_index_phase(group, phase)
                pipeline_q.consumer_wait_w_index_phase(slot, state.phase)
                acc_S = scores(B_idx=slot)
                pipeline_v.consumer_wait_w_index_phase(group, phase)
                pipeline_do.consumer_wait_w_index_phase(slot, state.phase)
                finish(acc_S, self.started(dprobabilities, slot), slot, state.phase)
                for _ in cutlass.range(1, work_tile.tiles, unroll=1):
                    before = group * spec.stages + state.index
                    state.advance()
                    slot = group * spec.stages + state.index
                    add_dk(B_idx=before, wg_wait=-1)
                    pipeline_q.consumer_wait_w_index_phase(slot, state.phase)
                    acc_S = scores(B_idx=slot)
                    wait(spec.use_mma_sync, 1)
                    for each in (pipeline_q, pipeline_do, pipeline_sums):
                        each.consumer_release_w_index(before)
                    pipeline_do.consumer_wait_w_index_phase(slot, state.phase)
                    finish(acc_S, self.started(dprobabilities, slot), slot, state.phase)
                pipeline_k.consumer_release_w_index(group)
                pipeline_v.consumer_release_w_index(group)
                phase ^= 1
                slot = group * spec.stages + state.index
                add_dk(B_idx=slot, wg_wait=0)
                for each in (pipeline_q, pipeline_do, pipeline_sums):
                    each.consumer_release_w_index(slot)
                state.advance()
            # Read again instead of kept: registers are scarce in the loop.
            work_tile = work_tiles.work_tile(index)
            self.write(work_tile, outputs, 0, acc_dK, scales[0], thread)
            self.write(work_tile, outputs, 1, acc_dV, Float32(1.0), thread)
            index = scheduler.follow(draw.index, draw.phase)
            draw.advance()

    @cute.jit
    def multiply_one(
        self,
        which: cutlass.Constexpr[int],
        staged: list[cute.Tensor],
        row_sums: cute.Tensor,
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        outputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        scales: tuple[Float32, Float32],
        work_tiles: WorkTiles,
        scheduler: Scheduler,
        thread: Int32,
    ):
        """A warpgroup that computes dk (0) or dv (1) of all work tiles of its CTA."""
        spec = self.spec
        sQ, sdO, sK, sV = staged
        pipeline_q, pipeline_do, pipeline_k, pipeline_v, pipeline_sums = pipelines
        of_keys = [of_shared(a, b, thread, spec.use_mma_sync) for a, b in ((sK, sQ), (sV, sdO))]
        scores, dprobabilities = [partial(product, A_idx=0) for product in of_keys]
        acc = sum_registers(spec.tile_dims[which])
        product = of_registers(layout_utils.transpose_view((sQ, sdO)[which]), thread, spec.use_mma_sync)
        add, started = partial(product, acc=acc), partial(self.started, dprobabilities if which == 0 else None)
        draw = pipeline.make_pipeline_state(PipelineUserType.Consumer, DRAWS)
        state = pipeline.make_pipeline_state(PipelineUserType.Consumer, spec.stages)
        phase = Int32(0)  # of k and v
        zero = scales[0] * 0.0  # as in `multiply`
        index = scheduler.first()
        while index < work_tiles.count():
            work_tile = work_tiles.work_tile(index)
            acc.fill(zero)
            if work_tile.tiles > 0:
                finish = partial(
                    self.finish_one, row_sums=row_sums, pipeline_sums=pipeline_sums, first_key=work_tile.first_key,
                    thread=thread, scale_log2=scales[1], operand=product.A,
                )  # fmt: skip
                pipeline_k.consumer_wait_w_index_phase(0, phase)
                pipeline_q.consumer_wait_w_index_phase(state.index, state.phase)
                acc_S = scores(B_idx=state.index)
                pipeline_v.consumer_wait_w_index_phase(0, phase)
                pipeline_do.consumer_wait_w_index_phase(state.index, state.phase)
                finish(acc_S, started(state.index), state.index, state.phase)
                for _ in cutlass.range(1, work_tile.tiles, unroll=1):
                    before = Int32(state.index)
                    state.advance()
                    add(B_idx=before, wg_wait=-1)
                    pipeline_q.consumer_wait_w_index_phase(state.index, state.phase)
                    acc_S = scores(B_idx=state.index)
                    wait(spec.use_mma_sync, 1)
                    for each in (pipeline_q, pipeline_do, pipeline_sums):
                        each.consumer_release_w_index(before)
                    pipeline_do.consumer_wait_w_index_phase(state.index, state.phase)
                    finish(acc_S, started(state.index), state.index, state.phase)
                pipeline_k.consumer_release_w_index(0)
                pipeline_v.consumer_release_w_index(0)
                phase ^= 1
                add(B_idx=state.index, wg_wait=0)
                for each in (pipeline_q, pipeline_do, pipeline_sums):
                    each.consumer_release_w_index(state.index)
                state.advance()
            scale = scales[0] if which == 0 else Float32(1.0)
            self.write(work_tiles.work_tile(index), outputs, which, acc, scale, thread)
            index = scheduler.follow(draw.index, draw.phase)
            draw.advance()

    @cute.jit
    def finish_one(
        self,
        acc_S: cute.Tensor,
        dP_of: Optional[Callable[[], cute.Tensor]],
        slot: Int32,
        sums_phase: Int32,
        row_sums: cute.Tensor,
        pipeline_sums: pipeline_custom.PipelineAsync,
        first_key: Int32,
        thread: Int32,
        scale_log2: Float32,
        operand: cute.Tensor,
    ):
        """From S in flight to P, or with dP in flight too, to dS; in `operand`."""
        wait(self.spec.use_mma_sync, 0 if dP_of is None else 1)
        pipeline_sums.consumer_wait_w_index_phase(slot, sums_phase)
        self.weigh(acc_S, row_sums, slot, first_key, thread, scale_log2)
        if const_expr(dP_of is not None):
            acc_dP = dP_of()
            wait(self.spec.use_mma_sync, 0)
            self.subtract(acc_S, acc_dP, row_sums, slot, thread)
        utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), operand)

    def started(self, product: Optional[Callable], slot: Int32) -> Optional[Callable[[], cute.Tensor]]:
        """A function that returns the product: wgmma is issued now, mma.sync only when called, to spare registers."""
        if product is None:
            return None
        if self.spec.use_mma_sync:
            return partial(product, B_idx=slot)
        acc = product(B_idx=slot)
        return lambda: acc

    @cute.jit
    def finish_tile(
        self,
        acc_S: cute.Tensor,
        dP_of: Callable[[], cute.Tensor],
        slot: Int32,
        sums_phase: Int32,
        row_sums: cute.Tensor,
        pipeline_sums: pipeline_custom.PipelineAsync,
        first_key: Int32,
        thread: Int32,
        scale_log2: Float32,
        tdVrP: cute.Tensor,
        tdKrdS: cute.Tensor,
        add_dv: Callable,
    ):
        """From S and dP in flight to P, whose product with do is issued, and to dS in `tdKrdS`."""
        wait(self.spec.use_mma_sync, 1)
        pipeline_sums.consumer_wait_w_index_phase(slot, sums_phase)
        self.weigh(acc_S, row_sums, slot, first_key, thread, scale_log2)
        utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), tdVrP)
        add_dv(B_idx=slot)
        acc_dP = dP_of()
        wait(self.spec.use_mma_sync, 1)
        self.subtract(acc_S, acc_dP, row_sums, slot, thread)
        utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), tdKrdS)
        wait(self.spec.use_mma_sync, 0)

    @cute.jit
    def weigh(
        self,
        acc_S: cute.Tensor,
        row_sums: cute.Tensor,
        slot: Int32,
        first_key: Int32,
        thread: Int32,
        scale_log2: Float32,
    ):
        """Overwrite S with P."""
        S = layout_utils.reshape_acc_to_mn(acc_S)
        lane = thread % WARP
        pair = partial(self.pair_of_columns, row_sums, slot, lane % 4)
        if const_expr(self.spec.causal):
            positions = cute.make_tensor(cute.recast_ptr(row_sums.iterator, dtype=Int32), row_sums.layout)
            if positions[0, 2, slot] < first_key + (ROWS - 1):
                key = first_key + thread // WARP * 16 + lane // 4
                for i in cutlass.range_constexpr(ROWS // 8):
                    tokens = cute.recast_tensor(pair(2, i), Int32)
                    for e in cutlass.range_constexpr(2):
                        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                            hidden = key + 8 * r > tokens[e]
                            S[r, 2 * i + e] = -Float32.inf if hidden else S[r, 2 * i + e]
        for i in cutlass.range_constexpr(ROWS // 8):
            lse = pair(0, i)
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    S[r, 2 * i + e] = cute.math.exp2(S[r, 2 * i + e] * scale_log2 - lse[e], fastmath=True)

    @cute.jit
    def subtract(self, acc_S: cute.Tensor, acc_dP: cute.Tensor, row_sums: cute.Tensor, slot: Int32, thread: Int32):
        """Overwrite P with dS."""
        S, dP = layout_utils.reshape_acc_to_mn(acc_S), layout_utils.reshape_acc_to_mn(acc_dP)
        pair = partial(self.pair_of_columns, row_sums, slot, thread % 4)
        for i in cutlass.range_constexpr(ROWS // 8):
            dpsum = pair(1, i)
            for e in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    S[r, 2 * i + e] = S[r, 2 * i + e] * (dP[r, 2 * i + e] - dpsum[e])

    def pair_of_columns(self, row_sums: cute.Tensor, slot: Int32, quad: Int32, which: int, i: int) -> cute.Tensor:
        """Row sum `which` for the thread's two of the i-th 8 columns of S^T."""
        found = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(cute.local_tile(row_sums[None, which, slot], (2,), (4 * i + quad,)), found)
        return found

    @cute.jit
    def write(
        self,
        work_tile: WorkTile,
        outputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        which: cutlass.Constexpr[int],
        acc: cute.Tensor,
        scale: Float32,
        thread: Int32,
    ):
        """Write dk (0) or dv (1) of a work tile, or its partial sum."""
        spec = self.spec
        registers = cute.make_tensor(acc.iterator, cute.make_layout((4, spec.dims[which] // 8)))
        if work_tile.partial < 0:
            rows = work_tile.seqlen.offset_batch_K(outputs[which], work_tile.batch, dim=3)[None, None, work_tile.head]
            KeyRows(rows, work_tile.first_key, work_tile.end, thread, spec.add).write(registers, scale)
        else:
            cute.autovec_copy(registers, partial_sum(outputs[2], work_tile.partial, which, thread, spec.dims))
