"""The kernel of `select_by_index`; the package's docstring gives the algorithm."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flash_attn.cute.mma.form import use_mma_sync
from flash_attn.cute.runtime.own_device import target_sm_count
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.select_by_index.block_maxima import BlockMaxima
from nsa_layer.kernels.select_by_index.loads import Barriers, Loads
from nsa_layer.kernels.select_by_index.spec import KEYS, ROWS, IndexTopKSpec
from nsa_layer.kernels.select_by_token.gemm import operand_layout
from nsa_layer.kernels.select_by_token.spec import THREADS, WARP, WARPS
from nsa_layer.kernels.select_by_token.tiles import Tiles
from nsa_layer.kernels.select_by_token.topk import BestBlocks
from nsa_layer.support import device_arch

Tensor = torch.Tensor


class IndexTopK:
    """One launch of `select_by_index`."""

    shapes = ("B T Hs D", "B S Hk D", "starts", "B T Hs n", "starts", "sequences", "B T Hs n")

    def __init__(self, spec: IndexTopKSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *arguments):
        """q_index, k_index, starts of queries, lists; starts of keys and positions of first queries, None if queries
        and keys are the same tokens; scores, or None; keys of a sequence, multiprocessors, stream."""
        mQ, mK, mCu, mIndices, mCu_keys, mOffset, mScores, S, multiprocessors, stream = arguments
        spec, dtype = self.spec, mQ.element_type
        sQ_layout = operand_layout(dtype, ROWS, spec.D, spec.groups)
        sK_layout = operand_layout(dtype, KEYS, spec.D, spec.stages)
        starts_of_keys = mCu if const_expr(mCu_keys is None) else mCu_keys
        scheduler = Tiles(spec, mQ, mIndices, (mCu, starts_of_keys, mCu_keys, mOffset), S)
        tma_q, tma_k = self.tma(mQ, sQ_layout, ROWS), self.tma(mK, sK_layout, KEYS)
        self.kernel(scheduler, mScores, tma_q, tma_k, (sQ_layout, sK_layout)).launch(
            grid=[cutlass.min(scheduler.tiles(), multiprocessors), 1, 1],
            block=[THREADS * (spec.groups + 2), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def tma(self, x: cute.Tensor, layout: cute.ComposedLayout, rows: int):
        x = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1] if self.spec.packed else [1, 3, 2, 0]))
        one = cute.select(layout, mode=[0, 1])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, one, (rows, self.spec.D))

    @cute.kernel
    def kernel(
        self,
        scheduler: Tiles,
        mScores: cute.Tensor | None,
        tma_q: tuple[cute.CopyAtom, cute.Tensor],
        tma_k: tuple[cute.CopyAtom, cute.Tensor],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        spec, dtype = self.spec, scheduler.mQ.element_type
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        smem = SmemAllocator()
        barriers = Barriers.of(smem.allocate_array(Int64, 2 * spec.stages + 2), spec.stages)
        sQ, sK = [
            smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner) for layout in layouts
        ]
        scores_layout = cute.make_layout(
            (spec.blocks_a_step, spec.tokens_a_warp, WARPS), stride=(1, spec.token_words, spec.warp_words)
        )
        sScores = smem.allocate_tensor(Float32, scores_layout, byte_alignment=16)
        sColumns = smem.allocate_tensor(Int64, cute.make_ordered_layout((spec.capacity, WARP, WARPS), order=(1, 0, 2)))
        sNonnegative = smem.allocate_tensor(Int32, cute.make_layout(WARPS))
        sSelected = smem.allocate_tensor(Int64, cute.make_layout((spec.n, spec.tokens_a_warp, WARPS)))
        if warp == 0:
            cpasync.prefetch_descriptor(tma_q[0])
            cpasync.prefetch_descriptor(tma_k[0])
            barriers.init(spec.stages, WARPS * spec.groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Warpgroups: 0 multiplies, 1 keeps lists, 2 loads, 3, if there, multiplies.
        number = warp // WARPS
        if number == 1:
            if const_expr(spec.registers is not None):
                cute.arch.setmaxregister_increase(spec.registers[1])
            BestBlocks(spec, scheduler, sScores, sColumns, sSelected, sNonnegative, mScores).run()
        elif number == 2:
            if const_expr(spec.registers is not None):
                cute.arch.setmaxregister_decrease(spec.registers[2])
            if warp % WARPS == 0:
                Loads(spec, scheduler, tma_q, tma_k, sQ, sK, barriers).run()
        else:
            if const_expr(spec.registers is not None):
                cute.arch.setmaxregister_increase(spec.registers[0])
            bits = cute.recast_tensor(sScores, Int32)
            thread = tidx % THREADS
            BlockMaxima(spec, scheduler, sQ, sK, bits, sNonnegative, barriers, number // 3, thread).run()


@torch.no_grad()
def select_by_index(
    q_index: Tensor,
    k_index: Tensor,
    *,
    config: NSAConfig,
    width: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    q_offset: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    with_scores: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Select the blocks of each token and list by their largest token score.

    Args:
        q_index: [B, T, Hs, Di], or packed [total, Hs, Di]; fp16 or bf16, Di 16, 32, 64 or 128.
        k_index: [B, S, Hs, Di], one key for all lists [B, S, 1, Di], or packed, like q_index.
        cu_seqlens: packed only: int32, where sequences start.
        width, max_seqlen, q_offset, cu_seqlens_k, max_seqlen_k: as for `token_topk`.

    Returns:
        int32 [B, T, Hs, width], ascending, padded with -1 (packed [total, Hs, width]); and, if asked for, the blocks'
        scores in fp32 without a scale, written where blocks are not forced.
    """
    Hs, D, packed = *q_index.shape[-2:], cu_seqlens is not None
    spec = IndexTopKSpec.of(
        D, config.block_counts, config.init_blocks, config.local_blocks, packed, config.block_size,
        use_mma_sync(device_arch(q_index.device.index)), k_index.shape[-2] < Hs,
    )  # fmt: skip
    S = max_seqlen_k if q_offset is not None else max_seqlen if packed else q_index.shape[1]
    width = config.list_width(S) if width is None else width
    indices = torch.empty(*q_index.shape[:-1], width, dtype=torch.int32, device=q_index.device)
    scores = torch.empty_like(indices, dtype=torch.float32) if with_scores else None
    if indices.numel():
        tensors = (q_index, k_index, cu_seqlens, indices, cu_seqlens_k, q_offset, scores)
        launch("index_topk", IndexTopK, (spec,), *tensors, S, target_sm_count())
    return indices, scores
