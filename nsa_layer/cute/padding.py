"""Head dimensions that the kernels are not compiled for: zeros behind the rows, up to the next native size.

Columns of zeros change no score and no other column of an output or a gradient; their own are cut off. Graphs have
PyTorch's own operators for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from nsa_layer.call import Call
from nsa_layer.derivatives import ReverseMode, first_derivatives
from nsa_layer.support import kernel_dims

Tensor = torch.Tensor
SQUARE = ("compress_k_weight", "compress_v_weight")  # [Hkv, D, D] and [Hkv, Dv, Dv]
OF_D, OF_DV = ("q", "k", "gate_weight", "k_cmp", "k_win", SQUARE[0]), ("v", "v_cmp", "v_win", SQUARE[1])


def padded(call: Call, *, needs_grad: bool) -> Call:
    """The call with rows of the kernels' head dimensions, by one differentiable copy of each tensor of others."""
    dims = kernel_dims(call, needs_grad=needs_grad)
    if dims == call.dims:
        return call
    for size, names in zip(dims, (OF_D, OF_DV)):
        call = call._replace(**{name: widened(getattr(call, name), size, square=name in SQUARE) for name in names})
    return call


def widened(x: Tensor | None, size: int, *, square: bool = False) -> Tensor | None:
    """x [..., D] with zeros up to [..., size]; square: [..., D, D] up to [..., size, size]."""
    if x is None or x.shape[-1] == size:
        return x
    rows = size if square else x.shape[-2]
    if torch.compiler.is_compiling():
        return pad(x, (0, size - x.shape[-1], 0, rows - x.shape[-2]))
    return _Widen.apply(x, (*x.shape[:-2], rows, size))


def cut(o: Tensor, Dv: int) -> Tensor:
    """The first Dv columns of an output."""
    if o.shape[-1] == Dv:
        return o
    return o[..., :Dv].contiguous() if torch.compiler.is_compiling() else _Cut.apply(o, (*o.shape[:-1], Dv))


def _in_words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in words of 8 bytes, of which PyTorch copies rows faster, if all of them lie in such."""
    step = 8 // tensors[0].element_size()
    starts = [n for x in tensors for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1])]
    if any(n % step for n in starts) or any(x.stride(-1) != 1 for x in tensors):
        return tensors
    return tuple(x.view(torch.int64) for x in tensors)


class _Widen(ReverseMode):
    """A copy of a larger shape, with zeros behind; each element is written once, and gradients are a view."""

    @staticmethod
    def forward(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        whole = x.new_empty(shape)
        source, target = _in_words(x, whole[tuple(map(slice, x.shape))])
        target.copy_(source)
        _in_words(whole[..., x.shape[-1] :])[0].zero_()
        if x.shape[-2] < shape[-2]:
            whole[..., x.shape[-2] :, : x.shape[-1]] = 0
        return whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d[tuple(map(slice, ctx.shape))], None


class _Cut(ReverseMode):
    """A contiguous copy of the first columns; the gradient of the others is 0."""

    @staticmethod
    def forward(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        (part,) = _in_words(x[tuple(map(slice, shape))])
        return part.contiguous().view(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return first_derivatives(_Widen.forward, d, ctx.shape), None
