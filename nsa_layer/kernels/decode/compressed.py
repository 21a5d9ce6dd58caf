"""First launch of a step: append tokens, complete compressed keys, and the compressed branch over pieces of its keys.

A thread block has up to 16 rows of a key/value head and a piece of the compressed keys. Scores go to memory for the
choice. The last piece has the keys that this call completes, too; its thread blocks look at all the sequence's pages
first, since a sequence that is led out of the caches writes nothing. Those of a further 16 rows write the same again,
rather than wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from nsa_layer.kernels.decode.places import LARGEST, Lengths, Sequence, Table
from nsa_layer.kernels.decode.spec import KEYS, ROWS, THREADS, VECTOR, WARPS, DecodeSpec
from nsa_layer.kernels.decode.stored import Stored, new_row
from nsa_layer.kernels.decode.warp_rows import (
    WarpRows,
    no_rows,
    own_keys,
    set_queries,
    shared_partial,
    write_nothing,
    write_partial,
)

LOG2_E = 1.4426950408889634
WARP_KEYS = KEYS * WARPS


class CompressedDecode:
    """The kernel."""

    shapes = (
        "Bq Tq Hq D", "P S Hkv D", "P S Hkv D", "Bk Tk Hkv D", "Bk Tk Hkv D", "P S Hkv D", "P S Hkv D", "Bk Tk Hkv D",
        "Bk Tk Hkv D", "Pc Sc Hkv D", "Pc Sc Hkv D", "Bm m Hkv D", "Bm m Hkv D", "B n *", "B nc *", "B *", "Bs *",
        "B *", "Hkv D D", "Hkv D D", "B Hkv R keys", "B Hkv R pieces 2", "B Hkv R pieces D", "B Hkv",
    )  # fmt: skip

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK_cache: cute.Tensor,
        mV_cache: cute.Tensor,
        mK: cute.Tensor | None,
        mV: cute.Tensor | None,
        mK_win_cache: cute.Tensor | None,
        mV_win_cache: cute.Tensor | None,
        mK_win: cute.Tensor | None,
        mV_win: cute.Tensor | None,
        mK_cmp_cache: cute.Tensor,
        mV_cmp_cache: cute.Tensor,
        mK_cmp: cute.Tensor | None,
        mV_cmp: cute.Tensor | None,
        mPages: cute.Tensor | None,
        mCmp_pages: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mLengths: cute.Tensor,
        mW_k: cute.Tensor | None,
        mW_v: cute.Tensor | None,
        mScores: cute.Tensor,
        mStats: cute.Tensor,
        mAcc: cute.Tensor,
        mValid: cute.Tensor,
        room: Int32,
        compressed_room: Int32,
        cmp: Int32,
        softmax_scale: Float32,
        stream,
    ):
        spec = self.spec
        lengths = Lengths(spec, mLengths, mCu, mIdx, room, compressed_room, Int32(mQ.shape[1]))
        tokens = Stored((mK_cache, mV_cache), (mK, mV), mPages)
        keys = Stored((mK_cmp_cache, mV_cmp_cache), (mK_cmp, mV_cmp), mCmp_pages)
        window = (
            None if const_expr(mK_win_cache is None and mV_win_cache is None)
            else Stored((mK_win_cache, mV_win_cache), (mK_win, mV_win), mPages)
        )  # fmt: skip
        B, Hkv, R, _ = mScores.shape
        self.kernel(
            mQ,
            tokens,
            window,
            keys,
            lengths,
            cmp,
            (mW_k, mW_v),
            (mScores, mStats, mAcc, mValid),
            softmax_scale * LOG2_E,
        ).launch(
            grid=[cmp * -(-spec.rows // ROWS), Hkv, B],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=50,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        tokens: Stored,
        window: Stored | None,
        keys: Stored,
        lengths: Lengths,
        splits: Int32,
        weights: tuple,
        out: tuple,
        scale_log2: Float32,
    ):
        spec, (mScores, mStats, mAcc, mValid) = self.spec, out
        tidx, _, _ = cute.arch.thread_idx()
        x, head, b = cute.arch.block_idx()
        smem = SmemAllocator()
        sStats, sAcc = shared_partial(smem, spec.D)
        sBad = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        split, tile = x % splits, x // splits

        sequence = lengths.of(b, LARGEST if const_expr(tokens.pages is not None) else Int32(tokens.caches[0].shape[0]))
        before, after = sequence.completed()
        share = cute.ceil_div(cute.ceil_div(before, splits), WARP_KEYS) * WARP_KEYS
        begin = cutlass.min(split * share, before)
        end = cutlass.min(begin + share, before)
        if split == splits - 1:
            end = after
        first, count = tile * ROWS, cutlass.min(spec.rows - tile * ROWS, ROWS)
        last = sequence.position(cutlass.min((first + count - 1) // spec.G, sequence.T - 1))
        end = cutlass.min(end, sequence.keys_end(last))
        end = cutlass.select_(sequence.inside, end, Int32(0))
        own = RowTile(spec, sequence, keys.table(sequence), head, first, count, begin, end)
        rows = no_rows(spec.D, mQ.element_type, scale_log2)
        if begin < end:
            own.set_queries(rows, mQ)
        own.load_first(rows, keys)
        if split == splits - 1:
            # Beside the first keys, which are loaded again where they are made here.
            valid = self.is_inside(sequence, tokens, keys, sBad)
            if valid:
                if tile == 0:
                    append(spec, sequence, tokens, head)
                    if const_expr(window is not None):
                        append(spec, sequence, window, head)
                for j in cutlass.range(before, after, unroll=1):
                    complete(spec, sequence, tokens, keys, weights, j, head, sAcc)
            if tile == 0 and tidx == 0:
                mValid[b, head] = cutlass.select_(valid, Int32(1), Int32(0))
            if before < after:
                cute.arch.sync_threads()
                if own.first_key + KEYS > before:
                    own.load_first(rows, keys)
        stats, acc = mStats[b, head, None, None, None], mAcc[b, head, None, None, None]
        if begin < end:
            own.attend(rows, keys, mScores[b, head, None, None])
            write_partial(rows, sStats, sAcc, stats, acc, first, count, split)
        else:
            write_nothing(stats, first, count, split)

    @cute.jit
    def is_inside(self, sequence: Sequence, tokens: Stored, keys: Stored, sBad: cute.Tensor) -> Boolean:
        """True if all the sequence's places are there; of all threads together."""
        tidx, _, _ = cute.arch.thread_idx()
        if const_expr(tokens.pages is not None or keys.pages is not None):
            if tidx == 0:
                sBad[0] = Int32(0)
            cute.arch.sync_threads()
            if sequence.inside:
                bad = tokens.table(sequence).lacks(sequence.S, tidx, THREADS)
                bad = bad | keys.table(sequence).lacks(sequence.completed()[1], tidx, THREADS)
                if bad:
                    sBad[0] = Int32(1)
            cute.arch.sync_threads()
            return sequence.inside & (sBad[0] == 0)
        return sequence.inside


