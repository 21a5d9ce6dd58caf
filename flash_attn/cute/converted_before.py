"""What the output of backward's conversion held before, for a conversion that adds to it.

The conversion turns a tile of an fp32 accumulator into the output's dtype. To add, it brings the output's tile into
shared memory while it waits for the accumulator, reads it with the threads that hold the accumulator, and rounds the
sum: one pass over the output, one rounding. Rows and columns past the output's end are neither read nor written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from flash_attn.cute import utils


def allocate(smem: cutlass.utils.SmemAllocator, layout: cute.ComposedLayout, dtype) -> cute.Tensor:
    """Room for a tile, laid out as the conversion lays out its own."""
    tile = smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    return tile if cute.rank(tile) == 2 else tile[None, None, 0]


@cute.jit
def load(
    gmem: cute.Tensor,
    smem: cute.Tensor,
    tiled_copy: cute.TiledCopy,
    tidx: Int32,
    rows: Int32,
    columns: Int32,
) -> None:
    """Start copying the (tile_m, head_dim) tile: there after the caller's next commit, wait and barrier."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), gmem.element_type, num_bits_per_copy=128)
    thread = tiled_copy.get_slice(tidx)
    source, target = thread.partition_S(gmem), thread.partition_D(smem)
    where = thread.partition_S(cute.make_identity_tensor(gmem.shape))
    inside = utils.predicate_k(where, limit=columns)
    for m in cutlass.range(cute.size(source.shape[1]), unroll_full=True):
        if where[0, m, 0][0] < rows:
            cute.copy(atom, source[None, m, None], target[None, m, None], pred=inside[None, m, None])


@cute.jit
def arrived() -> None:
    """Wait for the tile, where the caller copies nothing else into shared memory."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier()


@cute.jit
def added(accum: cute.Tensor, scale: Float32, before: cute.Tensor):
    """scale * accum + before, fp32; both partitioned alike, in registers and in shared memory."""
    held = cute.make_rmem_tensor(before.shape, before.element_type)
    cute.autovec_copy(before, held)
    held = cute.make_tensor(held.iterator, cute.make_layout(accum.shape))
    return accum.load() * scale + held.load().to(Float32)
