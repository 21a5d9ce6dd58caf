"""Sums of tensors of rows, in fp32, rounded once: one pass, bound by memory.

A CTA has consecutive rows, heads side by side as in memory; a thread has 16 bytes of each part, all loaded before the
first is added.
"""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from nsa_layer.kernels.launch import launch, rows_aligned
from nsa_layer.support import KERNEL_DTYPES

Tensor = torch.Tensor
VECTOR = 8  # 16 bytes of a 16-bit dtype
MOST = 16  # parts of a launch


class RoundedSum:
    """The kernel of `rounded_sum`, of `count` parts."""

    threads = 256
    longest = threads * VECTOR  # elements of a row

    def __init__(self, count: int, D: int) -> None:
        self.shapes = ("T H D",) * (count + 1)
        self.lanes = D // VECTOR
        self.rows = self.threads // self.lanes  # of a CTA

    @cute.jit
    def __call__(self, mOut: cute.Tensor, *arguments):
        *parts, stream = arguments
        T, H, _ = mOut.shape
        self.kernel(mOut, parts).launch(
            grid=[cute.ceil_div(T * H, self.rows), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mOut: cute.Tensor, parts: list):
        n, bidx = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        T, H, _ = mOut.shape
        row = bidx * self.rows + n // self.lanes
        inside = (n < self.rows * self.lanes) & (row < T * H)
        row = cutlass.min(row, T * H - 1)  # others read the last row: a branch would delay the loads
        element = row // H, row % H, n % self.lanes
        loads = [self.load(x, *element) for x in parts]
        total = loads[0].load().to(Float32)
        for x in loads[1:]:
            total = total + x.load().to(Float32)
        rounded = cute.make_rmem_tensor(VECTOR, mOut.element_type)
        rounded.store(total.to(mOut.element_type))
        if inside:
            cute.autovec_copy(rounded, self.vector(mOut, *element))

    def load(self, x: cute.Tensor, *element: Int32) -> cute.Tensor:
        loaded = cute.make_rmem_tensor(VECTOR, x.element_type)
        cute.autovec_copy(self.vector(x, *element), loaded)
        return loaded

    def vector(self, x: cute.Tensor, token: Int32, head: Int32, lane: Int32) -> cute.Tensor:
        return cute.local_tile(x[token, head, None], (VECTOR,), (lane,))


def can_sum(parts: Sequence[Tensor], out: Tensor) -> bool:
    """True if `rounded_sum` has a kernel for these."""
    every = (out, *parts)
    return (
        out.is_cuda
        and len(parts) <= MOST
        and out.dtype in KERNEL_DTYPES
        and out.shape[-1] % VECTOR == 0
        and out.shape[-1] <= RoundedSum.longest
        and all(x.dtype == out.dtype and x.stride(-1) == 1 and rows_aligned(x) for x in every)
    )


def rounded_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of parts in fp32, added in this order and rounded once, to out.

    Args:
        parts, out: [T, H, D] in fp16 or bf16; tokens and heads have any strides that keep rows at multiples of 16
            bytes. `out` may be one of the parts.
    """
    if out.numel():
        launch("rounded_sum", RoundedSum, (len(parts), out.shape[-1]), out, *parts)
