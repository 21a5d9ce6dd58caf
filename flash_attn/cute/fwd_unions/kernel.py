"""The kernel of `fwd_unions/interface`: a load warp, and two warpgroups that multiply, 64 rows each, as in the dq pass.

A block of keys at a time, if a token of the warpgroup lists it: S = q k^T, P = exp2 of it by `UnionSoftmax`,
o = o * scale + P v. Both products are awaited: while one warpgroup does arithmetic, the other multiplies.
"""

import math
from functools import partial
from typing import Callable, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType, pipeline_init_wait
from cutlass.utils import LayoutEnum
from quack import layout_utils, sm90_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.bwd_dq_sm90.epilogue import DqOutput
from flash_attn.cute.bwd_dq_sm90.kernel import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    FlashAttentionBackwardDqSm90,
    parts_of_stages,
)
from flash_attn.cute.bwd_dq_sm90.packed_heads import load_rows, tma_of_rows
from flash_attn.cute.bwd_dq_sm90.spec import THREADS, WARPGROUPS, WARPS
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.fwd_sm90.loads import NOWHERE, TmaTensor, key_loader, query_loader
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD, KeyMask
from flash_attn.cute.fwd_sm90.union_softmax import UnionSoftmax
from flash_attn.cute.lists.tiling import ROWS, STEP
from flash_attn.cute.multiply.product import of_registers, of_shared, sum_registers, wait
from flash_attn.cute.runtime.bounded_loads import bounded
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.utils import AuxData


