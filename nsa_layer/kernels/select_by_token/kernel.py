"""The kernel of `token_topk`: persistent CTAs of two warpgroups; the package's docstring gives the algorithm."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flash_attn.cute.mma.form import use_mma_sync
from flash_attn.cute.runtime.own_device import target_sm_count
from flash_attn.cute.utils import LOG2_E
from nsa_layer.config import NSAConfig
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.select_by_token.gemm import operand_layout
from nsa_layer.kernels.select_by_token.group_sums import GroupSums
from nsa_layer.kernels.select_by_token.spec import (
    KEYS,
    STAGES,
    THREADS,
    WARP,
    WARPS,
    TokenTopKSpec,
)
from nsa_layer.kernels.select_by_token.tiles import Tiles
from nsa_layer.kernels.select_by_token.topk import BestBlocks
from nsa_layer.support import device_arch

Tensor = torch.Tensor


class TokenTopK:
    """One launch of `token_topk`."""

    shapes = ("B T Hq D", "B Tc Hkv D", "B Hq T", "starts", "starts", "B T Hkv n", "starts", "sequences")

    def __init__(self, spec: TokenTopKSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *arguments):
        """q, compressed keys, LSE, starts of queries and of compressed keys, lists; starts of keys, positions of first
        queries, None if queries and keys are the same tokens; keys of a sequence, multiprocessors, scale, stream."""
        *tensors, S, multiprocessors, softmax_scale, stream = arguments
        mQ, mK, mLSE, mCu, mCu_blocks, mIndices, mCu_keys, mOffset = tensors
        spec, dtype = self.spec, mQ.element_type
        by_key = [0, 2, 1] if const_expr(spec.packed) else [1, 3, 2, 0]
        mK = cute.make_tensor(mK.iterator, cute.select(mK.layout, mode=by_key))
        box = (KEYS, spec.D)
        sQ_layout, sK_layout = operand_layout(dtype, spec.columns, spec.D, 1), operand_layout(dtype, *box, STAGES)
        one = cute.select(sK_layout, mode=[0, 1])
        tma = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mK, one, box)
        scheduler = Tiles(spec, mQ, mIndices, (mCu, mCu_blocks, mCu_keys, mOffset), S)
        self.kernel(scheduler, tma, mLSE, softmax_scale * LOG2_E, (sQ_layout, sK_layout)).launch(
            grid=[cutlass.min(scheduler.tiles(), multiprocessors * spec.resident), 1, 1],
            block=[2 * THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=spec.resident,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        scheduler: Tiles,
        tma: tuple[cute.CopyAtom, cute.Tensor],
        mLSE: cute.Tensor,
        scale_log2: Float32,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        spec, dtype, (atom, mK) = self.spec, scheduler.mQ.element_type, tma
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        if warp == 0:
            cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, STAGES)
        sQ, sK = [
            smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner) for layout in layouts
        ]
        sLSE = smem.allocate_tensor(Float32, cute.make_layout(spec.columns), byte_alignment=16)
        scores_layout = cute.make_layout(
            (KEYS, spec.tokens_a_warp, WARPS), stride=(1, spec.token_words, spec.warp_words)
        )
        sScores = smem.allocate_tensor(Float32, scores_layout, byte_alignment=16)
        sColumns = smem.allocate_tensor(Int64, cute.make_ordered_layout((spec.capacity, WARP, WARPS), order=(1, 0, 2)))
        sSelected = smem.allocate_tensor(Int64, cute.make_layout((spec.n, WARP // spec.lanes, WARPS)))
        if warp == 0:
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(barriers + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < WARPS:
            if const_expr(spec.registers is not None):
                cute.arch.setmaxregister_increase(spec.registers[0])
            GroupSums(spec, scheduler, atom, mK, mLSE, scale_log2, sQ, sK, sLSE, sScores, barriers).run()
        else:
            if const_expr(spec.registers is not None):
                cute.arch.setmaxregister_decrease(spec.registers[1])
            BestBlocks(spec, scheduler, sScores, sColumns, sSelected).run()


@torch.no_grad()
def token_topk(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    config: NSAConfig,
    causal: bool,
    softmax_scale: float,
    width: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_blocks: Tensor | None = None,
    max_seqlen: int | None = None,
    q_offset: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """Select the blocks of each token and key/value head.

    Args:
        q: [B, T, Hq, D], or packed [total, Hq, D]; fp16 or bf16, D a multiple of 32 up to 256.
        k_cmp: [B, Tc, Hkv, D], packed [all, Hkv, D]: the compressed branch's keys, like q.
        lse: fp32 [B, Hq, T], packed [Hq, total]: the compressed branch's log-sum-exp, -inf where a row sees no key.
        width: entries of a list; None: the least, ``config.list_width`` of the longest sequence of keys.
        cu_seqlens, cu_blocks: packed only: int32, where sequences start in q, and in k_cmp.
        max_seqlen: packed only: tokens of the longest sequence, or more.
        q_offset: int32 [B], packed [sequences]: the position of each sequence's first query among its keys. None: 0, as
            many keys as queries.
        cu_seqlens_k: packed, with q_offset: int32, where the sequences' keys, before compression, start.
        max_seqlen_k: with q_offset: tokens of a sequence's keys; packed: of the longest.

    Returns:
        int32 [B, T, Hkv, width], ascending, padded with -1 (packed [total, Hkv, width]).
    """
    Hq, D, Hkv = q.shape[-2], q.shape[-1], k_cmp.shape[-2]
    packed = cu_seqlens is not None
    spec = TokenTopKSpec(
        D, Hq // Hkv, config.block_counts, causal, config.init_blocks, config.local_blocks,
        packed, config.block_size, config.span, config.stride, config.offset, use_mma_sync(device_arch(q.device.index)),
    )  # fmt: skip
    S = max_seqlen_k if q_offset is not None else max_seqlen if packed else q.shape[1]
    width = config.list_width(S) if width is None else width
    indices = torch.empty(*q.shape[:-2], Hkv, width, dtype=torch.int32, device=q.device)
    if indices.numel():
        if not k_cmp.shape[-3]:  # nothing is loaded, but a descriptor needs a row
            k_cmp = k_cmp.new_empty(*k_cmp.shape[:-3], 1, Hkv, D)
        tensors = (q, k_cmp, lse, cu_seqlens, cu_blocks, indices, cu_seqlens_k, q_offset)
        launch("token_topk", TokenTopK, (spec,), *tensors, S, target_sm_count(), float(softmax_scale))
    return indices
