"""The GPU of a call's tensors: its architecture and number of multiprocessors select the kernels of the call."""

import os
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, Callable, Optional, TypeVar

import torch
from cutlass.utils import HardwareInfo

from flash_attn.cute.cute_dsl_utils import get_num_sms_for_selection

Function = TypeVar("Function", bound=Callable[..., Any])


def on_own_device(function: Function) -> Function:
    """Make the GPU of the first tensor argument the current device for a call.

    Kernels are launched on their tensors' GPU anyway, but host code selects them by the current device.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            first = next((x for x in chain(args, kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if first is None or not torch.cuda.is_initialized():
            return function(*args, **kwargs)
        device = first.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call


@lru_cache(maxsize=None)
def arch_of_gpu(index: int) -> int:
    """The architecture of a GPU: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def selected_arch() -> Optional[int]:
    """The architecture of FLASH_ATTENTION_ARCH, else of the current GPU, else None."""
    forced = os.environ.get("FLASH_ATTENTION_ARCH")
    if forced is not None:
        from flash_attn.cute.interface import _parse_arch_str

        return _parse_arch_str(forced)
    return arch_of_gpu(torch.cuda.current_device()) if torch.cuda.is_available() else None


def dispatch_arch() -> int:
    """The architecture that upstream's interface dispatches on, 90 for sm_90."""
    from flash_attn.cute import interface  # which imports this package

    return interface._get_device_arch()


def check_target() -> None:
    """Refuse to compile if the compiler's target, one per process, does not fit the architecture of the call."""
    from cutlass.base_dsl.dsl import BaseDSL

    arch, target = selected_arch(), BaseDSL._get_dsl().get_arch_enum()
    if arch is None:
        return
    major, minor, suffix = target.value
    if os.environ.get("FLASH_ATTENTION_ARCH") is not None:  # it selects kernels, not the target
        fits = major in {9: (9,), 10: (10, 11), 11: (10, 11)}.get(arch // 10, (major,))
    else:  # from 9.0 on code runs on its own architecture alone, unless compiled for a family
        fits = arch < 90 or arch == major * 10 + minor or (suffix == "f" and arch // 10 == major)
    if not fits:
        raise NotImplementedError(
            f"a kernel for sm_{arch} in a process that compiles for {target}: it compiles for CUTE_DSL_ARCH, or else "
            "for the machine's first GPU. CUDA_VISIBLE_DEVICES gives GPUs of each architecture a process of their own"
        )


def target_sm_count() -> int:
    """Multiprocessors of the compilation target: FLASH_ATTENTION_NUM_SMS if set, else the device's.

    The count bounds the compiled grid; a kernel compiled for another count is slower, never wrong.
    """
    if os.getenv("FLASH_ATTENTION_NUM_SMS") is None:
        return _device_sm_count()
    # Upstream's function parses the variable, which overrides both arguments.
    return get_num_sms_for_selection(device_index=0, arch=0)


@lru_cache(maxsize=None)
def _device_sm_count() -> int:
    """The driver's count, cached, since every backward call needs it."""
    return HardwareInfo().get_device_multiprocessor_count()
