"""Compressed keys and values that a call completes: means of cached tokens, read and written in the caches themselves.

Like `pooling.mean_pool`, whose tiles and sums these are; tokens and compressed keys have their places by `find_places`.
A segment of tokens lies on one page: pages are multiples of the block, and segments divide the stride.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from nsa_layer.kernels.cache_rows.locate import Field
from nsa_layer.kernels.launch import are_aligned, launch
from nsa_layer.kernels.pooling.mean_pool import PoolKernel
from nsa_layer.kernels.pooling.tiling import RESIDENT, THREADS, Pooling

Tensor = torch.Tensor
Pair = tuple[Tensor | None, Tensor | None]


class CompleteKernel(PoolKernel):
    """One launch of `complete_blocks`."""

    shapes = (
        *["pages page H D"] * 2,
        *("k_pages k_page H D", "v_pages v_page H D"),
        *("sequences width *", "sequences cmp_width *", "fields sequences"),
    )

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,  # [rows, S, H, D] or [pages, page, H, D]
        mV: cute.Tensor | None,
        mK_cmp: cute.Tensor,
        mV_cmp: cute.Tensor | None,
        mTable: cute.Tensor | None,  # int32 [B, n]
        mCmp_table: cute.Tensor | None,
        mPlaces: cute.Tensor,  # int32 [fields, B]
        most: Int32,  # blocks of a sequence
        stream: cuda.CUstream,
    ):
        tiles = cute.ceil_div(most, self.blocks)
        self.kernel((mK, mV, mK_cmp, mV_cmp, mTable, mCmp_table, mPlaces), tiles).launch(
            grid=[mPlaces.shape[1] * tiles * mK.shape[2], 1 if const_expr(mV is None) else 2, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, tiles: Int32):
        mK, mV, mK_cmp, mV_cmp, mTable, mCmp_table, mPlaces = tensors
        unit, is_value, _ = cute.arch.block_idx()
        H = mK.shape[2]
        s, tile, head = unit // H // tiles, unit // H % tiles, unit % H
        first = tile * self.blocks
        count = cutlass.min(mPlaces[Field.CMP_NEW, s] - first, self.blocks)
        token, row = mPlaces[Field.SOURCE, s] + first * self.pooling.d, mPlaces[Field.CMP_FIRST, s] + first
        smem = cutlass.utils.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(self.smem_floats), byte_alignment=16)
        if count > 0:
            if is_value == 0:
                self.sum_segments((mK, mTable, s, head), token, count, sums, self.key)
                cute.arch.sync_threads()
                self.write_means(sums, (mK_cmp, mCmp_table, s, head), None, row, count, self.key)
            elif const_expr(mV is not None):
                self.sum_segments((mV, mTable, s, head), token, count, sums, self.value)
                cute.arch.sync_threads()
                self.write_means(sums, (mV_cmp, mCmp_table, s, head), None, row, count, self.value)

    def rows(self, x: tuple, first: Int32) -> cute.Tensor:
        """Rows of a sequence's head from the first on, up to the end of its page."""
        cache, table, row, head = x
        if const_expr(table is not None):
            page = cache.shape[1]
            row, first = table[row, first // page], first % page
        return cute.domain_offset((first, 0), cache[row, None, head, None])


def complete_blocks(
    caches: Pair, compressed: Pair, tables: Pair, places: Tensor, *, block_size: int, stride: int, most: int
) -> None:
    """Write the means of the blocks that a call completes, summed in fp32, in one launch.

    Args:
        caches: k and v, [rows, S, H, D], or [pages, page, H, D] with a table; rows are aligned, see `can_complete`.
        compressed: the same of compressed keys and values; where either is None it is left alone.
        tables: int32 [B, n], pages of each sequence, of tokens and of compressed keys; None: row b.
        places: of `find_places`.
        most: blocks that a sequence can complete.
    """
    pairs = [(cache, to) for cache, to in zip(caches, compressed, strict=True) if to is not None and 0 not in to.shape]
    if pairs and most:
        (k, k_cmp), (v, v_cmp) = (pairs + [(None, None)])[:2]
        static = (Pooling(block_size, stride), k.shape[-1], 0 if v is None else v.shape[-1])
        launch("complete_blocks", CompleteKernel, static, k, v, k_cmp, v_cmp, *tables, places, most)


def can_complete(caches: Pair, compressed: Pair) -> bool:
    """True if rows lie at multiples of 16 bytes."""
    return all(x is None or are_aligned(x) for x in (*caches, *compressed))
