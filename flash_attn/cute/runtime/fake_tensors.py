"""DLPack exchange of the tensors that kernels are compiled for, fake ones included, without a warning.

PyTorch's DLPack exchange reads the address of a FakeTensor, which warns once per process. The compiler needs only
sizes, strides, dtype and device.
"""

from typing import Any

import torch
from cutlass import cute
from cutlass.cute import runtime
from torch._subclasses.fake_tensor import FakeTensor


class _NullTensor(torch.Tensor):
    """A tensor at address 0, on any device, that no operator accepts."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a tensor without memory")


def from_dlpack(x: torch.Tensor, **options: Any) -> cute.Tensor:
    """The DSL's `from_dlpack`, also of fake tensors."""
    if isinstance(x, FakeTensor):
        like = dict(strides=x.stride(), dtype=x.dtype, device=x.device)
        x = torch.Tensor._make_wrapper_subclass(_NullTensor, x.shape, **like)
    return runtime.from_dlpack(x, **options)
