"""What `interface` and `flash_bwd_dq_sm90` compile kernels from, each imported when one of its kernels is compiled."""

import os

from flash_attn.cute.deferred import Deferred, import_compiler

# quack and this package then each put an assembler of the user's into the compiler, in this order.
if os.environ.get("CUTE_DSL_PTXAS_PATH") is not None:
    import_compiler()

FlashAttentionForwardSm80 = Deferred("flash_attn.cute.flash_fwd", "FlashAttentionForwardSm80")
FlashAttentionForwardSm90 = Deferred("flash_attn.cute.flash_fwd_sm90", "FlashAttentionForwardSm90")
FlashAttentionForwardSm100 = Deferred("flash_attn.cute.flash_fwd_sm100", "FlashAttentionForwardSm100")
DescaleTensors = Deferred("flash_attn.cute.flash_fwd_sm100", "DescaleTensors")
FlashAttentionForwardSm120 = Deferred("flash_attn.cute.flash_fwd_sm120", "FlashAttentionForwardSm120")
FlashAttentionForwardCombine = Deferred("flash_attn.cute.flash_fwd_combine", "FlashAttentionForwardCombine")
FlashAttentionBackwardPreprocess = Deferred("flash_attn.cute.flash_bwd_preprocess", "FlashAttentionBackwardPreprocess")
FlashAttentionBackwardSm80 = Deferred("flash_attn.cute.flash_bwd", "FlashAttentionBackwardSm80")
FlashAttentionBackwardSm90 = Deferred("flash_attn.cute.flash_bwd_sm90", "FlashAttentionBackwardSm90")
FlashAttentionBackwardDqSm90 = Deferred("flash_attn.cute.dq_kernel_sm90", "FlashAttentionBackwardDqSm90")
FlashAttentionBackwardSm100 = Deferred("flash_attn.cute.flash_bwd_sm100", "FlashAttentionBackwardSm100")
FlashAttentionBackwardSm120 = Deferred("flash_attn.cute.flash_bwd_sm120", "FlashAttentionBackwardSm120")
BlackwellFusedMultiHeadAttentionBackward = Deferred(
    "flash_attn.cute.sm100_hd256_2cta_fmha_backward", "BlackwellFusedMultiHeadAttentionBackward"
)
FlashAttentionBackwardPostprocess = Deferred(
    "flash_attn.cute.flash_bwd_postprocess", "FlashAttentionBackwardPostprocess"
)
LearnableSinkBwdTensors = Deferred("flash_attn.cute.flash_bwd_postprocess", "LearnableSinkBwdTensors")
DSinkReduceKernel = Deferred("flash_attn.cute.flash_bwd_postprocess", "DSinkReduceKernel")
FlashAttentionMLAForwardSm100 = Deferred("flash_attn.cute.flash_fwd_mla_sm100", "FlashAttentionMLAForwardSm100")
FlashAttentionMLAForward1CtaSm100 = Deferred(
    "flash_attn.cute.flash_fwd_mla_1cta_sm100", "FlashAttentionMLAForward1CtaSm100"
)
FlashAttentionMLAForward1CtaKb64Sm100 = Deferred(
    "flash_attn.cute.flash_fwd_mla_1cta_kb64_sm100", "FlashAttentionMLAForward1CtaKb64Sm100"
)
FlashAttentionSparseMLABackwardSm100 = Deferred(
    "flash_attn.cute.flash_bwd_mla_sm100", "FlashAttentionSparseMLABackwardSm100"
)
dQdQvGemmKernel = Deferred("flash_attn.cute.flash_bwd_mla_dq_dqv_sm100", "dQdQvGemmKernel")
dQdQvGemmKernelH64 = Deferred("flash_attn.cute.flash_bwd_mla_dq_dqv_sm100_h64", "dQdQvGemmKernelH64")
dKGemmKernel = Deferred("flash_attn.cute.flash_bwd_mla_dk_sm100", "dKGemmKernel")
FlashPrepareScheduler = Deferred("flash_attn.cute.prepare_scheduler", "FlashPrepareScheduler")
CuSeqlensToBlocksKernel = Deferred("flash_attn.cute.cu_blocks_kernel", "CuSeqlensToBlocksKernel")
CuBlocksToBatchKernel = Deferred("flash_attn.cute.cu_blocks_kernel", "CuBlocksToBatchKernel")
sparse_mla_qhead_tile = Deferred("flash_attn.cute.pack_gqa", "sparse_mla_qhead_tile")
fake_tensor = Deferred("quack.compile_utils", "make_fake_tensor")
