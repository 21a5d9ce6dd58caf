"""Rows of one head in both layouts: the packed sequence of a row or tile, and 16-byte pieces of a row.

A thread block finds its sequence by itself: sequence s has the tiles from ``start[s] // size + s`` on, which leaves
room for its last, short tile whatever the lengths are; tiles past a sequence's end have nothing to do.
"""

import math
from typing import Optional

import cutlass.cute as cute
from cutlass import Int32


def tiles_and_batch(x: cute.Tensor, starts: Optional[cute.Tensor], size: int):
    """Tiles of `size` rows: exactly in a batch, at most in packed input."""
    if starts is None:
        return cute.ceil_div(x.shape[1], size), x.shape[0]
    return x.shape[0] // size + starts.shape[0] - 1, 1


def place_of_cta(tiles: Int32, H: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """(sequence, tile, head, y) of a CTA, heads side by side: x alone has room for every batch."""
    unit, y, _ = cute.arch.block_idx()
    row = unit // H
    return row // tiles, row % tiles, unit % H, y


def head_rows(x: cute.Tensor, batch: Int32, head: Int32) -> cute.Tensor:
    """[rows, D] of [B, rows, H, D], or of packed [rows, H, D]."""
    return x[batch, None, head, None] if cute.rank(x) == 4 else x[None, head, None]


def vector(x: cute.Tensor, row: Int32, lane: Int32, size: int) -> cute.Tensor:
    """Elements ``lane * size`` and on of a row of [rows, D]."""
    return cute.local_tile(x[row, None], (size,), (lane,))


def divided(total: cute.Tensor, by: float) -> cute.TensorSSA:
    """total / by; exact and fast for a power of two."""
    return total.load() * (1.0 / by) if math.frexp(by)[0] == 0.5 else total.load() / by


def round_to(value: cute.TensorSSA, target: cute.Tensor) -> None:
    rounded = cute.make_rmem_tensor(target.shape, target.element_type)
    rounded.store(value.to(target.element_type))
    cute.autovec_copy(rounded, target)