class FlashAttentionForwardUnions(FlashAttentionBackwardDqSm90):
    """The kernel for one `DqSpec` of lists with bits; tiles and their places are those of the dq pass."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, Hq, D], or packed [total, Hq, D]
        mK: cute.Tensor,  # [B, S, Hkv, D], or packed [total, Hkv, D]
        mV: cute.Tensor,
        mO: cute.Tensor,  # like q
        mLSE: cute.Tensor,  # fp32 [B, Hq, T], or packed [Hq, total]
        softmax_scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mQOffset: cute.Tensor | None,
        lists: BlockSparseTensors,
        stream: cuda.CUstream,
    ):
        spec = self.spec
        mQ, mK, mV, mO = [assume_tensor_aligned(t) for t in (mQ, mK, mV, mO)]
        by_token = [[1, 3, 2, 0] if const_expr(not packed) else [0, 2, 1] for packed in spec.packed]
        mQ, mO = [layout_utils.select(t, by_token[0]) for t in (mQ, mO)]
        mK, mV = [layout_utils.select(t, by_token[1]) for t in (mK, mV)]
        mLSE = layout_utils.select(mLSE, [2, 1, 0] if const_expr(not spec.packed[0]) else [1, 0])

        layout = partial(sm90_utils.make_smem_layout, self.dtype, LayoutEnum.ROW_MAJOR)
        sQ_layout = layout((ROWS, spec.head_dim), WARPGROUPS)
        sK_layout = layout((STEP, spec.head_dim), spec.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_box = layout(spec.box, major_mode_size=spec.head_dim)
        tma_q = tma_of_rows(load, mQ, layout((ROWS, spec.head_dim)), spec.packed_heads)
        tma_k, tma_v = [cpasync.make_tiled_tma_atom(load, bounded(t, mCuSeqlensK), k_box, spec.box) for t in (mK, mV)]
        tiles = self.all_tiles(lists, mO, mCuSeqlensQ)
        grid = cutlass.min(tiles, target_sm_count()) if const_expr(spec.stay) else tiles
        self.kernel(
            (tma_q, tma_k, tma_v), (mO, mLSE), Float32(softmax_scale * math.log2(math.e)), (left, right),
            (mCuSeqlensQ, mCuSeqlensK, mQOffset), lists, (sQ_layout, sK_layout), tiles,
        ).launch(
            grid=[grid, 1, 1], block=[(WARPGROUPS + 1) * THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        tma: tuple[TmaTensor, ...],  # of q, k and v, and so on below; for q see `tma_of_rows`
        outputs: tuple[cute.Tensor, cute.Tensor],  # o, lse
        scale_log2: Float32,  # softmax_scale times log2(e)
        edges: tuple[Optional[Int32], Optional[Int32]],
        ends: tuple[Optional[cute.Tensor], ...],  # cu_seqlens of q and k, q_offset
        lists: BlockSparseTensors,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],  # of q, of k and v in shared memory
        tiles: Int32,
    ):
        spec = self.spec
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in tma:
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        staged, pipelines = self.stage(layouts, of_rows=1)
        lengths = partial(
            SeqlenInfoQK.create,
            seqlen_q_static=outputs[0].shape[0],
            seqlen_k_static=tma[1][1].shape[0],
            mCuSeqlensQ=ends[0],
            mCuSeqlensK=ends[1],
            mQOffset=ends[2],
            tile_m=spec.start,
            tile_n=spec.block_k,
        )
        place = partial(self.place, lists=lists, mDQ=outputs[0])
        pipeline_init_wait(cluster_shape_mn=(1, 1))

        if warp_idx < WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_idx == 0:
                self.load(tma, staged, pipelines, lists, lengths, place, tiles)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(tma[0], staged, pipelines, outputs, scale_log2, edges, lists, lengths, place, tiles)

    @cute.jit
    def load(
        self,
        tma: tuple[TmaTensor, ...],
        staged: list[cute.Tensor],
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        lists: BlockSparseTensors,
        lengths: Callable,
        place_of: Callable,
        tiles: Int32,
    ):
        """The load warp: all tiles of the CTA."""
        state = pipeline.make_pipeline_state(PipelineUserType.Producer, self.spec.stages)
        phase = Int32(1)  # of the slots of q
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for index in cutlass.range(first, tiles, stride, unroll=1):
            place = place_of(index)
            seqlen, walk, steps = self.visit(place, lists, lengths)
            if steps > 0:
                of = list(zip(tma, staged, pipelines))
                if const_expr(tma[0][0] is not None):
                    query_loader(*of[0], seqlen, place)(phase)
                head_kv = place.head // (self.spec.group // self.spec.packed_heads)
                load_k, load_v = [key_loader(*each, seqlen, place.batch, head_kv, self.spec.box) for each in of[1:]]
                coming = walk.entries(Int32(0))
                for step in cutlass.range(steps, unroll=1):
                    entries = coming
                    coming = walk.entries(step + 1)
                    load_k(entries, state)
                    load_v(entries, state)
                    state.advance()
                phase ^= 1
        pipelines[2].producer_tail(state)

    @cute.jit
    def multiply(
        self,
        queries: TmaTensor,
        staged: list[cute.Tensor],
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        outputs: tuple[cute.Tensor, cute.Tensor],
        scale_log2: Float32,
        edges: tuple[Optional[Int32], Optional[Int32]],
        lists: BlockSparseTensors,
        lengths: Callable,
        place_of: Callable,
        tiles: Int32,
    ):
        """A warpgroup: its rows of all tiles of the CTA."""
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // THREADS) - 1
        thread = tidx % THREADS
        sQ, sK, sV = staged
        loaded = const_expr(queries[0] is not None)

        acc_O = sum_registers(spec.head_dim)
        sK, sV = [parts_of_stages(t, (spec.block_k, spec.head_dim)) for t in (sK, sV)]
        scores = of_shared(sQ, sK, thread, spec.by_warp)
        add_v = of_registers(layout_utils.transpose_view(sV), thread, spec.by_warp)
        softmax = UnionSoftmax.of(Softmax.create(scale_log2, ROWS_OF_THREAD), self.dtype)

        state = pipeline.make_pipeline_state(PipelineUserType.Consumer, spec.stages)
        phase = Int32(0)  # of the slots of q
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for index in cutlass.range(first, tiles, stride, unroll=1):
            place = place_of(index)
            seqlen, walk, steps = self.visit(place, lists, lengths)
            first_row = (place.m_block * WARPGROUPS + group) * ROWS
            mask = KeyMask(
                seqlen, place.batch, place.head, first_row, thread, *edges, None, AuxData(None, None), spec.packed_heads
            )  # fmt: skip
            acc_O.fill(0.0)
            softmax.reset()
            if const_expr(not loaded):
                source = seqlen.offset_batch_Q(queries[1], place.batch, dim=3)
                load_rows((source,), (sQ[None, None, group],), mask, group)
            if steps > 0:
                if const_expr(loaded):
                    pipelines[0].consumer_wait_w_index_phase(group, phase)
                coming, coming_words = walk.entries(Int32(0)), walk.all_words(Int32(0))
                for step in cutlass.range(steps, unroll=1):
                    entries, words = coming, coming_words
                    coming, coming_words = walk.entries(step + 1), walk.all_words(step + 1)
                    for stages in pipelines[1:]:
                        stages.consumer_wait(state)
                    for part in cutlass.range_constexpr(len(entries)):
                        key = walk.first_key(entries[part], step, part)
                        if mask.any_lists(words[part]) & (key < NOWHERE):
                            acc_S = scores(A_idx=group, B_idx=(Int32(part), state.index))
                            wait(spec.by_warp, 0)
                            S = layout_utils.reshape_acc_to_mn(acc_S)
                            mask.hide(S, key, cutlass.Boolean(False), 0, spec.block_k)
                            mask.hide_parts(S, words[part], 0, spec.block_k)
                            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                                softmax.hidden[r] = mask.hidden(words[part], r)
                            softmax.rescale_O(acc_O, softmax.online_softmax(acc_S))
                            utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), add_v.A)
                            add_v(acc=acc_O, B_idx=(Int32(part), state.index))
                            wait(spec.by_warp, 0)
                    for stages in pipelines[1:]:
                        stages.consumer_release(state)
                    state.advance()
                if const_expr(loaded):
                    pipelines[0].consumer_release_w_index(group)
                phase ^= 1
            self.write(outputs, acc_O, softmax, mask)

    @cute.jit
    def write(self, outputs: tuple[cute.Tensor, cute.Tensor], acc_O: cute.Tensor, softmax: UnionSoftmax, mask: KeyMask):
        """Write a tile's o and lse."""
        Softmax.rescale_O(softmax, acc_O, softmax.finalize())
        DqOutput(outputs[0], None, False, self.spec.head_dim, Float32(1.0), mask).write(acc_O)
        lse = mask.seqlen.offset_batch_Q(outputs[1], mask.batch, dim=2)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            if mask.row(r) < mask.seqlen.seqlen_q and mask.thread % 4 == 0:
                lse[mask.row(r), mask.query_head(r)] = softmax.row_sum[r]
