"""NaN in the rows of sequences that have no slots in the caches; those of all others are left alone."""

import math

import cutlass
import cutlass.cute as cute
import torch
from cutlass import const_expr

from nsa_layer.kernels.cache_rows.locate import Field
from nsa_layer.kernels.launch import launch
from nsa_layer.kernels.varlen import sequence_tile, tiles_and_batch

Tensor = torch.Tensor
THREADS = 256
TILE = 64  # tokens of a thread block


class BlankRows:
    """One launch of `blank_rows`, with its arguments and a stream."""

    shapes = "B T Hq D", *["B Hq T"] * 3, "fields sequences", "starts *"

    def __init__(self, D: int) -> None:
        self.D = D

    @cute.jit
    def __call__(self, *arguments):
        o, *lses, places, cu, stream = arguments
        units = math.prod(tiles_and_batch(o, cu, TILE))
        self.kernel(o, tuple(lses), places, cu, units // places.shape[1]).launch(
            grid=[units, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, o: cute.Tensor, lses: tuple, places: cute.Tensor, cu: cute.Tensor | None, tiles: cutlass.Int32):
        s, tile, start, length = sequence_tile(cute.arch.block_idx()[0], tiles, o, cu, TILE)
        count, first = cutlass.min(length - tile * TILE, TILE), start + tile * TILE
        if const_expr(cu is None):
            o, lses = o[s, None, None, None], tuple(lse[s, None, None] for lse in lses)
        if places[Field.BLANK, s] > 0 and count > 0:
            H = o.shape[1]
            for n in cutlass.range(cute.arch.thread_idx()[0], count * H, THREADS):
                i, head = first + n // H, n % H
                for d in cutlass.range(self.D):
                    o[i, head, d] = o.element_type(float("nan"))
                for lse in cutlass.range_constexpr(3):
                    lses[lse][head, i] = cutlass.Float32(float("nan"))


def blank_rows(o: Tensor, lses: tuple[Tensor, Tensor, Tensor], places: Tensor, cu_seqlens: Tensor | None) -> None:
    """Write NaN where `Field.BLANK` says so.

    Args:
        o: [B, T, Hq, D], packed [total, Hq, D]; lses: fp32 [B, Hq, T], packed [Hq, total].
        places: int32 [fields, B].
        cu_seqlens: int32 [B + 1] of packed queries.
    """
    launch("blank_rows", BlankRows, (o.shape[-1],), o, *lses, places, cu_seqlens)
