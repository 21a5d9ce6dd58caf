"""NaN in the rows of sequences that have no place in the caches; those of all others are left alone."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at
from nsa_layer.kernels.cache_rows.locate import Field
from nsa_layer.kernels.launch import launch

Tensor = torch.Tensor
THREADS = 256
TILE = 64  # tokens of a thread block


class BlankRows:
    """One launch of `blank_rows`."""

    shapes = "B T Hq D", *["B Hq T"] * 3, "fields sequences", "starts *"

    def __init__(self, D: int) -> None:
        self.D = D

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # [B, T, Hq, D], packed [total, Hq, D]
        mLSE_cmp: cute.Tensor,  # fp32 [B, Hq, T], packed [Hq, total]
        mLSE_slc: cute.Tensor,
        mLSE_swa: cute.Tensor,
        mPlaces: cute.Tensor,  # int32 [fields, B]
        mCu: cute.Tensor | None,  # int32 [B + 1]
        stream: cuda.CUstream,
    ):
        sequences = mPlaces.shape[1]
        if const_expr(mCu is not None):
            units = mO.shape[0] // TILE + sequences
        else:
            units = sequences * cute.ceil_div(mO.shape[1], TILE)
        self.kernel(mO, (mLSE_cmp, mLSE_slc, mLSE_swa), mPlaces, mCu, units // sequences).launch(
            grid=[units, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mO: cute.Tensor, lses: tuple, mPlaces: cute.Tensor, mCu: cute.Tensor | None, tiles: Int32):
        unit = cute.arch.block_idx()[0]
        s, tile, start = unit // tiles, unit % tiles, Int32(0)
        if const_expr(mCu is not None):
            s = sequence_at(mCu, unit, TILE)
            start = mCu[s]
            tile, length = unit - (start // TILE + s), mCu[s + 1] - start
        else:
            length = Int32(mO.shape[1])
        count = cutlass.min(length - tile * TILE, TILE)
        if mPlaces[Field.BLANK, s] > 0 and count > 0:
            first = start + tile * TILE
            o, rows = (mO, lses) if const_expr(mCu is not None) else (mO[s, None, None, None], None)
            if const_expr(mCu is None):
                rows = tuple(lse[s, None, None] for lse in lses)
            H = o.shape[1]
            for n in cutlass.range(cute.arch.thread_idx()[0], count * H, THREADS):
                i, head = first + n // H, n % H
                for d in cutlass.range(self.D):
                    o[i, head, d] = o.element_type(float("nan"))
                for lse in cutlass.range_constexpr(3):
                    rows[lse][head, i] = cutlass.Float32(float("nan"))


def blank_rows(o: Tensor, lses: tuple[Tensor, Tensor, Tensor], places: Tensor, cu_seqlens: Tensor | None) -> None:
    """Write NaN where `Field.BLANK` says so.

    Args:
        o: [B, T, Hq, D], packed [total, Hq, D]; lses: fp32 [B, Hq, T], packed [Hq, total].
        places: int32 [fields, B].
        cu_seqlens: int32 [B + 1] of packed queries.
    """
    launch("blank_rows", BlankRows, (o.shape[-1],), o, *lses, places, cu_seqlens)
