"""Copies of rows of keys and values between caches and dense tensors; their slots are known on the GPU only.

A CTA moves `TILE` tokens of keys, or of values, 16 bytes a thread; CTAs past a sequence's number of rows have nothing
to do. A few rows past the last one are cleared, in dense tensors and in caches that attention reads in place, since
attention multiplies them by 0 in its last tile, which NaN would survive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Optional

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from nsa_layer.kernels.cache_rows.locate import CacheSlots
from nsa_layer.kernels.fp8 import E4M3, floats, inverse, store
from nsa_layer.kernels.launch import launch, rows_aligned
from nsa_layer.kernels.varlen import sequence_tile, tiles_and_batch

Tensor = torch.Tensor
THREADS = 256
TILE = 32  # tokens of a CTA
AT_ONCE = 4  # loads of a thread in flight
BEHIND = 512  # cleared rows: more than tiles of queries and of keys reach together
KEYS = 64  # keys that attention reads at a time
VECTOR = 8  # 16 bytes of a 16-bit dtype
TOKEN_ROWS = CacheSlots.FIRST, CacheSlots.NEW, CacheSlots.END
CMP_ROWS = CacheSlots.CMP_FIRST, CacheSlots.CMP_NEW, CacheSlots.CMP_END


@dataclass(frozen=True)
class Move:
    """Static options.

    Attributes:
        to: "cache", "dense", or "nothing": rows of the cache are cleared.
        vector: elements of a load.
        behind: rows cleared past the appended ones: `BEHIND` "rows", those up to the end of a "block" of `KEYS`, or "".
        alignment: bytes of a cache's rows, if not 16.
    """

    to: str
    vector: int = VECTOR
    behind: str = ""
    alignment: int = 16

    @classmethod
    def of(cls, to: str, caches: list[Tensor], behind: str = "") -> "Move":
        """Options for the strides and alignment of these caches."""
        if all(map(rows_aligned, caches)):
            return cls(to, behind=behind)
        return cls(to, 1, behind, caches[0].element_size())


class _Rows:
    """A copy of tiles of rows between a cache and a dense tensor."""

    def __init__(self, move: Move, *_: int) -> None:
        self.move = move

    @cute.jit
    def move_tile(
        self,
        cache: cute.Tensor,
        dense: cute.Tensor | None,
        table: cute.Tensor | None,
        span: tuple,
        scale: cute.Tensor | None,
    ):
        """Move rows of a tile, which begins at ``begin``, up to ``count``, and clear those up to ``rows``.

        span: the sequence, its first row in packed `dense`, its first slot in `cache`; begin, count and rows.
        """
        move = self.move
        s, start, first, begin, count, rows = span
        H, D = cache.shape[cute.rank(cache) - 2], cache.shape[cute.rank(cache) - 1]
        lanes = D // move.vector
        vectors = H * lanes
        tidx = cute.arch.thread_idx()[0]
        reads_cache = dense is None or move.to == "dense"
        held = cute.make_rmem_tensor((move.vector, AT_ONCE), (cache if reads_cache else dense).element_type)
        for batch in cutlass.range(cute.ceil_div(TILE * vectors, THREADS * AT_ONCE), unroll=1):
            for u in cutlass.range_constexpr(AT_ONCE):
                n = (batch * AT_ONCE + u) * THREADS + tidx
                i, head, lane = begin + n // vectors, n % vectors // lanes, n % lanes
                held[None, u].fill(held.element_type(0.0))
                if const_expr(dense is not None):
                    if n < TILE * vectors and i < count:
                        if const_expr(move.to == "dense"):
                            cute.autovec_copy(self.of_cache(cache, table, s, 0, first + i, head, lane), held[None, u])
                        else:
                            cute.autovec_copy(self.of_dense(dense, s, start + i, head, lane), held[None, u])
            for u in cutlass.range_constexpr(AT_ONCE):
                n = (batch * AT_ONCE + u) * THREADS + tidx
                i, head, lane = begin + n // vectors, n % vectors // lanes, n % lanes
                if n < TILE * vectors and i < rows:
                    if const_expr(move.to == "dense"):
                        self.write(held[None, u], self.of_dense(dense, s, start + i, head, lane), scale, head)
                    else:
                        target = self.of_cache(cache, table, s, start, first + i, head, lane)
                        self.write(held[None, u], target, scale, head)

    def write(self, held: cute.Tensor, target: cute.Tensor, scale: cute.Tensor | None, head: Int32) -> None:
        """Write elements: from FP8 times their scale, to FP8 divided by it."""
        if const_expr(held.element_type == target.element_type):
            cute.autovec_copy(held, target)
        elif const_expr(held.element_type == E4M3):
            by = Float32(1.0) if const_expr(scale is None) else scale[head]
            store([x * by for x in floats(held)], by, target)
        else:
            store(floats(held), inverse(scale, head), target)

    @cute.jit
    def of_cache(
        self, cache: cute.Tensor, table: cute.Tensor | None, s: Int32, start: Int32, at: Int32, head: Int32, lane: Int32
    ) -> cute.Tensor:
        if const_expr(cute.rank(cache) == 3):
            return cute.local_tile(cache[start + at, head, None], (self.move.vector,), (lane,))
        row = s
        if const_expr(table is not None):
            page = cache.shape[1]
            row, at = table[s, at // page], at % page
        return cute.local_tile(cache[row, at, head, None], (self.move.vector,), (lane,))

    @cute.jit
    def of_dense(self, dense: cute.Tensor, s: Int32, at: Int32, head: Int32, lane: Int32) -> cute.Tensor:
        if const_expr(cute.rank(dense) == 3):
            return cute.local_tile(dense[at, head, None], (self.move.vector,), (lane,))
        return cute.local_tile(dense[s, at, head, None], (self.move.vector,), (lane,))


class AppendRows(_Rows):
    """The kernel of `append`; a CTA has a tile of one of up to six caches."""

    def __init__(self, move: Move, *dims: int) -> None:
        super().__init__(move, *dims)
        caches = [f"{kind}pages {kind}page H D@{move.alignment}" for kind in ("", "", "", "", "k_", "v_")]
        new = ["B T H D"] * 4 + ["B filled H D"] * 2
        tables = "sequences width *", "sequences cmp_width *"
        self.shapes = (*caches, *new, *["H *"] * 6, *tables, "fields sequences", "starts *", "starts *")

    @cute.jit
    def __call__(self, *arguments):
        """Six caches, their new rows and scales, both tables, `CacheSlots`, both starts, see `append`; stream."""
        *rows, table, cmp_table, slots, cu_seqlens, cu_blocks, stream = arguments
        tables = ((table, cu_seqlens),) * 4 + ((cmp_table, cu_blocks),) * 2
        jobs, compressed = self.jobs(rows[:6], rows[6:12], rows[12:], tables)
        units = Int32(0)
        for _, x, _, _, cu in jobs:
            units = cutlass.max(units, self.tiles(x, cu))
        units += self.tiles_behind * slots.shape[1]
        self.kernel(jobs, slots, compressed).launch(grid=[units, len(jobs), 1], block=[THREADS, 1, 1], stream=stream)

    def jobs(self, caches: tuple, new: tuple, scales: tuple, tables: tuple) -> tuple[tuple, tuple[bool, ...]]:
        """(cache, new rows, scale, table, starts) of each cache with rows to write or clear, and whether it has
        compressed ones."""
        every = enumerate(zip(caches, new, scales, tables))
        jobs = [
            ((cache, x, scale, *table), i >= 4)
            for i, (cache, x, scale, table) in every
            if cache is not None and (x is not None or self.tiles_behind > 0)
        ]
        return tuple(zip(*jobs))

    @property
    def tiles_behind(self) -> int:
        """Tiles of a sequence's rows that are cleared."""
        return {"": 0, "rows": -(-BEHIND // TILE), "block": KEYS // TILE}[self.move.behind]

    def tiles(self, x: cute.Tensor | None, cu: cute.Tensor | None) -> Int32:
        """Tiles of all new rows."""
        return Int32(0) if const_expr(x is None) else Int32(math.prod(tiles_and_batch(x, cu, TILE)))

    @cute.kernel
    def kernel(self, jobs: tuple, slots: cute.Tensor, compressed: cutlass.Constexpr[tuple]):
        unit, job, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(len(jobs)):
            if job == i:
                self.run(jobs[i], slots, compressed[i], unit)

    @cute.jit
    def run(self, job: tuple, slots: cute.Tensor, compressed: cutlass.Constexpr[bool], unit: Int32):
        cache, x, scale, table, cu = job
        first, new, end = CMP_ROWS if compressed else TOKEN_ROWS
        sequences, moved = slots.shape[1], self.tiles(x, cu)
        if const_expr(x is not None):
            if unit < moved:
                s, tile, start, length = sequence_tile(unit, moved // sequences, x, cu, TILE)
                count = cutlass.min(slots[new, s], length)
                if tile * TILE < count:
                    self.move_tile(cache, x, table, (s, start, slots[first, s], tile * TILE, count, count), scale)
        if const_expr(self.tiles_behind > 0):
            s, tile = (unit - moved) // self.tiles_behind, (unit - moved) % self.tiles_behind
            if unit >= moved and s < sequences:
                at, there = slots[end, s], Int32(slots[CacheSlots.NEW, s] > 0)
                if const_expr(self.move.behind == "rows"):
                    rows = cutlass.min(BEHIND, cache.shape[1] - at) * there
                else:
                    rows = (KEYS - at % KEYS) % KEYS * there
                if tile * TILE < rows:
                    self.move_tile(cache, None, table, (s, Int32(0), at, tile * TILE, Int32(0), rows), None)


class MoveRows(_Rows):
    """The kernel of `gather` and `clear`; the second of each pair may be missing."""

    def __init__(self, move: Move, *dims: int) -> None:
        super().__init__(move, *dims)
        cache = f"pages page H D@{move.alignment}"
        # A packed target of `clear` has no pages.
        cache = cache.replace("pages", "B") if move.to == "nothing" else cache
        dense = "B T H D", "B T H D", "H *", "H *"
        self.shapes = (cache, cache, *dense, "sequences width *", "fields sequences", "starts *")

    @cute.jit
    def __call__(self, *arguments):
        """k and v in caches, and dense; their scales; page table, `CacheSlots`, starts of packed rows; which of its
        fields are the first row in the cache and the number of rows; stream."""
        *tensors, first, count, stream = arguments
        mK, mV, mX, *_, slots, cu = tensors
        sequences = slots.shape[1]
        if const_expr(self.move.to == "nothing"):
            units = Int32(cute.ceil_div(BEHIND, TILE)) * sequences
        else:
            units = Int32(math.prod(tiles_and_batch(mX, cu, TILE)))  # if packed, no multiple of the sequences
        self.kernel(tuple(tensors), (first, count), units // sequences).launch(
            grid=[units, 1 if const_expr(mV is None) else 2, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, tensors: tuple, fields: tuple[Int32, Int32], tiles: Int32):
        mK, mV, mX, mY, k_scale, v_scale, table, slots, cu = tensors
        unit, is_value, _ = cute.arch.block_idx()
        if const_expr(self.move.to == "nothing"):
            s, tile, start, length = unit // tiles, unit % tiles, Int32(0), Int32(mK.shape[1])
            if const_expr(cu is not None):
                start, length = cu[s], cu[s + 1] - cu[s]
        else:
            s, tile, start, length = sequence_tile(unit, tiles, mX, cu, TILE)
        first, count = slots[fields[0], s], Int32(0)
        if const_expr(self.move.to == "nothing"):
            rows = cutlass.min(BEHIND, length - first) * Int32(slots[CacheSlots.NEW, s] > 0)
        else:
            count = cutlass.min(slots[fields[1], s], length)
            rows = cutlass.min(count + BEHIND, length)
        span = (s, start, first, tile * TILE, count, rows)
        if tile * TILE < rows:
            if is_value == 0:
                self.move_tile(mK, mX, table, span, k_scale)
            elif const_expr(mV is not None):
                self.move_tile(mV, mY, table, span, v_scale)


Pair = tuple[Optional[Tensor], Optional[Tensor]]
Six = Sequence[Optional[Tensor]]


def append(
    x: Six,
    caches: Six,
    tables: Pair,
    slots: Tensor,
    starts: Pair = (None, None),
    *,
    behind: str = "",
    scales: Six = (None,) * 6,
) -> None:
    """Write the first rows of dense keys and values [B, N, H, D], packed [total, H, D], to their slots in the caches.

    Args:
        x, caches: k and v, the window's own, and the compressed, of which any may be missing; [rows, S, H, D], or
            [pages, page, H, D] with a table.
        tables: int32 [B, n], pages of each sequence, of tokens and of compressed keys; None: row b.
        slots: of `locate`.
        starts: int32 [B + 1] of packed tokens and of packed compressed keys.
        behind: clear behind the last row of each cache, also where nothing is written: "rows", `BEHIND` of them, in
            caches without a table; "block", those up to a multiple of `KEYS`.
        scales: fp32 [H], of caches in FP8.
    """
    caches = [None if cache is None or 0 in cache.shape else cache for cache in caches]
    present = [cache for cache, new in zip(caches, x) if cache is not None and (new is not None or behind)]
    if not present:
        return
    dims = tuple(None if cache is None else cache.shape[-1] for cache in caches)
    move = Move.of("cache", present, behind)
    launch("append_rows", AppendRows, (move, *dims), *caches, *x, *scales, *tables, slots, *starts)


def gather(
    caches: Pair,
    x: Pair,
    table: Tensor | None,
    slots: Tensor,
    fields: tuple[int, int],
    cu_seqlens: Tensor | None,
    scales: Pair = (None, None),
) -> None:
    """Read rows of two caches into dense tensors, and clear `BEHIND` rows behind them.

    Args:
        table: of both; fields: `CacheSlots` of the first slot and of the number of rows; the rest as for `append`.
    """
    _launch("dense", caches, x, table, slots, fields, cu_seqlens, scales)


def clear(x: Pair, slots: Tensor, first: CacheSlots, cu_seqlens: Tensor | None = None) -> None:
    """Clear `BEHIND` rows of [B, S, H, D], packed [total, H, D], from the slot on of each sequence with queries."""
    _launch("nothing", x, (None, None), None, slots, (first, first), cu_seqlens)


def _launch(
    to: str,
    caches: Pair,
    dense: Pair,
    table: Tensor | None,
    slots: Tensor,
    fields: tuple[int, int],
    cu_seqlens: Tensor | None,
    scales: Pair = (None, None),
) -> None:
    present = [each for each in zip(caches, dense, scales, strict=True) if each[0] is not None]
    if not present or any(0 in x.shape for each in present for x in each if x is not None):
        return
    k_and_v = zip(*(present + [(None,) * 3])[:2])
    present = [cache for cache, *_ in present]
    static = (Move.of(to, present), *(cache.shape[-1] for cache in present))
    launch("move_rows", MoveRows, static, *chain(*k_and_v), table, slots, cu_seqlens, *map(int, fields))
