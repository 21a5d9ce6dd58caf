"""Lazy imports of the kernel classes that `interface` and others compile: each at its first use.

A call whose kernels are in the disk cache takes milliseconds, but the modules that kernels are written with take
seconds to import: quack alone imports torch._dynamo and triton.
"""

import os
from importlib import import_module
from typing import Any

from flash_attn.cute.runtime.own_device import check_target


def import_compiler() -> None:
    """Import quack, and check the compilation target; cheap after the first time.

    quack extends the DSL's tensors and its preprocessor: without it the same source may mean something else.
    """
    import_module("quack")
    check_target()


class Deferred:
    """A proxy that imports its class or function when it is called or an attribute is read.

    Args:
        module: full name of the module; the compiler is imported before it.
        name: the object's name in the module.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = self.__name__ = name  # upstream keys kernels by it

    def load(self) -> Any:
        """The object itself."""
        import_compiler()
        return getattr(import_module(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, inspect and others probe for these
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return getattr(self.load(), name)

    def __repr__(self) -> str:
        return f"<{self._module}.{self._name}, not imported>"


# With a ptxas of the user's, quack and this package both patch the compiler to use it, in this order.
if os.environ.get("CUTE_DSL_PTXAS_PATH") is not None:
    import_compiler()

# Names by module of flash_attn.cute.
NAMES = {
    "flash_fwd": "FlashAttentionForwardSm80",
    "flash_fwd_sm90": "FlashAttentionForwardSm90",
    "flash_fwd_sm100": "FlashAttentionForwardSm100 DescaleTensors",
    "flash_fwd_sm120": "FlashAttentionForwardSm120",
    "flash_fwd_combine": "FlashAttentionForwardCombine",
    "flash_bwd_preprocess": "FlashAttentionBackwardPreprocess",
    "flash_bwd": "FlashAttentionBackwardSm80",
    "flash_bwd_sm90": "FlashAttentionBackwardSm90",
    "bwd_dq.kernel": "FlashAttentionBackwardDqSm90",
    "bwd_dkdv.kernel": "FlashAttentionBackwardDkdvSm90",
    "fwd_unions.kernel": "FlashAttentionForwardUnions",
    "flash_bwd_sm100": "FlashAttentionBackwardSm100",
    "flash_bwd_sm120": "FlashAttentionBackwardSm120",
    "sm100_hd256_2cta_fmha_backward": "BlackwellFusedMultiHeadAttentionBackward",
    "flash_bwd_postprocess": "FlashAttentionBackwardPostprocess LearnableSinkBwdTensors DSinkReduceKernel",
    "flash_fwd_mla_sm100": "FlashAttentionMLAForwardSm100",
    "flash_fwd_mla_1cta_sm100": "FlashAttentionMLAForward1CtaSm100",
    "flash_fwd_mla_1cta_kb64_sm100": "FlashAttentionMLAForward1CtaKb64Sm100",
    "flash_bwd_mla_sm100": "FlashAttentionSparseMLABackwardSm100",
    "flash_bwd_mla_dq_dqv_sm100": "dQdQvGemmKernel",
    "flash_bwd_mla_dq_dqv_sm100_h64": "dQdQvGemmKernelH64",
    "flash_bwd_mla_dk_sm100": "dKGemmKernel",
    "prepare_scheduler": "FlashPrepareScheduler",
    "cu_blocks_kernel": "CuSeqlensToBlocksKernel CuBlocksToBatchKernel",
    "pack_gqa": "sparse_mla_qhead_tile",
}
for _module, _names in NAMES.items():
    globals().update({name: Deferred(f"flash_attn.cute.{_module}", name) for name in _names.split()})
fake_tensor = Deferred("quack.compile_utils", "make_fake_tensor")
