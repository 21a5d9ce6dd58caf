"""Accumulators of backward: dq without zero-filling (first writer), and a conversion that adds to its output.

**First writer.** The first CTA of a query tile stores its dq, the others add: no kernel has to clear the accumulator
before. Under compressed-causal masking the first writer is the last key tile that is visible to the query tile. It
stores, then sets a flag, int32 [query tiles, 1, heads, batch], which the other CTAs wait for. Key tiles are launched
from the last to the first, so a CTA only waits for one launched before it. The preprocess kernel clears query tiles
that see no key tile. One thread of a warp issues bulk copies, waits for them, and handles flags.

**Adding conversion.** To add the output's old values while it rounds a tile of an fp32 accumulator, the conversion
prefetches the output's tile into shared memory while it waits for the accumulator: one pass over the output, one
rounding. Rows and columns past the output's end are neither read nor written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from quack import copy_utils

from flash_attn.cute import barrier, utils
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.tile_scheduler import SingleTileScheduler, TileSchedulerArguments, WorkTileInfo


class LastKeysFirstScheduler(SingleTileScheduler):
    """SingleTileScheduler in reverse: last key tile first, and last share of the queries (`QueryShares`) first.

    All heads of a share are launched before the next share, as `compressed_causal.schedule` assumes.
    """

    paired = False

    @staticmethod
    def to_underlying_arguments(args: TileSchedulerArguments, **options):
        return SingleTileScheduler.to_underlying_arguments(args, **options)

    @classmethod
    def create(cls, params, ctx=None, *, loc=None, ip=None) -> "LastKeysFirstScheduler":
        plain = SingleTileScheduler.create(params, ctx, loc=loc, ip=ip)
        return cls(params, plain._blk_coord, loc=loc, ip=ip)

    def get_current_work(self, *, loc=None, ip=None) -> WorkTileInfo:
        launched, head, batch = self._blk_coord
        share = Int32(0)
        if cutlass.const_expr(self.params.is_split_kv):
            share = self.params.num_splits - 1 - head // self.params.num_head
            head = head % self.params.num_head
        if cutlass.const_expr(self.paired):
            launched += head % 2 * self.params.num_block
            head = head // 2 + launched % 2 * (self.params.num_head // 2)
            launched = launched // 2
        n_block = self.params.num_block - 1 - launched
        return WorkTileInfo((n_block, head, batch, share), self._is_first_block)

    def __new_from_mlir_values__(self, values):
        plain = super().__new_from_mlir_values__(values)
        scheduler = type(self)(plain.params, plain._blk_coord, loc=self._loc)
        scheduler._is_first_block = plain._is_first_block
        return scheduler


class PairedHeadsScheduler(LastKeysFirstScheduler):
    """LastKeysFirstScheduler with the key tiles of heads h and h + H / 2 interleaved, for an even number of heads H.

    A key tile and the one whose adds it waits for (`ordered_reduction`) are then launched one CTA further apart.
    """

    paired = True


@cute.jit
def first_written_end(block_info: BlockInfo, seqlen: SeqlenInfoQK, n_block: Int32, m_block_max: Int32) -> Int32:
    """Exclusive end of the query blocks whose dq this key block stores, as their last one; it adds to later ones."""
    end = m_block_max
    if (n_block + 1) * block_info.tile_n < seqlen.seqlen_k:
        next_begin, _ = block_info.get_m_block_min_max(seqlen, n_block + 1)
        end = cutlass.min(next_begin, m_block_max)
    return end


@cute.jit
def wait_until_written(flag: cute.Pointer) -> None:
    """Wait for the first writer; called by the thread that adds. The fence orders its bulk copies after the flag."""
    written = Int32(0)
    while written == 0:
        written = barrier.ld_acquire(flag)
    cute.arch.fence_proxy("async.global")


@cute.jit
def store_or_add(stores: Boolean, smem: cute.Pointer, gmem: cute.Pointer, num_bytes: cutlass.Constexpr[int]) -> None:
    if stores:
        copy_utils.cpasync_bulk_s2g(smem, gmem, num_bytes)
    else:
        copy_utils.cpasync_reduce_bulk_add_f32(smem, gmem, num_bytes)


@cute.jit
def raise_flag(flag: cute.Pointer) -> None:
    """Count up a flag, after this thread's bulk copies have arrived in global memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.fence_proxy("async.global")
    barrier.red_release(flag, 1)


@cute.jit
def between_tiles(flags: cute.Tensor, m_block: Int32, m_block_min: Int32, m_block_written: Int32) -> None:
    """Before the copies of query block m_block: set the flag of the block before, if stored, or wait for this one's."""
    if m_block > m_block_min and m_block <= m_block_written:
        with cute.arch.elect_one():
            raise_flag(flags[(m_block - 1, None)].iterator)
    if m_block >= m_block_written:
        with cute.arch.elect_one():
            wait_until_written(flags[(m_block, None)].iterator)


@cute.jit
def after_tiles(flags: cute.Tensor, m_block_min: Int32, m_block_max: Int32, m_block_written: Int32) -> None:
    """After the copies of the last query block: set its flag, if it was stored."""
    if m_block_min < m_block_max and m_block_max <= m_block_written:
        with cute.arch.elect_one():
            raise_flag(flags[(m_block_max - 1, None)].iterator)


@cute.jit
def lower_flag(flags: cute.Tensor, m_block: Int32, head_idx: Int32, batch_idx: Int32, tidx: Int32) -> None:
    """Clear a query tile's flag; called by the preprocess kernel."""
    if tidx == 0:
        flags[batch_idx, head_idx, m_block, 0] = Int32(0)


def allocate_output(smem: cutlass.utils.SmemAllocator, layout: cute.ComposedLayout, dtype) -> cute.Tensor:
    """Shared memory for a tile of the output, in the conversion's layout."""
    tile = smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    return tile if cute.rank(tile) == 2 else tile[None, None, 0]


@cute.jit
def load_output(
    gmem: cute.Tensor, smem: cute.Tensor, tiled_copy: cute.TiledCopy, tidx: Int32, rows: Int32, columns: Int32
) -> None:
    """Issue cp.async of a (tile_m, head_dim) tile; the caller commits, waits and synchronises."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), gmem.element_type, num_bits_per_copy=128)
    thread = tiled_copy.get_slice(tidx)
    source, target = thread.partition_S(gmem), thread.partition_D(smem)
    coordinates = thread.partition_S(cute.make_identity_tensor(gmem.shape))
    inside = utils.predicate_k(coordinates, limit=columns)
    for m in cutlass.range(cute.size(source.shape[1]), unroll_full=True):
        if coordinates[0, m, 0][0] < rows:
            cute.copy(atom, source[None, m, None], target[None, m, None], pred=inside[None, m, None])


@cute.jit
def wait_for_output() -> None:
    """Commit and await the copies of `load_output`, with a barrier of the CTA."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier()


@cute.jit
def add_output(accum: cute.Tensor, scale: Float32, before: cute.Tensor):
    """scale * accum + before, fp32; accum in registers and before in shared memory have the same partition."""
    held = cute.make_rmem_tensor(before.shape, before.element_type)
    cute.autovec_copy(before, held)
    held = cute.make_tensor(held.iterator, cute.make_layout(accum.shape))
    return accum.load() * scale + held.load().to(Float32)
