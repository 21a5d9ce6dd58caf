"""Sum of the CTAs' partial sums, a tensor over its first dimension, always in the same order."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32

from nsa_layer.kernels.launch import launch


class ReducePartials:
    """``out[c] = sum_n sums[n, c]``: a CTA adds 32 columns, each of its warps every 32nd row."""

    shapes = "sums columns @16", "columns @16"
    columns = 32
    parts = 32
    at_once = 8

    @cute.jit
    def __call__(self, mSums: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mSums, mOut).launch(
            grid=[cute.ceil_div(mOut.shape[0], self.columns), 1, 1], block=[self.columns, self.parts, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mOut: cute.Tensor):
        lane, part, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        column = bidx * self.columns + lane
        smem = cutlass.utils.SmemAllocator()
        sParts = smem.allocate_tensor(Float32, cute.make_layout((self.columns, self.parts)), byte_alignment=16)
        total = Float32(0.0)
        count = mSums.shape[0]
        for first in cutlass.range(part, count, self.parts * self.at_once, unroll=1):
            rows = [first + n * self.parts for n in range(self.at_once)]
            loads = [mSums[cutlass.min(row, count - 1), column] for row in rows]
            for row, x in zip(rows, loads):
                total += Float32(cutlass.select_(row < count, x, Float32(0.0)))
        sParts[lane, part] = total
        cute.arch.sync_threads()
        if part == 0:
            for p in cutlass.range_constexpr(1, self.parts):
                total += sParts[lane, p]
            mOut[column] = total.to(mOut.element_type)


def reduce_partials(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``sums.sum(0)`` of a contiguous fp32 [N, ...], rounded once to `dtype`; of a multiple of 32 elements each."""
    out = torch.empty(sums.shape[1:], dtype=dtype, device=sums.device)
    launch("reduce_partials", ReducePartials, (), sums.view(sums.shape[0], -1), out.view(-1))
    return out
