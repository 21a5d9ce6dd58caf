"""Rows of one head in both layouts: the packed sequence of a row or tile, counts of compressed keys, vectors of a row.

Grids do not depend on packed lengths: sequence s has the tiles from ``start[s] // size + s`` on, enough for its last,
short tile, and a CTA finds its sequence by them. Tiles past a sequence's end have nothing to do.
"""

import math
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn.cute.lists.rows import sequence_at


def tiles_and_batch(x: cute.Tensor, starts: Optional[cute.Tensor], size: int):
    """Tiles of `size` rows: exactly in a batch, at most in packed input."""
    if starts is None:
        return cute.ceil_div(x.shape[1], size), x.shape[0]
    return x.shape[0] // size + starts.shape[0] - 1, 1


def cta_coordinates(tiles: Int32, H: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """(sequence, tile, head, y) of a CTA, the head fastest; grid x alone is large enough for these of every batch."""
    unit, y, _ = cute.arch.block_idx()
    row = unit // H
    return row // tiles, row % tiles, unit % H, y


@cute.jit
def sequence_tile(unit: Int32, tiles: Int32, x: cute.Tensor, starts: Optional[cute.Tensor], size: int):
    """(sequence, tile of it, its first row in packed x, its rows) of the unit-th of `tiles_and_batch`."""
    s, tile, start, rows = unit // tiles, unit % tiles, Int32(0), Int32(0)
    if const_expr(starts is not None):
        s = sequence_at(starts, unit, size)
        start, rows = starts[s], starts[s + 1] - starts[s]
        tile = unit - (start // size + s)
    else:
        rows = Int32(x.shape[1])
    return s, tile, start, rows


def head_rows(x: cute.Tensor, batch: Int32, head: Int32) -> cute.Tensor:
    """[rows, D] of [B, rows, H, D], or of packed [rows, H, D]."""
    return x[batch, None, head, None] if cute.rank(x) == 4 else x[None, head, None]


def compressed_length(tokens: Int32, span: int, stride: int) -> Int32:
    """The number of compressed keys that `tokens` tokens complete."""
    return cutlass.max(tokens - span + stride, 0) // stride


def compressed_end(t: Int32, offset: int, stride: int) -> Int32:
    """One past the last compressed key that the causal mask shows token t, of those that are complete."""
    return cutlass.max(t - offset + stride, 0) // stride


def vector(x: cute.Tensor, row: Int32, lane: Int32, size: int) -> cute.Tensor:
    """Elements ``lane * size`` and on of a row of [rows, D]."""
    return cute.local_tile(x[row, None], (size,), (lane,))


def load_once(source: cute.Tensor, target: cute.Tensor) -> None:
    """Load up to 16 bytes that nobody reads again, so not kept in L1. Not marked invariant: the compiler would move
    loads behind stores."""
    no_l1 = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    op, dtype = cute.nvgpu.CopyG2ROp(), source.element_type
    bits = dtype.width * cute.size(source)
    cute.copy(cute.make_copy_atom(op, dtype, num_bits_per_copy=bits, l1c_evict_priority=no_l1), source, target)


def divided(total: cute.Tensor, by: float) -> cute.TensorSSA:
    """total / by; exact and fast for a power of two."""
    return total.load() * (1.0 / by) if math.frexp(by)[0] == 0.5 else total.load() / by


def round_to(value: cute.TensorSSA, target: cute.Tensor) -> None:
    rounded = cute.make_rmem_tensor(target.shape, target.element_type)
    rounded.store(value.to(target.element_type))
    cute.autovec_copy(rounded, target)
