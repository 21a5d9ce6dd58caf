"""NaN in the rows of invalid sequences, whose slots are not all in the caches; the others are left alone."""

import math

import cutlass
import cutlass.cute as cute
import torch
from cutlass import const_expr

from nsa_layer.kernels.cache_rows.locate import CacheSlots
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.varlen import sequence_tile, tiles_and_batch

Tensor = torch.Tensor
THREADS = 256
TILE = 64  # tokens of a CTA


class InvalidateRows:
    """The kernel of `invalidate_rows`, called with its arguments and a stream."""

    shapes = "B T Hq D", *["B Hq T"] * 3, "fields sequences", "starts *"

    def __init__(self, D: int) -> None:
        self.D = D

    @cute.jit
    def __call__(self, *arguments):
        o, *lses, slots, cu, stream = arguments
        units = math.prod(tiles_and_batch(o, cu, TILE))
        self.kernel(o, tuple(lses), slots, cu, units // slots.shape[1]).launch(
            grid=[units, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, o: cute.Tensor, lses: tuple, slots: cute.Tensor, cu: cute.Tensor | None, tiles: cutlass.Int32):
        s, tile, start, length = sequence_tile(cute.arch.block_idx()[0], tiles, o, cu, TILE)
        count, first = cutlass.min(length - tile * TILE, TILE), start + tile * TILE
        if const_expr(cu is None):
            o, lses = o[s, None, None, None], tuple(lse[s, None, None] for lse in lses)
        if slots[CacheSlots.INVALID, s] > 0 and count > 0:
            H = o.shape[1]
            for n in cutlass.range(cute.arch.thread_idx()[0], count * H, THREADS):
                i, head = first + n // H, n % H
                for d in cutlass.range(self.D):
                    o[i, head, d] = o.element_type(float("nan"))
                for lse in cutlass.range_constexpr(3):
                    lses[lse][head, i] = cutlass.Float32(float("nan"))


def invalidate_rows(o: Tensor, lses: tuple[Tensor, Tensor, Tensor], slots: Tensor, cu_seqlens: Tensor | None) -> None:
    """Write NaN to the rows of sequences that are `CacheSlots.INVALID`.

    Args:
        o: [B, T, Hq, D], packed [total, Hq, D]; lses: fp32 [B, Hq, T], packed [Hq, total].
        slots: int32 [fields, B].
        cu_seqlens: int32 [B + 1] of packed queries.
    """
    launch("invalidate_rows", InvalidateRows, (o.shape[-1],), o, *lses, slots, cu_seqlens)