@dataclass(frozen=True)
class RowTile:
    """Up to 16 rows of a key/value head, and the compressed keys ``begin .. end - 1`` that a thread block has of them.

    Attributes:
        table: of the compressed keys.
        first, count: of the rows.
    """

    spec: cutlass.Constexpr[DecodeSpec]
    sequence: Sequence
    table: Table
    head: Int32
    first: Int32
    count: Int32
    begin: Int32
    end: Int32

    @property
    def first_key(self) -> Int32:
        """This warp's first key."""
        return self.begin + cute.arch.make_warp_uniform(cute.arch.warp_idx()) * KEYS

    def own(self) -> list[Int32]:
        """The rows g and g + 8."""
        return [cutlass.min(cute.arch.lane_idx() // 4 + 8 * r, self.count - 1) + self.first for r in range(2)]

    def token(self, row: Int32) -> Int32:
        return cutlass.min(row // self.spec.G, self.sequence.T - 1)

    def set_queries(self, rows: WarpRows, mQ: cute.Tensor) -> None:
        heads = [self.head * self.spec.G + row % self.spec.G for row in self.own()]
        queries = zip(self.own(), heads)
        set_queries(rows, [new_row(mQ, self.sequence, self.token(row), head) for row, head in queries])

    def page(self, at: Int32) -> Int32:
        """In lane x % 16 that of key ``at + x``."""
        return self.table.page(cutlass.min(at + cute.arch.lane_idx() % KEYS, self.end - 1))

    def row_of(self, cache: cute.Tensor, page: Int32, first: Int32, i: Int32) -> cute.Tensor:
        """Row [D] of key ``first + i``, of the last one if that is behind; page: as `page` has it."""
        at = cutlass.min(first + i, self.end - 1)
        if const_expr(self.table.pages is not None):
            page = cute.arch.shuffle_sync(page, i)
        return cache[page, self.table.within(at), self.head, None]

    @cute.jit
    def load_first(self, rows: WarpRows, keys: Stored):
        """Load this warp's first 16 keys."""
        at = self.first_key
        if at < self.end:
            page, (k_at, v_at) = self.page(at), own_keys()
            rows.load_k([self.row_of(keys.caches[0], page, at, i) for i in k_at])
            rows.load_v([self.row_of(keys.caches[1], page, at, i) for i in v_at])

    @cute.jit
    def attend(self, rows: WarpRows, keys: Stored, scores_out: cute.Tensor):
        """Attention to this warp's keys, of which `load_first` has loaded the first."""
        lane, end = cute.arch.lane_idx(), self.end
        g, c = lane // 4, lane % 4
        own = self.own()
        seen = [self.sequence.keys_end(self.sequence.position(self.token(row))) for row in own]
        k_at, v_at = own_keys()
        at = self.first_key
        if at < end:
            page = self.page(at + WARP_KEYS)
            for now in cutlass.range(at, end, WARP_KEYS, unroll=1):
                scores = rows.scores()
                after = now + WARP_KEYS
                if after < end:
                    rows.load_k([self.row_of(keys.caches[0], page, after, i) for i in k_at])
                for x in cutlass.range_constexpr(8):
                    key, r = now + x // 4 * 8 + 2 * c + x % 2, x % 4 // 2
                    if (key < end) & (g + 8 * r < self.count):
                        scores_out[own[r], key] = scores[x]
                    scores[x] = cutlass.select_(key < cutlass.min(seen[r], end), scores[x], -Float32.inf)
                rows.add(scores)
                if after < end:
                    rows.load_v([self.row_of(keys.caches[1], page, after, i) for i in v_at])
                page = self.page(after + WARP_KEYS)


@cute.jit
def append(spec: DecodeSpec, sequence: Sequence, stored: Stored, head: Int32):
    """Write a sequence's new keys and values of a head."""
    tidx, _, _ = cute.arch.thread_idx()
    lanes, table = spec.D // VECTOR, stored.table(sequence)
    for i in cutlass.range_constexpr(2):
        new, cache = stored.new[i], stored.caches[i]
        if const_expr(new is not None and cache is not None):
            for token in cutlass.range(tidx // lanes, sequence.T, THREADS // lanes, unroll=1):
                at = sequence.position(token)
                piece = load_piece(new_row(new, sequence, token, head), tidx % lanes)
                target = cache[table.page(at), table.within(at), head, None]
                cute.autovec_copy(piece, cute.local_tile(target, (VECTOR,), (tidx % lanes,)))


@cute.jit
def complete(
    spec: DecodeSpec,
    sequence: Sequence,
    tokens: Stored,
    keys: Stored,
    weights: tuple,
    j: Int32,
    head: Int32,
    sSums: cute.Tensor,
):
    """Write compressed key and value j of a head: given, or means of their tokens, projected."""
    tidx, _, _ = cute.arch.thread_idx()
    lanes, groups, table = spec.D // VECTOR, THREADS * VECTOR // spec.D, keys.table(sequence)
    lane, group = tidx % lanes, tidx // lanes
    targets = [cache[table.page(j), table.within(j), head, None] for cache in keys.caches]
    made = [i for i in range(2) if keys.new[i] is None]
    for i in cutlass.range_constexpr(2):
        if const_expr(keys.new[i] is not None):
            if group == 0:
                before, _ = sequence.completed()
                piece = load_piece(new_row(keys.new[i], sequence, j - before, head), lane)
                cute.autovec_copy(piece, cute.local_tile(targets[i], (VECTOR,), (lane,)))
    if const_expr(len(made) > 0):
        sums, own = cute.make_rmem_tensor((VECTOR, len(made)), Float32), tokens.table(sequence)
        sums.fill(0.0)
        for token in cutlass.range(group, spec.span, groups, unroll=8):
            at = j * spec.stride + token
            page = own.page(at)
            for n in cutlass.range_constexpr(len(made)):
                piece = load_piece(tokens.token(made[n], own, page, at, head), lane)
                for x in cutlass.range_constexpr(VECTOR):
                    sums[x, n] += piece[x].to(Float32)
        sLines = cute.make_tensor(sSums.iterator, cute.make_layout((spec.D, groups, len(made))))
        for n in cutlass.range_constexpr(len(made)):
            for x in cutlass.range_constexpr(VECTOR):
                sLines[lane * VECTOR + x, group, n] = sums[x, n]
        cute.arch.sync_threads()
        if tidx < spec.D:
            for n in cutlass.range_constexpr(len(made)):
                total = Float32(0.0)
                for line in cutlass.range_constexpr(groups):
                    total += sLines[tidx, line, n]
                sLines[tidx, 0, n] = total * (1.0 / spec.span)
        cute.arch.sync_threads()
        if tidx < spec.D:
            for n in cutlass.range_constexpr(len(made)):
                i = made[n]
                mean = sLines[tidx, 0, n]
                if const_expr(weights[i] is not None):
                    mean = Float32(0.0)
                    for d in cutlass.range(spec.D, unroll=16):
                        mean += sLines[d, 0, n] * weights[i][head, d, tidx].to(Float32)
                targets[i][tidx] = mean.to(targets[i].element_type)
        cute.arch.sync_threads()


def load_piece(row: cute.Tensor, at: Int32) -> cute.Tensor:
    """16 bytes of a row."""
    piece = cute.make_rmem_tensor((VECTOR,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (at,)), piece)
    return piece
