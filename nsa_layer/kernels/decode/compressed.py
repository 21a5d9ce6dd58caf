"""The compressed branch over splits of its keys, and its separate launch for calls with many compressed keys.

A CTA has up to 16 rows of a key/value head and a split of the compressed keys. Scores go to memory for the selection.
CTAs of the last split also write, and attend to, the keys that this call completes; they check all the sequence's pages
first, since nothing of a sequence with pages outside of the caches may be written. If there are several row tiles, the
last split of each writes the same keys, so that no CTA waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from flash_attn.cute.utils import LOG2_E
from nsa_layer.kernels.decode.append import complete_keys, write_valid
from nsa_layer.kernels.decode.attention import WarpRows, allocate_rows, lane_keys, set_queries, write_partial
from nsa_layer.kernels.decode.cache_rows import Caches, Lengths, Sequence, Stored, Table, new_row
from nsa_layer.kernels.decode.partial_sums import shared_partial, write_nothing
from nsa_layer.kernels.decode.spec import LAUNCH, ROWS, WARP, WARPS, DecodeSpec, StepTensors


class CompressedDecode:
    """The kernel of the separate launch."""

    shapes = StepTensors()

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *arguments):
        """`StepTensors`, capacity and compressed capacity of a sequence, softmax scale, stream."""
        *tensors, capacity, compressed_capacity, softmax_scale, stream = arguments
        step = StepTensors(*tensors)
        lengths, caches = Lengths.of(self.spec, step, capacity, compressed_capacity), Caches.of(step)
        B, Hkv, _, _ = step.scores.shape
        partial = (step.scores, step.stats, step.acc, step.valid)
        self.kernel(step.q, caches, lengths, partial, softmax_scale * LOG2_E).launch(
            grid=[step.stats.shape[3] * -(-self.spec.rows // ROWS), Hkv, B], stream=stream, **LAUNCH
        )

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, caches: Caches, lengths: Lengths, out: tuple, scale_log2: Float32):
        spec, (mScores, mStats, mAcc, mValid) = self.spec, out
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = shared_partial(smem, spec.columns_of_sums, WARPS)
        sBad = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        splits = mStats.shape[3]
        split, tile = x % splits, x // splits

        sequence = lengths.sequence(b, caches.rows)
        first, count = tile * ROWS, cutlass.min(spec.rows - tile * ROWS, ROWS)
        own = RowTile.of(spec, WARPS, sequence, caches.keys, head, first, count, split, splits)
        rows = allocate_rows(spec, mQ.element_type, caches.keys.caches[0].element_type, scale_log2)
        stats, acc = mStats[b, head, None, None, None], mAcc[b, head, None, None, None]
        if split == splits - 1:
            complete_keys(sequence, caches, head, WARP * WARPS, shared[1], sBad)
        if own.begin < own.end:
            own.set_queries(rows, mQ, caches.keys)
        own.load_first(rows, caches.keys)
        if split == splits - 1:
            write_valid(mValid, sequence, caches, head, WARP * WARPS, sBad)
        rows.forget()
        own.attend(rows, caches.keys, mScores[b, head, None, None])
        own.write(rows, *shared, stats, acc, first, split)


@dataclass(frozen=True)
class RowTile:
    """A CTA's work tile: up to 16 rows of a key/value head, and a split of their compressed keys, ``begin .. end - 1``.

    Attributes:
        warps: warps of the CTA.
        table: page table of the compressed keys.
        first, count: the tile's (token, head) rows.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    warps: cutlass.Constexpr[int]
    sequence: Sequence
    table: Table
    head: Int32
    first: Int32
    count: Int32
    begin: Int32
    end: Int32

    @classmethod
    def of(
        cls,
        spec: DecodeSpec,
        warps: int,
        sequence: Sequence,
        keys: Stored,
        head: Int32,
        first: Int32,
        count: Int32,
        split: Int32,
        splits: Int32,
    ) -> RowTile:
        """The tile of a split of the keys; the last split also has the keys that this call completes."""
        before, after = sequence.completed()
        share = cute.ceil_div(cute.ceil_div(before, splits), spec.keys * warps) * spec.keys * warps
        begin = cutlass.min(split * share, before)
        end = cutlass.select_(split == splits - 1, after, cutlass.min(begin + share, before))
        last = sequence.position(cutlass.min((first + count - 1) // spec.G, sequence.T - 1))
        end = cutlass.min(end, sequence.keys_end(last))
        end = cutlass.select_(sequence.inside, end, Int32(0))
        return cls(spec, warps, sequence, keys.table(sequence), head, first, count, begin, end)

    @property
    def first_key(self) -> Int32:
        """The first key of this warp."""
        return self.begin + cute.arch.make_warp_uniform(cute.arch.warp_idx()) * self.spec.keys

    def own(self) -> list[Int32]:
        """Rows g and g + 8 of the tile, clamped to its last row."""
        return [cutlass.min(cute.arch.lane_idx() // 4 + 8 * r, self.count - 1) + self.first for r in range(2)]

    def token(self, row: Int32) -> Int32:
        return cutlass.min(row // self.spec.G, self.sequence.T - 1)

    def set_queries(self, rows: WarpRows, mQ: cute.Tensor, keys: Stored) -> None:
        heads = [self.head * self.spec.G + row % self.spec.G for row in self.own()]
        queries = zip(self.own(), heads)
        queries = [new_row(mQ, self.sequence, self.token(row), head) for row, head in queries]
        set_queries(rows, queries, keys.scale(0, self.head))

    def page(self, at: Int32) -> Int32:
        """In each lane the page of key ``at + lane % spec.keys``, for `row_of`."""
        return self.table.page(cutlass.min(at + cute.arch.lane_idx() % self.spec.keys, self.end - 1))

    def row_of(self, cache: cute.Tensor, page: Int32, first: Int32, i: Int32) -> cute.Tensor:
        """Row [D] of key ``min(first + i, end - 1)``; page: the result of `page` for `first`."""
        at = cutlass.min(first + i, self.end - 1)
        if const_expr(self.table.pages is not None):
            page = cute.arch.shuffle_sync(page, i)
        return cache[page, self.table.within(at), self.head, None]

    @cute.jit
    def load_first(self, rows: WarpRows, keys: Stored):
        """Load the keys of this warp's first step."""
        at = self.first_key
        if at < self.end:
            page, (k_at, v_at) = self.page(at), lane_keys(self.spec.keys)
            rows.load_k([self.row_of(keys.caches[0], page, at, i) for i in k_at])
            rows.load_v([self.row_of(keys.caches[1], page, at, i) for i in v_at])

    @cute.jit
    def attend(self, rows: WarpRows, keys: Stored, scores_out: cute.Tensor):
        """Attention to this warp's keys, the first step of which `load_first` has loaded."""
        lane, end = cute.arch.lane_idx(), self.end
        c = lane % 4
        seen = [self.sequence.keys_end(self.sequence.position(self.token(row))) for row in self.own()]
        k_at, v_at = lane_keys(self.spec.keys)
        at = self.first_key
        if at < end:
            step = self.spec.keys * self.warps
            page = self.page(at + step)
            for now in cutlass.range(at, end, step, unroll=1):
                scores = rows.scores()
                after = now + step
                if after < end:
                    rows.load_k([self.row_of(keys.caches[0], page, after, i) for i in k_at])
                self.write_scores(scores, now, scores_out)
                for x in cutlass.range_constexpr(len(scores)):
                    key, r = now + x // 4 * 8 + 2 * c + x % 2, x % 4 // 2
                    scores[x] = cutlass.select_(key < cutlass.min(seen[r], end), scores[x], -Float32.inf)
                rows.add(scores)
                if after < end:
                    rows.load_v([self.row_of(keys.caches[1], page, after, i) for i in v_at])
                page = self.page(after + step)

    def write_scores(self, scores: list[Float32], now: Int32, to: cute.Tensor) -> None:
        """Write a step's scores, also past `end`; rows past the tile's last one repeat that row's."""
        c = cute.arch.lane_idx() % 4
        for r, row in enumerate(self.own()[: -(-self.spec.rows // 8)]):
            for i in range(len(scores) // 4):
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]
                cute.autovec_copy(pair, cute.local_tile(to[row, None], (2,), (now // 2 + 4 * i + c,)))

    @cute.jit
    def write(
        self,
        rows: WarpRows,
        sStats: cute.Tensor,
        sAcc: cute.Tensor,
        stats: cute.Tensor,
        acc: cute.Tensor,
        first: Int32,
        split: Int32,
    ):
        """Write the split's partial sums by `write_partial`; first: the tile's first row in stats and acc."""
        if self.begin < self.end:
            write_partial(rows, sStats, sAcc, stats, acc, first, self.count, split)
        else:
            write_nothing(stats[None, split, None], first, self.count)
