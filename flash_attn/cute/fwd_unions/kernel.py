"""The kernel of `fwd_unions/interface`: a load warp, and two consumer warpgroups of 64 rows each, as in the dq pass.

For each block of keys that a token of the warpgroup lists: S = q k^T, P by `UnionSoftmax`, o = o * scale + P v. A
warpgroup awaits each product: while it does arithmetic, the other one multiplies.
"""

from typing import Callable, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.pipeline import PipelineUserType
from quack import layout_utils

from flash_attn.cute import pipeline as pipeline_custom
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.bwd_dq.epilogue import DqOutput
from flash_attn.cute.bwd_dq.kernel import FlashAttentionBackwardDqSm90, parts_of_stages
from flash_attn.cute.bwd_dq.packed_heads import load_rows
from flash_attn.cute.bwd_dq.spec import THREADS, WARPGROUPS
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.fwd_sm90.block_sums import BlockSums
from flash_attn.cute.fwd_sm90.loads import NOWHERE, TmaTensor
from flash_attn.cute.fwd_sm90.masks import ROWS_OF_THREAD, KeyMask
from flash_attn.cute.fwd_sm90.union_softmax import UnionSoftmax
from flash_attn.cute.lists.tiling import ROWS
from flash_attn.cute.mma.product import of_registers, of_shared, sum_registers, wait
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.utils import AuxData


class FlashAttentionForwardUnions(FlashAttentionBackwardDqSm90):
    """The kernel compiled for a `DqSpec` of lists with bits, with the dq pass's tiles and launch order."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, Hq, D], or packed [total, Hq, D]
        mK: cute.Tensor,  # [B, S, Hkv, D], or packed [total, Hkv, D]
        mV: cute.Tensor,  # v and o have Dv
        mO: cute.Tensor,
        mLSE: cute.Tensor,  # fp32 [B, Hq, T], or packed [Hq, total]
        mSums: cute.Tensor | None,  # of `block_sums`
        softmax_scale: Float32,
        left: Int32 | None,
        right: Int32 | None,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mQOffset: cute.Tensor | None,
        lists: BlockSparseTensors,
        stream: cuda.CUstream,
    ):
        mQ, mK, mV, mO = [assume_tensor_aligned(t) for t in (mQ, mK, mV, mO)]
        mQ, mO = [self.by_token(t, 0) for t in (mQ, mO)]
        mK, mV = [self.by_token(t, 1) for t in (mK, mV)]
        aux_data = AuxData(None if const_expr(mSums is None) else [mSums], None)
        self.launch(
            (mQ,), (mK, mV), (), (mO, self.rows_by_token(mLSE)), softmax_scale, (left, right),
            (mCuSeqlensQ, mCuSeqlensK, None, None, mQOffset), lists, aux_data, stream,
        )  # fmt: skip

    @cute.jit
    def multiply(
        self,
        queries: tuple[TmaTensor],
        staged: list[cute.Tensor],
        pipelines: list[pipeline_custom.PipelineTmaAsync],
        sums: tuple[()],
        outputs: tuple[cute.Tensor, cute.Tensor],  # o, lse
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
        sQ, sK, sV = staged
        loaded = const_expr(queries[0][0] is not None)

        acc_O = sum_registers(spec.head_dim_v)
        sK, sV = [parts_of_stages(t, (spec.block_k, dim)) for t, dim in zip((sK, sV), spec.dims)]
        scores = of_shared(sQ, sK, thread, spec.use_mma_sync)
        add_v = of_registers(layout_utils.transpose_view(sV), thread, spec.use_mma_sync)
        softmax = UnionSoftmax.of(Softmax.create(scales[1], ROWS_OF_THREAD), self.dtype)

        state = pipeline.make_pipeline_state(PipelineUserType.Consumer, spec.stages)
        phase = Int32(0)  # of the slots of q
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for index in cutlass.range(first, tiles, stride, unroll=1):
            coord = coord_of(index)
            seqlen, loop, steps = self.visit(coord, lists, lengths)
            first_row = (coord.m_block * WARPGROUPS + group) * ROWS
            mask = KeyMask(
                seqlen, coord.batch, coord.head, first_row, thread, *edges, None, aux_data, spec.packed_heads
            )  # fmt: skip
            block_sums = BlockSums.of(mask)
            acc_O.fill(0.0)
            softmax.reset()
            if const_expr(not loaded):
                source = seqlen.offset_batch_Q(queries[0][1], coord.batch, dim=3)
                load_rows((source,), (sQ[None, None, group],), mask, group)
            if steps > 0:
                if const_expr(loaded):
                    pipelines[0].consumer_wait_w_index_phase(group, phase)
                coming, coming_words = loop.entries(Int32(0)), loop.all_words(Int32(0))
                for step in cutlass.range(steps, unroll=1):
                    entries, words = coming, coming_words
                    coming, coming_words = loop.entries(step + 1), loop.all_words(step + 1)
                    for stages in pipelines[1:]:
                        stages.consumer_wait(state)
                    for part in cutlass.range_constexpr(len(entries)):
                        key = loop.first_key(entries[part], step, part)
                        if mask.any_lists(words[part]) & (key < NOWHERE):
                            acc_S = scores(A_idx=group, B_idx=(Int32(part), state.index))
                            wait(spec.use_mma_sync, 0)
                            S = layout_utils.reshape_acc_to_mn(acc_S)
                            mask.hide(S, key, cutlass.Boolean(False), 0, spec.block_k)
                            mask.hide_parts(S, words[part], 0, spec.block_k)
                            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                                softmax.hidden[r] = mask.hidden(words[part], r)
                            softmax.rescale_O(acc_O, softmax.online_softmax(acc_S))
                            if const_expr(block_sums is not None):
                                block_sums.write(acc_S, words[part], softmax)
                            utils.cvt_f16(layout_utils.reshape_acc_to_frgA(acc_S), add_v.A)
                            add_v(acc=acc_O, B_idx=(Int32(part), state.index))
                            wait(spec.use_mma_sync, 0)
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
        DqOutput(outputs[0], None, False, self.spec.head_dim_v, Float32(1.0), mask).write(acc_O)
        lse = mask.seqlen.offset_batch_Q(outputs[1], mask.batch, dim=2)
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            if mask.row(r) < mask.seqlen.seqlen_q and mask.thread % 4 == 0:
                lse[mask.row(r), mask.query_head(r)] = softmax.row_sum[r]
